"""Token embedding look-up, and pooling."""

from __future__ import annotations

import numpy as np

from hybrid.quant.codec import Real, Value, dequantise, take


def embed(*, tokens: np.ndarray, w: Value, scale: float, real: Real = np.float64) -> tuple[np.ndarray]:
    """x[T,H] = w[tokens[T]] * scale, w [V,H]. An id beyond the vocabulary takes the last row."""
    known = np.minimum(tokens, w.shape[0] - 1)
    return (dequantise(take(w, known), real) * real(scale),)


def insert_rows(
    *, tokens: np.ndarray, x: np.ndarray, rows: np.ndarray, first: int, real: Real = np.float64
) -> tuple[np.ndarray]:
    """y[T,H] = rows[tokens - first] for ids first to first + R - 1, else x. x [T,H], rows [R,H]."""
    at = tokens.astype(np.int64) - first
    named = (at >= 0) & (at < len(rows))
    return (np.where(named[:, None], rows[np.clip(at, 0, len(rows) - 1)], x).astype(real, copy=False),)


def row_views(
    *, positions: np.ndarray, slots: np.ndarray, span_last: np.ndarray, real: Real = np.float64
) -> tuple[np.ndarray]:
    """sees i32 [T] = max(position, span_last[slot, position]). span_last [S,C]."""
    return (np.maximum(positions, span_last[slots, positions]).astype(np.int32, copy=False),)


def mean_rows(*, x: np.ndarray, ranges: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[O,W] = mean of the rows ranges[o,0] .. ranges[o,1] of x[R,W]."""
    return (np.stack([x[a : b + 1].mean(axis=0, dtype=real) for a, b in ranges.tolist()]),)
