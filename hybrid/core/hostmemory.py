"""Host memory that several devices of one machine may use at once: anonymous, private, in whole pages; or a driver's
own buffers, given on as dma-bufs.

Drivers pin anonymous pages for a GPU or an NPU. A mapping of a driver's own buffer, of a file or of shared memory is
not such memory: amdgpu refuses it (AMDGPU_GEM_USERPTR_ANONONLY: no page of the range may belong to a file), other
drivers may take it and break later, so it is refused here for all.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Tensor

PAGE = mmap.PAGESIZE


class NotShareable(RuntimeError):
    """This memory, or this device, cannot share without a copy; the message says why."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor in a driver's buffers: one dma-buf for each part, as file descriptors that whoever takes them closes."""

    value: Tensor
    """The exporter's own mapping."""
    fds: tuple[int, ...]
    buffers: tuple[Any, ...]
    """Alive for as long as the mapping is used."""


def anonymous(decl: TensorDecl) -> Tensor:
    """A tensor of zeros whose parts begin at pages of their own."""
    return over(decl, lambda nbytes: mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def over(decl: TensorDecl, room: Callable[[int], Any]) -> Tensor:
    """A tensor whose parts lie at the beginning of `room(whole pages of bytes)` each."""
    parts = []
    for part in DTYPES[decl.dtype].parts:
        shape = DTYPES[decl.dtype].part_shape(part, decl.shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * part.dtype.itemsize
        parts.append(np.frombuffer(room(pages(nbytes)), np.uint8)[:nbytes].view(part.dtype).reshape(shape))
    return Tensor(decl.dtype, decl.shape, tuple(parts))


def pages(nbytes: int) -> int:
    """Bytes, up to whole pages."""
    return -(-max(nbytes, 1) // PAGE) * PAGE


def whole_pages(array: np.ndarray) -> tuple[int, int]:
    """(address, bytes) of the pages under an array. NotShareable unless they are anonymous memory that begins with
    it."""
    address, nbytes = array.ctypes.data, pages(array.nbytes)
    if address % PAGE:
        raise NotShareable(f"memory at {address:#x} does not begin at a page of {PAGE} bytes")
    covered = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _access, _offset, _device, inode, *path = line.split(maxsplit=5)
        start, end = (int(x, 16) for x in span.split("-"))
        if start <= covered < end:
            if inode != "0" or (path and not path[0].startswith(("[heap]", "[anon"))):
                raise NotShareable(
                    f"memory at {covered:#x} is a mapping of {path[0] if path else 'a file'}, not anonymous"
                )
            covered = end
        if covered >= address + nbytes:
            return address, nbytes
    raise NotShareable(f"memory at {covered:#x} is not mapped to the end of its {nbytes} bytes")
