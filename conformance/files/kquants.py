"""Encode matrices as q4_k, q5_k and q6_k, which gguf.quants can only decode: rounding to nearest, no search for better
scales.

Good enough for files of a real model whose loss differs by type; the project itself never writes these types.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from conformance.support.gguf_files import finish
from hybrid.checkpoint import Checkpoint
from hybrid.checkpoint.gguf_metadata import write_metadata
from hybrid.core.dtypes import fitting
from hybrid.core.tensor import Tensor
from hybrid.harness.block_values import pack
from hybrid.quant.codec import dequantise, quantise, to_ggml

K_TYPES = ("q4_k", "q5_k", "q6_k")


def encode(values: np.ndarray, dtype: str) -> Tensor:
    """Real values [..., K] as any type of weights."""
    if dtype not in K_TYPES:
        return quantise(values, dtype)
    x = np.asarray(values, np.float32)
    return _q6_k(x) if dtype == "q6_k" else _with_minima(x, dtype, 15 if dtype == "q4_k" else 31)


def _with_minima(x: np.ndarray, dtype: str, top: int) -> Tensor:
    """Each 32 values from their smallest (at most 0) to their largest; scales and minima in 63rds of their block's."""
    lead, k = x.shape[:-1], x.shape[-1]
    sub = x.reshape(*lead, k // 256, 8, 32)
    low = np.minimum(sub.min(-1), 0)
    step = (sub.max(-1) - low) / top
    d, dmin = (_half(v.max(-1, keepdims=True) / 63) for v in (step, -low))
    scales, minima = (np.clip(np.rint(_ratio(v, s)), 0, 63) for v, s in ((step, d), (-low, dmin)))
    codes = np.clip(np.rint(_ratio(sub + (dmin * minima)[..., None], (d * scales)[..., None])), 0, top)
    shape = (*lead, k // 32)
    supers = np.concatenate([d, dmin], axis=-1)
    return pack(dtype, codes.reshape(x.shape).astype(np.int64), scales.reshape(shape), minima.reshape(shape), supers)


def _q6_k(x: np.ndarray) -> Tensor:
    """Each 16 values by their largest, which becomes -32; scales in 128ths of their block's."""
    lead, k = x.shape[:-1], x.shape[-1]
    sub = x.reshape(*lead, k // 256, 16, 16)
    peak = np.take_along_axis(sub, np.abs(sub).argmax(-1)[..., None], -1)[..., 0]
    step = peak / -32
    largest = np.take_along_axis(step, np.abs(step).argmax(-1)[..., None], -1)
    d = _half(largest / -128)
    scales = np.clip(np.rint(_ratio(step, d)), -128, 127)
    codes = np.clip(np.rint(_ratio(sub, (d * scales)[..., None])), -32, 31)
    shape = (*lead, k // 16)
    return pack("q6_k", codes.reshape(x.shape).astype(np.int64), scales.reshape(shape), supers=d[..., 0])


def _half(v: np.ndarray) -> np.ndarray:
    return v.astype(np.float16).astype(np.float32)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def mixture(name: str, types: str, layers: int) -> str:
    """Type of a matrix in a file of `types`: a plain type for all, or q4_k_m and q5_k_m, whose output matrix and some v
    and down matrices are q6_k, as llama.cpp's quantiser chooses them."""
    if not types.endswith("_m"):
        return types
    parts = name.split(".")
    if parts[0] != "blk":
        return "q6_k"
    layer, eighth = int(parts[1]), layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "q6_k" if more and parts[2] in ("attn_v", "ffn_down") else types.removesuffix("_m")


def write_gguf(source: Checkpoint, path: Path, types: str) -> Path:
    """`source` as a GGUF file of `types` (a storage type, q4_k_m or q5_k_m); vectors are float32, rows that are not whole
    blocks the narrower type."""
    writer = GGUFWriter(path, source.hparams.family)
    write_metadata(writer, source, types.removesuffix("_m"))
    for name in source.names:
        values = dequantise(source.tensor(name), np.float32)
        kind = "f32" if values.ndim == 1 else mixture(name, types, source.hparams.n_layers)
        kind = fitting(kind, values.shape[-1])
        writer.add_tensor(name, to_ggml(encode(values, kind)), raw_dtype=GGMLQuantizationType[kind.upper()])
    finish(writer)
    return path
