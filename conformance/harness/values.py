"""Tensor values from the counter hash (hashed.py) in any storage type, and the reals that a tensor encodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Tensor
from hybrid.harness import block_values
from hybrid.harness.block_values import quantised
from hybrid.harness.hashed import bits, integers, normal, permutation, uniform

__all__ = ["bits", "exact", "integers", "normal", "permutation", "quantised", "real", "rounded", "uniform"]


def rounded(values: np.ndarray, dtype: str) -> Tensor:
    """Real values in a plain storage type, rounded to nearest even."""
    if dtype == "f32":
        return Tensor.of(values.astype(np.float32))
    if dtype == "f16":
        return Tensor.of(values.astype(np.float16))
    if dtype == "bf16":
        word = values.astype(np.float32).view(np.uint32)
        return Tensor.of(((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16), "bf16")
    if dtype == "i8":
        return Tensor("i8", values.shape, (values.astype(np.int8),))
    if dtype in ("i32", "u32"):
        return Tensor.of(values.astype(DTYPES[dtype].parts[0].dtype))
    raise ValueError(f"{dtype} is not a plain storage type")


def exact(seed: int, name: str, shape: Sequence[int], dtype: str, span: int = 3) -> Tensor:
    """Integers -span..span in any numeric type: products and sums of them are exact in float32 in any order.

    Quantised types use their whole code range with block scales of 1 (q8_act: 1/64), which keeps sums of up to
    2^24 units exact as well.
    """
    if DTYPES[dtype].quantised:
        return block_values.exact(seed, name, shape, dtype)
    return rounded(integers(seed, name, shape, -span, span).astype(np.float64), dtype)


def real(tensor: Tensor) -> np.ndarray:
    """f64 values of a tensor (integers unchanged), decoded without the oracle's decoder."""
    kind = tensor.dtype
    if kind in ("i8", "i32", "u32"):
        return tensor.array
    if kind == "bf16":
        return (tensor.array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if not tensor.type.quantised:
        return tensor.array.astype(np.float64)
    codes, scale, minimum = block_values.unpack(tensor)
    return (codes * scale + minimum).reshape(tensor.shape)
