"""Gemma 3 in float64 straight from its equations, sharing no code with operations, planner or engine: an independent
reference for whole models of any shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hybrid.checkpoint import Checkpoint
from hybrid.core.hparams import HParams
from hybrid.quant.codec import dequantise


def forward(
    checkpoint: Checkpoint,
    ids: Sequence[int],
    rows: Mapping[int, np.ndarray] | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """(logits [n, vocab], hidden states [layers + 1, n, hidden]) of a token sequence, all positions at once. rows:
    embeddings that replace some positions' tokens. spans: positions with full attention among themselves, and windows
    that end with them."""
    hp = checkpoint.hparams

    def w(name: str) -> np.ndarray:
        return dequantise(checkpoint.tensor(f"{name}.weight"), np.float64)

    n, known = len(ids), [0 if i in (rows or {}) else token for i, token in enumerate(ids)]
    x = w("token_embd")[known] * hp.embed_scale
    for i, row in (rows or {}).items():
        x[i] = row
    last = np.arange(n)
    for begin, end in spans:
        last[begin:end] = end - 1
    hidden = [x]
    for layer in range(hp.n_layers):
        b, own = f"blk.{layer}", hp.layers[layer]
        y = _rms(x, hp.eps) * w(f"{b}.attn_norm")
        q = (y @ w(f"{b}.attn_q").T).reshape(n, own.n_heads, own.head_dim)
        k = (y @ w(f"{b}.attn_k").T).reshape(n, own.n_kv_heads, own.head_dim)
        v = (y @ w(f"{b}.attn_v").T).reshape(n, own.n_kv_heads, own.head_dim)
        q = _rotate(_rms(q, hp.eps) * w(f"{b}.attn_q_norm"), hp, layer)
        k = _rotate(_rms(k, hp.eps) * w(f"{b}.attn_k_norm"), hp, layer)
        o = _attend(q, k, v, hp, layer, last) @ w(f"{b}.attn_output").T
        x = x + _rms(o, hp.eps) * w(f"{b}.post_attention_norm")
        y = _rms(x, hp.eps) * w(f"{b}.ffn_norm")
        gate, up = y @ w(f"{b}.ffn_gate").T, y @ w(f"{b}.ffn_up").T
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        x = x + _rms((gelu * up) @ w(f"{b}.ffn_down").T, hp.eps) * w(f"{b}.post_ffw_norm")
        hidden.append(x)
    logits = (_rms(x, hp.eps) * w("output_norm")) @ w("token_embd" if hp.tied else "output").T
    if hp.softcap:
        logits = hp.softcap * np.tanh(logits / hp.softcap)
    return logits, np.stack(hidden)


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _rotate(x: np.ndarray, hp: HParams, layer: int) -> np.ndarray:
    """Half-split RoPE of [n, heads, head_dim] at positions 0..n-1."""
    own, half = hp.layers[layer], hp.layers[layer].head_dim // 2
    angle = np.arange(len(x))[:, None, None] * own.rope_theta ** (-2 * np.arange(half) / own.head_dim) / own.rope_factor
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, hp: HParams, layer: int, last: np.ndarray) -> np.ndarray:
    """Attention to positions up to `last` [n], sliding on local layers; [n, heads * head_dim]."""
    n, own = len(q), hp.layers[layer]
    group = own.n_heads // own.n_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    i, j = last[:, None], np.arange(n)
    seen = (j <= i) & ((own.window == 0) | (i - j < own.window))
    scores = np.where(seen, np.einsum("ihd,jhd->hij", q, k) * hp.attention_scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
