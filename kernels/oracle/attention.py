"""QK-norm, RoPE and KV append; attention over the block-addressed cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import matmul

from hybrid.core.tensor import Tensor
from hybrid.kernels.oracle.integer import int8_rows
from hybrid.kernels.oracle.norm import rms
from hybrid.quant.codec import Real, dequantise, quantise, row_blocks, widened

_SCORES = 1 << 22  # scores held at once
Cache = np.ndarray | Tensor  # of numbers, or q8_0
Where = tuple[np.ndarray, np.ndarray]  # block and row of each position


def rotate(x: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """Half-split RoPE: x [T, heads, D], rope [T, R] (R/2 cosines, then R/2 sines). Element i < R/2 pairs with i + D/2;
    the rest is unchanged."""
    half, pairs = x.shape[-1] // 2, rope.shape[-1] // 2
    cos, sin = rope[:, None, :pairs], rope[:, None, pairs:]
    a, b = x[..., :pairs], x[..., half : half + pairs]
    return np.concatenate([a * cos - b * sin, x[..., pairs:half], b * cos + a * sin, x[..., half + pairs :]], axis=-1)


def qk_norm_rope_append(
    *,
    qkv: np.ndarray,
    w_q_norm: np.ndarray,
    w_k_norm: np.ndarray,
    rope: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    block_table: np.ndarray,
    k_cache: Cache,
    v_cache: Cache,
    eps: float,
    projections: int = 2,
    value_norm: int = 0,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """q[T,HQ*D]: per-head rms * weight, then RoPE. k likewise, and v unchanged or normed without a weight, go into the
    caches [B,BS,HK,D]: position p of slot s at block block_table[s, p // BS], row p % BS. projections: what comes after
    the queries in qkv: 2: keys and values, 1: keys that are also the values, 0: nothing, and nothing is appended."""
    _, block_size, kv_heads, d = k_cache.shape
    heads = qkv.astype(real, copy=False).reshape(len(qkv), -1, d)
    n_heads = heads.shape[1] - projections * kv_heads
    q, kv = heads[:, :n_heads], heads[:, n_heads:]
    angles = rope[positions].astype(real, copy=False)
    if projections:
        block, row = block_table[slots, positions // block_size], positions % block_size
        k, v = kv[:, :kv_heads], kv[:, -kv_heads:]
        append(k_cache, (block, row), rotate(rms(k, eps) * w_k_norm.astype(real, copy=False), angles))
        append(v_cache, (block, row), rms(v, eps) if value_norm else v)
    q = rotate(rms(q, eps) * w_q_norm.astype(real, copy=False), angles)
    return (q.reshape(len(qkv), -1),)


def append(cache: Cache, where: Where, heads: np.ndarray) -> None:
    """Write heads [n, HK, D] to the positions `where` of a cache. q8_0: codes as of q8_act activations, scale = amax /
    127 in float32, then rounded to float16."""
    if isinstance(cache, Tensor):
        codes, scales = quantise(heads, "q8_act").parts
        with np.errstate(over="ignore"):
            cache.parts[0][where], cache.parts[1][where] = codes, scales[..., ::2]
    else:
        cache[where] = heads


def cached(cache: Cache, where: Where, real: Real) -> np.ndarray:
    """The positions `where` of a cache as numbers [n, HK, D]."""
    if isinstance(cache, Tensor):
        parts = tuple(p[where] for p in cache.parts)
        return dequantise(Tensor(cache.dtype, (*where[0].shape, *cache.shape[2:]), parts), real)
    return widened(cache[where], real)


def attention(
    *,
    q: np.ndarray,
    k_cache: Cache,
    v_cache: Cache,
    block_table: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    scale: float,
    window: int,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """o[T,HQ*D] = softmax(scale * q.k) v over the positions j <= pos (and pos - j < window if window > 0) of the
    row's slot; query head h reads kv head h // (HQ/HK)."""
    first = np.maximum(0, positions - window + 1) if window > 0 else np.zeros_like(positions)
    return view_attention(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        slots=slots,
        views=np.stack([first, positions], axis=-1),
        scale=scale,
        real=real,
    )


def view_attention(
    *,
    q: np.ndarray,
    k_cache: Cache,
    v_cache: Cache,
    block_table: np.ndarray,
    slots: np.ndarray,
    views: np.ndarray,
    scale: float,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """o[T,HQ*D] = softmax(scale * q.k) v over the positions views[t,0] .. views[t,1] of the row's slot."""
    o = np.empty(q.shape, real)
    heads = q.shape[1] // k_cache.shape[3]
    for slot in sorted(set(slots.tolist())):
        members = np.flatnonzero(slots == slot)
        if len(members) > 1:
            members = members[np.argsort(views[members, 1], kind="stable")]  # neighbours share their keys
        for a, b in row_blocks(len(members), heads * (int(views[members, 1].max()) + 1), _SCORES):
            chunk = members[a:b]
            first, last = views[chunk, 0], views[chunk, 1]
            keys = np.arange(int(first.min()), int(last.max()) + 1)
            visible = (first[:, None] <= keys) & (keys <= last[:, None])
            seen = visible.any(axis=0)  # positions that no row sees may hold anything, NaN included
            visible, keys = visible[:, seen], keys[seen]
            o[chunk] = _one_slot(q[chunk], k_cache, v_cache, block_table[slot], keys, visible, scale, real)
    return (o,)


def attention_i8(*, q: np.ndarray, k_cache: np.ndarray, real: Real = np.float64, **others: Any) -> tuple[np.ndarray]:
    """attention of queries and keys that are int8 codes times a float32 scale for each head's vector."""
    d = k_cache.shape[3]
    return attention(q=in_int8(q, d, real), k_cache=in_int8(k_cache, d, real), real=real, **others)


def in_int8(x: np.ndarray, d: int, real: Real) -> np.ndarray:
    """Every vector of d elements as int8 codes times its float32 scale, in `real`."""
    codes, scale = int8_rows(x.astype(np.float32, copy=False).reshape(-1, d))
    return (codes.astype(real) * scale[:, None].astype(real)).reshape(x.shape)


def decode_attention(
    *,
    qkv: np.ndarray,
    w_q_norm: np.ndarray,
    w_k_norm: np.ndarray,
    rope: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    block_table: np.ndarray,
    k_cache: Cache,
    v_cache: Cache,
    eps: float,
    scale: float,
    window: int,
    projections: int = 2,
    value_norm: int = 0,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """o[T,HQ*D]: qk_norm_rope_append, then attention over the extended cache. One row per slot."""
    (q,) = qk_norm_rope_append(
        qkv=qkv,
        w_q_norm=w_q_norm,
        w_k_norm=w_k_norm,
        rope=rope,
        positions=positions,
        slots=slots,
        block_table=block_table,
        k_cache=k_cache,
        v_cache=v_cache,
        eps=eps,
        projections=projections,
        value_norm=value_norm,
        real=real,
    )
    return attention(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        slots=slots,
        positions=positions,
        scale=scale,
        window=window,
        real=real,
    )


def decode_attention_o(
    *, k_cache: np.ndarray, v_cache: np.ndarray, scale: float, window: int, real: Real = np.float64, **others: Any
) -> tuple[np.ndarray]:
    """decode_attention over caches that are already extended."""
    (q,) = qk_norm_rope_append(k_cache=k_cache.copy(), v_cache=v_cache.copy(), real=real, **others)
    routes = {n: others[n] for n in ("slots", "positions", "block_table")}
    return attention(q=q, k_cache=k_cache, v_cache=v_cache, scale=scale, window=window, real=real, **routes)


def _one_slot(
    q: np.ndarray,
    k_cache: Cache,
    v_cache: Cache,
    blocks: np.ndarray,
    keys: np.ndarray,
    visible: np.ndarray,
    scale: float,
    real: Real,
) -> np.ndarray:
    """Rows q [n, HQ*D] against positions `keys` [J] of one sequence; `visible` bool [n, J]."""
    _, block_size, kv_heads, d = k_cache.shape
    n, where = len(q), (blocks[keys // block_size], keys % block_size)
    k = cached(k_cache, where, real).transpose(1, 2, 0)  # [HK, D, J]
    v = cached(v_cache, where, real).swapaxes(0, 1)  # [HK, J, D]
    grouped = q.astype(real, copy=False).reshape(n, kv_heads, -1, d).swapaxes(0, 1)  # [HK, n, G, D]
    s = matmul(grouped.reshape(kv_heads, -1, d), k).reshape(kv_heads, n, -1, len(keys)) * real(scale)
    np.copyto(s, -np.inf, where=~visible[:, None])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    o = matmul(p.reshape(kv_heads, -1, len(keys)), v) / p.sum(axis=-1).reshape(kv_heads, -1, 1)
    return o.reshape(kv_heads, n, -1, d).swapaxes(0, 1).reshape(n, -1)
