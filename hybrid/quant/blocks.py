"""Layouts of quantised blocks: conversion between ggml's blocks and our parts, and a block's integers and scales.

Functions named `..._words` move bits in words of 4 or 8 bytes. All are vectorised over blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybrid.core.dtypes import DTYPES

_LOW, _PAIR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0303030303030303)
_SIXTEEN = np.dtype("V16")  # copied, never computed with
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)  # of the pairs of a byte; every second: of its nibbles
_BYTES = np.arange(256, dtype=np.uint32)
_SPREAD = np.bitwise_or.reduce([((_BYTES >> c) & 1) << (8 * (c % 4) + c // 4) for c in range(8)]).astype(np.uint32)
_GATHER = np.bitwise_or.reduce([((_BYTES >> k) & 1) << (4 * k) for k in range(8)]).astype(np.uint32)


def halves(low_high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u8 [..., 32] with one 32-code group in the low nibbles and another in the high nibbles (ggml's K types) -> each
    group as u8 [..., 16] packed as `nibbles`."""
    first, second = _sixteens(low_high)
    low = (first & _LOW) | ((second & _LOW) << np.uint64(4))
    high = ((first >> np.uint64(4)) & _LOW) | (second & ~_LOW)
    shape = (*low_high.shape[:-1], 16)
    return low.view(np.uint8).reshape(shape), high.view(np.uint8).reshape(shape)


def _sixteens(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and second halves of every 32 bytes, as contiguous words: NumPy is slow on rows of two words."""
    pairs = np.ascontiguousarray(data).view(_SIXTEEN).reshape(-1, 2)
    return pairs[:, 0].copy().view(np.uint64), pairs[:, 1].copy().view(np.uint64)


def _codes_of_q6_k(ggml: np.ndarray) -> np.ndarray:
    """u8 [n, 128]: element groups 0, 1 and 2, 3 of each half in the low and high nibbles -> 8 x 16 bytes in order."""
    out = np.empty((len(ggml), 2, 2, 2), _SIXTEEN)  # block, half, nibble, which 32 bytes
    for nibble, codes in enumerate(halves(ggml.reshape(-1, 2, 2, 32))):
        out[:, :, nibble] = codes.view(_SIXTEEN)[..., 0]
    return out.reshape(-1, 8).view(np.uint8)


def _codes_to_q6_k(ours: np.ndarray) -> np.ndarray:
    words = np.ascontiguousarray(ours).view(np.uint64).reshape(-1, 2, 2, 2, 2)  # block, half, nibble, 32 bytes, word
    low, high = words[:, :, 0], words[:, :, 1]
    first = (low & _LOW) | ((high & _LOW) << np.uint64(4))
    second = ((low >> np.uint64(4)) & _LOW) | (high & ~_LOW)
    return np.stack([first, second], axis=3).reshape(len(words), -1).view(np.uint8)


def _pairs_words(high: np.ndarray) -> np.ndarray:
    """u8 [n, 64] of q6_k. ggml: in each half, pair g of byte l is element 32g + l's. Ours: group g has 8 separate
    bytes, and pair k of byte i is its element 8k + i's. The conversion exchanges g and k and is its own inverse."""
    words = np.ascontiguousarray(high).view(np.uint64).reshape(-1, 4).T.copy()
    out = np.zeros_like(words)
    for g in range(4):
        for k in range(4):
            out[g] |= ((words[k] >> np.uint64(2 * g)) & _PAIR) << np.uint64(2 * k)
    return out.T.copy().reshape(len(high), 8).view(np.uint8)


def _fifth_from_ggml(high: np.ndarray) -> np.ndarray:
    """u8 [n, 4]: bit e of the word is element e's -> bit k of byte i is element 4k + i's."""
    out = np.zeros(len(high), np.uint32)
    for b in range(4):
        out |= _SPREAD[high[:, b]] << np.uint32(2 * b)
    return out.view(np.uint8).reshape(-1, 4)


def _fifth_to_ggml(high: np.ndarray) -> np.ndarray:
    out = np.zeros(len(high), np.uint32)
    for i in range(4):
        out |= _GATHER[high[:, i]] << np.uint32(i)
    return out.view(np.uint8).reshape(-1, 4)


def fifths_from_32(high: np.ndarray) -> np.ndarray:
    """u8 [n, 32], bit j of byte e element e's of sub-block j -> u8 [n, 8, 4], packed as `fifths`. Exchanges two axes of
    bits, and is its own inverse."""
    words = np.ascontiguousarray(high).view(np.uint32).reshape(-1, 8).T.copy()
    out = np.zeros_like(words)
    for j in range(8):
        for k in range(8):
            out[j] |= ((words[k] >> np.uint32(j)) & np.uint32(0x01010101)) << np.uint32(k)
    return out.T.copy().view(np.uint8).reshape(-1, 8, 4)


def _bits_words(high: np.ndarray) -> np.ndarray:
    return fifths_from_32(high).reshape(len(high), 32)


Relay = Callable[[np.ndarray], np.ndarray]
# Parts with another layout than ggml's: (conversion from ggml's bytes, conversion back).
RELAY: dict[str, tuple[Relay, Relay]] = {
    "fifths": (_fifth_from_ggml, _fifth_to_ggml),
    "halves": (_codes_of_q6_k, _codes_to_q6_k),
    "pairs": (_pairs_words, _pairs_words),
    "bits": (_bits_words, _bits_words),
}


def scales_and_minima(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u8 [n, 12] packed as `six_bits` -> 6-bit scales u8 [n, 8] and minima u8 [n, 8]."""
    a, b, c = scales[:, :4], scales[:, 4:8], scales[:, 8:]
    top = np.uint8(0x30)
    scale = np.concatenate([a & np.uint8(63), (c & np.uint8(15)) | ((a >> np.uint8(2)) & top)], axis=1)
    minimum = np.concatenate([b & np.uint8(63), (c >> np.uint8(4)) | ((b >> np.uint8(2)) & top)], axis=1)
    return scale, minimum


def signed_scales(packing: str, scales: np.ndarray) -> np.ndarray:
    """u8 [n, ..] packed as six_bits_of_8 or six_bits_of_16 -> int8 [n, 8 or 16], less 32 as values multiply them."""
    if packing == "six_bits_of_8":
        low, high = scales[:, 2:, None] >> _SHIFTS[::2], scales[:, :2, None] >> _SHIFTS
        low, high = low.reshape(-1, 8), high.reshape(-1, 8)
    else:
        low = (scales[:, None, :8] >> _SHIFTS[::2, None]).reshape(-1, 16)
        high = (scales[:, None, 8:] >> _SHIFTS[:, None]).reshape(-1, 16)
    return ((low & np.uint8(15)) | (high & np.uint8(3)) << np.uint8(4)).view(np.int8) - np.int8(32)


def packed_scales(packing: str, scales: np.ndarray) -> np.ndarray:
    """The inverse of `signed_scales`."""
    codes = (scales + 32).astype(np.uint8)
    low, high = codes & np.uint8(15), codes >> np.uint8(4)
    if packing == "six_bits_of_8":
        high = np.bitwise_or.reduce(high.reshape(-1, 2, 4) << _SHIFTS, axis=2)
        return np.concatenate([high, low[:, ::2] | low[:, 1::2] << np.uint8(4)], axis=1)
    high = np.bitwise_or.reduce(high.reshape(-1, 4, 4) << _SHIFTS[:, None], axis=1)
    return np.concatenate([low[:, :8] | low[:, 8:] << np.uint8(4), high], axis=1)


def _fifths(codes: np.ndarray, high: np.ndarray, place: int = 4) -> None:
    bits = np.ascontiguousarray(high).view(np.uint32).reshape(-1, 1) >> np.arange(
        8, dtype=np.uint32
    )  # word k of a block: 4k to 4k+3
    words = codes.view(np.uint32).reshape(-1, 8)
    words |= (bits.reshape(words.shape) & np.uint32(0x01010101)) << np.uint32(place)


def _thirds(codes: np.ndarray, high: np.ndarray) -> None:
    _fifths(codes, high, 2)


def _fifths_of_32(codes: np.ndarray, high: np.ndarray) -> None:
    by = codes.reshape(-1, 8, 32)
    for j in range(8):
        by[:, j] |= ((high >> np.uint8(j)) & np.uint8(1)) << np.uint8(4)


def _sixths(codes: np.ndarray, high: np.ndarray) -> None:
    eights, pairs = codes.reshape(len(codes), 8, 4, 8), high.reshape(len(codes), 8, 8)
    for k in range(4):
        eights[:, :, k] |= ((pairs >> np.uint8(2 * k)) & np.uint8(3)) << np.uint8(4)


# Packing -> layout of nibbles (elements with adjacent low nibbles), and the function that adds the upper bits.
_SPANS = {"nibbles": 16, "nibbles_of_32": 32}
_ABOVE: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "fifths": _fifths,
    "fifths_of_32": _fifths_of_32,
    "sixths": _sixths,
    "thirds": _thirds,
}


def integers(dtype: str, parts: list[np.ndarray]) -> np.ndarray:
    """int8 [n, block]: the integers that scales multiply, in element order, without the offset. `parts`: arrays [n,
    ...] of n blocks."""
    kind, codes = DTYPES[dtype], parts[0]
    if not kind.parts[0].packing:
        return codes.view(np.int8)
    if kind.parts[0].packing == "pairs":
        words = codes.reshape(len(codes), -1, 1, 8) >> _SHIFTS[:, None]
        q = np.bitwise_and(words, np.uint8(3), out=words).reshape(len(codes), -1)
    else:
        span = _SPANS[kind.parts[0].packing]
        out = np.empty((len(codes), codes.shape[1] // span, 2, span), np.uint8)
        pairs = codes.reshape(len(codes), -1, span)
        np.bitwise_and(pairs, np.uint8(15), out=out[:, :, 0])
        np.right_shift(pairs, np.uint8(4), out=out[:, :, 1])
        q = out.reshape(len(codes), -1)
    if kind.parts[1].packing in _ABOVE:
        _ABOVE[kind.parts[1].packing](q, parts[1])
    if kind.table:
        return np.take(np.array(kind.table, np.int8), q)
    return q.view(np.int8) - np.int8(kind.offset) if kind.offset else q.view(np.int8)


def factors(
    dtype: str, parts: list[np.ndarray], real: type[np.float32] | type[np.float64]
) -> tuple[np.ndarray, np.ndarray | None]:
    """(scale, minimum or None) as `real` [n, groups], one group for each scale: value = scale * integer + minimum.
    `parts` as in `integers`."""
    kind, last = DTYPES[dtype], parts[-1]
    if kind.parts[-1].name == "super":
        if kind.minimum:
            both: np.ndarray = last.astype(real)
            if kind.part("scales").packing == "four_bits":
                scale, minimum = parts[-2] & np.uint8(15), parts[-2] >> np.uint8(4)
            else:
                scale, minimum = scales_and_minima(parts[-2])
            return both[:, :1] * scale.astype(real), -(both[:, 1:] * minimum.astype(real))
        packing = kind.part("scales").packing
        scale = signed_scales(packing, parts[-2]) if packing else parts[-2]
        return last.astype(real) * scale.astype(real), None
    if kind.minimum:
        both = last.astype(real)
        return both[:, :1], both[:, 1:]
    return last.astype(real)[:, :1], None
