"""Conversions between row-major tensors and the layouts of the NPU's tile kernels, and the NPU's quantisations.

Matrices are cut into tiles r x c that are contiguous, row after row, and follow one another row after row: the operand
order of aie::mmul. For activations the DMA does this; weights are stored so (layout k_tiled). Rows and columns that a
tile lacks are zeros, which add nothing.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
TINY = np.finfo(np.float32).tiny
STRIP = 1 << 16
"""Numbers that are rounded at a time."""
LIMB, BITS = 4096, 23
"""A scale is an integer of 23 bits in two multipliers of 12: int32 sums over 512 codes of 4 bits cannot overflow."""


def tiled(x: np.ndarray, r: int, c: int) -> np.ndarray:
    """[R, C] -> [R/r, C/c, r, c]. ValueError where the tiles do not fit."""
    rows, columns = x.shape
    if rows % r or columns % c:
        raise ValueError(f"a {rows} x {columns} matrix is not made of {r} x {c} tiles")
    return np.ascontiguousarray(x.reshape(rows // r, r, columns // c, c).swapaxes(1, 2))


def untiled(x: np.ndarray) -> np.ndarray:
    """[R/r, C/c, r, c] -> [R, C]."""
    a, b, r, c = x.shape
    return x.swapaxes(1, 2).reshape(a * r, b * c)


def padded(x: np.ndarray, *multiples: int) -> np.ndarray:
    """Zeros added at the end of each axis up to a multiple; the array itself where there is nothing to add."""
    if not any(n % m for n, m in zip(x.shape, multiples, strict=True)):
        return x
    return np.pad(x, [(0, -n % m) for n, m in zip(x.shape, multiples, strict=True)])


def bf16(x: np.ndarray) -> np.ndarray:
    """Real numbers as bfloat16's 16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def real(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16's bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def two_parts(x: np.ndarray) -> np.ndarray:
    """[...] -> bfloat16 bits [2, ...]: high parts, then what they leave (rmsnorm's weights)."""
    x = np.asarray(x, np.float32)
    high = bf16(x)
    return np.stack([high, bf16(x - real(high))])


def int8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R, C] -> int8 codes [R, C] and float32 scales [R]: value = code * scale, codes -127..127, ties to even. A NaN
    becomes its row's scale. A few rows at a time: what is between stays in the processor's cache."""
    x = np.asarray(x, np.float32)
    rows, columns = x.shape
    codes, scales = np.empty(x.shape, np.int8), np.empty(rows, np.float32)
    step = max(1, STRIP // max(columns, 1))
    room = np.empty((step, columns), np.float32)
    for i in range(0, rows, step):
        part = x[i : i + step]
        amax = np.maximum(part.max(axis=1), -part.min(axis=1))
        scale = scales[i : i + step] = np.where(amax == 0, np.float32(1), amax / np.float32(127))
        made = np.divide(part, scale[:, None], out=room[: len(part)])
        np.rint(made, out=made)
        if (scale < TINY).any():  # rounded so coarsely, being a subnormal, that a quotient may be above 127.5
            np.clip(made, -127, 127, out=made)
        with np.errstate(invalid="ignore"):  # of a row with a NaN codes mean nothing
            np.copyto(codes[i : i + step], made, casting="unsafe")
    return codes, scales


def nibbles(codes: np.ndarray) -> np.ndarray:
    """int8 codes -8..7 [..., C] -> bytes [..., C/2], the first of each two in the low half."""
    low, high = codes[..., 0::2].view(np.uint8), codes[..., 1::2].view(np.uint8)
    return np.ascontiguousarray((low & np.uint8(15)) | (high << np.uint8(4)))


def limbs(scales: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales [N, G] of blocks of 32 -> multipliers int16 [N, G, 2] and float32 units [N, G/groups]:
    scale = unit (4096 m[0] + m[1]), |m| <= 2048 (aie/scales.h).

    `groups` of a tile (DIM_K / 32) share the unit, a power of two. A float16 scale within 2^-12 of the tile's largest
    is exact; a smaller one is off by at most 2^-23 of the largest."""
    n, g = scales.shape
    if g % groups:
        raise ValueError(f"{g} groups are not made of tiles of {groups}")
    cut = np.asarray(scales, np.float64).reshape(n, g // groups, groups)
    top = np.abs(cut).max(axis=2)
    unit = np.exp2(np.frexp(top)[1] - float(BITS)) * (top > 0) + (top == 0)
    whole = np.rint(cut / unit[..., None]).astype(np.int64)
    high = (whole + LIMB // 2) // LIMB
    return np.stack([high, whole - LIMB * high], axis=-1).reshape(n, g, 2).astype(np.int16), unit.astype(np.float32)


def from_limbs(m: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """float64 scales [N, G] of what limbs() gives."""
    n, g, _ = m.shape
    whole = (m[..., 0].astype(np.int64) * LIMB + m[..., 1]).reshape(n, unit.shape[1], -1)
    return (whole * unit[..., None].astype(np.float64)).reshape(n, g)
