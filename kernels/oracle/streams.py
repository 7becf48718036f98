"""AltUp's streams and LAuReL (Gemma 3n). A token has A residual streams, stored one after another in a row of A*H.
Stream 0, the active one, goes through the layer; the rest are predicted before it and corrected after it."""

from __future__ import annotations

import numpy as np

from hybrid.kernels.oracle.linear import linear
from hybrid.kernels.oracle.norm import add_rmsnorm_y, rms, rmsnorm
from hybrid.quant.codec import Real, Value, rows


def _mean_square(x: np.ndarray) -> np.ndarray:
    return np.add.reduce(x * x, axis=-1, keepdims=True) / x.dtype.type(x.shape[-1])


def _split(streams: np.ndarray, hidden: int, real: Real) -> np.ndarray:
    """[T,A,H] of [T,A*H]."""
    return streams.astype(real, copy=False).reshape(len(streams), -1, hidden)


def _joined(streams: np.ndarray) -> np.ndarray:
    """[T,A*H] of [T,A,H]."""
    return streams.reshape(len(streams), -1)


def _matched(x: np.ndarray, z: np.ndarray, least: float) -> np.ndarray:
    """z[T,A-1,H], each of its vectors with the root mean square of x[T,H]."""
    return z * np.sqrt(_mean_square(x))[:, None] / np.sqrt(np.maximum(_mean_square(z), z.dtype.type(least)))


def _router(x: np.ndarray, w_router_norm: np.ndarray, w_router: np.ndarray, eps: float, real: Real) -> np.ndarray:
    """[T,A]: tanh of w_router[A,H] @ (rms(x[T,H]) * w_router_norm / H)."""
    scaled = rms(x, eps) * w_router_norm.astype(real, copy=False) / real(x.shape[-1])
    return np.tanh(scaled @ w_router.astype(real, copy=False).T)


def altup_start(*, x: np.ndarray, z: np.ndarray, least: float, real: Real = np.float64) -> tuple[np.ndarray]:
    """streams[T,A*H]: x[T,H], then the projections z[T,(A-1)*H] of it at x's magnitude."""
    x = x.astype(real, copy=False)
    return (np.concatenate([x, _joined(_matched(x, _split(z, x.shape[1], real), least))], axis=1),)


def altup_predict(
    *,
    streams: np.ndarray,
    w_router_norm: np.ndarray,
    w_router: np.ndarray,
    w_predict: np.ndarray,
    w_norm: np.ndarray,
    eps: float,
    real: Real = np.float64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """predicted[T,A*H] = streams + C @ streams with C[A,A] = w_predict[A*A,A] @ router(stream 0);
    normed[T,H] = y[T,H] = rms(predicted 0) * w_norm."""
    s = _split(streams, len(w_norm), real)
    route = _router(s[:, 0], w_router_norm, w_router, eps, real)
    c = (route @ w_predict.astype(real, copy=False).T).reshape(len(s), s.shape[1], s.shape[1])
    predicted = s + np.matmul(c, s)
    (normed,) = rmsnorm(x=predicted[:, 0], w=w_norm, eps=eps, real=real)
    return _joined(predicted), normed, normed


def altup_predict_normed(
    *, predicted: np.ndarray, w_norm: np.ndarray, eps: float, real: Real = np.float64
) -> tuple[np.ndarray]:
    return rmsnorm(x=predicted[:, : len(w_norm)], w=w_norm, eps=eps, real=real)


altup_predict_y = altup_predict_normed


def laurel_add(
    *,
    a: np.ndarray,
    laurel: np.ndarray,
    predicted: np.ndarray,
    normed: np.ndarray,
    w_post: np.ndarray,
    w_laurel: np.ndarray,
    w_next: np.ndarray,
    eps: float,
    real: Real = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """sum[T,H] = (predicted 0 + rms(a) * w_post + normed + rms(laurel) * w_laurel) / sqrt(2);
    y[T,H] = rms(sum) * w_next."""
    x = predicted[:, : len(w_next)].astype(real, copy=False)
    attended = x + rmsnorm(x=a, w=w_post, eps=eps, real=real)[0]
    beside = normed.astype(real, copy=False) + rmsnorm(x=laurel, w=w_laurel, eps=eps, real=real)[0]
    total = (attended + beside) * real(np.sqrt(0.5))
    return total, rmsnorm(x=total, w=w_next, eps=eps, real=real)[0]


laurel_add_y = add_rmsnorm_y


def altup_correct(
    *,
    a: np.ndarray,
    residual: np.ndarray,
    w_post: np.ndarray,
    predicted: np.ndarray,
    w_router_norm: np.ndarray,
    w_router: np.ndarray,
    w_correct: np.ndarray,
    w_scale: np.ndarray,
    eps: float,
    real: Real = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """corrected[T,A*H] = predicted + (1 + w_correct[A,A] @ router(out)) * (out - predicted 0), out = residual + rms(a)
    * w_post; y[T,H] = corrected 0 * w_scale."""
    out = residual.astype(real, copy=False) + rmsnorm(x=a, w=w_post, eps=eps, real=real)[0]
    p = _split(predicted, len(w_post), real)
    d = 1 + _router(out, w_router_norm, w_router, eps, real) @ w_correct.astype(real, copy=False).T
    corrected = p + d[:, :, None] * (out - p[:, 0])[:, None]
    return _joined(corrected), corrected[:, 0] * w_scale.astype(real, copy=False)


def altup_correct_y(*, corrected: np.ndarray, w_scale: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    return (corrected[:, : len(w_scale)].astype(real, copy=False) * w_scale.astype(real, copy=False),)


def altup_add(
    *, corrected: np.ndarray, a: np.ndarray, w_post: np.ndarray, eps: float, real: Real = np.float64
) -> tuple[np.ndarray]:
    """streams[T,A*H] = corrected, with rms(a[T,H]) * w_post added to all but stream 0."""
    streams = _split(corrected.astype(real), len(w_post), real)
    streams[:, 1:] += rmsnorm(x=a, w=w_post, eps=eps, real=real)[0][:, None]
    return (_joined(streams),)


def altup_unembed(*, streams: np.ndarray, w: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    """z[T,(A-1)*H]: stream i times its matrix, rows (i-1)*H .. i*H of w[(A-1)*H,H]."""
    h = w.shape[1]
    each = [linear(x=streams[:, i + h : i + 2 * h], w=rows(w, i, i + h), real=real)[0] for i in range(0, w.shape[0], h)]
    return (np.concatenate(each, axis=1),)


def altup_end(
    *, streams: np.ndarray, z: np.ndarray, w_norm: np.ndarray, eps: float, least: float, real: Real = np.float64
) -> tuple[np.ndarray]:
    """y[T,H] = rms(mean of stream 0 and of the vectors of z[T,(A-1)*H] at its magnitude) * w_norm."""
    h = len(w_norm)
    x = streams[:, :h].astype(real, copy=False)
    mean = (x + _matched(x, _split(z, h, real), least).sum(1)) / real(streams.shape[1] // h)
    return rmsnorm(x=mean, w=w_norm, eps=eps, real=real)
