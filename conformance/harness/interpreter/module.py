"""A SPIR-V module with its specialisation constants: types, constants, variables and the blocks of its one function."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybrid.kernels.vulkan.spirv import SPEC_OPS

TYPE_BOOL, TYPE_INT, TYPE_FLOAT, TYPE_VECTOR, TYPE_ARRAY, TYPE_RUNTIME, TYPE_STRUCT, TYPE_POINTER = (
    20,
    21,
    22,
    23,
    28,
    29,
    30,
    32,
)
TYPE_MATRIX = 4456
DECLARES = {41, 42, 43, 44, 46, 48, 49, 50, 51, 52, 1}
NO_RESULT = {62, 63, 224, 225, 228, 246, 247, 249, 250, 251, 253, 255, 4458}  # instructions whose first word is no type
ENDS = {249, 250, 251, 253, 255}
INTS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}


@dataclass(slots=True)
class Type:
    """kind: TYPE_...; of: element, pointee or members; n: length; dtype: of scalars (integers are kept unsigned)."""

    kind: int
    dtype: Any = None
    of: Any = None
    n: int = 0
    stride: int = 0
    offsets: tuple[int, ...] = ()
    storage: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)
    """Of a matrix: rows, columns, use (0 A, 1 B, 2 accumulator)."""

    def size(self) -> int:
        """Size in memory in bytes."""
        if self.kind in (TYPE_INT, TYPE_FLOAT, TYPE_BOOL):
            return 4 if self.kind == TYPE_BOOL else np.dtype(self.dtype).itemsize
        if self.kind == TYPE_VECTOR:
            return self.n * self.of.size()
        if self.kind == TYPE_ARRAY:
            return self.n * self.step()
        if self.kind == TYPE_STRUCT:
            return max(o + m.size() for o, m in zip(self.places(), self.of, strict=True))
        raise ValueError(f"no size of a type of kind {self.kind}")

    def step(self) -> int:
        return self.stride or self.of.size()

    def places(self) -> tuple[int, ...]:
        """Member offsets: the module's, else contiguous."""
        if self.offsets:
            return self.offsets
        found, at = [], 0
        for member in self.of:
            found.append(at)
            at += -(-member.size() // 4) * 4
        return tuple(found)


@dataclass(slots=True)
class Block:
    label: int
    phis: list[tuple[int, list[int]]] = field(default_factory=list)
    """(result, pairs of value and block)"""
    body: list[tuple[int, Type | None, int, list[int]]] = field(default_factory=list)
    """(opcode, type of the result, result, operands)"""
    end: tuple[int, list[int]] = (255, [])
    merge: tuple[int, ...] = ()
    """Of a header: its merge block, and of a loop its continue block."""
    origin: int = 0
    """The module's block that this one is the end of (flow.cut)."""
    waits: bool = False
    """It begins with a workgroup barrier."""
    polls: bool = False
    """It polls a flag that another workgroup may publish."""


@dataclass(slots=True)
class Module:
    types: dict[int, Type]
    constants: dict[int, Any]
    variables: dict[int, tuple[Type, int]]
    """id: (pointee, storage class)"""
    decorations: dict[int, dict[int, list[int]]]
    blocks: list[Block]
    local: tuple[int, int, int]
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Of values that are matrices: see Type."""
    order: list[Block] = field(default_factory=list)
    """Its blocks as they are run (flow), and the opcodes in them; made by the first run."""
    used: frozenset[int] = frozenset()


def read(code: bytes, given: Mapping[int, int]) -> Module:
    """given: specialisation constants by id."""
    words = list(struct.unpack(f"<{len(code) // 4}I", code))
    return _Reader(given).read(words)


class _Reader:
    def __init__(self, given: Mapping[int, int]) -> None:
        self.given = given
        self.m = Module({}, {}, {}, {}, [], (1, 1, 1))
        self.offsets: dict[int, dict[int, int]] = {}
        self.local_ids: list[int] | None = None
        self.block: Block | None = None

    def read(self, words: list[int]) -> Module:
        at = 5
        while at < len(words):
            count, op = words[at] >> 16, words[at] & 0xFFFF
            self.take(op, words[at + 1 : at + count])
            at += count
        m = self.m
        built = [i for i, d in m.decorations.items() if d.get(11) == [25]]
        if built:
            m.local = tuple(int(x) for x in m.constants[built[0]])  # type: ignore[assignment]
        elif self.local_ids:
            m.local = tuple(int(m.constants[i]) for i in self.local_ids)  # type: ignore[assignment]
        return m

    def take(self, op: int, a: list[int]) -> None:
        m = self.m
        if self.block is not None:
            self.instruction(op, a)
        elif op == 16 and a[1] == 17:
            m.local = (a[2], a[3], a[4])
        elif op == 331 and a[1] == 38:
            self.local_ids = a[2:5]
        elif op == 71:
            m.decorations.setdefault(a[0], {})[a[1]] = a[2:]
        elif op == 72 and a[2] == 35:
            self.offsets.setdefault(a[0], {})[a[1]] = a[3]
        elif 19 <= op <= 33 or op == TYPE_MATRIX:
            self.type(op, a)
        elif op in DECLARES:
            m.constants[a[1]] = self.constant(op, m.types[a[0]], a)
            self.shape(a)
        elif op == 59:
            m.variables[a[1]] = (m.types[a[0]].of, a[2])
        elif op == 248:
            self.block = Block(a[0])
            m.blocks.append(self.block)

    def type(self, op: int, a: list[int]) -> None:
        t, m = self.m.types, self.m
        deco = m.decorations.get(a[0], {})
        if op == TYPE_BOOL:
            made = Type(op, np.bool_)
        elif op == TYPE_INT:
            made = Type(op, INTS[a[1]])
        elif op == TYPE_FLOAT:
            made = Type(op, FLOATS[a[1]])
        elif op == TYPE_VECTOR:
            made = Type(op, t[a[1]].dtype, t[a[1]], a[2])
        elif op == TYPE_ARRAY:
            made = Type(op, None, t[a[1]], int(m.constants[a[2]]), deco.get(6, [0])[0])
        elif op == TYPE_RUNTIME:
            made = Type(op, None, t[a[1]], 0, deco.get(6, [0])[0])
        elif op == TYPE_STRUCT:
            offsets = self.offsets.get(a[0], {})
            made = Type(
                op, None, [t[x] for x in a[1:]], len(a) - 1, offsets=tuple(offsets[i] for i in range(len(offsets)))
            )
        elif op == TYPE_POINTER:
            made = Type(op, None, t[a[2]], storage=a[1])
        elif op == TYPE_MATRIX:
            rows, columns, use = (int(m.constants[x]) for x in a[3:6])
            made = Type(op, t[a[1]].dtype, t[a[1]], rows * columns // 32, shape=(rows, columns, use))
        else:
            made = Type(op)
        t[a[0]] = made

    def constant(self, op: int, kind: Type, a: list[int]) -> Any:
        spec = self.m.decorations.get(a[1], {}).get(1)
        given = self.given.get(spec[0]) if spec else None
        if op in (41, 42, 48, 49):
            return np.bool_(op in (41, 48) if given is None else given)
        if op in (43, 50):
            word = sum(w << 32 * k for k, w in enumerate(a[2:])) if given is None else given
            size = np.dtype(kind.dtype).itemsize
            return np.frombuffer(struct.pack("<Q", word & (1 << 8 * size) - 1)[:size], kind.dtype)[0]
        if op in (44, 51):
            parts = [self.m.constants[x] for x in a[2:]]
            return np.full((1, kind.n), parts[0], kind.dtype) if kind.kind == TYPE_MATRIX else parts
        if op == 52:
            return self.folded(a[2], kind, [self.m.constants.get(x, x) for x in a[3:]])
        return zero(kind)  # OpConstantNull, OpUndef

    @staticmethod
    def folded(op: int, kind: Type, values: list[Any]) -> Any:
        if op == 81:  # OpCompositeExtract
            return values[0][int(values[1])]
        if op == 80:
            return values
        signed = op in (135, 138, 139, 195, 173, 175, 177, 179)
        found = SPEC_OPS[op](*[_number(v, signed) for v in values])
        if kind.kind == TYPE_BOOL:
            return np.bool_(found)
        return kind.dtype(int(found) & (1 << 8 * np.dtype(kind.dtype).itemsize) - 1)

    def instruction(self, op: int, a: list[int]) -> None:
        m, block = self.m, self.block
        assert block is not None
        if op == 248:
            self.block = Block(a[0])
            m.blocks.append(self.block)
        elif op == 245:
            block.phis.append((a[1], a[2:]))
            self.shape(a)
        elif op in (246, 247):
            block.merge = tuple(a[:2]) if op == 246 else (a[0],)
        elif op == 59:
            m.variables[a[1]] = (m.types[a[0]].of, a[2])
        elif op in ENDS:
            block.end = (op, a)
        elif op in NO_RESULT:
            block.body.append((op, None, 0, a))
        elif op != 56:
            block.body.append((op, m.types[a[0]], a[1], a[2:]))
            self.shape(a)

    def shape(self, a: list[int]) -> None:
        """Shape of a result of this type."""
        kind = self.m.types[a[0]]
        if kind.kind == TYPE_MATRIX:
            self.m.shapes[a[1]] = kind.shape


def _number(value: Any, signed: bool) -> int:
    if signed and isinstance(value, np.unsignedinteger):
        return int(value.view(f"i{value.itemsize}"))
    return int(value)


def zero(kind: Type) -> Any:
    """A zero value of this type."""
    if kind.kind in (TYPE_BOOL, TYPE_INT, TYPE_FLOAT):
        return kind.dtype(0)
    if kind.kind == TYPE_MATRIX:
        return np.zeros((1, kind.n), kind.dtype)
    if kind.kind == TYPE_STRUCT:
        return [zero(m) for m in kind.of]
    return [zero(kind.of) for _ in range(kind.n)]
