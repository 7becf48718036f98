"""Mixture of experts: choice, grouping of rows by expert, the experts' feed-forward, and its sum."""

from __future__ import annotations

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.kernels.oracle.ffn import geglu
from hybrid.kernels.oracle.linear import linear
from hybrid.kernels.oracle.norm import rms, rmsnorm
from hybrid.quant.codec import Real, Value, argument, round_into, rows


def router(
    *, x: np.ndarray, scale: np.ndarray, w: np.ndarray, eps: float, real: Real = np.float64
) -> tuple[np.ndarray]:
    """logits[T,X] = (rms(x[T,H]) * scale[H]) @ w[X,H].T."""
    return linear(x=rmsnorm(x=x, w=scale, eps=eps, real=real)[0], w=w, real=real)


def top_experts(
    *, logits: np.ndarray, expert_scale: np.ndarray, k: int, scale: float, real: Real = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """experts i32 [T,K]: the largest of logits [T,X], the first of equal ones; gates [T,K]: their softmax of
    logits * scale, divided by its sum over the chosen ones, times expert_scale[X]."""
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    z = np.take_along_axis(logits, experts, -1).astype(real) * real(scale)
    p = np.exp(z - z[:, :1])
    gates = p / np.add.reduce(p, axis=-1, keepdims=True) * expert_scale.astype(real, copy=False)[experts]
    return experts.astype(np.int32), gates


def group_experts(
    *, experts: np.ndarray, e: int, real: Real = np.float64
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """places i32 [T,K] of the pairs in a stable order by expert; order i32 [T*K]: the expert of each place; spans u32
    [X,2]: first place of each expert, and the one after its last; pairs u32 [1]: their number."""
    order = np.argsort(experts.reshape(-1), kind="stable")
    places = np.empty(experts.size, np.int32)
    places[order] = np.arange(experts.size, dtype=np.int32)
    ends = np.cumsum(np.bincount(experts.reshape(-1), minlength=e))
    spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=-1)
    count = np.array([experts.size], np.uint32)
    return places.reshape(experts.shape), experts.reshape(-1)[order], spans.astype(np.uint32), count


def expert_rows(
    *, x: np.ndarray, w: np.ndarray, places: np.ndarray, eps: float, real: Real = np.float64
) -> tuple[np.ndarray]:
    """y[T*K,H]: row places[t,k] is rms(x[t]) * w."""
    normed = rms(x.astype(real, copy=False), eps) * w.astype(real, copy=False)
    y = np.empty((places.size, x.shape[-1]), real)
    y[places.reshape(-1)] = np.repeat(normed, places.shape[-1], axis=0)
    return (y,)


def expert_ffn(
    *,
    x: Value,
    spans: np.ndarray,
    order: np.ndarray,
    w_gate_up: Value,
    w_down: Value,
    h_dtype: str = "f32",
    h: Tensor | None = None,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """y[T,H]: rows spans[e,0] .. spans[e,1] of x[T,H] by the feed-forward of expert e, rows e*2F .. of w_gate_up[2XF,H]
    and e*H .. of w_down[XH,F]; the middle is rounded to `h_dtype` (and kept in `h`)."""
    (mid,) = expert_ffn_h(x=x, spans=spans, w_gate_up=w_gate_up, real=real)
    if h is None:
        h = Tensor.empty(h_dtype, mid.shape)
    round_into(h, mid)
    return expert_ffn_y(h=argument(h), spans=spans, w_down=w_down, real=real)


def expert_ffn_h(*, x: Value, spans: np.ndarray, w_gate_up: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    return geglu(gate_up=grouped(x, spans, w_gate_up, real), real=real)


def expert_ffn_y(*, h: Value, spans: np.ndarray, w_down: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    return (grouped(h, spans, w_down, real),)


def grouped(x: Value, spans: np.ndarray, w: Value, real: Real = np.float64) -> np.ndarray:
    """[T,N]: rows spans[e,0] .. spans[e,1] of x[T,K] @ rows e*N .. e*N + N - 1 of w[X*N,K], transposed."""
    n = w.shape[0] // len(spans)
    y = np.zeros((x.shape[0], n), real)
    for expert, (start, end) in enumerate(spans.tolist()):
        if end > start:
            (y[start:end],) = linear(x=rows(x, start, end), w=rows(w, expert * n, (expert + 1) * n), real=real)
    return y


def expert_add(
    *,
    a: np.ndarray,
    o: np.ndarray,
    places: np.ndarray,
    gates: np.ndarray,
    residual: np.ndarray,
    w_dense: np.ndarray,
    w_experts: np.ndarray,
    w_post: np.ndarray,
    w_next: np.ndarray,
    eps: float,
    scale: float = 1.0,
    real: Real = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """sum[T,H] = (residual + rms(m) * w_post) * scale, m = rms(a) * w_dense + rms(experts' sum) * w_experts;
    y[T,H] = rms(sum) * w_next."""
    m = mixed(a, o, places, gates, w_dense, w_experts, eps, real)
    total = (residual.astype(real, copy=False) + rmsnorm(x=m, w=w_post, eps=eps, real=real)[0]) * real(scale)
    return total, rmsnorm(x=total, w=w_next, eps=eps, real=real)[0]


def expert_add_y(*, sum: np.ndarray, w_next: np.ndarray, eps: float, real: Real = np.float64) -> tuple[np.ndarray]:
    return rmsnorm(x=sum, w=w_next, eps=eps, real=real)


def mixed(
    a: np.ndarray,
    o: np.ndarray,
    places: np.ndarray,
    gates: np.ndarray,
    w_dense: np.ndarray,
    w_experts: np.ndarray,
    eps: float,
    real: Real = np.float64,
) -> np.ndarray:
    """rms(a) * w_dense + rms(sum over k of gates[t,k] * o[places[t,k]]) * w_experts."""
    chosen = o.astype(real, copy=False)[places]
    experts = np.add.reduce(chosen * gates.astype(real, copy=False)[..., None], axis=1)
    (dense,), (sparse,) = (rmsnorm(x=v, w=w, eps=eps, real=real) for v, w in ((a, w_dense), (experts, w_experts)))
    return dense + sparse
