"""Quantised tensors from their integers and scales, and back: the formats written down here a second time, element by
element from hybrid.core.dtypes, independent of the oracle's codecs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Tensor
from hybrid.harness.hashed import integers, uniform

CODES = {
    "q8_0": (-127, 127),
    "q4_0": (-8, 7),
    "q4_1": (0, 15),
    "q5_0": (-16, 15),
    "q5_1": (0, 31),
    "q6_k": (-32, 31),
    "q4_k": (0, 15),
    "q5_k": (0, 31),
    "q8_act": (-127, 127),
}
"""Smallest and largest integer of each type (q8_0 could hold -128; encoders never make it)."""
_OFFSET = {"q4_0": 8, "q5_0": 16, "q6_k": 32}
_MINIMA = ("q4_1", "q5_1", "q4_k", "q5_k")
POOL_ROWS, POOLED = 8192, 1 << 27  # rows of a pool, and elements of a matrix from which on one is used


def pack(
    dtype: str,
    codes: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None = None,
    supers: np.ndarray | None = None,
) -> Tensor:
    """codes i64 [..., K]; scales [..., K/32] (q6_k: integers [..., K/16]; q4_k, q5_k: 0..63), minima [..., K/32] of the
    types that have them (q4_k, q5_k: 0..63), supers [..., K/256] (q4_k, q5_k: [..., K/256, 2])."""
    lead, k = codes.shape[:-1], codes.shape[-1]
    q = (codes + _OFFSET.get(dtype, 0)).astype(np.uint8)
    b32, half = q.reshape(*lead, k // 32, 32), np.float16
    parts: dict[str, np.ndarray] = {}
    if dtype in ("q8_0", "q8_act"):
        parts["codes"] = codes.astype(np.int8)
    elif dtype in ("q4_k", "q5_k"):
        pairs = q.reshape(*lead, k // 64, 2, 32) & 15
        parts["codes"] = pairs[..., 0, :] | pairs[..., 1, :] << 4
    else:
        parts["codes"] = (b32[..., :16] & 15) | (b32[..., 16:] & 15) << 4
    if dtype in ("q5_0", "q5_1"):
        fifth = b32.reshape(*lead, k // 32, 8, 4) >> 4
        parts["high"] = sum((fifth[..., j, :] << j for j in range(8)), start=np.uint8(0))
    elif dtype == "q5_k":
        fifth = q.reshape(*lead, k // 256, 8, 32) >> 4
        parts["high"] = sum((fifth[..., j, :] << j for j in range(8)), start=np.uint8(0))
    elif dtype == "q6_k":
        upper = b32.reshape(*lead, k // 32, 4, 8) >> 4
        parts["high"] = sum((upper[..., j, :] << 2 * j for j in range(4)), start=np.uint8(0))
    if dtype == "q8_act":
        scale = scales.astype(np.float32)
        total = codes.reshape(*lead, k // 32, 32).sum(-1).astype(np.float32)
        parts["scales"] = np.stack([scale, scale * total], axis=-1)
    elif dtype in ("q4_1", "q5_1"):
        assert minima is not None
        parts["scales"] = np.stack([scales, minima], axis=-1).astype(half)
    elif dtype in ("q4_k", "q5_k"):
        assert minima is not None and supers is not None
        parts["scales"], parts["super"] = _six_bits(scales, minima), supers.astype(half)
    elif dtype == "q6_k":
        assert supers is not None
        parts["scales"], parts["super"] = scales.astype(np.int8), supers.astype(half)
    else:
        parts["scales"] = scales.astype(half)
    kind = DTYPES[dtype]
    return Tensor(dtype, codes.shape, tuple(parts[p.name].reshape(kind.part_shape(p, codes.shape)) for p in kind.parts))


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """[..., K/32] integers 0..63 twice -> u8 [..., K/256, 12]."""
    sc, mn = (x.astype(np.uint8).reshape(*x.shape[:-1], -1, 8) for x in (scales, minima))
    first = [x[..., :4] | (x[..., 4:] >> 4) << 6 for x in (sc, mn)]
    return np.concatenate([*first, (sc[..., 4:] & 15) | (mn[..., 4:] & 15) << 4], axis=-1)


def unpack(t: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
    """(integers [..., groups, elements], scale, minimum [..., groups, 1]) in f64: value = scale * integer + minimum."""
    kind, lead, k = t.dtype, t.shape[:-1], t.shape[-1]
    part = {p.name: a for p, a in zip(t.type.parts, t.parts, strict=True)}
    codes = part["codes"]
    if kind in ("q4_k", "q5_k"):
        packed = codes.reshape(*lead, k // 64, 1, 32)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-2).reshape(*lead, k // 32, 32)
    elif kind not in ("q8_0", "q8_act"):
        packed = codes.reshape(*lead, k // 32, 16)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    q = codes.reshape(*lead, k // 32, 32).astype(np.int64)
    e = np.arange(32)
    if kind in ("q5_0", "q5_1"):
        q = q + (part["high"].reshape(*lead, k // 32, 4)[..., e % 4] >> (e // 4) & 1) * 16
    elif kind == "q5_k":
        high = part["high"].reshape(*lead, k // 256, 1, 32) >> np.arange(8)[:, None] & 1
        q = q + high.reshape(q.shape) * 16
    elif kind == "q6_k":
        q = q + (part["high"].reshape(*lead, k // 32, 8)[..., e % 8] >> (e // 8 * 2) & 3) * 16
    real = (q - _OFFSET.get(kind, 0)).astype(np.float64)
    scales, minimum = part["scales"], np.float64(0)
    if kind == "q6_k":
        d = part["super"].astype(np.float64)[..., None]
        return (
            real.reshape(*lead, k // 16, 16),
            (d * scales.reshape(*lead, k // 256, 16)).reshape(*lead, k // 16, 1),
            minimum,
        )
    if kind in ("q4_k", "q5_k"):
        a, b, c = (scales.reshape(*lead, k // 256, 3, 4)[..., i, :].astype(np.int64) for i in range(3))
        sc = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1).reshape(*lead, k // 32)
        mn = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1).reshape(*lead, k // 32)
        d = np.repeat(part["super"].astype(np.float64).reshape(*lead, k // 256, 2), 8, axis=-2)
        return real, (d[..., 0] * sc)[..., None], -(d[..., 1] * mn)[..., None]
    pairs = scales.astype(np.float64).reshape(*lead, k // 32, -1)
    return real, pairs[..., :1], pairs[..., 1:] if kind in ("q4_1", "q5_1") else minimum


def quantised(seed: int, name: str, shape: Sequence[int], dtype: str, scale: float) -> Tensor:
    """Random integers over their whole range; random signed block scales (q8_act: positive); values deviate by `scale`
    around a mean that is not zero where the type has a minimum."""
    low, high = CODES[dtype]
    lead, k = tuple(shape[:-1]), shape[-1]
    if len(lead) == 1 and lead[0] > POOL_ROWS and lead[0] * k > POOLED:
        return _pooled(seed, name, lead[0], quantised(seed, name, (POOL_ROWS, k), dtype, scale))
    codes = integers(seed, name, shape, low, high)
    spread, middle = (high - low) / 12**0.5, (low + high) / 2  # deviation and mean of a uniform integer

    def some(what: str, count: int, unit: float) -> np.ndarray:
        values = uniform(seed, name + what, (*lead, count), 0.25, 1.75) * (unit / spread)
        if dtype != "q8_act":  # a file's scales may be negative; activations' never are
            values *= 1 - 2 * integers(seed, name + what + ".signs", (*lead, count), 0, 1)
        return values

    if dtype in ("q4_k", "q5_k"):
        d = some(".super", k // 256, scale / 32)
        supers = np.stack([d, d * middle], axis=-1)
        sc, mn = (integers(seed, name + part, (*lead, k // 32), 0, 63) for part in (".scales", ".minima"))
        return pack(dtype, codes, sc, mn, supers)
    if dtype == "q6_k":
        sub = integers(seed, name + ".scales", (*lead, k // 16), -128, 127)
        return pack(dtype, codes, sub, supers=some(".super", k // 256, scale / 74))
    d = some(".scales", k // 32, scale)
    minima = -d * middle * uniform(seed, name + ".minima", d.shape, 0.8, 1.2) if dtype in _MINIMA else None
    return pack(dtype, codes, d, minima)


def _pooled(seed: int, name: str, rows: int, pool: Tensor) -> Tensor:
    """A matrix too large to be drawn: the pool's rows again and again, each time with another sign and power of two in
    all its scales, so that rows taken for one another show."""
    factor = np.ldexp(1.0, integers(seed, name + ".row.power", (rows, 1), -2, 1))
    factor *= 1 - 2 * integers(seed, name + ".row.sign", (rows, 1), 0, 1)
    index = np.arange(rows) % POOL_ROWS
    parts = tuple(p[index] * factor.astype(p.dtype) if p.dtype.kind == "f" else p[index] for p in pool.parts)
    return Tensor(pool.dtype, (rows, *pool.shape[1:]), parts)


def exact(seed: int, name: str, shape: Sequence[int], dtype: str) -> Tensor:
    """The whole range of integers with scales of 1 (q8_act: 1/64) and minima that centre them: all sums are exact."""
    low, high = CODES[dtype]
    codes, blocks = integers(seed, name, shape, low, high), (*shape[:-1], shape[-1] // 32)
    ones, middle = np.full(blocks, 1 / 64 if dtype == "q8_act" else 1.0), (low + high + 1) // 2
    if dtype == "q6_k":
        return pack(
            dtype, codes, np.ones((*shape[:-1], shape[-1] // 16)), supers=np.ones((*shape[:-1], shape[-1] // 256))
        )
    if dtype in ("q4_k", "q5_k"):
        return pack(dtype, codes, ones, ones * middle, np.ones((*shape[:-1], shape[-1] // 256, 2)))
    return pack(dtype, codes, ones, -ones * middle if dtype in _MINIMA else None)


def largest(t: Tensor, block: int) -> Tensor:
    """The tensor with the largest scales that its type has in one block, and extreme integers under them."""
    parts = []
    for part, array in zip(t.type.parts, t.parts, strict=True):
        array = array.copy()
        rows = array.reshape(-1, part.count)
        if part.name == "codes":
            rows[block, :2] = (127, -128) if t.dtype == "q8_0" else (0xF0, 0x0F)
        elif part.dtype.kind == "f":
            rows[block] = 65504.0
        elif part.name == "scales":
            rows[block, ::2] = 127 if part.dtype.kind == "i" else 0xFF
            rows[block, 1::2] = -128 if part.dtype.kind == "i" else 0x3F
        parts.append(array)
    return Tensor(t.dtype, t.shape, tuple(parts))


def negative(t: Tensor) -> Tensor:
    """The tensor with negative float16 scales (and minima) throughout."""
    *others, scales = t.parts
    return Tensor(t.dtype, t.shape, (*(p.copy() for p in others), -np.abs(scales)))
