"""Host tensors of any storage type, for weights and test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid.core.dtypes import DTYPES, DType
from hybrid.core.numeric import np


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """`shape` counts elements; `parts` are the arrays of the storage type `dtype`, in its order."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown storage type {self.dtype!r}; known: {', '.join(DTYPES)}")
        want = [(t.part_shape(p, self.shape), p.dtype) for t in (self.type,) for p in t.parts]
        got = [(a.shape, a.dtype) for a in self.parts]
        if want != got:
            raise ValueError(f"{self.dtype} tensor of shape {self.shape} needs parts {want}, got {got}")

    @property
    def type(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    @property
    def array(self) -> np.ndarray:
        """The one part of a plain type (bf16 as raw u16)."""
        if len(self.parts) != 1:
            raise TypeError(f"{self.dtype} has parts {[p.name for p in self.type.parts]}, no single array")
        return self.parts[0]

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop of the first axis, as views."""
        parts = tuple(p[start:stop] for p in self.parts)
        return Tensor(self.dtype, (parts[0].shape[0], *self.shape[1:]), parts)

    @classmethod
    def of(cls, array: np.ndarray, dtype: str | None = None) -> Tensor:
        """A plain array as a tensor (no conversion; `dtype` names bf16 for raw u16)."""
        names = {"float32": "f32", "float16": "f16", "int32": "i32", "uint32": "u32", "uint16": "bf16"}
        name = dtype or names.get(array.dtype.name)
        if name is None:
            raise TypeError(f"no storage type for a NumPy array of {array.dtype}")
        return cls(name, tuple(array.shape), (array,))

    @classmethod
    def empty(cls, dtype: str, shape: Sequence[int]) -> Tensor:
        """Zero-filled tensor."""
        shape, t = tuple(shape), DTYPES[dtype]
        return cls(dtype, shape, tuple(np.zeros(t.part_shape(p, shape), p.dtype) for p in t.parts))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A tensor in its file's encoding, read lazily: ggml blocks, or the bytes of a plain type."""

    dtype: str
    shape: tuple[int, ...]
    read_into: Callable[[int, np.ndarray], None]
    """(byte offset in the tensor, uint8 array): fills the array. Thread-safe. Raises the file reader's errors; does not
    check scales."""
    load_rows: Callable[[int, int], Tensor]
    """A copy of rows start..stop. Raises for scales that are not finite, naming their position."""

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].nbytes(self.shape)

    def load(self) -> Tensor:
        """The tensor on the host. Raises the errors of `load_rows`."""
        return self.load_rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> Packed:
        """Rows start..stop of the first axis, still unread."""
        shape = (stop - start, *self.shape[1:])
        first = start * DTYPES[self.dtype].nbytes(self.shape[1:])
        return Packed(
            self.dtype,
            shape,
            lambda at, out: self.read_into(first + at, out),
            lambda a, b: self.load_rows(start + a, start + b),
        )


Source = Callable[[], Tensor | Packed]
"""Reads or makes a weight's rows when they are stored."""


def unpacked(piece: Tensor | Packed) -> Tensor:
    """The tensor on the host; reads a Packed one."""
    return piece.load() if isinstance(piece, Packed) else piece


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A matrix as consecutive pieces: of mixed storage types, or from several places of a file."""

    tensors: tuple[Tensor | Packed, ...]

    @property
    def dtype(self) -> str:
        """The widest of the types."""
        return max((t.dtype for t in self.tensors), key=lambda dtype: DTYPES[dtype].bits)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(t.shape[0] for t in self.tensors), *self.tensors[0].shape[1:])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows start..stop, as views."""
        cut: list[Tensor | Packed] = []
        at = 0
        for t in self.tensors:
            first, last = max(start - at, 0), min(stop - at, t.shape[0])
            if first < last:
                cut.append(t.rows(first, last))
            at += t.shape[0]
        return Rows(tuple(cut))
