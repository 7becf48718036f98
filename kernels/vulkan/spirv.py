"""Requirements of a SPIR-V module: workgroup size, shared memory, capabilities, bindings, push constants.

A pipeline over a device's limits can lose the device, so limits are checked first. Specialisation constants may set the
workgroup size and array lengths; they are evaluated here as a driver does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.core.numeric import np

_WORKGROUP, _PUSH = 4, 9  # storage classes


def _over(a: int, b: int) -> int:
    return a // b if b else 0  # SPIR-V leaves division by zero undefined; here the constant is not set yet


def _rest(a: int, b: int) -> int:
    return a % b if b else 0


SPEC_OPS: dict[int, Callable[..., Any]] = {  # opcodes inside OpSpecConstantOp
    128: lambda a, b: a + b,
    130: lambda a, b: a - b,
    132: lambda a, b: a * b,
    134: _over,
    135: _over,
    137: _rest,
    139: _rest,
    138: _rest,
    194: lambda a, b: a >> b,
    195: lambda a, b: a >> b,
    196: lambda a, b: a << b,
    197: lambda a, b: a | b,
    198: lambda a, b: a ^ b,
    199: lambda a, b: a & b,
    169: lambda c, a, b: a if c else b,
    170: lambda a, b: a == b,
    171: lambda a, b: a != b,
    172: lambda a, b: a > b,
    173: lambda a, b: a > b,
    174: lambda a, b: a >= b,
    175: lambda a, b: a >= b,
    176: lambda a, b: a < b,
    177: lambda a, b: a < b,
    178: lambda a, b: a <= b,
    179: lambda a, b: a <= b,
    166: lambda a, b: a or b,
    167: lambda a, b: a and b,
    168: lambda a: not a,
    113: lambda a: a,
    114: lambda a: a,
    124: lambda a: a,
}


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    local_size: tuple[int, int, int]
    shared_bytes: int
    capabilities: frozenset[int]
    bindings: frozenset[int]
    push: int
    spec_ids: frozenset[int]


class SpirvError(ValueError):
    """The bytes are no SPIR-V module of the form that the compiler makes."""


def inspect(code: bytes, constants: Mapping[int, int] | None = None) -> ModuleInfo:
    """Read a module with specialisation constants `constants` (id -> value; others keep their defaults)."""
    return _Reader(code, constants or {}).info()


_UNUSED = {2, 3, 5, 6}  # OpSourceContinued, OpSource, OpName, OpMemberName


def stripped(code: bytes) -> bytes:
    """The module without names and OpSource. No driver uses them, and older validation layers do not know the
    language."""
    words, out, i = np.frombuffer(code, "<u4"), [], 5
    while i < len(words):
        count = int(words[i]) >> 16
        if int(words[i]) & 0xFFFF not in _UNUSED:
            out.append(words[i : i + count])
        i += count
    return np.concatenate([words[:5], *out]).tobytes()


class _Reader:
    def __init__(self, code: bytes, constants: Mapping[int, int]) -> None:
        if len(code) % 4 or len(code) < 20 or code[:4] != b"\x03\x02\x23\x07":
            raise SpirvError("not a SPIR-V module (wrong magic number or length)")
        self.types: dict[int, tuple[int, list[int]]] = {}
        self.values: dict[int, int] = {}
        self.decorations: dict[int, dict[int, list[int]]] = {}
        self.members: dict[int, dict[int, int]] = {}
        self.variables: list[tuple[int, int, int]] = []
        self.composites: dict[int, list[int]] = {}
        self.capabilities: set[int] = set()
        self.local: list[int] | None = None
        self.local_ids: list[int] | None = None
        self.constants = constants
        ops, i = np.frombuffer(code, "<u4").tolist(), 5
        while i < len(ops):
            count, op = ops[i] >> 16, ops[i] & 0xFFFF
            if not count or op == 54:  # functions follow the declarations
                break
            self.declare(op, ops[i + 1 : i + count])
            i += count

    def declare(self, op: int, a: list[int]) -> None:
        if op == 17:
            self.capabilities.add(a[0])
        elif op == 16 and a[1] == 17:
            self.local = a[2:5]
        elif op == 331 and a[1] == 38:
            self.local_ids = a[2:5]
        elif op == 71:
            self.decorations.setdefault(a[0], {})[a[1]] = a[2:]
        elif op == 72 and a[2] == 35:
            self.members.setdefault(a[0], {})[a[1]] = a[3]
        elif 19 <= op <= 33 or op == 4456:
            self.types[a[0]] = (op, a[1:])
        elif op in (41, 48):
            self.values[a[1]] = self.specialised(a[1], 1)
        elif op in (42, 49):
            self.values[a[1]] = self.specialised(a[1], 0)
        elif op in (43, 50):
            self.values[a[1]] = self.specialised(a[1], sum(w << 32 * k for k, w in enumerate(a[2:])))
        elif op in (44, 51):
            self.composites[a[1]] = a[2:]
        elif op == 52:
            fn = SPEC_OPS.get(a[2])
            if fn and all(x in self.values for x in a[3:]):
                self.values[a[1]] = int(fn(*[self.values[x] for x in a[3:]])) & 0xFFFFFFFF
        elif op == 59:
            self.variables.append((a[0], a[1], a[2]))

    def specialised(self, result: int, default: int) -> int:
        spec = self.decorations.get(result, {}).get(1)
        return self.constants.get(spec[0], default) & 0xFFFFFFFF if spec else default

    def size(self, type_id: int) -> int:
        """Bytes of a type in shared memory (structures: explicit offsets, or packed to 4)."""
        op, a = self.types[type_id]
        if op in (21, 22):
            return a[0] // 8
        if op == 20:
            return 4
        if op in (23, 24):
            return self.size(a[0]) * a[1]
        if op == 28:
            if a[1] not in self.values:
                raise SpirvError("an array's length is an expression that cannot be evaluated here")
            length, stride = self.values[a[1]], self.decorations.get(type_id, {}).get(6)
            return length * (stride[0] if stride else self.size(a[0]))
        if op == 30:
            offsets = self.members.get(type_id)
            if offsets:
                last = max(offsets, key=lambda m: offsets[m])
                return offsets[last] + self.size(a[last])
            return sum(-(-self.size(m) // 4) * 4 for m in a)
        if op == 32:
            return 8
        raise SpirvError(f"no size known for a type made by opcode {op}")

    def info(self) -> ModuleInfo:
        builtin = [i for i, d in self.decorations.items() if d.get(11) == [25] and i in self.composites]
        ids = self.composites[builtin[0]] if builtin else self.local_ids
        local = [self.values[i] for i in ids] if ids else self.local
        if local is None:
            raise SpirvError("the module is no compute shader: it has no workgroup size")
        shared = push = 0
        bindings = set()
        for pointer, variable, storage in self.variables:
            pointee = self.types[pointer][1][1]
            if storage == _WORKGROUP:
                shared += -(-self.size(pointee) // 4) * 4
            elif storage == _PUSH:
                push = self.size(pointee)
            binding = self.decorations.get(variable, {}).get(33)
            if binding:
                bindings.add(binding[0])
        specs = frozenset(d[1][0] for d in self.decorations.values() if 1 in d)
        return ModuleInfo(
            (local[0], local[1], local[2]), shared, frozenset(self.capabilities), frozenset(bindings), push, specs
        )
