"""A stand-in for every processor's BLAS: float32 products whose summation order depends on their shape.

The bits of a BLAS product depend on the processor's kernels and on the number of rows and threads. With
HYBRID_ROUGH_PRODUCTS=1 each product of the device `cpu` is cut along K at a point given by its shape, and the two sums
are added. It is as exact as any BLAS. With another number of rows the order differs everywhere, so code that relies on
one order fails.
"""

from __future__ import annotations

import os

import numpy as np


def wanted() -> bool:
    return os.environ.get("HYBRID_ROUGH_PRODUCTS") == "1"


def install() -> None:
    """For this process, in all operations of the oracle that multiply float32 matrices."""
    from hybrid.kernels.oracle import attention, linear

    for module in (attention, linear):
        module.matmul = product  # type: ignore[attr-defined]


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """a [..., M, K] @ b [..., K, N]; float64, which is the definition, as NumPy does it."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dtype != np.float32 or k < 2:
        return np.matmul(a, b, out=out)
    at = 1 + (7919 * m + 31 * k + n) % (k - 1)
    found = np.matmul(a[..., :at], b[..., :at, :], out=out)
    found += np.matmul(a[..., at:], b[..., at:, :])
    return found
