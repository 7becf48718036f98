"""Storage types to numbers and back, bit-equal to ggml's own (gguf.quants) for f32, f16, bf16, q8_0 and q4_0.

All functions are vectorised; those that make temporaries work in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hybrid.spec.dtypes import DTYPES
from hybrid.spec.tensor import Tensor

Real = type[np.float32] | type[np.float64]
Value = Tensor | np.ndarray

BLOCK = 32
_CHUNK = 1 << 20  # elements worked on at once: temporaries stay in the cache

_INV_127 = np.float32(1 / 127)
_HALF = BLOCK // 2


def row_blocks(rows: int, width: int, elements: int = _CHUNK) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive row blocks of at most `elements` elements (at least one row each)."""
    step = max(1, elements // max(width, 1))
    return ((a, min(a + step, rows)) for a in range(0, rows, step))


def rows(value: Value, start: int, stop: int) -> Value:
    """Rows start..stop of the first axis, as views."""
    return value.rows(start, stop) if isinstance(value, Tensor) else value[start:stop]


def take(value: Value, index: np.ndarray) -> Value:
    """Rows `index` of the first axis, copied. Raises ValueError for an index outside it (no wrap-around)."""
    n = value.shape[0]
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < n:
        raise ValueError(f"row index outside 0..{n - 1}: {int(index.min())}..{int(index.max())}")
    if isinstance(value, Tensor):
        return Tensor(value.dtype, (*index.shape, *value.shape[1:]), tuple(p[index] for p in value.parts))
    return value[index]


def argument(value: Value) -> Value:
    """The form in which the functions take a tensor: plain numbers as an array, bf16 and block types as they are."""
    if isinstance(value, Tensor) and not value.type.quantised and value.dtype != "bf16":
        return value.array
    return value


def copy_rows(what: str, target: Tensor, pieces: Iterable[Tensor]) -> None:
    """Fill `target` with the rows of tensors of its type, one after another. ValueError names `what` does not fit."""
    at = 0
    for piece in pieces:
        if piece.dtype != target.dtype or piece.shape[1:] != target.shape[1:] or at + piece.shape[0] > target.shape[0]:
            got, want = f"{piece.dtype} {piece.shape}", f"{target.dtype} {target.shape}"
            raise ValueError(f"{what}: {got} does not fit into {want} at row {at}")
        for to, value in zip(target.parts, piece.parts, strict=True):
            to[at : at + piece.shape[0]] = value
        at += piece.shape[0]
    if at != target.shape[0]:
        raise ValueError(f"{what}: {at} rows given for a tensor of {target.shape[0]}")


def dequantise(value: Value, real: Real = np.float32, out: np.ndarray | None = None) -> np.ndarray:
    """The numbers of a tensor [..., K] as a `real` array of its shape; exact for every type except q8_act in
    float32 (24-bit scale times 8-bit code). `out`: contiguous array of that shape and type to fill.
    A plain array of the right type is returned as it is when no `out` is given."""
    if isinstance(value, np.ndarray):
        if out is None:
            return value.astype(real, copy=False)
        out[...] = value
        return out
    if value.dtype in ("f32", "f16"):
        return dequantise(value.array, real, out)
    if value.dtype not in ("bf16", "q8_0", "q4_0", "q8_act"):
        raise TypeError(f"{value.dtype} tensors hold integers: use .array")
    if out is None:
        out = np.empty(value.shape, real)
    elif not out.flags.c_contiguous or out.shape != value.shape or out.dtype != real:
        raise ValueError(f"out must be a contiguous {np.dtype(real)} array of shape {value.shape}")
    flat = out.reshape(-1, value.shape[-1])
    parts = [p.reshape(len(flat), -1) for p in value.parts]
    for a, b in row_blocks(*flat.shape):
        _decode(value.dtype, [p[a:b] for p in parts], flat[a:b])
    return out


def _decode(dtype: str, parts: list[np.ndarray], out: np.ndarray) -> None:
    """A few rows of a bf16 or block type into `out` [rows, K]."""
    if dtype == "bf16":
        out[...] = (parts[0].astype(np.uint32) << np.uint32(16)).view(np.float32)
        return
    blocks = out.reshape(-1, BLOCK)
    scale = parts[1].astype(out.dtype).reshape(len(blocks), -1)[:, :1]
    codes = parts[0].reshape(len(blocks), -1)
    if dtype == "q4_0":
        np.multiply((codes & np.uint8(15)).view(np.int8) - np.int8(8), scale, out=blocks[:, :_HALF])
        np.multiply((codes >> np.uint8(4)).view(np.int8) - np.int8(8), scale, out=blocks[:, _HALF:])
    else:
        np.multiply(codes, scale, out=blocks)


def quantise(array: np.ndarray, dtype: str) -> Tensor:
    """Real array [..., K] -> tensor of `dtype` (f32, f16, bf16, q8_0, q4_0, q8_act).

    Rounding: f16 and bf16 to nearest even; q8_0 and q4_0 as ggml does (and they raise ValueError for values whose
    scale float16 cannot hold); q8_act after rounding to float32: scale = amax/127, codes half to even."""
    if dtype == "f32":
        return Tensor.of(np.asarray(array, np.float32, order="C"))
    if dtype == "f16":
        with np.errstate(over="ignore"):  # IEEE: what is too large becomes infinite
            return Tensor.of(np.asarray(array, np.float16, order="C"))
    if dtype not in _ENCODERS:
        raise ValueError(f"cannot encode real numbers as {dtype!r}; known: f32, f16, {', '.join(_ENCODERS)}")
    out = Tensor.empty(dtype, array.shape)
    if not array.size:
        return out
    source = array.reshape(-1, array.shape[-1])
    parts = [p.reshape(len(source), -1) for p in out.parts]
    for a, b in row_blocks(*source.shape):
        chunk = np.asarray(source[a:b], np.float32, order="C")
        blocks = chunk if dtype == "bf16" else chunk.reshape(-1, BLOCK)
        for part, value in zip(parts, _ENCODERS[dtype](blocks), strict=True):
            part[a:b] = value.reshape(b - a, -1)
    return out


def encode(array: np.ndarray, dtype: str) -> Tensor:
    """An operation's result, real or integer, as a tensor of its declared output type."""
    if DTYPES[dtype].parts[0].dtype.kind in "iu" and DTYPES[dtype].block == 1 and dtype != "bf16":
        return Tensor.of(np.asarray(array, DTYPES[dtype].parts[0].dtype, order="C"))
    return quantise(array, dtype)


def from_ggml(raw: np.ndarray | bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes of a ggml tensor (any array or bytes) of `shape` elements -> tensor. Plain types are views of `raw`,
    block types are split into their parts. Raises ValueError when the byte count does not fit."""
    flat = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.ascontiguousarray(raw).reshape(-1)
    data = flat.view(np.uint8)
    kind, shape = DTYPES[dtype], tuple(shape)
    if data.size != kind.nbytes(shape):
        raise ValueError(f"{dtype} tensor of shape {shape} takes {kind.nbytes(shape)} bytes, got {data.size}")
    if kind.block == 1:
        return Tensor(dtype, shape, (data.view(kind.parts[0].dtype).reshape(shape),))
    codes, scales = kind.parts  # ggml keeps the scale first, then the codes, block by block
    blocks = data.reshape(-1, 2 + codes.count)
    return Tensor(dtype, shape, (
        np.ascontiguousarray(blocks[:, 2:]).view(codes.dtype).reshape(kind.part_shape(codes, shape)),
        np.ascontiguousarray(blocks[:, :2]).view(scales.dtype).reshape(kind.part_shape(scales, shape)),
    ))  # fmt: skip


def to_ggml(tensor: Tensor) -> np.ndarray:
    """The tensor's bytes as ggml stores them: uint8 [..., bytes of a row]."""
    lead, kind = tensor.shape[:-1], tensor.type
    if tensor.dtype == "q8_act":
        raise ValueError("q8_act is an activation type: ggml has no such tensor")
    if kind.block == 1:
        return np.ascontiguousarray(tensor.array).view(np.uint8).reshape(*lead, -1)
    codes, scales = tensor.parts
    blocks = np.empty((scales.size, 2 + kind.parts[0].count), np.uint8)
    blocks[:, :2] = np.ascontiguousarray(scales).reshape(-1, 1).view(np.uint8)
    blocks[:, 2:] = codes.reshape(scales.size, -1).view(np.uint8)
    return blocks.reshape(*lead, -1)


def _bf16(x: np.ndarray) -> tuple[np.ndarray]:
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)  # a NaN stays one
    return (np.where(np.isnan(x), quiet, rounded).astype(np.uint16),)


def _reciprocal(d: np.ndarray) -> np.ndarray:
    """1/d; 0 where d is 0 or so small (below 2**-128) that float32 cannot hold 1/d: float16 holds 0 for it."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _f16_scale(d: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        scale = d.astype(np.float16)
    if not np.isfinite(scale).all():
        raise ValueError(f"cannot quantise to {dtype}: a value is NaN, infinite, or too large for a float16 scale")
    return scale


def _q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scale = _f16_scale(d, "q8_0")
    x = x * _reciprocal(d)  # the unrounded d
    a = np.abs(x)
    whole = np.floor(a)
    whole += np.floor(2 * (a - whole))  # half away from zero
    return np.copysign(whole, x).astype(np.int8), scale


def _q4_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)  # with its sign
    d = largest / np.float32(-8)
    scale = _f16_scale(d, "q4_0")
    q = np.minimum(np.trunc(x * _reciprocal(d) + np.float32(8.5)), 15).astype(np.uint8)
    return q[:, :_HALF] | (q[:, _HALF:] << np.uint8(4)), scale


def _q8_act(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and (scale, scale * sum of codes). A block that is not finite has a scale that is not."""
    amax = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(amax == 0, np.float32(0), np.float32(127) / amax)
        scaled = np.clip(np.rint(x * inverse), -127, 127)
        scale = amax * _INV_127
        codes = np.where(np.isnan(scaled), np.float32(0), scaled).astype(np.int8)
        sums = codes.sum(axis=1, keepdims=True, dtype=np.int32).astype(np.float32)
        return codes, np.concatenate([scale, scale * sums], axis=1)


_ENCODERS = {"bf16": _bf16, "q8_0": _q8_0, "q4_0": _q4_0, "q8_act": _q8_act}
