"""Storage types of tensors: the memory layout of a row of K elements.

A plain type has one part, a block-quantised type several. Each part is a dense array with one row for each row of the
tensor. Devices give every part its own aligned buffer range and load it in 16-byte words.
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
    """NumPy type code: a kind and one digit of bytes, such as `f2`."""
    count: int
    packing: str = ""
    """Packing of small integers into items (hybrid/quant/blocks.py); empty: items are plain numbers."""
    ggml: str = ""
    """ggml's item order, if it differs: a key of hybrid.quant.blocks.RELAY."""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.code)

    @property
    def itemsize(self) -> int:
        """Bytes of one item."""
        return int(self.code[1])


@dataclass(frozen=True, slots=True)
class InFiles:
    """A weight type's encoding in GGUF files."""

    number: int
    """ggml's tensor type."""
    file_type: int
    """llama.cpp's file type (`general.file_type`); for K types the medium mixture's."""
    order: tuple[str, ...] = ("data",)
    """Order of the parts inside a block."""
    written: bool = True
    """False: supported for reading only."""
    narrower: str = "f16"
    """The type written instead if rows are not whole blocks."""


@dataclass(frozen=True, slots=True)
class DType:
    """A storage type. `block` elements share one set of parts; rows are whole blocks."""

    name: str
    block: int
    parts: tuple[Part, ...]
    integers: tuple[int, int] = (0, 0)
    """Range of the integers that a scale multiplies, as encoders and conformance tests make them (q8_0 excludes -128).
    Stored codes begin at 0."""
    table: tuple[int, ...] = ()
    """The integer of each stored code, ascending; empty: the code less the offset."""
    files: InFiles | None = None
    """The GGUF encoding; None: not a weight type."""
    elsewhere: tuple[tuple[str, str], ...] = ()
    """(backend without kernels for this type, type it converts to); other backends have kernels."""
    noise: tuple[float, float] = (1.0, 0.0)
    """For random codes: standard deviation in units of the (super) scale, and the minimum that centres the values."""

    @property
    def quantised(self) -> bool:
        return self.block > 1

    @property
    def bits(self) -> float:
        """Bits per element, scales included."""
        return 8 * sum(p.itemsize * p.count for p in self.parts) / self.block

    @property
    def offset(self) -> int:
        """The zero point: subtracted from a stored code."""
        return 0 if self.parts[0].code == "i1" or self.table else -self.integers[0]

    @property
    def minimum(self) -> bool:
        """Whether each scale has a minimum (an affine type)."""
        return self.quantised and self.parts[-1].code == "f2" and self.parts[-1].count == 2

    @property
    def group(self) -> int:
        """Elements of one scale."""
        scales = self.part("scales")
        return self.block // SCALES.get(scales.packing, scales.count if scales.code == "i1" else 1)

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
SCALES = {"six_bits": 8, "six_bits_of_8": 8, "six_bits_of_16": 16, "four_bits": 16}
"""Scales of a block, by their packing."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# bf16 is stored as raw u16. q8_act: activations, int8 codes and (scale, scale * sum of codes) in float32 for each 32
# elements. Types with kernels have blocks of 32 that load as whole words. Byte i of a word holds bits of elements 4k+i,
# k = 0..7, so that one shift of the word extracts four codes:
#   nibbles byte i of a block of 32 holds element i (low nibble) and i+16 (high)
#   fifths  bit k of byte i is the fifth bit of element 4k+i
#   sixths  of each 32, bits 2k, 2k+1 of byte i are the upper bits of element 8k+i
#   pairs   as sixths, but the lowest bits; thirds: as fifths, the third bit
#   scales  one float16 d, value = d*code; two (d, m), value = d*code + m; int8 for each 16, value = d*scale*code, d in
#           `super`
# Small scales are packed as in ggml's blocks, and `super` is what they multiply, d or (d, dmin): six_bits 8 scales and 8
# minima, six_bits_of_8 and _of_16 so many scales less 32, four_bits 16 bytes with a scale and a minimum. q4_k and q5_k keep
# all parts of ggml's blocks.
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
        DType(
            "q3_k",
            256,
            (
                Part("codes", "u1", 64, "pairs", ggml="pairs"),
                Part("high", "u1", 32, "thirds", ggml="bits"),
                Part("scales", "u1", 12, "six_bits_of_16"),
                Part("super", "f2", 1),
            ),
            integers=(-4, 3),
            files=InFiles(11, 12, ("high", "codes", "scales", "super"), narrower="iq4_nl"),
            noise=(43.3, 0.0),
        ),
        DType(
            "q2_k",
            256,
            (
                Part("codes", "u1", 64, "pairs", ggml="pairs"),
                Part("scales", "u1", 16, "four_bits"),
                Part("super", "f2", 2),
            ),
            integers=(0, 3),
            files=InFiles(10, 10, ("scales", "codes", "super"), narrower="iq4_nl"),
            noise=(13.9, 1.5),
        ),
        DType(
            "iq4_nl",
            32,
            (_NIBBLES, _SCALE),
            integers=(-127, 113),
            table=_IQ4,
            files=InFiles(20, 25, ("scales", "codes")),
            noise=(67.4, 0.0),
        ),
        DType(
            "iq4_xs",
            256,
            (Part("codes", "u1", 128, "nibbles"), Part("scales", "u1", 6, "six_bits_of_8"), Part("super", "f2", 1)),
            integers=(-127, 113),
            table=_IQ4,
            files=InFiles(23, 30, ("super", "scales", "codes"), narrower="iq4_nl"),
            noise=(1246.0, 0.0),
        ),
        DType("q8_act", 32, (Part("codes", "i1", 32), Part("scales", "f4", 2)), integers=(-127, 127)),
    )
}

FILE_TYPES: dict[str, InFiles] = {t: d.files for t, d in DTYPES.items() if d.files is not None}
"""GGUF encodings by weight type."""
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
"""Groups of types that specs may name. lone_scales: a single float16 per block, which needs 16-bit loads."""


def requantises(stored: str, made: str) -> bool:
    """Whether making type `made` of a matrix quantises numbers that were quantised before."""
    return made != stored and DTYPES[stored].quantised and DTYPES[made].quantised


def fitting(dtype: str, width: int) -> str:
    """The type for rows of `width` elements: if they are no whole blocks the next larger type, as llama.cpp's quantiser
    takes it."""
    while width % DTYPES[dtype].block:
        dtype = FILE_TYPES[dtype].narrower
    return dtype


def held_as(dtype: str, backend: str) -> str:
    """The type in which a backend stores matrices of this type: the same if it has kernels for it."""
    return dict(DTYPES[dtype].elsewhere).get(backend, dtype)


def native_types(backend: str) -> tuple[str, ...]:
    """Weight types that a backend has kernels for."""
    return tuple(t for t in WEIGHT_TYPES if held_as(t, backend) == t)


CacheType = Literal["f32", "f16", "q8_0"]
"""KV cache types. q8_0 needs a head_dim that is a multiple of 32."""
CacheChoice = Literal["auto", "f32", "f16", "q8_0"]
"""Values of the `kv` option. auto: the schedule's precision profile decides."""
CACHE_TYPES, CACHE_CHOICES = get_args(CacheType), get_args(CacheChoice)
