"""Per-layer inputs (Gemma 3n, Gemma 4, EmbeddingGemma 2): a vector for each layer that depends on the token and its
embedding alone, and the gated branch of a layer that takes it."""

from __future__ import annotations

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.kernels.oracle.ffn import gelu_tanh
from hybrid.kernels.oracle.linear import linear
from hybrid.kernels.oracle.norm import rms
from hybrid.quant.codec import Real, Value, argument, dequantise, round_into, take


def per_layer_embed(
    *,
    tokens: np.ndarray,
    w: Value,
    context: np.ndarray,
    w_norm: np.ndarray,
    scale: float,
    context_scale: float,
    eps: float,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """ple[T,E] = (w[tokens] * scale + rms(context * context_scale) * w_norm) / sqrt(2); the norm is over the P columns
    of each layer, w_norm [P]. An id outside the table takes row 0."""
    known = np.where((tokens >= 0) & (tokens < w.shape[0]), tokens, 0)
    row = dequantise(take(w, known), real) * real(scale)
    (normed,) = per_layer_norm(context=context, w_norm=w_norm, context_scale=context_scale, eps=eps, real=real)
    return ((row + normed) * real(np.sqrt(0.5)),)


def per_layer_norm(
    *, context: np.ndarray, w_norm: np.ndarray, context_scale: float, eps: float, real: Real = np.float64
) -> tuple[np.ndarray]:
    """ple[T,E] = rms(context * context_scale) * w_norm; the norm is over the P columns of each layer, w_norm [P]."""
    each = context.astype(real, copy=False).reshape(len(context), -1, len(w_norm)) * real(context_scale)
    return ((rms(each, eps) * w_norm.astype(real, copy=False)).reshape(context.shape),)


def per_layer_input(
    *,
    x: Value,
    w_gate: Value,
    ple: np.ndarray,
    w_proj: Value,
    layer: int,
    h_dtype: str = "f32",
    h: Tensor | None = None,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """y[T,H] = (gelu_tanh(x @ w_gate[P,H].T) * ple[T, the layer's columns]) @ w_proj[H,P].T; the middle is rounded to
    `h_dtype`."""
    (mid,) = per_layer_input_h(x=x, w_gate=w_gate, ple=ple, layer=layer, real=real)
    if h is None:
        h = Tensor.empty(h_dtype, mid.shape)
    round_into(h, mid)
    return per_layer_input_y(h=argument(h), w_proj=w_proj, real=real)


def per_layer_input_h(
    *, x: Value, w_gate: Value, ple: np.ndarray, layer: int, real: Real = np.float64
) -> tuple[np.ndarray]:
    (gate,) = linear(x=x, w=w_gate, real=real)
    return (gelu_tanh(gate) * of_layer(ple, layer, gate.shape[-1]).astype(real, copy=False),)


def per_layer_input_y(*, h: Value, w_proj: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    return linear(x=h, w=w_proj, real=real)


def of_layer(ple: np.ndarray, layer: int, width: int) -> np.ndarray:
    """The columns of one layer, [T,P] of [T,E]."""
    return ple[:, layer * width : (layer + 1) * width]


def take_rows(*, x: np.ndarray, out_rows: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[O,W] = x[out_rows]."""
    return (x[out_rows].astype(real, copy=False),)


def take_routes(
    *, all_positions: np.ndarray, all_slots: np.ndarray, out_rows: np.ndarray, real: Real = np.float64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Position and slot of each wanted row, i32 [O], and its index 0..O-1."""
    return all_positions[out_rows], all_slots[out_rows], np.arange(len(out_rows), dtype=np.int32)
