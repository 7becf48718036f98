"""Rotary position tables: row p holds D/2 cosines, then D/2 sines, of position p."""

from __future__ import annotations

import numpy as np

from hybrid.core.hparams import HParams


def rope_table(ctx: int, head_dim: int, theta: float, factor: float) -> np.ndarray:
    """float32 [ctx, head_dim]: angle[p, i] = p * theta^(-2i/head_dim) / factor, i < head_dim / 2.

    Computed in float64 and rounded once: at long contexts float32 angles are off by whole thousandths.
    """
    half = head_dim // 2
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half) / factor
    angle = np.arange(ctx, dtype=np.float64)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def rope_of(name: str, hp: HParams, ctx: int) -> np.ndarray:
    """The table `rope.global`, or of local layers, of a model."""
    theta, factor = (hp.rope_theta_global, hp.rope_factor) if name == "rope.global" else (hp.rope_theta_local, 1.0)
    return rope_table(ctx, hp.head_dim, theta, factor)
