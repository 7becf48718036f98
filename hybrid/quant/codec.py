"""Encode and decode storage types, bit-equal to ggml (gguf.quants) for the types that it has.

All functions are vectorised and process blocks of rows to bound temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from hybrid.core.dtypes import DTYPES, FILE_TYPES, DType
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Packed, Rows, Source, Tensor, unpacked
from hybrid.quant.blocks import RELAY, factors, integers
from hybrid.quant.search import encode as searched
from hybrid.quant.search import f16_scale, reciprocal

Real = type[np.float32] | type[np.float64]
Value = Tensor | Rows | Packed | np.ndarray

BLOCK = 32
F16_MAX = 65504.0
_CHUNK = 1 << 20  # elements of a block of rows: temporaries fit in the cache

_INV_127 = np.float32(1 / 127)
_F16_BITS, _F16_BIAS = np.int32(0x0FFFE000 - (1 << 31)), np.float32(2.0**112)  # sign, exponent and mantissa; 127 - 15
_TINY = np.float32(1e-36)  # smallest amax for which 127 / amax is finite
_HALF = BLOCK // 2


def row_blocks(rows: int, width: int, elements: int = _CHUNK) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive row blocks of at most `elements` elements (at least one row each)."""
    step = max(1, elements // max(width, 1))
    return ((a, min(a + step, rows)) for a in range(0, rows, step))


def rows(value: Value, start: int, stop: int) -> Value:
    """Rows start..stop of the first axis, as views."""
    return value[start:stop] if isinstance(value, np.ndarray) else value.rows(start, stop)


def take(value: Value, index: np.ndarray) -> Value:
    """Rows `index` of the first axis, copied. Raises ValueError for an index outside it (no wrap-around)."""
    n = value.shape[0]
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < n:
        raise ValueError(f"row index outside 0..{n - 1}: {int(index.min())}..{int(index.max())}")
    if isinstance(value, Packed):  # reads only these rows
        found, index = np.unique(index, return_inverse=True)
        value = joined("rows of a file", Rows(tuple(value.rows(i, i + 1) for i in found.tolist())))
    if isinstance(value, Tensor):
        return Tensor(value.dtype, (*index.shape, *value.shape[1:]), tuple(p[index] for p in value.parts))
    if isinstance(value, Rows):
        raise TypeError("rows of a matrix of several storage types cannot be picked: no operation needs it")
    return value[index]


def argument(value: Value) -> Value:
    """A tensor as an argument of these functions: a plain type as its array, bf16 and block types unchanged."""
    if isinstance(value, Tensor) and not value.type.quantised and value.dtype != "bf16":
        return value.array
    return value


def copy_rows(what: str, target: Tensor, pieces: Iterable[Tensor]) -> None:
    """Fill `target` with the concatenated rows of tensors of its type. ValueError, naming `what`, if they do not
    fit."""
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


def runs(decl: TensorDecl, parts: Sequence[Source]) -> Rows:
    """A weight of mixed storage types, with one tensor for each run of rows."""
    made = [Tensor.empty(dtype, (rows, *decl.shape[1:])) for dtype, rows in decl.row_types]
    makers = iter(parts)
    for run in made:
        at = 0
        while at < run.shape[0]:
            piece = unpacked(next(makers)())
            copy_rows(decl.name, run.rows(at, run.shape[0]).rows(0, piece.shape[0]), [piece])
            at += piece.shape[0]
    return Rows(tuple(made))


def joined(what: str, value: Tensor | Rows | Packed) -> Tensor:
    """One tensor on the host; a Tensor is returned unchanged. ValueError for mixed storage types."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Packed):
        return value.load()
    if len({t.dtype for t in value.tensors}) > 1:
        raise ValueError(f"{what} has rows of several storage types: it cannot be read or written as one tensor")
    out = Tensor.empty(value.dtype, value.shape)
    copy_rows(what, out, map(unpacked, value.tensors))
    return out


def dequantise(value: Value, real: Real = np.float32, out: np.ndarray | None = None) -> np.ndarray:
    """The values of a tensor [..., K] as a `real` array of its shape. Exact in float32, except for q8_act (24-bit scale
    times 8-bit code) and the addition of a minimum, which are rounded once.
    out: contiguous array of that shape and type to fill. Without it a plain array of the right type is returned
    unchanged."""
    if isinstance(value, np.ndarray):
        if out is None:
            return value.astype(real, copy=False)
        out[...] = value
        return out
    if isinstance(value, Rows):
        out, at = np.empty(value.shape, real) if out is None else out, 0
        for tensor in value.tensors:
            dequantise(tensor, real, out[at : at + tensor.shape[0]])
            at += tensor.shape[0]
        return out
    if isinstance(value, Packed):
        value = value.load()
    if value.dtype in ("f32", "f16"):
        return dequantise(value.array, real, out)
    if value.dtype != "bf16" and not value.type.quantised:
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
    """Decode a block of rows of a bf16 or block type into `out` [rows, K]."""
    if dtype == "bf16":
        out[...] = (parts[0].astype(np.uint32) << np.uint32(16)).view(np.float32)
        return
    kind = DTYPES[dtype]
    n = out.size // kind.block
    parts = [p.reshape(n, -1) for p in parts]
    if not kind.parts[0].packing:  # fast path for activations
        np.multiply(parts[0], parts[1][:, :1].astype(out.dtype, copy=False), out=out.reshape(n, BLOCK))
        return
    if dtype == "q4_0":  # fast path of the most common type: half a block at a time, without intermediate integers
        blocks, codes, scale = out.reshape(n, BLOCK), parts[0], parts[1].astype(out.dtype)
        np.multiply((codes & np.uint8(15)).view(np.int8) - np.int8(8), scale, out=blocks[:, :_HALF])
        np.multiply((codes >> np.uint8(4)).view(np.int8) - np.int8(8), scale, out=blocks[:, _HALF:])
        return
    scale, minimum = factors(dtype, parts, out.dtype.type)
    groups = out.reshape(*scale.shape, -1)
    np.multiply(integers(dtype, parts).reshape(groups.shape), scale[..., None], out=groups)
    if minimum is not None:
        groups += minimum[..., None]


def widened(x: np.ndarray, real: Real) -> np.ndarray:
    """`x` as `real`. Converts float16 to float32 by integer operations, which is faster than NumPy's conversion;
    attention of one token spends most of its time here."""
    if x.dtype != np.float16 or real is not np.float32 or x.size < _CHUNK >> 6:
        return x.astype(real, copy=False)
    out = np.empty(x.shape, np.float32)
    bits = out.view(np.int32)
    bits[...] = np.ascontiguousarray(x).view(np.int16)  # sign-extended
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, _F16_BITS, out=bits)
    out *= _F16_BIAS  # exact, also for subnormal numbers
    finite = -65536 < np.minimum.reduce(out, axis=None) <= np.maximum.reduce(out, axis=None) < 65536
    return out if finite else x.astype(np.float32)


def quantise(array: np.ndarray, dtype: str) -> Tensor:
    """Real array [..., K] -> tensor of `dtype`: f32, f16 or a type of _ENCODERS.

    Rounding: f16 and bf16 to nearest even; block types as ggml; q8_act after rounding to float32: scale = amax/127,
    codes half to even. Raises ValueError for a scale beyond float16 and for types without an encoder."""
    if dtype == "f32":
        return Tensor.of(np.asarray(array, np.float32, order="C"))
    if dtype == "f16":
        with np.errstate(over="ignore"):  # IEEE: overflow to infinity
            return Tensor.of(np.asarray(array, np.float16, order="C"))
    if dtype not in _ENCODERS:
        why = ": that type is only read" if dtype in FILE_TYPES else ""
        raise ValueError(f"cannot encode real numbers as {dtype!r}{why}; known: f32, f16, {', '.join(_ENCODERS)}")
    out = Tensor.empty(dtype, array.shape)
    if not array.size:
        return out
    source = array.reshape(-1, array.shape[-1])
    parts = [p.reshape(len(source), -1) for p in out.parts]
    for a, b in row_blocks(*source.shape):
        chunk = np.asarray(source[a:b], np.float32, order="C")
        blocks = chunk if dtype == "bf16" else chunk.reshape(-1, out.type.block)
        for part, value in zip(parts, _ENCODERS[dtype](blocks), strict=True):
            part[a:b] = value.reshape(b - a, -1)
    return out


def round_into(target: Tensor, array: np.ndarray) -> None:
    """Round an operation's result to the storage type of `target` and write it there."""
    kind = target.type
    if kind.block == 1 and target.dtype != "bf16":
        target.parts[0][...] = array  # float16: to nearest even, overflow to infinity
        return
    source = np.asarray(array, np.float32, order="C").reshape(-1, array.shape[-1] if kind.block == 1 else kind.block)
    parts = [p.reshape(len(source), -1) for p in target.parts]
    for a, b in row_blocks(*source.shape):
        for part, value in zip(parts, _ENCODERS[target.dtype](source[a:b]), strict=True):
            part[a:b] = value


def encode(array: np.ndarray, dtype: str) -> Tensor:
    """An operation's result, real or integer, as a tensor of its declared output type. Clamps to float16's range:
    activations must stay finite."""
    if DTYPES[dtype].parts[0].dtype.kind in "iu" and DTYPES[dtype].block == 1 and dtype != "bf16":
        return Tensor.of(np.asarray(array, DTYPES[dtype].parts[0].dtype, order="C"))
    return quantise(np.clip(array, -F16_MAX, F16_MAX) if dtype == "f16" else array, dtype)


def from_ggml(raw: np.ndarray | bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes of a ggml tensor of `shape` elements -> tensor. Plain types are views of `raw`; block types are split into
    parts. Raises ValueError for a wrong number of bytes."""
    flat = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.ascontiguousarray(raw).reshape(-1)
    data = flat.view(np.uint8)
    kind, shape = DTYPES[dtype], tuple(shape)
    if data.size != kind.nbytes(shape):
        raise ValueError(f"{dtype} tensor of shape {shape} takes {kind.nbytes(shape)} bytes, got {data.size}")
    if kind.block == 1:
        return Tensor(dtype, shape, (data.view(kind.parts[0].dtype).reshape(shape),))
    out = Tensor.empty(dtype, shape)
    blocks = data.reshape(-1, kind.nbytes((kind.block,)))
    for a, b in row_blocks(len(blocks), kind.block):
        for columns, i in _columns(dtype):
            piece = np.ascontiguousarray(blocks[a:b, columns])
            if relay := RELAY.get(kind.parts[i].ggml):
                piece = relay[0](piece)
            out.parts[i].reshape(len(blocks), -1)[a:b] = piece.view(kind.parts[i].dtype)
    return out


def to_ggml(tensor: Tensor) -> np.ndarray:
    """The tensor's bytes in ggml's encoding: uint8 [..., bytes of a row]."""
    lead, kind = tensor.shape[:-1], tensor.type
    if tensor.dtype == "q8_act":
        raise ValueError("q8_act is an activation type: ggml has no such tensor")
    if kind.block == 1:
        return np.ascontiguousarray(tensor.array).view(np.uint8).reshape(*lead, -1)
    count = int(np.prod(tensor.shape)) // kind.block
    blocks = np.empty((count, kind.nbytes((kind.block,))), np.uint8)
    parts = [np.ascontiguousarray(p).reshape(count, -1).view(np.uint8) for p in tensor.parts]
    for a, b in row_blocks(count, kind.block):
        for columns, i in _columns(tensor.dtype):
            relay = RELAY.get(kind.parts[i].ggml)
            blocks[a:b, columns] = relay[1](parts[i][a:b]) if relay else parts[i][a:b]
    return blocks.reshape(*lead, -1)


def _columns(dtype: str) -> Iterator[tuple[slice, int]]:
    """(bytes of a ggml block, index of their part), in ggml's order."""
    kind, at = DTYPES[dtype], 0
    names = [p.name for p in kind.parts]
    for name in FILE_TYPES[dtype].order:
        i = names.index(name)
        size = kind.parts[i].count * kind.parts[i].dtype.itemsize
        yield slice(at, at + size), i
        at += size


def _bf16(x: np.ndarray) -> tuple[np.ndarray]:
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)  # a NaN stays NaN
    return (np.where(np.isnan(x), quiet, rounded).astype(np.uint16),)


def _q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scale = f16_scale(d, "q8_0")
    x = x * reciprocal(d)  # the unrounded d
    a = np.abs(x)
    whole = np.floor(a)
    whole += np.floor(2 * (a - whole))  # half away from zero
    return np.copysign(whole, x).astype(np.int8), scale


def _nibbled(kind: DType, x: np.ndarray) -> tuple[np.ndarray, ...]:
    q, scales = _with_minimum(kind, x) if kind.minimum else _with_offset(kind, x)
    made = [_nibbles(q), scales] if len(kind.parts) == 2 else [_nibbles(q), _fifth(q), scales]
    return tuple(made)


def _with_offset(kind: DType, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stored codes of each block, and its d: the value of largest magnitude has the lowest integer."""
    low, high = kind.integers
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = largest / np.float32(low)
    scale = f16_scale(d, kind.name)
    return np.minimum(np.trunc(x * reciprocal(d) + np.float32(0.5 - low)), high - low).astype(np.uint8), scale


def _with_minimum(kind: DType, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of each block and its (d, m): value = d * code + m."""
    _, top = kind.integers
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        d = (high - low) / np.float32(top)
    scales = f16_scale(np.concatenate([d, low], axis=1), kind.name)
    q = np.trunc((x - low) * reciprocal(d) + np.float32(0.5))
    return np.minimum(q, top).astype(np.uint8), scales


def _nibbles(q: np.ndarray) -> np.ndarray:
    return (q[:, :_HALF] & np.uint8(15)) | (q[:, _HALF:] << np.uint8(4))


def _fifth(q: np.ndarray) -> np.ndarray:
    """Bit k of byte i: the fifth bit of code 4k + i."""
    return np.packbits(q.reshape(-1, 8, 4) >> np.uint8(4), axis=1, bitorder="little").reshape(-1, 4)


def _q8_act(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and (scale, scale * sum of codes). A non-finite block has a non-finite scale."""
    amax = np.maximum.reduce(np.abs(x), axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / amax
        scaled = np.rint(x * inverse)
        if not _TINY < np.minimum.reduce(amax, axis=None) <= np.maximum.reduce(amax, axis=None) < np.inf:
            scaled = np.rint(x * np.where(amax == 0, np.float32(0), inverse))
            scaled = np.clip(np.where(np.isnan(scaled), np.float32(0), scaled), -127, 127)
        scales = np.empty((len(x), 2), np.float32)
        np.multiply(amax, _INV_127, out=scales[:, :1])
        np.add.reduce(scaled, axis=1, keepdims=True, out=scales[:, 1:])  # of integers: exact
        scales[:, 1] *= scales[:, 0]
        return scaled.astype(np.int8), scales


_ENCODERS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, ...]]] = {
    "bf16": _bf16,
    "q8_0": _q8_0,
    **{t: partial(_nibbled, DTYPES[t]) for t in ("q4_0", "q4_1", "q5_0", "q5_1")},
    **{t: partial(searched, t) for t in ("q3_k", "q2_k", "iq4_nl", "iq4_xs")},
    "q8_act": _q8_act,
}
