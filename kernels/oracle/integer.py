"""Products of int8 codes quantised per row: the unscaled results of integer matrix units."""

from __future__ import annotations

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.quant.codec import Real, Value, dequantise


def matmul_i8(x: np.ndarray, w: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    """x i8 [T, K], w i8 [N, K] -> x @ w.T as integers: float64 holds them exactly up to K = 2^39."""
    return ((x.astype(np.float64) @ w.astype(np.float64).T).astype(np.int64),)


def linear_rows(x: np.ndarray, w: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    """x f32 [T, K], w [N, K] -> x @ w.T with int8 codes of both, a scale for each row of either."""
    left, right = int8_rows(x), int8_rows(dequantise(w, np.float32))
    dots = left[0].astype(np.float64) @ right[0].astype(np.float64).T
    return (dots.astype(real) * left[1][:, None].astype(real) * right[1].astype(real),)


def int8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 [R, C] -> int8 codes [R, C] and f32 scales [R], all in float32: scale = max|row| / 127 (1 for a row of
    zeros). A NaN becomes its row's scale, whose codes mean nothing."""
    most = np.abs(x).max(axis=1)
    scale = np.where(most == 0, np.float32(1), most / np.float32(127)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.clip(np.rint(x / scale[:, None]), -127, 127).astype(np.int8), scale


def matmul_blocks(x: np.ndarray, w: Tensor, real: Real = np.float64) -> tuple[np.ndarray]:
    """x i8 [T, K], w q4_0 or q8_0 [N, K] -> x @ w.T."""
    return (x.astype(real) @ dequantise(w, real).T,)
