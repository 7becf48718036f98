"""Gemma 4 in float64 straight from its equations, sharing no code with operations, planner or engine: an
independent reference for whole models of any shape. `Plain` is shared with Gemma 3n."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid.checkpoint import Checkpoint
from hybrid.quant.codec import dequantise


class Plain:
    """A checkpoint's numbers as float64, and the layers' attention."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.hp = checkpoint, checkpoint.hparams

    def w(self, name: str) -> np.ndarray:
        return dequantise(self.checkpoint.tensor(f"{name}.weight"), np.float64)

    def rms(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.hp.eps)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.rms(x) * self.w(name)

    def embedded(self, ids: Sequence[int]) -> np.ndarray:
        return self.w("token_embd")[list(ids)] * self.hp.embed_scale

    def per_layer(self, ids: Sequence[int], x: np.ndarray) -> np.ndarray:
        """[n, layers, P] of each token and its embedding x [n, hidden]."""
        hp, width = self.hp, self.hp.per_layer_dim
        known = [i if 0 <= i < hp.per_layer_vocab else 0 for i in ids]
        row = self.w("per_layer_token_embd")[known] * np.sqrt(width)
        context = (x @ self.w("per_layer_model_proj").T / np.sqrt(hp.hidden)).reshape(len(ids), -1, width)
        return (row.reshape(context.shape) + self.norm(context, "per_layer_proj_norm")) / np.sqrt(2)

    def gated(self, x: np.ndarray, own: np.ndarray, layer: int) -> np.ndarray:
        """The normed branch of a layer's per-layer input."""
        b = f"blk.{layer}"
        return self.norm((gelu(x @ self.w(f"{b}.inp_gate").T) * own) @ self.w(f"{b}.proj").T, f"{b}.post_norm")

    def attended(self, y: np.ndarray, layer: int, caches: dict[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Attention's output of the normed y [n, hidden]. A layer with its own keys and values stores them in `caches`."""
        b, own, n = f"blk.{layer}", self.hp.layers[layer], len(y)
        q = self.norm((y @ self.w(f"{b}.attn_q").T).reshape(n, own.n_heads, own.head_dim), f"{b}.attn_q_norm")
        if own.kv_from is None:
            bare = (y @ self.w(f"{b}.attn_k").T).reshape(n, own.n_kv_heads, own.head_dim)
            v = bare if own.k_as_v else (y @ self.w(f"{b}.attn_v").T).reshape(bare.shape)
            caches[layer] = self._rotate(self.norm(bare, f"{b}.attn_k_norm"), own), self.rms(v)
        k, v = caches[layer if own.kv_from is None else own.kv_from]
        group = own.n_heads // own.n_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        i, j = np.mgrid[:n, :n]
        seen = (j <= i) & ((own.window == 0) | (i - j < own.window))
        scores = np.where(seen, np.einsum("ihd,jhd->hij", self._rotate(q, own), k) * self.hp.attention_scale, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
        return o @ self.w(f"{b}.attn_output").T

    def _rotate(self, x: np.ndarray, own) -> np.ndarray:  # type: ignore[no-untyped-def]
        """Half-split RoPE of [n, heads, head_dim] at positions 0..n-1; only the first angles turn where part is
        rotated."""
        half, d = own.head_dim // 2, own.head_dim
        turning = int(own.rotated * d / 2)
        rate = np.where(np.arange(half) < turning, own.rope_theta ** (-2 * np.arange(half) / d) / own.rope_factor, 0.0)
        angle = np.arange(len(x))[:, None, None] * rate
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Of the normed x [n, hidden]."""
        y = x @ self.w("token_embd" if self.hp.tied else "output").T
        return self.hp.softcap * np.tanh(y / self.hp.softcap) if self.hp.softcap else y

    def router(self, x: np.ndarray, layer: int) -> np.ndarray:
        """[n, experts]: probabilities of the residual stream x [n, hidden]."""
        scale = dequantise(self.checkpoint.tensor(f"blk.{layer}.ffn_gate_inp.scale"), np.float64)
        z = self.rms(x) * scale / np.sqrt(self.hp.hidden)
        z = z @ self.w(f"blk.{layer}.ffn_gate_inp").T
        p = np.exp(z - z.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def mixture(self, x: np.ndarray, dense: np.ndarray, layer: int) -> np.ndarray:
        """The dense feed-forward's output and the experts' of the residual stream x [n, hidden], both normed."""
        b, own, p = f"blk.{layer}", self.hp.layers[layer], self.router(x, layer)
        each = dequantise(self.checkpoint.tensor(f"{b}.ffn_down_exps.scale"), np.float64)
        gate_up = self.w(f"{b}.ffn_gate_up_exps").reshape(own.n_experts, 2, own.expert_ffn, -1)
        down = self.w(f"{b}.ffn_down_exps").reshape(own.n_experts, -1, own.expert_ffn)
        rows, found = self.norm(x, f"{b}.pre_ffw_norm_2"), np.zeros_like(x)
        for i, row in enumerate(rows):
            chosen = sorted(range(own.n_experts), key=lambda j: -p[i, j])[: own.experts_used]
            for j in chosen:
                gate, up = gate_up[j] @ row
                found[i] += p[i, j] / p[i, chosen].sum() * each[j] * (down[j] @ (gelu(gate) * up))
        return self.norm(dense, f"{b}.post_ffw_norm_1") + self.norm(found, f"{b}.post_ffw_norm_2")


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def forward(checkpoint: Checkpoint, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits [n, vocab], hidden states [layers + 1, n, hidden]) of a token sequence, all positions at once."""
    m = Plain(checkpoint)
    x = m.embedded(ids)
    per_layer = m.per_layer(ids, x) if m.hp.per_layer_dim else None
    caches: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    hidden = [x]
    for layer, own in enumerate(m.hp.layers):
        b = f"blk.{layer}"
        x = x + m.norm(m.attended(m.norm(x, f"{b}.attn_norm"), layer, caches), f"{b}.post_attention_norm")
        y = m.norm(x, f"{b}.ffn_norm")
        ffn = (gelu(y @ m.w(f"{b}.ffn_gate").T) * (y @ m.w(f"{b}.ffn_up").T)) @ m.w(f"{b}.ffn_down").T
        if own.n_experts:
            ffn = m.mixture(x, ffn, layer)
        x = x + m.norm(ffn, f"{b}.post_ffw_norm")
        if per_layer is not None:
            x = x + m.gated(x, per_layer[:, layer], layer)
        x = x * own.scalar
        hidden.append(x)
    return m.logits(m.norm(x, "output_norm")), np.stack(hidden)
