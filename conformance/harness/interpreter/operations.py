"""Instructions that compute only from values: opcode -> function of (type of the result, operands)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from hybrid.harness.interpreter.module import TYPE_FLOAT, TYPE_INT, TYPE_MATRIX, TYPE_VECTOR, Type
from hybrid.harness.interpreter.values import each, signed, unsigned

Operation = Callable[..., Any]


def scalar(t: Type) -> Any:
    return t.of.dtype if t.kind in (TYPE_VECTOR, TYPE_MATRIX) else t.dtype


def _plain(call: Operation) -> Operation:
    return lambda t, *v: each(call, *v)


def _signed(call: Operation) -> Operation:
    return lambda t, *v: each(lambda *x: call(*(signed(y) for y in x)), *v)


def _signed_result(call: Operation) -> Operation:
    return lambda t, *v: each(lambda *x: unsigned(call(*(signed(y) for y in x))), *v)


def _over(a: Any, b: Any) -> Any:
    """Unsigned division; the result of a division by zero is undefined."""
    if np.ndim(b) == 0 and b:
        return a // b
    return np.where(b == 0, a.dtype.type(0), a // np.where(b == 0, b.dtype.type(1), b))[()]


def _toward_zero(a: Any, b: Any) -> Any:
    q = np.abs(a) // np.where(b == 0, b.dtype.type(1), np.abs(b))
    return np.where((a < 0) != (b < 0), -q, q).astype(a.dtype)[()]


def _shift(call: Operation) -> Operation:
    return lambda t, a, b: each(lambda x, y: call(x, y.astype(x.dtype)), a, b)


def _right_signed(t: Type, a: Any, b: Any) -> Any:
    return each(lambda x, y: unsigned(signed(x) >> signed(y.astype(x.dtype))), a, b)


def _convert(t: Type, v: Any) -> Any:
    dtype = scalar(t)
    return each(lambda x: x.astype(dtype), v)


def _from_signed(t: Type, v: Any) -> Any:
    dtype = scalar(t)
    if t.kind == TYPE_FLOAT or (t.kind == TYPE_VECTOR and t.of.kind == TYPE_FLOAT):
        return each(lambda x: signed(x).astype(dtype), v)
    return each(lambda x: unsigned(signed(x).astype(f"i{np.dtype(dtype).itemsize}")), v)


def _to_signed(t: Type, v: Any) -> Any:
    dtype = scalar(t)
    return each(lambda x: unsigned(np.trunc(x).astype(f"i{np.dtype(dtype).itemsize}")), v)


def bitcast(t: Type, v: Any) -> Any:
    """The same bits as another type."""
    parts = v if isinstance(v, list) else [v]
    dtype = np.dtype(scalar(t))
    n = t.n if t.kind == TYPE_VECTOR else 1
    if len(parts) == n:
        found = [np.asarray(x).view(dtype)[()] for x in parts]
    else:
        whole = np.ascontiguousarray(np.stack(np.broadcast_arrays(*parts), -1)).view(dtype)
        found = [whole[..., i][()] for i in range(n)]
    return found if t.kind == TYPE_VECTOR else found[0]


def _construct(t: Type, *v: Any) -> Any:
    if t.kind == TYPE_MATRIX:
        return np.broadcast_to(np.asarray(v[0]).reshape(-1, 1), (np.size(v[0]), t.n))
    if t.kind == TYPE_VECTOR:
        return [x for part in v for x in (part if isinstance(part, list) else [part])]
    return list(v)


def _select(t: Type, c: Any, a: Any, b: Any) -> Any:
    if isinstance(a, list):
        return [_select(t, c[i] if isinstance(c, list) else c, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    if np.ndim(c) == 0:
        return a if c else b
    return np.where(c[:, None] if np.ndim(a) == 2 or np.ndim(b) == 2 else c, a, b)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(a.dtype)


def _scaled(t: Type, v: Any, s: Any) -> Any:
    return [x * s for x in v]


def _matrix_scaled(t: Type, v: Any, s: Any) -> Any:
    return v * (s if np.ndim(s) == 0 else s[:, None])


def _dot(t: Type, a: Any, b: Any) -> Any:
    found = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        found = found + x * y
    return found


BYTES = Type(TYPE_VECTOR, np.uint8, Type(TYPE_INT, np.uint8), 4)


def _dot_bytes(t: Type, a: Any, b: Any, *packed: int) -> Any:
    """Dot product of four signed bytes each, packed in a word or as a vector."""
    if isinstance(a, list) or isinstance(b, list):
        x, y = (v if isinstance(v, list) else bitcast(BYTES, v) for v in (a, b))
        return unsigned(sum(signed(p).astype(np.int32) * signed(q).astype(np.int32) for p, q in zip(x, y, strict=True)))
    each_byte = _signed_bytes(a) * _signed_bytes(b)
    halves = each_byte[..., :2] + each_byte[..., 2:]
    return unsigned((halves[..., 0] + halves[..., 1])[()])


def _signed_bytes(words: Any) -> np.ndarray:
    """The four bytes of each word, as int32 [..., 4]."""
    return np.ascontiguousarray(words).view(np.int8).reshape(*np.shape(words), 4).astype(np.int32)


def _divided(a: Any, b: Any) -> Any:
    return a / b


def _half_2x16(t: Type, v: Any) -> Any:
    return [x.astype(np.float32) for x in bitcast(Type(TYPE_VECTOR, np.float16, Type(TYPE_FLOAT, np.float16), 2), v)]


def _pack_half(t: Type, v: Any) -> Any:
    return bitcast(Type(TYPE_INT, np.uint32), [x.astype(np.float16) for x in v])


OPERATIONS: dict[int, Operation] = {
    79: lambda t, a, b, *i: [([*a, *b])[k] for k in i],
    80: _construct,
    83: lambda t, v: v,
    109: _convert,
    110: _to_signed,
    111: _from_signed,
    112: _convert,
    113: _convert,
    114: _from_signed,
    115: _convert,
    124: bitcast,
    126: _plain(lambda a: (~a) + a.dtype.type(1)),
    127: _plain(lambda a: -a),
    128: _plain(lambda a, b: a + b),
    129: _plain(lambda a, b: a + b),
    130: _plain(lambda a, b: a - b),
    131: _plain(lambda a, b: a - b),
    132: _plain(lambda a, b: a * b),
    133: _plain(lambda a, b: a * b),
    134: _plain(_over),
    135: _signed_result(_toward_zero),
    136: _plain(_divided),
    137: _plain(lambda a, b: a - _over(a, b) * b),
    138: _signed_result(lambda a, b: a - _toward_zero(a, b) * b),
    142: _scaled,
    143: _matrix_scaled,
    148: _dot,
    164: _plain(lambda a, b: a == b),
    165: _plain(lambda a, b: a != b),
    166: _plain(lambda a, b: a | b),
    167: _plain(lambda a, b: a & b),
    168: _plain(lambda a: ~a),
    169: _select,
    170: _plain(lambda a, b: a == b),
    171: _plain(lambda a, b: a != b),
    172: _plain(lambda a, b: a > b),
    173: _signed(lambda a, b: a > b),
    174: _plain(lambda a, b: a >= b),
    175: _signed(lambda a, b: a >= b),
    176: _plain(lambda a, b: a < b),
    177: _signed(lambda a, b: a < b),
    178: _plain(lambda a, b: a <= b),
    179: _signed(lambda a, b: a <= b),
    180: _plain(lambda a, b: a == b),
    182: _plain(lambda a, b: (a != b) & (a == a) & (b == b)),
    183: _plain(lambda a, b: a != b),
    184: _plain(lambda a, b: a < b),
    185: _plain(lambda a, b: ~(a >= b)),
    186: _plain(lambda a, b: a > b),
    187: _plain(lambda a, b: ~(a <= b)),
    188: _plain(lambda a, b: a <= b),
    189: _plain(lambda a, b: ~(a > b)),
    190: _plain(lambda a, b: a >= b),
    191: _plain(lambda a, b: ~(a < b)),
    4450: _dot_bytes,
    154: lambda t, v: reduce(lambda a, b: a | b, v),
    155: lambda t, v: reduce(lambda a, b: a & b, v),
    156: _plain(np.isnan),
    157: _plain(np.isinf),
    194: _shift(lambda a, b: a >> b),
    195: _right_signed,
    196: _shift(lambda a, b: a << b),
    197: _plain(lambda a, b: a | b),
    198: _plain(lambda a, b: a ^ b),
    199: _plain(lambda a, b: a & b),
    200: _plain(lambda a: ~a),
}

EXTENDED: dict[int, Operation] = {  # GLSL.std.450
    2: _plain(np.rint),
    3: _plain(np.trunc),
    4: _plain(np.abs),
    8: _plain(np.floor),
    9: _plain(np.ceil),
    27: _plain(np.exp),
    28: _plain(np.log),
    29: _plain(np.exp2),
    30: _plain(np.log2),
    31: _plain(np.sqrt),
    32: _plain(lambda a: (1 / np.sqrt(a)).astype(a.dtype)),
    13: _plain(np.sin),
    14: _plain(np.cos),
    21: _plain(np.tanh),
    26: _plain(np.power),
    37: _plain(np.fmin),
    38: _plain(np.minimum),
    39: _signed_result(np.minimum),
    40: _plain(np.fmax),
    41: _plain(np.maximum),
    42: _signed_result(np.maximum),
    43: _plain(lambda a, b, c: np.fmin(np.fmax(a, b), c)),
    44: _plain(lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    45: _signed_result(lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    50: _plain(fused),
    58: _pack_half,
    62: _half_2x16,
}


def reduced(op: int, x: np.ndarray, active: np.ndarray, dtype: Any) -> np.ndarray:
    """[subgroups, 1]: reduction over the active lanes of x [subgroups, 32]. op: of GroupNonUniform."""
    floats = np.issubdtype(dtype, np.floating)
    if op in (349, 350):
        return _added(np.where(active, x, dtype(0)))
    if op in (351, 352):
        return np.where(active, x, dtype(1)).prod(-1, keepdims=True, dtype=dtype)
    if op in (353, 356):
        y, ends = signed(x), np.iinfo(f"i{x.itemsize}")
        if op == 353:
            return unsigned(np.where(active, y, ends.max).min(-1, keepdims=True))
        return unsigned(np.where(active, y, ends.min).max(-1, keepdims=True))
    if op in (354, 355):
        return np.where(active, x, dtype(np.inf) if floats else np.iinfo(dtype).max).min(-1, keepdims=True)
    if op in (357, 358):
        return np.where(active, x, dtype(-np.inf) if floats else dtype(0)).max(-1, keepdims=True)
    if op == 359:
        return np.bitwise_and.reduce(np.where(active, x, ~dtype(0)), -1, keepdims=True)
    if op == 360:
        return np.bitwise_or.reduce(np.where(active, x, dtype(0)), -1, keepdims=True)
    raise ValueError(f"opcode {op} is not a reduction")


def _added(x: np.ndarray) -> np.ndarray:
    """Pairwise sum, an order that hardware uses."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x
