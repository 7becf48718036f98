"""A dispatch run by NumPy: all lanes of all workgroups at once, the lanes of the earliest block first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybrid.harness.interpreter import matrices
from hybrid.harness.interpreter.flow import ATOMIC_LOAD, cut, ordered
from hybrid.harness.interpreter.memory import Bytes, Pointer, Seen, Shared, Variables, element, load, store
from hybrid.harness.interpreter.module import Block, Module, Type, zero
from hybrid.harness.interpreter.operations import EXTENDED, OPERATIONS
from hybrid.harness.interpreter.races import Touched
from hybrid.harness.interpreter.subgroups import LANES, Subgroups
from hybrid.harness.interpreter.values import Fault, NotInterpreted, merged, signed, spread, uniform
from hybrid.harness.interpreter.watch import Watch

NOBODY = object()
LITERALS = {79, 4450}  # whose operands from the third on are literals
INPUT, WORKGROUP, PRIVATE, FUNCTION, PUSH = 1, 4, 6, 7, 9  # storage classes; all others are buffers
MOST_LANES = 1 << 14
"""Lanes that run together."""
BATCHES = 3
"""Minimum number of workgroup batches, run in sequence, for kernels with atomic operations."""
MOST_BLOCKS = 1 << 20
"""Most blocks of a run: an endless loop is a fault."""


def run(
    module: Module,
    name: str,
    bindings: Sequence[np.ndarray],
    push: bytes,
    grid: Sequence[int],
    watch: Watch | None = None,
    limit: int | None = None,
    touched: Touched | None = None,
) -> None:
    """Run one dispatch. bindings: the bytes of each buffer, written in place. watch: counts events. limit: run only the
    first workgroups (default: all). touched: logs words of buffers. Raises Fault."""
    x, y, z = (int(g) for g in grid)
    count, threads = x * y * z, module.local[0] * module.local[1] * module.local[2]
    count = min(count, limit or count)
    if not count:
        return
    if threads % LANES:
        raise Fault(f"{name}: a workgroup of {threads} is not a whole number of subgroups")
    most = max(1, MOST_LANES // threads)
    if not module.order:
        module.order = ordered(cut(module.blocks, lambda scope: int(module.constants[scope]) <= 2))
        module.used = frozenset(op for block in module.blocks for op, *_ in block.body)
    if ATOMIC_LOAD in module.used:
        most = count  # workgroups wait for one another
    elif module.used & ATOMICS.keys():
        most = min(
            most, -(-count // BATCHES)
        )  # workgroups exchange data: an earlier lane must not see a later lane's writes
    for first in range(0, count, most):
        groups = np.arange(first, min(first + most, count))
        with np.errstate(all="ignore"):
            Machine(module, name, bindings, push, groups, (x, y, z), watch, touched).go()


class Machine(Subgroups):
    def __init__(
        self,
        module: Module,
        name: str,
        bindings: Sequence[np.ndarray],
        push: bytes,
        groups: np.ndarray,
        grid: tuple[int, int, int],
        watch: Watch | None = None,
        touched: Touched | None = None,
    ) -> None:
        self.m, self.name, self.watch, self.touched = module, name, watch, touched
        local = module.local
        threads = local[0] * local[1] * local[2]
        self.n, self.groups = len(groups) * threads, len(groups)
        lane = np.arange(self.n)
        self.group, inside = lane // threads, lane % threads
        self.subgroup = lane // LANES
        if watch is not None:
            watch.subgroups[name] += self.n // LANES
        self.values: dict[int, Any] = dict(module.constants)
        self.variables = Variables(self.n)
        self.mask: Any = None
        number = groups[self.group]
        at = [number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])]
        here = [inside % local[0], inside // local[0] % local[1], inside // (local[0] * local[1])]
        builtin: dict[int, Any] = {
            24: [np.uint32(g) for g in grid],
            25: [np.uint32(g) for g in local],
            26: at,
            27: here,
            28: [a * s + h for a, s, h in zip(at, local, here, strict=True)],
            29: inside,
            36: np.uint32(LANES),
            38: np.uint32(threads // LANES),
            40: inside // LANES,
            41: inside % LANES,
        }
        for variable, (kind, storage) in module.variables.items():
            deco = module.decorations.get(variable, {})
            if storage == INPUT:
                value = builtin[deco[11][0]]
                self.variables.held[variable] = _u32(value)
                self.values[variable] = Pointer(kind, None, 0, variable)
            elif storage == WORKGROUP:
                size = -(-kind.size() // 16) * 16
                shared = Shared(size, len(groups), self.subgroup, self.group, name, self._seen(None))
                self.values[variable] = Pointer(kind, shared, shared.base)
            elif storage == PUSH:
                self.values[variable] = Pointer(kind, Bytes(np.frombuffer(push, np.uint8), f"{name}: push constants"))
            elif storage in (PRIVATE, FUNCTION):
                self.variables.declare(variable, kind)
                self.values[variable] = Pointer(kind, None, 0, variable)
            else:
                binding = deco[33][0]
                self.values[variable] = Pointer(
                    kind, Bytes(bindings[binding], f"{name}: binding {binding}", self._seen(binding))
                )
        self.shared = [
            p.memory for p in self.values.values() if isinstance(p, Pointer) and isinstance(p.memory, Shared)
        ]
        self.blocks = module.order
        self.index = {b.label: i for i, b in enumerate(self.blocks)}

    def _seen(self, binding: int | None) -> Seen:
        """The access callback of a binding, or of shared memory (None)."""
        watch, touched = self.watch, self.touched
        if watch is not None:
            shared = binding is None
            return lambda offset, size, mask, writes: watch.touched(
                self.name, shared, offset, size, mask, writes, self.n
            )
        if touched is not None and binding is not None:
            return lambda offset, size, mask, writes: touched.touched(binding, offset, size, mask, writes)
        return None

    # --- flow
    # ----------------------------------------------------------------------------------------------------------
    def go(self) -> None:
        pending: dict[int, tuple[Any, Any]] = {
            0: (None, 0)
        }  # block: the lanes (None: all), and each lane's previous block
        resting: set[int] = set()  # blocks in which lanes poll an inter-workgroup flag
        for _ in range(MOST_BLOCKS):
            if not pending:
                return
            i = self._next(pending, resting)
            self.mask, came = self._taken(pending, i)
            block = self.blocks[i]
            if block.polls:
                resting.add(i)  # publishing lanes run first
            self._phis(block, came)
            for op, t, result, a in block.body:
                if self.watch is not None:
                    self.watch.executed(self.name, op, t, self.mask, self.n)
                try:
                    self._do(op, t, result, a)
                except Fault:
                    raise
                except IndexError as error:
                    raise Fault(f"{self.name}: opcode {op} outside its buffer: {error}") from error
                except Exception as error:
                    raise NotInterpreted(f"{self.name}: opcode {op}: {type(error).__name__}: {error}") from error
            for label, mask in self._ways(block):
                to = self.index[label]
                if to not in pending:
                    pending[to] = (mask, block.origin)
                    continue
                other, before = pending[to]
                source = np.array(np.broadcast_to(before, self.n))
                source[mask] = block.origin
                whole = mask | other
                pending[to] = (None if whole.all() else whole, source)
        raise Fault(f"{self.name}: more than {MOST_BLOCKS} blocks were run: an endless loop")

    def _next(self, pending: dict[int, tuple[Any, Any]], resting: set[int]) -> int:
        """The first runnable block. Blocks that poll a flag run only where no other block can."""
        able = [i for i in sorted(pending) if not self.blocks[i].waits or self._arrived(pending[i][0]) is not NOBODY]
        awake = [i for i in able if i not in resting]
        if not awake:
            resting.clear()
        if not able:
            raise Fault(f"{self.name}: a barrier that not all of a workgroup reach")
        return (awake or able)[0]

    def _arrived(self, mask: Any) -> Any:
        """The lanes at a barrier whose whole workgroup has arrived: NOBODY, or a mask (None: all)."""
        if mask is None:
            return None
        whole = mask.reshape(self.groups, -1).all(-1)
        return np.repeat(whole, self.n // self.groups) if whole.any() else NOBODY

    def _taken(self, pending: dict[int, tuple[Any, Any]], i: int) -> tuple[Any, Any]:
        """The lanes of a block that run now. At a barrier they pass it, and other lanes may stay."""
        mask, came = pending.pop(i)
        if not self.blocks[i].waits:
            return mask, came
        going = self._arrived(mask)
        for shared in self.shared:
            shared.barrier(going)
        if going is not None and (left := mask & ~going).any():
            pending[i] = (left, came)
        return going, came

    def _ways(self, block: Block) -> list[tuple[int, Any]]:
        op, a = block.end
        if op == 249:
            return [(a[0], self.mask)]
        if op == 250:
            return self._branch(self.values[a[0]], a[1], a[2])
        if op == 251:
            cases = [(label, value) for value, label in zip(a[2::2], a[3::2], strict=True)]
            return self._split(self.values[a[0]], cases, a[1])
        return []

    def _branch(self, value: Any, label: int, other: int) -> list[tuple[int, Any]]:
        if label == other or np.ndim(value) == 0:
            return [(label if label == other or value else other, self.mask)]
        true = value if self.mask is None else self.mask & value
        false = ~value if self.mask is None else self.mask & ~value
        if not false.any():
            return [(label, self.mask)]
        return [(label, true), (other, false)] if true.any() else [(other, self.mask)]

    def _split(self, value: Any, cases: list[tuple[int, Any]], rest: int) -> list[tuple[int, Any]]:
        whole = np.ones(self.n, bool) if self.mask is None else self.mask
        found: dict[int, Any] = {}
        left = whole
        for label, wanted in cases:
            taken = left & spread(value == wanted, self.n)
            left = left & ~taken
            if taken.any():
                found[label] = found[label] | taken if label in found else taken
        if left.any():
            found[rest] = found[rest] | left if rest in found else left
        return [(label, None if mask.all() else mask) for label, mask in found.items()]

    def _phis(self, block: Block, came: Any) -> None:
        made = []
        here: dict[int, Any] = {}  # lanes that came from a block
        for result, pairs in block.phis:
            ways = list(zip(pairs[::2], pairs[1::2], strict=True))
            if np.ndim(came) == 0:
                value = next(self.values[v] for v, label in ways if label == came)
            else:
                known = [(self.values[v], label) for v, label in ways if v in self.values]
                value = known[0][0]
                for other, label in known[1:]:
                    if label not in here:
                        here[label] = came == label
                    value = merged(here[label], other, value)
            made.append((result, value))
        for result, value in made:
            self._put(result, value)

    def _put(self, result: int, value: Any) -> None:
        if self.mask is not None and result in self.values and not isinstance(value, Pointer):
            value = merged(self.mask, value, self.values[result])
        elif self.mask is not None and isinstance(value, Pointer) and np.ndim(value.offset):
            old = self.values.get(result)
            if isinstance(old, Pointer):
                value = Pointer(
                    value.type, value.memory, np.where(self.mask, value.offset, old.offset), value.variable, value.path
                )
        self.values[result] = value

    # --- instructions
    # --------------------------------------------------------------------------------------------------
    def _do(self, op: int, t: Type | None, result: int, a: list[int]) -> None:
        v = self.values
        if op in OPERATIONS:
            operands = [v[x] for x in a] if op not in LITERALS else [v[a[0]], v[a[1]], *a[2:]]
            self._put(result, OPERATIONS[op](t, *operands))
        elif op == 12:
            self._put(result, EXTENDED[a[1]](t, *(v[x] for x in a[2:])))
        else:
            assert op in SPECIAL, f"opcode {op} is not known"
            SPECIAL[op](self, t, result, a)

    def _load(self, t: Any, result: int, a: list[int]) -> None:
        p = self.values[a[0]]
        self._put(result, self.variables.load(p, self.mask) if p.memory is None else load(p, t, self.mask))

    def _store(self, t: Any, result: int, a: list[int]) -> None:
        p, value = self.values[a[0]], self.values[a[1]]
        if p.memory is None:
            self.variables.store(p, value, self.mask)
        else:
            store(p, value, self.mask, self.n)

    def _chain(self, t: Any, result: int, a: list[int]) -> None:
        p = self.values[a[0]]
        for index in a[1:]:
            p = element(p, self.values[index])
        self._put(result, p)

    def _extract(self, t: Any, result: int, a: list[int]) -> None:
        value = self.values[a[0]]
        for i in a[1:]:
            value = value[:, i] if isinstance(value, np.ndarray) and value.ndim == 2 else value[i]
        self._put(result, value)

    def _insert(self, t: Any, result: int, a: list[int]) -> None:
        self._put(result, _with(self.values[a[1]], a[2:], self.values[a[0]], self.n))

    # --- matrices
    # --------------------------------------------------------------------------------------------------------
    def _addresses(self, p: Pointer, shape: tuple[int, int, int], layout: int, stride: int, dtype: Any) -> Any:
        row, column = matrices.places(*shape)
        if int(self.values[layout]) == 1:
            row, column = column, row
        step = p.type.size() * int(self._same(self.values[stride]))
        inside = row * step + column * np.dtype(dtype).itemsize
        base = np.broadcast_to(p.offset, self.n).astype(np.int64)
        return base[:, None] + np.tile(inside, (self.n // LANES, 1))

    def _matrix_load(self, t: Any, result: int, a: list[int]) -> None:
        p = self.values[a[0]]
        at = self._addresses(p, t.shape, a[1], a[2], t.dtype)
        p.memory.touched(at, np.dtype(t.dtype).itemsize, self.mask, False)
        view, index = p.memory.at(t.dtype, at, self.mask)
        self._put(result, view[index])

    def _matrix_store(self, t: Any, result: int, a: list[int]) -> None:
        p, value = self.values[a[0]], self.values[a[1]]
        shape = self._shape(a[1])
        at = self._addresses(p, shape, a[2], a[3], value.dtype)
        p.memory.touched(at, value.dtype.itemsize, self.mask, True)
        view, index = p.memory.at(value.dtype, at, self.mask)
        value = np.broadcast_to(value, index.shape)
        if self.mask is None:
            view[index] = value
        else:
            view[index[self.mask]] = value[self.mask]

    def _multiply(self, t: Any, result: int, a: list[int]) -> None:
        shapes = tuple(self._shape(x) for x in a[:3])
        self._whole_subgroups()
        x, y, z = (self.values[v] for v in a[:3])
        self._put(result, matrices.product(x, y, z, self.n, shapes))

    def _shape(self, value: int) -> tuple[int, int, int]:
        return self.m.shapes[value]

    def _same(self, value: Any) -> int:
        found = uniform(value, self.mask)
        if found is None:
            raise Fault(f"{self.name}: a stride of matrices that differs between lanes")
        return found

    # --- workgroups and atomic operations
    # -----------------------------------------------------------------------------------
    def _barrier(self, t: Any, result: int, a: list[int]) -> None:
        self._whole_subgroups()  # workgroup barriers are where blocks are split

    def _atomic(self, op: int, t: Any, result: int, a: list[int]) -> None:
        p = self.values[a[0]]
        dtype = p.type.dtype
        value = spread(self.values[a[3]], self.n) if len(a) > 3 else np.ones(self.n, dtype)
        view, index = p.memory.at(dtype, p.offset, self.mask)
        if not isinstance(p.memory, Shared):
            p.memory.touched(p.offset, np.dtype(dtype).itemsize, self.mask, op != ATOMIC_LOAD)
        if op == ATOMIC_LOAD:
            self._put(result, view[index])
            return
        index, found = np.broadcast_to(index, self.n), np.zeros(self.n, dtype)
        for lane in range(self.n) if self.mask is None else np.flatnonzero(self.mask):
            i = index[lane]
            found[lane] = view[i]
            view[i] = ATOMICS[op](view[i], value[lane])
        if t is not None:
            self._put(result, found)


def _with(old: Any, path: list[int], value: Any, lanes: int) -> Any:
    if not path:
        return value
    if isinstance(old, np.ndarray):
        made = np.array(np.broadcast_to(old, (lanes, old.shape[1])))
        made[:, path[0]] = value
        return made
    return [_with(x, path[1:], value, lanes) if i == path[0] else x for i, x in enumerate(old)]


def _u32(value: Any) -> Any:
    return [_u32(x) for x in value] if isinstance(value, list) else value.astype(np.uint32)


ATOMICS: dict[int, Callable[[Any, Any], Any]] = {
    227: lambda old, v: old,
    228: lambda old, v: v,
    229: lambda old, v: v,
    232: lambda old, v: old + v,
    234: lambda old, v: old + v,
    235: lambda old, v: old - v,
    236: lambda old, v: min(old, v, key=signed),
    237: min,
    238: lambda old, v: max(old, v, key=signed),
    239: max,
    240: lambda old, v: old & v,
    241: lambda old, v: old | v,
}
SPECIAL: dict[int, Callable[..., None]] = {
    1: lambda self, t, r, a: self._put(r, zero(t)),
    61: Machine._load,
    62: Machine._store,
    65: Machine._chain,
    66: Machine._chain,
    81: Machine._extract,
    82: Machine._insert,
    224: Machine._barrier,
    225: lambda self, t, r, a: None,
    333: Machine._elect,
    334: lambda self, t, r, a: self._vote(t, r, a, True),
    335: lambda self, t, r, a: self._vote(t, r, a, False),
    337: lambda self, t, r, a: self._broadcast(t, r, a, False),
    338: lambda self, t, r, a: self._broadcast(t, r, a, True),
    339: Machine._ballot,
    342: Machine._bit_count,
    345: lambda self, t, r, a: self._shuffle(t, r, a, False),
    346: lambda self, t, r, a: self._shuffle(t, r, a, True),
    4457: Machine._matrix_load,
    4458: Machine._matrix_store,
    4459: Machine._multiply,
    4460: lambda self, t, r, a: self._put(r, np.uint32(self.m.types[a[0]].n)),
    **{op: (lambda self, t, r, a, op=op: self._reduce(op, t, r, a)) for op in range(349, 361)},
    **{op: (lambda self, t, r, a, op=op: self._atomic(op, t, r, a)) for op in ATOMICS},
}
