"""Sampling of tokens."""

from __future__ import annotations

import numpy as np

from hybrid.core.plan import NOT_FINITE
from hybrid.quant.codec import Real

_GOLDEN = np.uint32(0x9E3779B9)


def _mix(h: np.ndarray) -> np.ndarray:
    """murmur3's finaliser, mod 2**32."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def hash32(seed_lo: int, seed_hi: int, position: int, ids: np.ndarray) -> np.ndarray:
    """u32 [ids]: h = mix(seed_lo); then h = mix(h ^ w * 0x9E3779B9) for w in seed_hi, position, id."""
    h = _mix(np.full(1, seed_lo, np.uint32))
    for word in (np.full(1, seed_hi, np.uint32), np.full(1, position, np.uint32), ids.astype(np.uint32)):
        h = _mix(h ^ word * _GOLDEN)
    return h


def gumbel(seed_lo: int, seed_hi: int, position: int, ids: np.ndarray) -> np.ndarray:
    """float64 [ids]: -log(-log(u)), u = ((hash32 >> 8) + 0.5) * 2^-24.
    Always in float64: in float32 the largest u rounds to 1 and its g is infinite."""
    u = ((hash32(seed_lo, seed_hi, position, ids) >> np.uint32(8)) + 0.5) * 2.0**-24
    return -np.log(-np.log(u))


def choose(logits: np.ndarray, params: np.ndarray, position: int, real: Real = np.float64) -> int:
    """Token id for one row of logits [valid] by its parameter words u32 [8]: temperature (f32 bits), top_k, top_p,
    min_p (f32 bits), seed low, seed high. NOT_FINITE where a logit is NaN or +inf, or none is above -inf."""
    temperature, top_p, min_p = (float(x) for x in params[[0, 2, 3]].view(np.float32))
    z = logits.astype(real)
    greatest = z.max()
    if not np.isfinite(greatest):  # NumPy's maximum of numbers with a NaN is NaN
        return NOT_FINITE
    if temperature == 0 or not np.isfinite(greatest / real(temperature)):  # so low that a quotient is infinite
        return int(z.argmax())
    z = z / real(temperature)
    kept = np.arange(len(z))
    top_k = int(params[1])
    if 0 < top_k < len(z):
        kept = np.flatnonzero(z >= np.partition(z, -top_k)[-top_k])
    if top_p < 1:
        falling = np.sort(z[kept])[::-1]
        mass = np.cumsum(np.exp(falling - falling[0]))
        kept = kept[z[kept] >= falling[np.searchsorted(mass, real(top_p) * mass[-1])]]
    if min_p > 0:
        kept = kept[z[kept] >= z.max() + real(np.log(min_p))]
    return int(kept[np.argmax(z[kept] + gumbel(int(params[4]), int(params[5]), position, kept))])


def sample(
    *,
    logits: np.ndarray,
    out_rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    params: np.ndarray,
    next_token: np.ndarray,
    next_position: np.ndarray,
    history: np.ndarray,
    valid: int,
    real: Real = np.float64,
) -> tuple[()]:
    """For each output row of logits[O,V]: sample among ids < valid, then set next_token[slot], next_position[slot] =
    pos + 1 and history[slot, pos + 1] (if that column exists). With non-finite logits next_token keeps its valid token
    and history gets NOT_FINITE."""
    for row, source in zip(logits, out_rows, strict=True):
        slot, pos = slots[source], int(positions[source])
        token = choose(row[:valid], params[slot], pos, real)
        if token != NOT_FINITE:
            next_token[slot] = token
        next_position[slot] = pos + 1
        if pos + 1 < history.shape[1]:
            history[slot, pos + 1] = token
    return ()
