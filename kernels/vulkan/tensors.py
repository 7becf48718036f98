"""Tensors in device memory: the slices of a declaration's parts and rows, and copies in and out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybrid.core.dtypes import DTYPES
from hybrid.core.numeric import np
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.kernels.vulkan import layout
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.memory import Slice


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows row..row+rows of a tensor: one slice for each part of its storage type."""

    row: int
    rows: int
    parts: tuple[Slice, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor as bindings see it. It has one chunk, except weights that are larger than a storage buffer or have rows
    of several storage types; `dtype` is then the widest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def parts(self) -> tuple[Slice, ...]:
        """The slices of a tensor that is not split."""
        if len(self.chunks) != 1:
            raise VulkanError(
                f"{self.name} {self.shape} is split into {len(self.chunks)} chunks of rows on this "
                "device; its binding must go through .chunks"
            )
        return self.chunks[0].parts

    def prefix(self, shape: tuple[int, ...]) -> DeviceTensor:
        """The first rows of this tensor, for a smaller bucket: same trailing axes, fewer rows."""
        if shape == self.shape:
            return self
        if not shape or shape[1:] != self.shape[1:] or shape[0] > self.shape[0]:
            raise ValueError(
                f"{self.name} is stored with shape {self.shape}; a plan may declare its first rows, not {shape}"
            )
        parts = tuple(
            Slice(s.buffer, s.offset, n) for s, n in zip(self.parts, part_bytes(self.dtype, shape), strict=True)
        )
        return DeviceTensor(self.name, self.dtype, shape, (Chunk(0, shape[0], parts, self.dtype),))

    def spans(self, row: int, value: Tensor) -> Iterator[tuple[Slice, np.ndarray]]:
        """(device bytes, host bytes) of the rows row.. that `value` covers, by chunk and part.

        Host arrays are views of the contiguous `value`, of any strides, in the device's byte order: write from them, or
        read into them.
        """
        stop = row + rows_of(value.shape)
        for chunk in self.chunks:
            first, last = max(row, chunk.row), min(stop, chunk.row + chunk.rows)
            if first >= last:
                continue
            if chunk.dtype != value.dtype:
                raise ValueError(f"rows {first} to {last - 1} of {self.name} are {chunk.dtype}, not {value.dtype}")
            for piece, array in zip(chunk.parts, value.parts, strict=True):
                if not array.flags.c_contiguous:
                    raise ValueError(f"{self.name}: the host array must be contiguous")
                per = array.nbytes // max(1, rows_of(value.shape))
                host = array.reshape(-1).view(np.uint8)[(first - row) * per : (last - row) * per]
                if layout.tiled(value.dtype, value.shape):
                    size = per // (value.shape[-1] // value.type.block)
                    found = layout.pieces(host.reshape(-1, per), first - chunk.row, size)
                else:
                    found = iter([((first - chunk.row) * per, host)])
                for start, view in found:
                    yield Slice(piece.buffer, piece.offset + start, view.size), view


def rows_of(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def part_bytes(dtype: str, shape: tuple[int, ...]) -> list[int]:
    """Bytes of each part, padded to whole tiles where it is tiled."""
    t, shape = DTYPES[dtype], (layout.padded_rows(dtype, shape), *shape[1:]) if shape else ()
    return [math.prod(t.part_shape(p, shape)) * p.itemsize for p in t.parts]


def cut(chunk: Chunk, first: int, rows: int, width: int) -> Chunk:
    """Rows first..first+rows of a chunk [.., width], counted from the chunk's first row. Where it is tiled, `first`
    must begin a tile."""
    if first % layout.TILE_ROWS and layout.tiled(chunk.dtype, (rows, width)):
        raise ValueError(f"{chunk.dtype} in tiles of {layout.TILE_ROWS} rows cannot be cut at row {first}")
    sizes = zip(
        chunk.parts, part_bytes(chunk.dtype, (first, width)), part_bytes(chunk.dtype, (rows, width)), strict=True
    )
    parts = tuple(Slice(p.buffer, p.offset + before, size) for p, before, size in sizes)
    return Chunk(chunk.row + first, rows, parts, chunk.dtype)


def chunk_rows(decl: TensorDecl, max_range: int) -> list[tuple[int, int, str]]:
    """(first row, rows, storage type) of a tensor's chunks: consecutive rows of one type, split where they must be."""
    found, start = [], 0
    for dtype, rows in decl.row_types or ((decl.dtype, rows_of(decl.shape)),):
        run = replace(decl, dtype=dtype, shape=(rows, *decl.shape[1:]), row_types=()) if decl.row_types else decl
        found += [(start + row, count, dtype) for row, count in split_rows(run, max_range)]
        start += rows
    return found


def split_rows(decl: TensorDecl, max_range: int) -> list[tuple[int, int]]:
    """(first row, rows) of a tensor's chunks, each within `max_range` bytes per part. Only weights may be split."""
    rows, sizes = rows_of(decl.shape), part_bytes(decl.dtype, decl.shape)
    if max(sizes) <= max_range:
        return [(0, rows)]
    if decl.kind != "weight":
        raise VulkanError(
            f"{decl.name} ({decl.kind} {decl.dtype}{list(decl.shape)}) takes {max(sizes)} bytes, a "
            f"buffer of this device at most {max_range}; use a smaller context or fewer rows"
        )
    most, least = max_range * layout.padded_rows(decl.dtype, decl.shape) // max(sizes), 1
    if layout.tiled(decl.dtype, decl.shape):
        least = layout.TILE_ROWS
    if most < least:
        what = "one row is" if least == 1 else f"{least} rows, which are stored in tiles, are"
        raise VulkanError(f"{decl.name}: {what} larger than a storage buffer of this device may be ({max_range} bytes)")
    # Whole tiles in all but the last chunk.
    most -= next((most % tile for tile in (64, 16, least) if most >= tile), 0)
    return [(row, min(most, rows - row)) for row in range(0, rows, most)]
