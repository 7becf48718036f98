"""Storage types of tensors: how one row of K elements lies in memory.

A type has one part (plain numbers) or several (block-quantised): each part is a dense array whose rows
follow the tensor's rows, so a device gives every part its own aligned buffer range and loads it 16 bytes wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hybrid.core.numeric import np


@dataclass(frozen=True, slots=True)
class Part:
    """One dense array of a type: `count` items of `dtype` for each block of elements."""

    name: str
    code: str
    """NumPy's: the kind of number and its bytes, one digit."""
    count: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.code)

    @property
    def itemsize(self) -> int:
        """Bytes of one item."""
        return int(self.code[1])


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
        return 8 * sum(p.itemsize * p.count for p in self.parts) / self.block

    def part_shape(self, part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a part's array for a tensor of `shape` (last axis = elements of a row)."""
        if self.block == 1:
            return shape
        if not shape or shape[-1] % self.block:
            raise ValueError(f"{self.name} needs rows of a multiple of {self.block} elements, not shape {shape}")
        return (*shape[:-1], shape[-1] // self.block * part.count)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of all parts of a tensor of `shape`, without padding."""
        return sum(math.prod(self.part_shape(p, shape)) * p.itemsize for p in self.parts)


def _plain(name: str, code: str) -> DType:
    return DType(name, 1, (Part("data", code, 1),))


def _blocks(name: str, block: int, *parts: tuple[str, str, int]) -> DType:
    return DType(name, block, tuple(Part(*part) for part in parts))


# bf16 is carried as its 16 raw bits. q8_act: activations, int8 codes and (scale, scale * sum of codes) in float32 for
# each 32 elements. Types that devices compute with have blocks of 32 whose loads are whole words (what elements 4k+i,
# k = 0..7, have in common lies in byte i of a word, so that shifting the word gives four codes at a time):
#   codes   of 4-bit (parts of) codes: byte i of a block of 32 holds element i (low nibble) and i+16 (high)
#   high    q5_0, q5_1: bit k of byte i is the fifth bit of element 4k+i
#           q6_k: of each 32, bits 2k, 2k+1 of byte i are the upper bits of element 8k+i
#   scales  q4_1, q5_1: (d, m), value = d*code + m; q6_k: int8 for each 16, value = d*scale*(code-32), d in `super`
# q4_k and q5_k have the parts of a ggml block as they are; scales: 8 scales and 8 minima of 6 bits, super: (d, dmin).
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _plain("f32", "f4"),
        _plain("f16", "f2"),
        _plain("bf16", "u2"),
        _plain("i8", "i1"),
        _plain("i32", "i4"),
        _plain("u32", "u4"),
        _blocks("q8_0", 32, ("codes", "i1", 32), ("scales", "f2", 1)),
        _blocks("q4_0", 32, ("codes", "u1", 16), ("scales", "f2", 1)),
        _blocks("q4_1", 32, ("codes", "u1", 16), ("scales", "f2", 2)),
        _blocks("q5_0", 32, ("codes", "u1", 16), ("high", "u1", 4), ("scales", "f2", 1)),
        _blocks("q5_1", 32, ("codes", "u1", 16), ("high", "u1", 4), ("scales", "f2", 2)),
        _blocks("q4_k", 256, ("codes", "u1", 128), ("scales", "u1", 12), ("super", "f2", 2)),
        _blocks("q5_k", 256, ("codes", "u1", 128), ("high", "u1", 32), ("scales", "u1", 12), ("super", "f2", 2)),
        _blocks("q6_k", 256, ("codes", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("super", "f2", 1)),
        _blocks("q8_act", 32, ("codes", "i1", 32), ("scales", "f4", 2)),
    )
}

WEIGHT_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
QUANTISED_TYPES = tuple(t for t in WEIGHT_TYPES if DTYPES[t].quantised)
WRITABLE_TYPES = tuple(t for t in WEIGHT_TYPES if DTYPES[t].block <= 32)  # the k types are read, never made
ACTIVATION_TYPES = ("f32", "f16", "q8_act")
CacheType = Literal["f32", "f16", "q8_0"]
"""Of the KV cache. q8_0 needs heads that are multiples of 32 elements."""
CacheChoice = Literal["auto", "f32", "f16", "q8_0"]
"""What `kv` may be: a type, or what the schedule's precision says."""
CACHE_TYPES, CACHE_CHOICES = get_args(CacheType), get_args(CacheChoice)
