"""RoPE tables: row p has the cosines, then the sines, of position p's angles, one of each for every pair."""

from __future__ import annotations

import numpy as np

from hybrid.core.hparams import LayerParams


def rope_table(
    ctx: int,
    head_dim: int,
    theta: float,
    factor: float,
    pairs: int | None = None,
    width: int | None = None,
    first: int = 0,
) -> np.ndarray:
    """float32 [ctx, width]: angle[p, i] = (first + p) * theta^(-2i/head_dim) / factor for i < width / 2, and 0 for
    i >= `pairs` (defaults: the whole head).

    Computed in float64 and rounded once; float32 angles are inaccurate at long contexts.
    """
    half = head_dim // 2
    index = np.arange(half if width is None else width // 2, dtype=np.float64)
    frequency = np.where(index < (half if pairs is None else pairs), theta ** (-index / half) / factor, 0.0)
    angle = np.arange(first, first + ctx, dtype=np.float64)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def rope_of(layer: LayerParams, ctx: int, first: int = 0) -> np.ndarray:
    """The table of a layer: float32 [ctx, rope_dim], its first row of position `first`. Layers with equal `rotation` share
    it."""
    pairs, width = layer.rotated_pairs, layer.rope_dim
    return rope_table(ctx, layer.head_dim, layer.rope_theta, layer.rope_factor, pairs, width, first)
