"""Host memory that several devices share: anonymous private pages, or a driver's buffers exported as dma-bufs.

Drivers pin anonymous pages for a GPU or an NPU. Mappings of driver buffers, files or shared memory are refused for
every driver. amdgpu refuses them itself (AMDGPU_GEM_USERPTR_ANONONLY); other drivers may accept them and fail later.
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
    """The memory or the device cannot be shared without a copy; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor in a driver's buffers: one dma-buf file descriptor for each part. The receiver closes them."""

    value: Tensor
    """The exporter's own mapping."""
    fds: tuple[int, ...]
    buffers: tuple[Any, ...]
    """Buffer objects, kept alive with the mapping."""


def anonymous(decl: TensorDecl) -> Tensor:
    """A tensor of zeros with page-aligned parts."""
    return over(decl, lambda nbytes: mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def over(decl: TensorDecl, room: Callable[[int], Any]) -> Tensor:
    """A tensor with each part at the start of a buffer `room(bytes)`; bytes are whole pages."""
    parts = []
    for part in DTYPES[decl.dtype].parts:
        shape = DTYPES[decl.dtype].part_shape(part, decl.shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * part.dtype.itemsize
        parts.append(np.frombuffer(room(pages(nbytes)), np.uint8)[:nbytes].view(part.dtype).reshape(shape))
    return Tensor(decl.dtype, decl.shape, tuple(parts))


def pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-max(nbytes, 1) // PAGE) * PAGE


def whole_pages(array: np.ndarray) -> tuple[int, int]:
    """(address, bytes) of an array's pages. Raises NotShareable unless the array is page-aligned anonymous memory."""
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
