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
    packing: str = ""
    """How items hold several small integers (hybrid/quant/blocks.py); empty: they are numbers."""
    ggml: str = ""
    """How ggml orders the items where that differs: a key of hybrid.quant.blocks.RELAY."""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.code)

    @property
    def itemsize(self) -> int:
        """Bytes of one item."""
        return int(self.code[1])


@dataclass(frozen=True, slots=True)
class InFiles:
    """A weight type as GGUF files have it."""

    number: int
    """ggml's, of a tensor."""
    file_type: int
    """llama.cpp's, of a file of such matrices; its K types come in mixtures, of which medium is the usual one."""
    order: tuple[str, ...] = ("data",)
    """Of the parts inside a block."""
    written: bool = True
    """False: read, never made."""
    narrower: str = "f16"
    """Written instead where rows are no whole blocks."""


@dataclass(frozen=True, slots=True)
class DType:
    """A storage type: all that is known of it. `block` elements share one set of parts; rows are whole blocks."""

    name: str
    block: int
    parts: tuple[Part, ...]
    integers: tuple[int, int] = (0, 0)
    """Smallest and largest integer that a scale multiplies, which conformance draws (q8_0 could hold -128; encoders
    never make it). Codes are stored from 0 on."""
    files: InFiles | None = None
    """None: no type of weights."""
    elsewhere: tuple[tuple[str, str], ...] = ()
    """(backend that does not compute with it, type in which it holds such matrices); the others compute with it."""
    noise: tuple[float, float] = (1.0, 0.0)
    """Of random codes: standard deviation of a value in units of the (super) scale, and the minimum that centres it."""

    @property
    def quantised(self) -> bool:
        return self.block > 1

    @property
    def bits(self) -> float:
        """Bits per element, scales included."""
        return 8 * sum(p.itemsize * p.count for p in self.parts) / self.block

    @property
    def offset(self) -> int:
        """What is subtracted from a stored code."""
        return 0 if self.parts[0].code == "i1" else -self.integers[0]

    @property
    def minimum(self) -> bool:
        """Is a minimum added to each scale's products?"""
        return self.quantised and self.parts[-1].code == "f2" and self.parts[-1].count == 2

    @property
    def group(self) -> int:
        """Elements under one scale."""
        scales = self.part("scales")
        return self.block // (8 if scales.packing == "six_bits" else scales.count if scales.code == "i1" else 1)

    def part(self, name: str) -> Part:
        return next(p for p in self.parts if p.name == name)

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


def _plain(name: str, code: str, files: InFiles | None = None) -> DType:
    return DType(name, 1, (Part("data", code, 1),), files=files)


_SCALE, _PAIR = Part("scales", "f2", 1), Part("scales", "f2", 2)
_NIBBLES, _FIFTHS = Part("codes", "u1", 16, "nibbles"), Part("high", "u1", 4, "fifths", ggml="fifths")
_CODES_K = Part("codes", "u1", 128, "nibbles_of_32")
_SIX_BITS = Part("scales", "u1", 12, "six_bits")

# bf16 is carried as its 16 raw bits. q8_act: activations, int8 codes and (scale, scale * sum of codes) in float32 for
# each 32 elements. Types that devices compute with have blocks of 32 whose loads are whole words (what elements 4k+i,
# k = 0..7, have in common lies in byte i of a word, so that shifting the word gives four codes at a time):
#   nibbles byte i of a block of 32 holds element i (low nibble) and i+16 (high)
#   fifths  bit k of byte i is the fifth bit of element 4k+i
#   sixths  of each 32, bits 2k, 2k+1 of byte i are the upper bits of element 8k+i
#   scales  one float16 d, value = d*code; two (d, m), value = d*code + m; int8 for each 16, value = d*scale*code, d in
#           `super`
# k types but q6_k have the parts of a ggml block as they are; scales: 8 scales and 8 minima of 6 bits, super: (d, dmin).
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _plain("f32", "f4", InFiles(0, 0)),
        _plain("f16", "f2", InFiles(1, 1)),
        _plain("bf16", "u2", InFiles(30, 32)),
        _plain("i8", "i1"),
        _plain("i32", "i4"),
        _plain("u32", "u4"),
        DType(
            "q8_0",
            32,
            (Part("codes", "i1", 32), _SCALE),
            integers=(-127, 127),
            files=InFiles(8, 7, ("scales", "codes")),
            noise=(74.0, 0.0),
        ),
        DType(
            "q4_0", 32, (_NIBBLES, _SCALE), integers=(-8, 7), files=InFiles(2, 2, ("scales", "codes")), noise=(4.6, 0.0)
        ),
        DType(
            "q4_1", 32, (_NIBBLES, _PAIR), integers=(0, 15), files=InFiles(3, 3, ("scales", "codes")), noise=(4.6, -7.5)
        ),
        DType(
            "q5_0",
            32,
            (_NIBBLES, _FIFTHS, _SCALE),
            integers=(-16, 15),
            files=InFiles(6, 8, ("scales", "high", "codes")),
            elsewhere=(("vulkan", "q5_1"),),
            noise=(9.2, 0.0),
        ),
        DType(
            "q5_1",
            32,
            (_NIBBLES, _FIFTHS, _PAIR),
            integers=(0, 31),
            files=InFiles(7, 9, ("scales", "high", "codes")),
            noise=(9.2, -15.5),
        ),
        DType(
            "q4_k",
            256,
            (_CODES_K, _SIX_BITS, Part("super", "f2", 2)),
            integers=(0, 15),
            files=InFiles(12, 15, ("super", "scales", "codes"), written=False, narrower="q5_0"),
            elsewhere=(("vulkan", "q4_1"),),
            noise=(250.0, 7.5),
        ),
        DType(
            "q5_k",
            256,
            (_CODES_K, Part("high", "u1", 32, "fifths_of_32"), _SIX_BITS, Part("super", "f2", 2)),
            integers=(0, 31),
            files=InFiles(13, 17, ("super", "scales", "high", "codes"), written=False, narrower="q5_1"),
            elsewhere=(("vulkan", "q5_1"),),
            noise=(500.0, 15.5),
        ),
        DType(
            "q6_k",
            256,
            (
                Part("codes", "u1", 128, "nibbles", ggml="halves"),
                Part("high", "u1", 64, "sixths", ggml="pairs"),
                Part("scales", "i1", 16),
                Part("super", "f2", 1),
            ),
            integers=(-32, 31),
            files=InFiles(14, 18, ("codes", "high", "scales", "super"), written=False, narrower="q8_0"),
            noise=(1370.0, 0.0),
        ),
        DType("q8_act", 32, (Part("codes", "i1", 32), Part("scales", "f4", 2)), integers=(-127, 127)),
    )
}

FILE_TYPES: dict[str, InFiles] = {t: d.files for t, d in DTYPES.items() if d.files is not None}
"""As files have them."""
WEIGHT_TYPES = tuple(FILE_TYPES)
QUANTISED_TYPES = tuple(t for t in WEIGHT_TYPES if DTYPES[t].quantised)
WRITABLE_TYPES = tuple(t for t, files in FILE_TYPES.items() if files.written)
ACTIVATION_TYPES = ("f32", "f16", "q8_act")
LISTS: dict[str, tuple[str, ...]] = {
    "$weights": WEIGHT_TYPES,
    "$quantised": QUANTISED_TYPES,
    "$activations": ACTIVATION_TYPES,
    "$lone_scales": tuple(t for t in QUANTISED_TYPES if DTYPES[t].parts[-1].count == 1),
}
"""Names that specs may write for several types. lone_scales: a float16 that no other lies beside in a word."""


def held_as(dtype: str, backend: str) -> str:
    """The type in which a backend holds matrices of this type: the same where it computes with it."""
    return dict(DTYPES[dtype].elsewhere).get(backend, dtype)


def native_types(backend: str) -> tuple[str, ...]:
    """Weight types that a backend computes with."""
    return tuple(t for t in WEIGHT_TYPES if held_as(t, backend) == t)


CacheType = Literal["f32", "f16", "q8_0"]
"""Of the KV cache. q8_0 needs heads that are multiples of 32 elements."""
CacheChoice = Literal["auto", "f32", "f16", "q8_0"]
"""What `kv` may be: a type, or what the schedule's precision says."""
CACHE_TYPES, CACHE_CHOICES = get_args(CacheType), get_args(CacheChoice)
