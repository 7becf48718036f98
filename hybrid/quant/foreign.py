"""Types of GGUF files that no kernel reads: decoded by the gguf package and encoded again, while they are read, in a type
that holds their numbers.

Numbers of a group are a unit times a few levels. The unit is found by trying each level for the group's largest number;
it becomes the scale of the other type, whose codes hold the levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import quantise
from hybrid.quant.search import f16_scale, reciprocal

Levels = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A type that is read as `target`."""

    name: str
    number: int
    """ggml's tensor type."""
    block: int
    nbytes: int
    """Bytes of a block."""
    target: str
    loss: str
    """What is lost, for notes."""
    group: int = 0
    """Elements of one unit; 0: any numbers, quantised as usual."""
    levels: tuple[Levels, ...] = ()
    """Levels of a group, ascending; several: each group has one of them; none: units are powers of two."""
    step: float = 1.0
    """Levels between neighbouring codes of the target."""

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.block

    def note(self, tensors: int) -> str:
        """One line for a file with tensors of this type."""
        to = DTYPES[self.target].bits
        return f"{tensors} tensors of {self.name} are read as {self.target}: {to:.4g} bits a weight, not {self.bits:.4g}; {self.loss}"


def _mirrored(*levels: float) -> Levels:
    return (*(-v for v in reversed(levels)), *levels)


_ROUNDED, _NEARLY = "scales rounded to float16", "scales of a few groups rounded"
_IQ2 = ((_mirrored(8, 25, 43),), 43 / 31, "1 % of noise, root mean square")
FOREIGN = {
    f.name: f
    for f in (
        Foreign("iq3_xxs", 18, 256, 98, "q6_k", _NEARLY, 16, (_mirrored(4, 12, 20, 28, 36, 44, 52, 62),), 2),
        Foreign("iq3_s", 21, 256, 110, "q4_1", _ROUNDED, 32, (_mirrored(1, 3, 5, 7, 9, 11, 13, 15),), 2),
        Foreign("iq2_xxs", 16, 256, 66, "q6_k", _IQ2[2], 16, *_IQ2[:2]),
        Foreign("iq2_xs", 17, 256, 74, "q6_k", _IQ2[2], 16, *_IQ2[:2]),
        Foreign("iq2_s", 22, 256, 82, "q6_k", _IQ2[2], 16, *_IQ2[:2]),
        Foreign("iq1_s", 19, 256, 50, "q4_1", _ROUNDED, 32, ((-9, -1, 7), (-7, 1, 9)), 8),
        Foreign("iq1_m", 29, 256, 56, "q6_k", _NEARLY, 16, (_mirrored(1, 7, 9),)),
        Foreign("tq1_0", 34, 256, 54, "q2_k", "exact", 256, ((-1, 0, 1),)),
        Foreign("tq2_0", 35, 256, 66, "q2_k", "exact", 256, ((-1, 0, 1, 2),)),
        Foreign("mxfp4", 39, 32, 17, "q5_0", "exact", 32),
        Foreign("nvfp4", 40, 64, 36, "q8_0", "0.6 % of noise, root mean square"),
    )
}


def read(kind: Foreign, raw: np.ndarray, shape: tuple[int, int], factor: float = 1.0) -> Tensor:
    """The matrix that ggml's blocks `raw` (uint8) hold, in the target type; times `factor` (nvfp4). ValueError for numbers that are not finite, or
    too large for float16 scales."""
    from gguf import GGMLQuantizationType, quants

    with np.errstate(invalid="ignore", over="ignore"):
        values = quants.dequantize(raw.reshape(-1, kind.nbytes), GGMLQuantizationType(kind.number))
    if not np.isfinite(values).all():
        raise ValueError("a scale is not finite: the file is damaged, fetch it again")
    if not kind.group:  # an int8 code of 32 elements, of which each 16 had a scale
        return quantise(values.reshape(shape) * np.float32(factor), kind.target)
    target = DTYPES[kind.target]
    groups = values.reshape(-1, kind.group)
    unit, level = _fit(groups, kind.levels) if kind.levels else _powers(groups)
    made: tuple[np.ndarray, ...]
    if kind.target == "q4_1":
        lowest = np.array([v[0] for v in kind.levels], np.float32)
        base = lowest[np.array([np.isin(level, v).all(1) for v in kind.levels]).argmax(0)][:, None]
        codes = ((level - base) / np.float32(kind.step)).astype(np.uint8)
        made = (_nibbles(codes), f16_scale(np.concatenate([unit * np.float32(kind.step), unit * base], 1), kind.name))
    elif kind.target == "q5_0":
        codes = (level + 16).astype(np.uint8)
        made = (_nibbles(codes), _fifths(codes), f16_scale(unit, kind.name))
    elif kind.target == "q2_k":
        codes = (level + 1).astype(np.uint8).reshape(len(unit), 8, 4, 8)
        packed = np.bitwise_or.reduce(codes << _PAIRS[:, None], axis=2)
        scales = np.full((len(unit), 16), 0x11, np.uint8)
        made = (packed, scales, f16_scale(np.repeat(unit, 2, axis=1), kind.name))
    else:
        made = _q6_k(kind, unit, level)
    parts = zip(target.parts, made, strict=True)
    return Tensor(kind.target, shape, tuple(p.reshape(target.part_shape(part, shape)) for part, p in parts))


_PAIRS = np.arange(0, 8, 2, dtype=np.uint8)


def _fit(groups: np.ndarray, sets: tuple[Levels, ...]) -> tuple[np.ndarray, np.ndarray]:
    """f32 [n, m] -> (unit [n, 1], level of each number [n, m]): of the largest levels that fit, else of the nearest."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    unit, level, best = np.zeros_like(peak), np.zeros_like(groups), np.full_like(peak, np.inf)
    left = np.arange(len(groups))
    for levels in sets:
        near, mirrored = _nearest(levels), -levels[0] == levels[-1]
        for top in sorted((v for v in levels if v > 0 or (v < 0 and not mirrored)), key=abs, reverse=True):
            some, u = groups[left], peak[left] / np.float32(top)
            found = near[np.rint(some * reciprocal(u)).astype(np.int8)]
            error = np.square(some - u * found).sum(1, keepdims=True)
            better = (error < best[left])[:, 0]
            at = left[better]
            best[at], unit[at], level[at] = error[better], u[better], found[better]
            left = left[best[left, 0] > np.float32(1e-9) * np.square(peak[left, 0])]
    return unit, level


def _powers(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_fit`, where the unit is a power of two: the one that makes the largest number 8 to 15."""
    _, exponent = np.frexp(np.abs(groups).max(1, keepdims=True))
    unit = np.ldexp(np.float32(1), np.maximum(exponent - 4, -24))
    return unit, np.rint(groups / unit)


@cache
def _nearest(levels: Levels) -> np.ndarray:
    """The level nearest to a whole number of at most 127, from 0 to 127 and then from -128 to -1."""
    whole = np.arange(256, dtype=np.uint8).view(np.int8)
    known = np.array(levels, np.float32)
    return known[np.abs(whole[:, None] - known).argmin(1)]


def _q6_k(kind: Foreign, unit: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, ...]:
    """Scales of 16 elements are whole multiples of a block's: of an odd fraction of its largest, as these types have them."""
    code = np.rint(level / np.float32(kind.step))
    known = np.array(kind.levels[0], np.float32)
    whole = np.rint(known / np.float32(kind.step))
    scale = (unit * (known @ whole / (whole @ whole))).reshape(-1, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    best, d, factor = np.full_like(largest, np.inf), np.zeros_like(largest), np.zeros_like(scale)
    for most in (*range(1, 33, 2), 127):
        one = largest / np.float32(most)
        small = np.rint(scale * reciprocal(one))
        error = np.square(scale - small * one).sum(1, keepdims=True)
        better = error < best * np.float32(0.5)
        best, d, factor = np.where(better, error, best), np.where(better, one, d), np.where(better, small, factor)
    stored = (code + 32).astype(np.uint8).reshape(-1, 32)
    upper = np.bitwise_or.reduce((stored >> np.uint8(4)).reshape(-1, 4, 8) << _PAIRS[:, None], axis=1)
    return _nibbles(stored), upper, factor.astype(np.int8), f16_scale(d, kind.name)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    by = (codes & np.uint8(15)).reshape(-1, 2, 16)
    return by[:, 0] | by[:, 1] << np.uint8(4)


def _fifths(codes: np.ndarray) -> np.ndarray:
    return np.packbits(codes.reshape(-1, 8, 4) >> np.uint8(4), axis=1, bitorder="little").reshape(-1, 4)
