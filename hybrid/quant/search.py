"""Encoders that search for scales: of types with a table, and of types whose small scales share a float16.

Each group of elements takes the candidate of least squared error, its scale fitted by least squares. Small scales are then
rounded under the block's float16, where the steps beside the nearest are tried too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from hybrid.core.dtypes import DTYPES, DType
from hybrid.quant.blocks import packed_scales

_ELEMENTS = 1 << 16  # at once: temporaries stay in the cache
# Where a group's largest number may be placed, in integers of the type.
_TARGETS = {
    "q3_k": tuple(np.arange(-4.8, -3.1, 0.2)),
    "iq4_nl": (-139.0, -133.0, -127.0, -121.0, -115.0, -108.0, 101.0, 107.0, 113.0, 119.0),
}
_TARGETS["iq4_xs"] = _TARGETS["iq4_nl"]
_STEPS = tuple(np.arange(2.5, 4.1, 0.125))  # of q2_k: codes from a group's smallest number to its largest

Codes = Callable[[np.ndarray], np.ndarray]


def reciprocal(d: np.ndarray) -> np.ndarray:
    """1/d, or 0 if d is 0 or 1/d overflows float32 (d below 2**-128, which is 0 in float16)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def f16_scale(d: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        scale = d.astype(np.float16)
    if not np.isfinite(scale).all():
        raise ValueError(f"cannot quantise to {dtype}: a value is NaN, infinite, or too large for a float16 scale")
    return scale


def encode(dtype: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Parts of f32 [n, block]. ValueError for numbers that float16 scales cannot hold."""
    kind = DTYPES[dtype]
    encoder = _affine if kind.minimum else _symmetric
    step = max(1, _ELEMENTS // kind.block)
    pieces = [encoder(kind, x[a : a + step]) for a in range(0, len(x), step)]
    return tuple(np.concatenate(p) for p in zip(*pieces, strict=True))


def _symmetric(kind: DType, x: np.ndarray) -> tuple[np.ndarray, ...]:
    nearest, groups = _nearest(kind.name), x.reshape(len(x), -1, kind.group)
    peak = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    f16_scale(peak / np.float32(127), kind.name)  # refuses what is not finite before it is computed with
    inverse = reciprocal(peak)
    best, scale = np.full(peak.shape, -1, np.float32), np.zeros_like(peak)
    for target in _TARGETS[kind.name]:
        q = nearest(groups * (inverse * np.float32(target)))
        dot, norm = _sums(groups, q), _sums(q, q)
        gain = dot * dot * reciprocal(norm)  # by how much the error falls
        better = gain > best
        best, scale = np.where(better, gain, best), np.where(better, dot * reciprocal(norm), scale)
    if kind.block == kind.group:
        d = f16_scale(scale[:, 0], kind.name)
        return _packed(kind, nearest(x * reciprocal(d.astype(np.float32)))), d
    largest = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = f16_scale(largest[:, 0] / np.float32(-32), kind.name)
    factor = d.astype(np.float32)[:, None]
    small = np.clip(np.rint(scale * reciprocal(factor)), -32, 31)
    tried = (np.clip(small + np.float32(step), -32, 31) for step in (0, -1, 1))
    small, q = _least(groups, ((s, factor * s, np.float32(0)) for s in tried), nearest)
    scales = packed_scales(kind.part("scales").packing, small.reshape(len(x), -1))
    return (*_parts(kind, q.reshape(x.shape)), scales, d)


def _affine(kind: DType, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """value = scale * code - minimum, both at least 0, in 15ths of the block's largest."""
    _, top = kind.integers
    groups = x.reshape(len(x), -1, kind.group)
    low, high = np.minimum(groups.min(-1, keepdims=True), 0), groups.max(-1, keepdims=True)
    f16_scale(np.concatenate([low, high]) / np.float32(15), kind.name)
    span, mean, n = reciprocal(np.maximum(high - low, 0)), groups.mean(-1, keepdims=True), np.float32(kind.group)

    def candidates() -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for steps in _STEPS:
            q = np.clip(np.rint((groups - low) * (span * np.float32(steps))), 0, top)
            dot, norm, total = _sums(groups, q), _sums(q, q), q.sum(-1, keepdims=True)
            centred = norm - total * total / n
            scale = (dot - total * mean) * reciprocal(centred)
            minimum = scale * total / n - mean
            free = (minimum > 0) & (scale > 0)
            scale = np.where(free, scale, np.maximum(dot, 0) * reciprocal(norm))
            minimum = np.where(free, minimum, 0)
            yield np.concatenate([scale, minimum], -1), scale, minimum

    codes = _clipped(0, top)
    found, _ = _least(groups, candidates(), codes)
    d = f16_scale(found.max(1) / np.float32(15), kind.name)
    factor = d.astype(np.float32)[:, None]
    small = np.clip(np.rint(found * reciprocal(factor)), 0, 15)
    steps = [np.array((a, b), np.float32) for a in (0, -1, 1) for b in (0, -1, 1)]
    tried = (np.clip(small + s, 0, 15) for s in steps)
    small, q = _least(groups, ((s, (factor * s)[..., :1], (factor * s)[..., 1:]) for s in tried), codes)
    both = small.astype(np.uint8)
    return (*_parts(kind, q.reshape(x.shape)), both[..., 0] | both[..., 1] << np.uint8(4), d)


def _least(
    groups: np.ndarray, tried: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray | np.float32]], codes: Codes
) -> tuple[np.ndarray, np.ndarray]:
    """Of (name, scale, minimum) tried for each group: the name and the codes of the least squared error."""
    best = np.full((*groups.shape[:-1], 1), np.inf, np.float32)
    found: list[np.ndarray] = []
    for name, scale, minimum in tried:
        q = codes((groups + minimum) * reciprocal(scale))
        error = groups - (scale * q - minimum)
        size = _sums(error, error)
        if not found:
            found = [name, q]
        else:
            better = size < best
            found = [np.where(better, a, b) for a, b in zip((name, q), found, strict=True)]
        best = np.minimum(best, size)
    return found[0], found[1]


def _sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("ngi,ngi->ng", a, b)[..., None]


def _clipped(low: int, high: int) -> Codes:
    return lambda v: np.clip(np.rint(v), low, high)


@cache
def _nearest(dtype: str) -> Codes:
    """The integers nearest to numbers, as float32."""
    kind = DTYPES[dtype]
    if not kind.table:
        return _clipped(*kind.integers)
    table = np.array(kind.table, np.float32)
    halves = np.arange(-256, 257) / 2
    near = table[np.abs(halves[:, None] - table).argmin(-1)]
    return lambda v: near[np.clip(np.rint(2 * v) + 256, 0, 512).astype(np.int16)]


def _parts(kind: DType, q: np.ndarray) -> list[np.ndarray]:
    """Packed codes of integers [n, block], and their upper bits where the type has them."""
    made = [_packed(kind, q)]
    if kind.parts[1].packing == "thirds":
        bits = (q - kind.integers[0]).astype(np.uint8).reshape(-1, 8, 4) >> np.uint8(2)
        made.append(np.packbits(bits, axis=1, bitorder="little").reshape(len(q), -1))
    return made


def _packed(kind: DType, q: np.ndarray) -> np.ndarray:
    stored = (np.searchsorted(kind.table, q) if kind.table else q - kind.integers[0]).astype(np.uint8)
    if kind.parts[0].packing == "pairs":
        by = (stored & np.uint8(3)).reshape(-1, 4, 8) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        return np.bitwise_or.reduce(by, axis=1).reshape(len(q), -1)
    by = stored.reshape(-1, 2, 16)
    return (by[:, 0] | by[:, 1] << np.uint8(4)).reshape(len(q), -1)
