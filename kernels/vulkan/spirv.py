"""Requirements of a SPIR-V module: workgroup size, shared memory, capabilities, bindings, push constants.

A pipeline over a device's limits can lose the device, so limits are checked first. Specialisation constants may set the
workgroup size and array lengths; they are evaluated here as a driver does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.core.numeric import np

_WORKGROUP, _PUSH = 4, 9  # storage classes


def _over(a: int, b: int) -> int:
    return a // b if b else 0  # SPIR-V leaves division by zero undefined; here the constant is not set yet


def _rest(a: int, b: int) -> int:
    return a % b if b else 0


def _signed(a: int) -> int:
    return a - (1 << 32) if a >> 31 else a


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
    195: lambda a, b: _signed(a) >> b,
    196: lambda a, b: a << b,
    197: lambda a, b: a | b,
    198: lambda a, b: a ^ b,
    199: lambda a, b: a & b,
    169: lambda c, a, b: a if c else b,
    170: lambda a, b: a == b,
    171: lambda a, b: a != b,
    172: lambda a, b: a > b,
    173: lambda a, b: _signed(a) > _signed(b),
    174: lambda a, b: a >= b,
    175: lambda a, b: _signed(a) >= _signed(b),
    176: lambda a, b: a < b,
    177: lambda a, b: _signed(a) < _signed(b),
    178: lambda a, b: a <= b,
    179: lambda a, b: _signed(a) <= _signed(b),
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


def written(code: bytes, constants: Mapping[int, int] | None = None) -> frozenset[int]:
    """Bindings that a module's reachable blocks store to. constants: values of specialisation constants (id -> value);
    None: both sides of every branch are reachable."""
    module, pointers, found = _Reader(code, constants or {}), dict[int, int](), set[int]()
    values = {} if constants is None else module.values
    for variable, decorations in module.decorations.items():
        if _BINDING in decorations:
            pointers[variable] = decorations[_BINDING][0]
    edges, reached, seen, label, live = set[tuple[int, int]](), set[int](), set[int](), -1, True
    for op, a in module.body:
        if op == _LABEL:
            live, label = label < 0 or a[0] in reached, a[0]  # the first block of a function is its entry
            seen.add(label)
        elif op == _FUNCTION:
            label = -1
        elif not live:
            continue
        elif op in _CHAINS and a[2] in pointers:
            pointers[a[1]] = pointers[a[2]]
        elif op in _STORES and a[_STORES[op]] in pointers:
            found.add(pointers[a[_STORES[op]]])
        elif op == _CALL:  # what it does with a pointer is not followed
            found |= {pointers[x] for x in a[3:] if x in pointers}
        elif op == _PHI:
            came = zip(a[2::2], a[3::2], strict=True)
            known = {values.get(x) for x, block in came if block not in seen or (block, label) in edges}
            value = known.pop() if len(known) == 1 else None
            if value is not None:
                values[a[1]] = value
        elif op in _DECIDED and any(values.get(x) == _DECIDED[op] for x in a[2:]):
            values[a[1]] = _DECIDED[op]
        elif op == _SELECT and a[2] in values and (chosen := a[3] if values[a[2]] else a[4]) in values:
            values[a[1]] = values[chosen]
        elif op in SPEC_OPS and all(x in values for x in a[2:]):
            values[a[1]] = int(SPEC_OPS[op](*[values[x] for x in a[2:]])) & 0xFFFFFFFF
        elif op in _JUMPS:
            targets = _targets(op, a, values)
            reached |= targets
            edges |= {(label, to) for to in targets}
    return frozenset(found)


def _targets(op: int, a: list[int], values: Mapping[int, int]) -> set[int]:
    """Labels that a jump may lead to; the merge block of a construct is one of them."""
    if op == _BRANCH_IF and a[0] in values:
        return {a[1] if values[a[0]] else a[2]}
    if op == _SWITCH and a[0] in values:
        cases = dict(zip(a[2::2], a[3::2], strict=True))
        return {cases.get(values[a[0]], a[1])}
    if op == _SWITCH:
        return {a[1], *a[3::2]}
    return set(a[1:3]) if op == _BRANCH_IF else {a[0]}


_BINDING, _FUNCTION, _CALL, _SELECT, _PHI, _LABEL, _BRANCH_IF, _SWITCH = 33, 54, 57, 169, 245, 248, 250, 251
_JUMPS = {249, _BRANCH_IF, _SWITCH}
_DECIDED = {166: 1, 167: 0}  # or, and: the operand that decides the result
_CHAINS = {65, 66, 67, 70, 83}  # access chains and copies of pointers
_STORES = {62: 0, 63: 0, 228: 0, 4458: 0, **dict.fromkeys(range(229, 243), 2)}
"""Opcode -> which operand is the pointer: stores, copies, stores of matrices, atomic operations."""
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
        self._words, i = np.frombuffer(code, "<u4").tolist(), 5
        while i < len(self._words):
            count, op = self._words[i] >> 16, self._words[i] & 0xFFFF
            if not count or op == _FUNCTION:  # functions follow the declarations
                break
            self.declare(op, self._words[i + 1 : i + count])
            i += count
        self._functions = i

    @property
    def body(self) -> Iterator[tuple[int, list[int]]]:
        """Opcode and operands of the functions' instructions."""
        words, i = self._words, self._functions
        while i < len(words) and words[i] >> 16:
            count = words[i] >> 16
            yield words[i] & 0xFFFF, words[i + 1 : i + count]
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
