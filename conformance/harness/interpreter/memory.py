"""Memory of kernels: byte ranges (buffers, push constants, shared memory) and private variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid.harness.interpreter.module import TYPE_ARRAY, TYPE_BOOL, TYPE_RUNTIME, TYPE_STRUCT, TYPE_VECTOR, Type, zero
from hybrid.harness.interpreter.values import Fault, NotInterpreted, merged, uniform

Seen = Callable[[Any, int, Any, bool], object] | None
OR = np.bitwise_or.reduce
CELL = 2  # bytes of shared memory tracked together
WHO = 32  # bits of a mark that hold the subgroup, above them the number of barriers


class Bytes:
    """A byte range; `name` identifies it in faults."""

    def __init__(self, data: np.ndarray, name: str, seen: Seen = None) -> None:
        """seen: called for every access with offset, bytes, mask, whether it writes."""
        self.data, self.name, self.seen = data, name, seen
        self.views: dict[Any, np.ndarray] = {}

    def view(self, dtype: Any) -> np.ndarray:
        if dtype not in self.views:
            size = np.dtype(dtype).itemsize
            self.views[dtype] = self.data[: len(self.data) // size * size].view(dtype)
        return self.views[dtype]

    def at(self, dtype: Any, offset: Any, mask: Any) -> tuple[np.ndarray, Any]:
        """The view and the element indices at these bytes; element 0 for inactive lanes."""
        view, size = self.view(dtype), np.dtype(dtype).itemsize
        if mask is not None and np.ndim(offset):
            offset = np.where(mask if np.ndim(offset) == 1 else mask[:, None], offset, 0)
        # The bitwise or of all offsets is negative or unaligned if any offset is.
        high, bits = (int(offset),) * 2 if np.ndim(offset) == 0 else (int(offset.max()), int(OR(offset, None)))
        if bits < 0 or high + size > len(self.data):
            low = int(np.min(offset))
            raise Fault(f"{self.name} has {len(self.data)} bytes, accessed were {low} to {high + size}")
        if bits & (size - 1):
            raise Fault(f"{self.name}: {np.dtype(dtype)} at an address that is not a multiple of its size")
        return view, offset >> (size.bit_length() - 1)

    def touched(self, offset: Any, size: int, mask: Any, writes: bool) -> None:
        """Report an access to the watcher."""
        if self.seen is not None:
            self.seen(offset, size, mask, writes)


class Shared(Bytes):
    """Shared memory of all workgroups, concatenated. Between two barriers, no other subgroup may touch a byte that a
    subgroup writes, or write a byte that it reads."""

    def __init__(
        self, nbytes: int, groups: int, subgroup: np.ndarray, group: np.ndarray, name: str, seen: Seen = None
    ) -> None:
        super().__init__(np.full(nbytes * groups, 0x7F, np.uint8), name, seen)  # undefined: a NaN as f16
        self.nbytes, self.subgroup, self.group = nbytes, subgroup, group
        self.base = group.astype(np.int64) * nbytes
        cells = nbytes * groups // CELL + 1
        self.wrote, self.read = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        """Marks of the latest accesses: 0 is nobody's; without a subgroup several have read since the barrier."""
        self.mark = (1 << WHO) + 1 + subgroup.astype(np.int64)
        """Current mark of each lane: barriers passed by its workgroup, its subgroup."""

    def barrier(self, lanes: Any) -> None:
        """The workgroups of these lanes (None: all) pass a barrier."""
        self.mark[slice(None) if lanes is None else lanes] += 1 << WHO

    def touched(self, offset: Any, size: int, mask: Any, writes: bool) -> None:
        super().touched(offset, size, mask, writes)
        lanes = slice(None) if mask is None else mask
        places = (offset if np.ndim(offset) else np.full(len(self.group), offset))[lanes]
        at = places[..., None] // CELL + np.arange(-(-size // CELL))
        mark = self.mark[lanes].reshape(-1, *(1,) * (at.ndim - 1))
        late = others(self.wrote[at], mark)
        if writes:
            late |= others(self.read[at], mark)
        if late.any():
            byte, what = int(at[late][0]) * CELL % self.nbytes, "written" if writes else "read"
            raise Fault(
                f"{self.name}: byte {byte} of shared memory is {what} by one subgroup after another has used it, with no "
                "barrier between"
            )
        if writes:
            self.wrote[at] = mark
            if (self.wrote[at] != mark).any():
                raise Fault(f"{self.name}: two subgroups write the same shared memory in one step")
        else:
            several = others(self.read[at], mark)
            self.read[at] = mark
            several |= self.read[at] != mark
            if several.any():
                self.read[at[several]] = np.broadcast_to(mark >> WHO << WHO, at.shape)[several]


def others(found: np.ndarray, mark: np.ndarray) -> np.ndarray:
    """True for marks with the same barrier count and another subgroup."""
    differs = found ^ mark
    return (differs - 1).view(np.uint64) < (1 << WHO) - 1


@dataclass(slots=True)
class Pointer:
    """A pointer: bytes at an offset (per lane, or uniform), or a variable with a path of indices."""

    type: Type
    memory: Bytes | None
    offset: Any = 0
    variable: int = 0
    path: tuple[Any, ...] = ()


def element(p: Pointer, index: Any) -> Pointer:
    """Pointer to one element of an array, vector, structure or matrix."""
    t = p.type
    if t.kind == TYPE_STRUCT:
        i = int(index)
        inner = t.of[i]
        if p.memory is None:
            return Pointer(inner, None, 0, p.variable, (*p.path, i))
        return Pointer(inner, p.memory, p.offset + t.places()[i])
    if p.memory is None:
        return Pointer(t.of, None, 0, p.variable, (*p.path, index))
    step = t.of.size() if t.kind == TYPE_VECTOR else t.step()
    index = index.astype(np.int64) if np.ndim(index) else int(index)
    if t.kind == TYPE_ARRAY and np.ndim(index) == 0 and not 0 <= index < t.n:
        raise Fault(f"element {index} of an array of {t.n}")
    return Pointer(t.of, p.memory, p.offset + index * step)


def load(p: Pointer, t: Type, mask: Any) -> Any:
    """Load a value from bytes."""
    assert p.memory is not None
    if t.kind == TYPE_STRUCT:
        return [load(element(p, i), m, mask) for i, m in enumerate(t.of)]
    if t.kind in (TYPE_ARRAY, TYPE_RUNTIME):
        return [load(element(p, i), t.of, mask) for i in range(t.n)]
    if t.kind == TYPE_VECTOR:
        p.memory.touched(p.offset, t.size(), mask, False)
        return [_read(p.memory, t.dtype, p.offset + i * t.of.size(), mask) for i in range(t.n)]
    p.memory.touched(p.offset, t.size(), mask, False)
    if t.kind == TYPE_BOOL:
        return _read(p.memory, np.uint32, p.offset, mask) != 0
    return _read(p.memory, t.dtype, p.offset, mask)


def store(p: Pointer, value: Any, mask: Any, lanes: int) -> None:
    assert p.memory is not None
    t = p.type
    if t.kind == TYPE_STRUCT or t.kind == TYPE_ARRAY:
        for i, part in enumerate(value):
            store(element(p, i), part, mask, lanes)
        return
    p.memory.touched(p.offset, t.size(), mask, True)
    if t.kind == TYPE_VECTOR:
        for i, part in enumerate(value):
            _write(p.memory, t.dtype, p.offset + i * t.of.size(), part, mask, lanes)
    else:
        _write(p.memory, np.uint32 if t.kind == TYPE_BOOL else t.dtype, p.offset, value, mask, lanes)


def _read(memory: Bytes, dtype: Any, offset: Any, mask: Any) -> Any:
    view, index = memory.at(dtype, offset, mask)
    return view[index]


def _write(memory: Bytes, dtype: Any, offset: Any, value: Any, mask: Any, lanes: int) -> None:
    view, index = memory.at(dtype, offset, mask)
    if np.ndim(index) == 0:
        held = value if np.ndim(value) == 0 else value[-1] if mask is None else value[np.flatnonzero(mask)[-1]]
        view[index] = held
    elif mask is None:
        view[index] = value
    else:
        view[index[mask]] = value if np.ndim(value) == 0 else value[mask]


class Variables:
    """Variables of all invocations: one tree of values each."""

    def __init__(self, lanes: int) -> None:
        self.lanes, self.held = lanes, dict[int, Any]()

    def load(self, p: Pointer, mask: Any) -> Any:
        value = self.held[p.variable]
        for index in p.path:
            value = self._inner(value, index, mask)
        return value

    def _inner(self, value: Any, index: Any, mask: Any) -> Any:
        if isinstance(value, np.ndarray) and value.ndim == 2:  # a matrix
            i = uniform(index, mask)
            if i is None:
                raise NotInterpreted("lanes read different elements of a matrix")
            return value[:, i]
        i = uniform(index, mask)
        if i is not None:
            if not 0 <= i < len(value):
                raise Fault(f"element {i} of an array of {len(value)}")
            return value[i]
        found = value[0]
        for k in range(1, len(value)):
            found = merged(np.asarray(index == k), value[k], found)
        return found

    def store(self, p: Pointer, value: Any, mask: Any) -> None:
        if not p.path:
            old = self.held[p.variable]
            self.held[p.variable] = value if mask is None else merged(mask, value, old)
            return
        self.held[p.variable] = self._changed(self.held[p.variable], p.path, value, mask)

    def _changed(self, old: Any, path: tuple[Any, ...], value: Any, mask: Any) -> Any:
        if not path:
            return value if mask is None else merged(mask, value, old)
        if isinstance(old, np.ndarray) and old.ndim == 2:
            i = uniform(path[0], mask)
            if i is None:
                raise NotInterpreted("lanes write different elements of a matrix")
            made = np.array(np.broadcast_to(old, (self.lanes, old.shape[1])))
            made[:, i] = value if mask is None else np.where(mask, value, made[:, i])
            return made
        i = uniform(path[0], mask)
        whole = np.ones(self.lanes, bool) if mask is None else mask
        parts = list(old)
        for k in range(len(old)) if i is None else (i,):
            here = mask if i is not None else whole & (path[0] == k)
            parts[k] = self._changed(old[k], path[1:], value, here)
        return parts

    def declare(self, variable: int, kind: Type) -> None:
        self.held[variable] = zero(kind)
