"""Gemma 3n in float64 straight from its equations, sharing no code with operations, planner or engine: an independent
reference for whole models of any shape. Attention, per-layer inputs and logits are those of plain_gemma4."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from conformance.support.plain_gemma4 import Plain, gelu
from hybrid.checkpoint import Checkpoint


def forward(checkpoint: Checkpoint, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits [n, vocab], hidden states [layers + 1, n, streams, hidden]) of a token sequence, all positions at
    once."""
    m = Plain(checkpoint)
    hp, w, norm = m.hp, m.w, m.norm
    x = m.embedded(ids)
    per_layer = m.per_layer(ids, x)
    others = range(1, hp.n_streams)
    projections = w("altup_proj").reshape(-1, hp.hidden, hp.hidden)
    streams = np.stack([x, *(_at_size_of(x, x @ projections[i - 1].T) for i in others)], axis=1)
    caches: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    hidden, active = [streams], hp.altup_active
    for layer, own in enumerate(hp.layers):
        b = f"blk.{layer}"

        def route(z: np.ndarray, b: str = b) -> np.ndarray:
            return np.tanh((norm(z, f"{b}.altup_router_norm") / hp.hidden) @ w(f"{b}.altup_router").T)

        c = (route(streams[:, active]) @ w(f"{b}.altup_predict_coef").T).reshape(len(x), hp.n_streams, hp.n_streams)
        predicted = streams + np.einsum("tij,tjh->tih", c, streams)
        y = norm(predicted[:, active], f"{b}.attn_norm")
        laurel = y + norm(y @ w(f"{b}.laurel_l").T @ w(f"{b}.laurel_r").T, f"{b}.laurel_post_norm")
        attended = predicted[:, active] + norm(m.attended(y, layer, caches), f"{b}.post_attention_norm")
        z = (attended + laurel) / np.sqrt(2)
        f = norm(z, f"{b}.ffn_norm")
        gate = f @ w(f"{b}.ffn_gate").T
        if own.sparsity:
            threshold = gate.mean(-1, keepdims=True) + gate.std(-1, keepdims=True) * NormalDist().inv_cdf(own.sparsity)
            gate = np.maximum(gate - threshold, 0)
        out = z + norm((gelu(gate) * (f @ w(f"{b}.ffn_up").T)) @ w(f"{b}.ffn_down").T, f"{b}.post_ffw_norm")
        d = route(out) @ w(f"{b}.altup_correct_coef").T + 1
        streams = predicted + d[..., None] * (out - predicted[:, active])[:, None]
        branch = m.gated(streams[:, active] * w(f"{b}.altup_correct_scale"), per_layer[:, layer], layer)
        streams = np.stack([streams[:, i] + (branch if i else 0) for i in range(hp.n_streams)], axis=1)
        hidden.append(streams)
    back = w("altup_unembd_proj").reshape(-1, hp.hidden, hp.hidden)
    merged = [streams[:, 0], *(_at_size_of(streams[:, 0], streams[:, i] @ back[i - 1].T) for i in others)]
    return m.logits(norm(np.mean(merged, axis=0), "output_norm")), np.stack(hidden)


def _at_size_of(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """z with the root mean square of x."""
    return z * np.sqrt((x * x).mean(-1, keepdims=True)) / np.sqrt(np.maximum((z * z).mean(-1, keepdims=True), 1e-5))
