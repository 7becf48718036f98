"""Token embedding look-up."""

from __future__ import annotations

import numpy as np

from hybrid.quant.codec import Real, Value, dequantise, take


def embed(*, tokens: np.ndarray, w: Value, scale: float, real: Real = np.float64) -> tuple[np.ndarray]:
    """x[T,H] = w[tokens[T]] * scale, w [V,H]."""
    return (dequantise(take(w, tokens), real) * real(scale),)
