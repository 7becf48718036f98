"""Products of int8 codes that were quantised per row: what integer matrix units compute before any scale."""

from __future__ import annotations

import numpy as np

from hybrid.spec.tensor import Tensor
from kernels.oracle.quant import Real, dequantise


def matmul_i8(x: np.ndarray, w: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    """x i8 [T, K], w i8 [N, K] -> x @ w.T as integers: float64 holds them exactly up to K = 2^39."""
    return ((x.astype(np.float64) @ w.astype(np.float64).T).astype(np.int64),)


def matmul_i8i4(x: np.ndarray, w: Tensor, real: Real = np.float64) -> tuple[np.ndarray]:
    """x i8 [T, K], w q4_0 [N, K] -> x @ w.T."""
    return (x.astype(real) @ dequantise(w, real).T,)
