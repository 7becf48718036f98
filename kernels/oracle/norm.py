"""RMSNorm, alone and after the residual add."""

from __future__ import annotations

import numpy as np

from hybrid.quant.codec import Real


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    real = x.dtype.type
    return x / np.sqrt(np.add.reduce(x * x, axis=-1, keepdims=True) / real(x.shape[-1]) + real(eps))


def rmsnorm(*, x: np.ndarray, w: np.ndarray, eps: float, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[T,H] = rms(x[T,H]) * w[H]."""
    return (rms(x.astype(real, copy=False), eps) * w.astype(real, copy=False),)


def add_rmsnorm(
    *,
    a: np.ndarray,
    residual: np.ndarray,
    w_post: np.ndarray,
    w_next: np.ndarray,
    eps: float,
    scale: float = 1.0,
    real: Real = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """sum[T,H] = (residual + rms(a) * w_post) * scale; y[T,H] = rms(sum) * w_next."""
    total = residual.astype(real, copy=False) + rmsnorm(x=a, w=w_post, eps=eps, real=real)[0]
    total *= real(scale)
    return total, rmsnorm(x=total, w=w_next, eps=eps, real=real)[0]


def add_rmsnorm_y(*, sum: np.ndarray, w_next: np.ndarray, eps: float, real: Real = np.float64) -> tuple[np.ndarray]:
    return rmsnorm(x=sum, w=w_next, eps=eps, real=real)


def add_norm(
    *, a: np.ndarray, residual: np.ndarray, w_post: np.ndarray, eps: float, real: Real = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """sum[T,H] = residual + rms(a) * w_post, also as y[T,H], the next matrix's input."""
    (normed,) = rmsnorm(x=a, w=w_post, eps=eps, real=real)
    total = normed + residual.astype(real, copy=False)
    return total, total


def add_norm_y(*, sum: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    return (sum.astype(real, copy=False),)
