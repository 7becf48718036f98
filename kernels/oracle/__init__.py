"""The definition of every operation, in NumPy: float64 for proofs, float32 as the fallback device.

Functions take named arrays (quantised and bf16 tensors as `Tensor`) and return the un-rounded outputs in the
spec's order; state arrays are changed in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.kernels.oracle import (
    attention,
    distribution,
    embedding,
    ffn,
    integer,
    linear,
    norm,
    passes,
    per_layer,
    sampling,
    streams,
    verification,
)
from hybrid.quant.codec import Real, Value, argument, encode

__all__ = ["ORACLE", "argument", "call", "encoded"]

ORACLE: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
    f.__name__: f
    for f in (
        embedding.embed,
        norm.rmsnorm,
        norm.add_rmsnorm,
        norm.add_norm,
        streams.altup_start,
        streams.altup_predict,
        streams.laurel_add,
        streams.altup_correct,
        streams.altup_add,
        streams.altup_unembed,
        streams.altup_end,
        per_layer.per_layer_embed,
        per_layer.per_layer_input,
        per_layer.take_rows,
        per_layer.take_routes,
        linear.linear,
        linear.fused_qkv,
        attention.qk_norm_rope_append,
        attention.attention,
        attention.attention_i8,
        attention.decode_attention,
        ffn.geglu,
        ffn.fused_ffn,
        linear.dequantize,
        linear.quantize_act,
        linear.logits,
        integer.linear_rows,
        integer.matmul_i8,
        integer.matmul_blocks,
        distribution.adjust_logits,
        sampling.sample,
        distribution.logprobs,
        passes.begin_pass,
        verification.verify,
    )
}


def call(
    op: str,
    tensors: Mapping[str, Value],
    attrs: Mapping[str, Any],
    out_dtypes: Mapping[str, str],
    real: Real = np.float64,
) -> dict[str, Tensor]:
    """Run one operation and round its results as declared.

    `tensors`: inputs and state by spec name (state is changed in place). `out_dtypes`: the storage type of each
    output, in the spec's order; a scratch's type may stand among them (fused_ffn rounds its `h`).
    Returns the outputs by name. Raises KeyError for an unknown op, TypeError for missing arguments."""
    if op not in ORACLE:
        raise KeyError(f"no oracle for operation {op!r}; known: {', '.join(sorted(ORACLE))}")
    accepted = inspect.signature(ORACLE[op]).parameters
    kept = {f"{name}_dtype": dtype for name, dtype in out_dtypes.items() if f"{name}_dtype" in accepted}
    outputs = {name: dtype for name, dtype in out_dtypes.items() if f"{name}_dtype" not in kept}
    results = ORACLE[op](**{name: argument(t) for name, t in tensors.items()}, **attrs, **kept, real=real)
    return encoded(op, results, outputs)


def encoded(what: str, results: tuple[np.ndarray, ...], outputs: Mapping[str, str]) -> dict[str, Tensor]:
    """A function's results rounded to the storage types of `outputs`, by name. TypeError if their count is wrong."""
    if len(results) != len(outputs):
        raise TypeError(f"{what} returned {len(results)} arrays for the outputs {list(outputs)}")
    return {name: encode(r, dtype) for r, (name, dtype) in zip(results, outputs.items(), strict=True)}
