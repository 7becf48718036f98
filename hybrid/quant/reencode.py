"""Re-encode weights at load, a block of rows at a time, from types without kernels on a device to native ones.

Codes are copied exactly. A K type's scales and minima are products of 6-bit and float16 numbers; native types have one
float16, so the products are rounded. Effect on accuracy: docs/quantisation.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Tensor
from hybrid.quant.blocks import fifths_from_32, halves, scales_and_minima
from hybrid.quant.native import NATIVE


@dataclass(frozen=True, slots=True)
class Reencoded:
    """Summary of the re-encoded matrices of one file type."""

    source: str
    target: str
    tensors: int
    file_bytes: int
    device_bytes: int
    rounding: float
    """The largest relative change of a scale or minimum."""

    def line(self) -> str:
        grown = 100 * (self.device_bytes / self.file_bytes - 1)
        exact = f"max relative scale rounding {self.rounding:.2g}" if self.rounding else "exact"
        return f"{self.source} as {self.target} ({self.tensors} tensors, +{grown:.1f} % bytes, {exact})"


def summary(done: Iterable[tuple[str, str, tuple[int, ...], float]]) -> tuple[Reencoded, ...]:
    """One entry for each pair of types. done: (file type, native type, shape, rounding) of every tensor."""
    found: dict[tuple[str, str], Reencoded] = {}
    for source, target, shape, rounding in done:
        old = found.get((source, target), Reencoded(source, target, 0, 0, 0, 0.0))
        found[source, target] = Reencoded(
            source,
            target,
            old.tensors + 1,
            old.file_bytes + DTYPES[source].nbytes(shape),
            old.device_bytes + DTYPES[target].nbytes(shape),
            max(old.rounding, rounding),
        )
    return tuple(found.values())


def reencode(tensor: Tensor) -> tuple[Tensor, float]:
    """(tensor in its NATIVE type, largest relative rounding of a scale or minimum; 0: exact). ValueError if a scale or
    minimum overflows float16."""
    target, parts = NATIVE[tensor.dtype], _named(tensor)
    if "super" not in parts:  # value = d * (code - offset)
        d = parts["scales"].astype(np.float32).reshape(-1, 1)
        factors = np.concatenate([d, -tensor.type.offset * d], axis=1)
        codes, high = parts["codes"], parts.get("high", np.empty(0, np.uint8))
    else:
        scale, minimum = scales_and_minima(parts["scales"].reshape(-1, 12))
        both = parts["super"].astype(np.float32).reshape(-1, 2)
        factors = np.stack([both[:, :1] * scale, -(both[:, 1:] * minimum)], axis=-1)
        both_halves = [
            c.view("V16")[..., 0] for c in halves(parts["codes"].reshape(-1, 4, 32))
        ]  # copied 16 bytes at a time
        codes = np.stack(both_halves, axis=2).view(np.uint8)
        high = fifths_from_32(parts["high"].reshape(-1, 32)) if "high" in parts else np.empty(0, np.uint8)
    scales, rounding = _rounded(factors, tensor.dtype)
    made = {"codes": codes, "high": high, "scales": scales}
    kind = DTYPES[target]
    out = tuple(made[p.name].reshape(kind.part_shape(p, tensor.shape)) for p in kind.parts)
    return Tensor(target, tensor.shape, out), rounding


def _named(tensor: Tensor) -> Mapping[str, np.ndarray]:
    return {p.name: a for p, a in zip(tensor.type.parts, tensor.parts, strict=True)}


def _rounded(factors: np.ndarray, dtype: str) -> tuple[np.ndarray, float]:
    with np.errstate(over="ignore"):
        half = factors.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError(f"a scale of {dtype} is not finite or overflows float16 in {NATIVE[dtype]}: use --device cpu")
    change = np.abs(half.astype(np.float32) - factors)
    size = np.abs(factors)
    return half, float(np.max(np.divide(change, size, out=np.zeros_like(change), where=size > 0), initial=0.0))
