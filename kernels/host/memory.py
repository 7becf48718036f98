"""Host memory of the NumPy device: tensors with optional guard bands, and the arena of activations."""

from __future__ import annotations

import os
from pathlib import Path

from hybrid.core.dtypes import DTYPES
from hybrid.core.numeric import np
from hybrid.core.plan import ALIGN, TensorDecl
from hybrid.core.tensor import Packed, Rows, Tensor

_PATTERN = 0xA5


def available_bytes() -> int:
    """Memory available to programs; the total where the system does not report it; else 4 GiB."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 << 30


def usable_bytes() -> int:
    """Limit for tensors: a sixteenth of it is left for temporaries and other programs."""
    return available_bytes() * 15 // 16


def in_memory(value: Tensor | Rows | Packed) -> int:
    """Bytes of a stored tensor that are in memory rather than in its file."""
    if isinstance(value, Rows):
        return sum(in_memory(t) for t in value.tensors)
    return value.nbytes if isinstance(value, Tensor) else 0


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed uint8 array that starts at a multiple of ALIGN."""
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def place(dtype: str, shape: tuple[int, ...], room: np.ndarray, offset: int = 0, guard: int = 0) -> Tensor:
    """Tensor of views into `room` (uint8) from `offset`: each part padded to ALIGN, `guard` bytes around each."""
    parts, kind = [], DTYPES[dtype]
    for part in kind.parts:
        want = kind.part_shape(part, shape)
        nbytes = int(np.prod(want, dtype=np.int64)) * part.dtype.itemsize
        offset += guard
        parts.append(room[offset : offset + nbytes].view(part.dtype).reshape(want))
        offset += -(-nbytes // ALIGN) * ALIGN + guard
    return Tensor(dtype, shape, tuple(parts))


class Slabs:
    """float32 arrays cut from large allocations, which get huge pages. Matrices of 2 to 4 MB are too small for them
    otherwise: 7.5 against 9.6 to 10.9 GB/s."""

    _ELEMENTS = 1 << 24
    _LINE = 64 // 4

    def __init__(self) -> None:
        self._free = np.empty(0, np.float32)

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """Uninitialised."""
        size = int(np.prod(shape, dtype=np.int64))
        if size > self._free.size:
            self._free = aligned(4 * max(size, self._ELEMENTS)).view(np.float32)
        taken, self._free = self._free[:size], self._free[-(-size // self._LINE) * self._LINE :]
        return taken.reshape(shape)


class Guarded:
    """A zeroed tensor in separate memory, with `guard` pattern bytes (rounded up to ALIGN) around each part."""

    def __init__(self, decl: TensorDecl, guard: int) -> None:
        guard = -(-guard // ALIGN) * ALIGN
        self.room = aligned(decl.nbytes + 2 * guard * len(DTYPES[decl.dtype].parts))
        self.tensor = place(decl.dtype, decl.shape, self.room, guard=guard)
        self._bands: list[np.ndarray] = []
        if guard:
            edges = [0]
            for part in self.tensor.parts:
                start = part.ctypes.data - self.room.ctypes.data
                edges += [start, start + part.nbytes]
            edges.append(self.room.size)
            self._bands = [self.room[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        for band in self._bands:
            band.fill(_PATTERN)

    def intact(self) -> bool:
        return all((band == _PATTERN).all() for band in self._bands)
