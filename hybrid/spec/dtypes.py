"""Storage types of tensors: how one row of K elements lies in memory.

A type has one part (plain numbers) or several (block-quantised): each part is a dense array whose rows
follow the tensor's rows, so a device gives every part its own aligned buffer range and loads it 16 bytes wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Part:
    """One dense array of a type: `count` items of `dtype` for each block of elements."""

    name: str
    dtype: np.dtype
    count: int


@dataclass(frozen=True, slots=True)
class DType:
    """A storage type. `block` elements share one set of parts; rows are whole numbers of blocks."""

    name: str
    block: int
    parts: tuple[Part, ...]

    @property
    def quantised(self) -> bool:
        return self.block > 1

    @property
    def bits(self) -> float:
        """Bits per element, scales included."""
        return 8 * sum(p.dtype.itemsize * p.count for p in self.parts) / self.block

    def part_shape(self, part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a part's array for a tensor of `shape` (last axis = elements of a row)."""
        if self.block == 1:
            return shape
        if not shape or shape[-1] % self.block:
            raise ValueError(f"{self.name} needs rows of a multiple of {self.block} elements, not shape {shape}")
        return (*shape[:-1], shape[-1] // self.block * part.count)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of all parts of a tensor of `shape`, without padding."""
        return sum(int(np.prod(self.part_shape(p, shape), dtype=np.int64)) * p.dtype.itemsize for p in self.parts)


def _plain(name: str, np_dtype: str) -> DType:
    return DType(name, 1, (Part("data", np.dtype(np_dtype), 1),))


# bf16 is carried as its 16 raw bits. q4_0: byte i of a block holds element i (low nibble) and i+16 (high).
# q8_act: activations, int8 codes and (scale, scale * sum of codes) in float32 for each 32 elements.
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _plain("f32", "f4"),
        _plain("f16", "f2"),
        _plain("bf16", "u2"),
        _plain("i32", "i4"),
        _plain("u32", "u4"),
        DType("q8_0", 32, (Part("codes", np.dtype("i1"), 32), Part("scales", np.dtype("f2"), 1))),
        DType("q4_0", 32, (Part("codes", np.dtype("u1"), 16), Part("scales", np.dtype("f2"), 1))),
        DType("q8_act", 32, (Part("codes", np.dtype("i1"), 32), Part("scales", np.dtype("f4"), 2))),
    )
}

WEIGHT_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
ACTIVATION_TYPES = ("f32", "f16", "q8_act")
