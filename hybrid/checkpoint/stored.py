"""A tensor in a file: its position, and conversion of its bytes to a Tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.files import OpenFile
from hybrid.checkpoint.finite import check_scales
from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Packed, Tensor
from hybrid.quant.codec import dequantise, from_ggml, row_blocks
from hybrid.quant.foreign import FOREIGN, read


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file. dtype: our name of the type; for unsupported types the file's name; for a foreign type the one
    that it is read as."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: OpenFile | None
    """None for an unsupported type."""
    offset: int = 0
    foreign: str = ""
    """The file's type, if it is a foreign one (hybrid.quant.foreign)."""

    factor: Stored | None = None
    """A number that multiplies the tensor's (nvfp4)."""

    @property
    def ids_bytes(self) -> int:
        """Bytes of a vector of I32 or I64."""
        return prod(self.shape) * (4 if self.dtype == "I32" else 8)

    def ids(self, count: int) -> Tensor:
        """A permutation of the token ids 0..count - 1, stored as I32 or I64, as i32 [count]. CheckpointError for other
        values."""
        if self.file is None or self.dtype not in ("I32", "I64") or self.shape != (count,):
            raise CheckpointError(
                f"{self.path}: tensor {self.name} is {self.dtype} {list(self.shape)}: it must be int32 or int64 [{count}]"
            )
        raw = self.file.read(self.offset, self.ids_bytes)
        found = np.frombuffer(raw, "<i4" if self.dtype == "I32" else "<i8")
        if not np.array_equal(np.sort(found), np.arange(count)):
            raise CheckpointError(f"{self.path}: tensor {self.name} must name each of the {count} tokens once")
        return Tensor.of(found.astype(np.int32))

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        if not self.foreign:
            return DTYPES[self.dtype].nbytes(self.shape)
        kind = FOREIGN[self.foreign]
        return prod(self.shape) // kind.block * kind.nbytes

    def raw(self) -> np.ndarray:
        """A copy of the tensor's bytes, uint8. CheckpointError if a scale is not finite or the file has changed."""
        return self._bytes(0, self.nbytes)

    def load(self) -> Tensor:
        """A copy of the tensor. Raises the errors of `raw`."""
        if len(self.shape) == 2:
            return self.read_rows(0, self.shape[0])
        if self.foreign:
            made = replace(self, shape=(1, prod(self.shape))).read_rows(0, 1)
            return Tensor(made.dtype, self.shape, tuple(p[0] for p in made.parts))
        return from_ggml(self.raw(), self.dtype, self.shape)

    def packed(self) -> Packed:
        """The matrix as a lazily read Packed tensor; not of a foreign type, whose rows are made."""
        file, offset = self.file, self.offset
        assert file is not None
        return Packed(self.dtype, self.shape, lambda at, out: file.read_into(offset + at, out), self.read_rows)

    def read_rows(self, start: int, stop: int) -> Tensor:
        """A copy of rows start..stop of a matrix. Block types are split into parts a few rows at a time, to avoid a
        second full copy. Raises the errors of `raw`."""
        width = self.shape[1]
        row, out = self.nbytes // max(self.shape[0], 1), Tensor.empty(self.dtype, (stop - start, width))
        if out.type.block == 1:
            assert self.file is not None
            self.file.read_into(self.offset + start * row, out.parts[0].reshape(-1).view(np.uint8))
            return out
        for a, b in row_blocks(stop - start, width, 1 << 18 if self.foreign else 1 << 20):
            raw = self._bytes((start + a) * row, (start + b) * row, start + a)
            piece = self._read(raw, (b - a, width)) if self.foreign else from_ggml(raw, self.dtype, (b - a, width))
            for to, part in zip(out.parts, piece.parts, strict=True):
                to[a:b] = part
        return out

    def _read(self, raw: np.ndarray, shape: tuple[int, int]) -> Tensor:
        try:
            factor = 1.0 if self.factor is None else float(dequantise(self.factor.load()).item())
            return read(FOREIGN[self.foreign], raw, shape, factor)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {self.name} of {self.foreign}: {error}") from None

    def _bytes(self, begin: int, end: int, first_row: int = 0) -> np.ndarray:
        assert self.file is not None
        raw = np.empty(end - begin, np.uint8)
        self.file.read_into(self.offset + begin, raw)
        if not self.foreign:
            check_scales(self.path, self.name, self.dtype, self.shape, raw, first_row)
        return raw
