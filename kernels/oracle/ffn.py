"""GeGLU and the feed-forward region."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.kernels.oracle.linear import linear
from hybrid.quant.codec import Real, Value, argument, round_into


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    real = x.dtype.type
    return real(0.5) * x * (1 + np.tanh(real(np.sqrt(2 / np.pi)) * (x + real(0.044715) * x * x * x)))


def sparsified(gate: np.ndarray, sparsity: float) -> np.ndarray:
    """max(gate - threshold, 0), threshold = mean + deviation * inverse normal (sparsity) of the F numbers of each row:
    of normal ones the share `sparsity` becomes 0. The deviation is that of the population. 0: the gate as it is."""
    if sparsity <= 0:
        return gate
    real = gate.dtype.type
    mean = np.add.reduce(gate, axis=-1, keepdims=True) / real(gate.shape[-1])
    apart = gate - mean
    deviation = np.sqrt(np.add.reduce(apart * apart, axis=-1, keepdims=True) / real(gate.shape[-1]))
    return np.maximum(gate - (mean + deviation * real(NormalDist().inv_cdf(sparsity))), real(0))


def geglu(*, gate_up: np.ndarray, sparsity: float = 0.0, real: Real = np.float64) -> tuple[np.ndarray]:
    """h[T,F] = gelu_tanh(sparsified(gate)) * up of gate_up[T,2F] (gate first)."""
    f = gate_up.shape[-1] // 2
    both = gate_up.astype(real, copy=False)
    return (gelu_tanh(sparsified(both[..., :f], sparsity)) * both[..., f:],)


def fused_ffn(
    *,
    x: Value,
    w_gate_up: Value,
    w_down: Value,
    sparsity: float = 0.0,
    h_dtype: str = "f32",
    h: Tensor | None = None,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """y[T,H] = geglu(x @ w_gate_up[2F,H].T, sparsity) @ w_down[H,F].T; the middle is rounded to `h_dtype` (and kept in
    `h`)."""
    (mid,) = fused_ffn_h(x=x, w_gate_up=w_gate_up, sparsity=sparsity, real=real)
    if h is None:
        h = Tensor.empty(h_dtype, mid.shape)
    round_into(h, mid)
    return fused_ffn_y(h=argument(h), w_down=w_down, real=real)


def fused_ffn_h(*, x: Value, w_gate_up: Value, sparsity: float = 0.0, real: Real = np.float64) -> tuple[np.ndarray]:
    return geglu(gate_up=linear(x=x, w=w_gate_up, real=real)[0], sparsity=sparsity, real=real)


def fused_ffn_y(*, h: Value, w_down: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    return linear(x=h, w=w_down, real=real)
