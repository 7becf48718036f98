"""Pack and unpack quantised tensors from integers and scales: a second implementation of the formats, element by
element from hybrid.core.dtypes, independent of the oracle's codecs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid.core.dtypes import DTYPES, SCALES
from hybrid.core.tensor import Tensor
from hybrid.harness.hashed import integers, uniform

POOL_ROWS, POOLED = 8192, 1 << 27  # rows of a pool, and the matrix elements from which a pool is used


def pack(
    dtype: str,
    codes: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None = None,
    supers: np.ndarray | None = None,
) -> Tensor:
    """codes i64 [..., K]: integers that scales multiply; scales [..., K/group] (integers, where there are supers), minima
    of the types that have them (integers, where there are supers), supers [..., K/256] (with a minimum:
    [..., K/256, 2])."""
    kind, lead, k = DTYPES[dtype], codes.shape[:-1], codes.shape[-1]
    packing = {p.name: p.packing for p in kind.parts}
    q = (np.searchsorted(kind.table, codes) if kind.table else codes + kind.offset).astype(np.uint8)
    b32, half = q.reshape(*lead, k // 32, 32), np.float16
    parts: dict[str, np.ndarray] = {}
    if packing["codes"] == "nibbles_of_32":
        pairs = q.reshape(*lead, k // 64, 2, 32) & 15
        parts["codes"] = pairs[..., 0, :] | pairs[..., 1, :] << 4
    elif packing["codes"] == "pairs":
        parts["codes"] = sum(((b32[..., 8 * j : 8 * j + 8] & 3) << 2 * j for j in range(4)), start=np.uint8(0))
    elif packing["codes"]:
        parts["codes"] = (b32[..., :16] & 15) | (b32[..., 16:] & 15) << 4
    else:
        parts["codes"] = codes.astype(np.int8)
    if packing.get("high") in ("fifths", "thirds"):
        fifth = b32.reshape(*lead, k // 32, 8, 4) >> (4 if packing["high"] == "fifths" else 2)
        parts["high"] = sum((fifth[..., j, :] << j for j in range(8)), start=np.uint8(0))
    elif packing.get("high") == "fifths_of_32":
        fifth = q.reshape(*lead, k // 256, 8, 32) >> 4
        parts["high"] = sum((fifth[..., j, :] << j for j in range(8)), start=np.uint8(0))
    elif packing.get("high") == "sixths":
        upper = b32.reshape(*lead, k // 32, 4, 8) >> 4
        parts["high"] = sum((upper[..., j, :] << 2 * j for j in range(4)), start=np.uint8(0))
    if dtype == "q8_act":
        scale = scales.astype(np.float32)
        total = codes.reshape(*lead, k // 32, 32).sum(-1).astype(np.float32)
        parts["scales"] = np.stack([scale, scale * total], axis=-1)
    elif packing["scales"] == "six_bits":
        assert minima is not None and supers is not None
        parts["scales"], parts["super"] = _six_bits(scales, minima), supers.astype(half)
    elif packing["scales"] == "four_bits":
        assert minima is not None and supers is not None
        parts["scales"] = (scales.astype(np.int64) | minima.astype(np.int64) << 4).astype(np.uint8)
        parts["super"] = supers.astype(half)
    elif "super" in packing:
        assert supers is not None
        parts["scales"], parts["super"] = _signed(packing["scales"], scales), supers.astype(half)
    elif kind.minimum:
        assert minima is not None
        parts["scales"] = np.stack([scales, minima], axis=-1).astype(half)
    else:
        parts["scales"] = scales.astype(half)
    return Tensor(dtype, codes.shape, tuple(parts[p.name].reshape(kind.part_shape(p, codes.shape)) for p in kind.parts))


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack [..., K/32] scales and minima 0..63 -> u8 [..., K/256, 12]."""
    sc, mn = (x.astype(np.uint8).reshape(*x.shape[:-1], -1, 8) for x in (scales, minima))
    first = [x[..., :4] | (x[..., 4:] >> 4) << 6 for x in (sc, mn)]
    return np.concatenate([*first, (sc[..., 4:] & 15) | (mn[..., 4:] & 15) << 4], axis=-1)


def _signed(packing: str, scales: np.ndarray) -> np.ndarray:
    """Pack integers -32..31, [..., K/group], in six bits; as int8 where there is no packing."""
    if not packing:
        return scales.astype(np.int8)
    out = np.zeros((*scales.shape[:-1], scales.shape[-1] // SCALES[packing], 8 * 6 * SCALES[packing] // 64), np.uint8)
    for i in range(scales.shape[-1]):
        block, e = divmod(i, SCALES[packing])
        code = scales[..., i].astype(np.int64) + 32
        for value, bit in zip((code & 15, code >> 4), _PLACES[packing](e), strict=True):
            out[..., block, bit // 8] |= (value << bit % 8).astype(np.uint8)
    return out


# Bits of ggml's block of scales where the four lower and the two upper bits of scale e begin.
_PLACES = {
    "six_bits_of_8": lambda e: (16 + 4 * e, 2 * e),
    "six_bits_of_16": lambda e: (e % 8 * 8 + e // 8 * 4, 64 + e % 4 * 8 + e // 4 * 2),
}


def unpack(t: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
    """(integers [..., groups, elements], scale, minimum [..., groups, 1]) in f64: value = scale * integer + minimum."""
    kind, lead, k = t.type, t.shape[:-1], t.shape[-1]
    part = {p.name: a for p, a in zip(kind.parts, t.parts, strict=True)}
    packing = {p.name: p.packing for p in kind.parts}
    codes = part["codes"]
    if packing["codes"] == "nibbles_of_32":
        packed = codes.reshape(*lead, k // 64, 1, 32)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-2).reshape(*lead, k // 32, 32)
    elif packing["codes"] == "pairs":
        codes = np.concatenate([codes.reshape(*lead, k // 32, 8) >> 2 * j & 3 for j in range(4)], axis=-1)
    elif packing["codes"]:
        packed = codes.reshape(*lead, k // 32, 16)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    q = codes.reshape(*lead, k // 32, 32).astype(np.int64)
    e = np.arange(32)
    if packing.get("high") in ("fifths", "thirds"):
        bit = part["high"].reshape(*lead, k // 32, 4)[..., e % 4] >> (e // 4) & 1
        q = q + bit * (16 if packing["high"] == "fifths" else 4)
    elif packing.get("high") == "fifths_of_32":
        high = part["high"].reshape(*lead, k // 256, 1, 32) >> np.arange(8)[:, None] & 1
        q = q + high.reshape(q.shape) * 16
    elif packing.get("high") == "sixths":
        q = q + (part["high"].reshape(*lead, k // 32, 8)[..., e % 8] >> (e // 8 * 2) & 3) * 16
    real = (np.array(kind.table)[q] if kind.table else q - kind.offset).astype(np.float64)
    scales, minimum = part["scales"], np.float64(0)
    if packing["scales"] == "six_bits":
        a, b, c = (scales.reshape(*lead, k // 256, 3, 4)[..., i, :].astype(np.int64) for i in range(3))
        sc = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1).reshape(*lead, k // 32)
        mn = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1).reshape(*lead, k // 32)
        d = np.repeat(part["super"].astype(np.float64).reshape(*lead, k // 256, 2), 8, axis=-2)
        return real, (d[..., 0] * sc)[..., None], -(d[..., 1] * mn)[..., None]
    if packing["scales"] == "four_bits":
        sc, mn = scales.astype(np.int64) & 15, scales.astype(np.int64) >> 4
        d = np.repeat(part["super"].astype(np.float64).reshape(*lead, k // 256, 2), 16, axis=-2)
        return real.reshape(*lead, k // 16, 16), (d[..., 0] * sc)[..., None], -(d[..., 1] * mn)[..., None]
    if "super" in packing:
        d = part["super"].astype(np.float64)[..., None]
        if packing["scales"]:
            bits = np.unpackbits(scales.reshape(*lead, k // 256, -1), axis=-1, bitorder="little").astype(np.int64)
            places = np.array([_PLACES[packing["scales"]](e) for e in range(256 // kind.group)])
            scales = np.full((*bits.shape[:-1], len(places)), -32)
            for i in range(6):
                scales += bits[..., places[:, i // 4] + i % 4] << i
        each = (*lead, k // kind.group)
        return (
            real.reshape(*each, kind.group),
            (d * scales.reshape(*lead, k // 256, 256 // kind.group)).reshape(*each, 1),
            minimum,
        )
    pairs = scales.astype(np.float64).reshape(*lead, k // 32, -1)
    return real, pairs[..., :1], pairs[..., 1:] if kind.minimum else minimum


def quantised(seed: int, name: str, shape: Sequence[int], dtype: str, scale: float) -> Tensor:
    """Random integers over their whole range and random signed block scales (q8_act: positive). Values have deviation
    `scale`, around a nonzero mean where the type has a minimum."""
    kind = DTYPES[dtype]
    (low, high), lead, k = kind.integers, tuple(shape[:-1]), shape[-1]
    if len(lead) == 1 and lead[0] > POOL_ROWS and lead[0] * k > POOLED:
        return _pooled(seed, name, lead[0], quantised(seed, name, (POOL_ROWS, k), dtype, scale))
    codes = _codes(seed, name, shape, dtype)
    spread, middle = (high - low) / 12**0.5, (low + high) / 2  # deviation and mean of a uniform integer

    def some(what: str, count: int, unit: float) -> np.ndarray:
        values = uniform(seed, name + what, (*lead, count), 0.25, 1.75) * (unit / spread)
        if dtype != "q8_act":  # a file's scales may be negative; activations' scales are positive
            values *= 1 - 2 * integers(seed, name + what + ".signs", (*lead, count), 0, 1)
        return values

    packing, groups = kind.part("scales").packing, (*lead, k // kind.group)
    if packing in ("six_bits", "four_bits"):
        most = 63 if packing == "six_bits" else 15
        d = some(".super", k // 256, scale / (most / 2))
        supers = np.stack([d, d * middle], axis=-1)
        sc, mn = (integers(seed, name + part, groups, 0, most) for part in (".scales", ".minima"))
        return pack(dtype, codes, sc, mn, supers)
    if kind.parts[-1].name == "super":
        most, deviation = (31, 18.5) if packing else (127, 74)
        sub = integers(seed, name + ".scales", groups, -1 - most, most)
        return pack(dtype, codes, sub, supers=some(".super", k // 256, scale / deviation))
    d = some(".scales", k // 32, scale)
    minima = -d * middle * uniform(seed, name + ".minima", d.shape, 0.8, 1.2) if kind.minimum else None
    return pack(dtype, codes, d, minima)


def _codes(seed: int, name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Random integers of a type's codes."""
    kind = DTYPES[dtype]
    if kind.table:
        return np.array(kind.table)[integers(seed, name, shape, 0, len(kind.table) - 1)]
    return integers(seed, name, shape, *kind.integers)


def _pooled(seed: int, name: str, rows: int, pool: Tensor) -> Tensor:
    """A matrix too large to draw: the pool's rows repeated, each time with another sign and power of two in all its
    scales, so that swapped rows are detected."""
    factor = np.ldexp(1.0, integers(seed, name + ".row.power", (rows, 1), -2, 1))
    factor *= 1 - 2 * integers(seed, name + ".row.sign", (rows, 1), 0, 1)
    index = np.arange(rows) % POOL_ROWS
    parts = tuple(p[index] * factor.astype(p.dtype) if p.dtype.kind == "f" else p[index] for p in pool.parts)
    return Tensor(pool.dtype, (rows, *pool.shape[1:]), parts)


def exact(seed: int, name: str, shape: Sequence[int], dtype: str) -> Tensor:
    """Whole integer range with scales of 1 (q8_act: 1/64) and centring minima: all sums are exact."""
    kind = DTYPES[dtype]
    low, high = kind.integers
    codes, groups = _codes(seed, name, shape, dtype), (*shape[:-1], shape[-1] // kind.group)
    ones, middle = np.full(groups, 1 / 64 if dtype == "q8_act" else 1.0), (low + high + 1) // 2
    if kind.parts[-1].name == "super":
        supers = np.ones((*shape[:-1], shape[-1] // 256, kind.parts[-1].count))
        return (
            pack(dtype, codes, ones, ones * middle, supers) if kind.minimum else pack(dtype, codes, ones, supers=supers)
        )
    return pack(dtype, codes, ones, -ones * middle if kind.minimum else None)


def largest(t: Tensor, block: int) -> Tensor:
    """The tensor with the largest scales that its type has in one block, and extreme integers under them."""
    parts = []
    for part, array in zip(t.type.parts, t.parts, strict=True):
        array = array.copy()
        rows = array.reshape(-1, part.count)
        if part.name == "codes":
            rows[block, :2] = (0xF0, 0x0F) if part.packing else (127, -128)
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
