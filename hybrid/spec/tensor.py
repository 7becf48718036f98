"""A host tensor of any storage type: the form in which weights and test data travel between parts of the project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid.spec.dtypes import DTYPES, DType


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
