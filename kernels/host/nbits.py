"""Products of quantised weights with int8 activations by onnxruntime's MatMulNBits (extra `cpu`).

MatMulNBits multiplies blocks of 32 codes of 4 or 8 bits, each block with a float32 scale, by activations that it rounds
to int8 by blocks of 32. Activations in q8_act have those very codes, so its integer dots are the definition's and only
float32 sums round. Weights become its codes without loss:
    scales for fewer than 32 elements: the matrix once for each part of a block, with the other parts' codes zero
    minima, and codes that are not centred: their share is a product of float32 minima with the sums of activations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np

from hybrid.core.dtypes import DTYPES, DType
from hybrid.core.protobuf import field
from hybrid.core.tensor import Packed, Rows, Tensor, unpacked
from hybrid.kernels.host.threads import processors
from hybrid.quant.blocks import factors, integers
from hybrid.quant.codec import BLOCK, dequantise, row_blocks

_AT_ONCE = 1 << 22  # elements of a session: larger ones are no faster, and what is made at once is memory
_ROWS = 16  # activations are split between threads by multiples of it
_DOMAIN = b"com.microsoft"


@cache
def unusable() -> str | None:
    """Why onnxruntime cannot compute here, proved by small products with extreme codes; None if it can. Empty: it is
    not installed."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return ""
    draw = np.random.default_rng(1)
    x = draw.choice(np.array([-127, 127], np.int8), (5, 64))
    scales = np.stack([np.ones((5, 2)), x.reshape(5, 2, 32).sum(axis=2)], axis=2)
    act = Tensor("q8_act", (5, 64), (x, scales.astype(np.float32).reshape(5, 4)))
    for dtype, ends in (("q4_0", (0, 255)), ("q8_0", (-127, 127))):
        kind = DTYPES[dtype].parts[0]
        codes = draw.choice(np.array(ends, kind.dtype), DTYPES[dtype].part_shape(kind, (48, 64)))
        w = Tensor(dtype, (48, 64), (codes, np.ones((48, 2), np.float16)))
        try:
            right = np.array_equal(Product(w)(act), dequantise(act) @ dequantise(w).T)
        except Exception as error:  # of several types, by version
            return f"{name()} cannot multiply {dtype}: {str(error).splitlines()[0][:200]}"
        if not right:
            return f"{name()}: wrong products of {dtype} on this processor"
    return None


def name() -> str:
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def exact_for(x: Tensor) -> bool:
    """Whether rounding x again gives its codes: each block has a code of 127 (as encoders make them) and a scale of
    ordinary size, or only zeros."""
    codes, scale = np.abs(x.parts[0]).reshape(-1, BLOCK), x.parts[1].reshape(-1, 2)[:, 0]
    peak = np.maximum.reduce(codes, axis=1)
    if np.minimum.reduce(peak) == 127 and 1e-30 < np.minimum.reduce(scale) <= np.maximum.reduce(scale) < 1e30:
        return True
    return bool((((peak == 127) & (scale > 1e-30) & (scale < 1e30)) | ((peak == 0) & np.isfinite(scale))).all())


def size(source: Any) -> int:
    """Bytes of a Product of a matrix, or of one with such a `dtype` and `shape`."""
    pieces = source.tensors if isinstance(source, Rows) else (source,)
    return sum(math.prod(p.shape) // BLOCK * _bytes_of_block(DTYPES[p.dtype]) for p in pieces)


class Product:
    """A matrix [N, K] that multiplies q8_act activations. source: the matrix in its own types, for activations that are
    not `exact_for` it. threads: how many may be used now."""

    def __init__(self, source: Tensor | Rows | Packed, threads: Callable[[], int] = lambda: 1) -> None:
        self.shape, self.source, self.threads = source.shape, source, threads
        pieces = source.tensors if isinstance(source, Rows) else (source,)
        at, makers = 0, []
        for _, alike in groupby(pieces, lambda piece: _Form.of(DTYPES[piece.dtype])):
            group = Rows(tuple(alike))
            for a, b in row_blocks(group.shape[0], group.shape[1], _AT_ONCE):
                makers.append((at + a, at + b, partial(_Part, group.rows(a, b))))
            at += group.shape[0]
        self._making = [(a, b, _pool(processors()).submit(make)) for a, b, make in makers]
        self._parts: list[tuple[int, int, _Part]] = []
        self.nbytes = size(source)

    def wait(self) -> list[tuple[int, int, _Part]]:
        """Its parts with their first and last rows, once they are made. Raises what reading the matrix raises."""
        if not self._parts:
            self._parts = [(a, b, part.result()) for a, b, part in self._making]
        return self._parts

    def __call__(self, x: Tensor) -> np.ndarray:
        """float32 x @ w.T. x: q8_act, `exact_for` it."""
        values = (x.parts[0].reshape(-1, BLOCK) * x.parts[1].reshape(-1, 2)[:, :1]).reshape(x.shape)
        threads, parts = self.threads(), self.wait()
        if len(parts) == 1 and (threads == 1 or len(values) <= _ROWS):
            return parts[0][2](x, values)
        y = np.empty((len(values), self.shape[0]), np.float32)
        step = max(_ROWS, -(-x.shape[0] // threads // _ROWS) * _ROWS)
        tasks = [(y[i : i + step, a:b], part, i) for a, b, part in parts for i in range(0, len(values), step)]

        def run(task: tuple[np.ndarray, _Part, int]) -> None:
            out, part, i = task
            out[...] = part(x.rows(i, i + step), values[i : i + step])

        list((_pool(threads).map if threads > 1 and len(tasks) > 1 else map)(run, tasks))
        return y


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "products")


@dataclass(frozen=True, slots=True)
class _Form:
    """How a storage type becomes codes of MatMulNBits."""

    bits: int
    group: int
    """Elements of a scale, at most BLOCK."""
    centre: int
    """The integer that becomes code 0."""
    minima: bool
    """Whether minima, or `centre`, take a product of their own."""

    @classmethod
    def of(cls, kind: DType) -> _Form:
        low, high = kind.integers
        bits = 4 if high - low < 16 else 8
        centre = low + (high - low + 1) // 2 if bits == 4 else (low + high + 1) // 2 if low >= 0 else 0
        return cls(bits, min(kind.group, BLOCK), centre, kind.minimum or centre != 0)


_ZEROS = {4: 0x88, 8: 0x80}
"""The bytes of zero points, by bits, that MatMulNBits takes if none are given."""


def _zero(kind: DType) -> int:
    """The code of 0: small where codes are, since it cancels in float32."""
    low, high = kind.integers
    return (high - low + 1) // 2 if high - low < 128 else 128


def _bytes_of_block(kind: DType) -> int:
    """What onnxruntime holds of a block: codes, a sum, the scale (of 8 bits twice: packed, and as given), and a zero point
    if given; minima."""
    form = _Form.of(kind)
    copy = BLOCK * form.bits // 8 + 4 * (form.bits // 8 + 2) + (_zero(kind) != 1 << form.bits - 1)
    return BLOCK // form.group * (copy + 4 * form.minima)


class _Part:
    """Some rows of a matrix whose types have one form: a session, and minima."""

    def __init__(self, source: Rows) -> None:
        form = _Form.of(DTYPES[source.dtype])
        (n, k), self._copies = source.shape, BLOCK // form.group
        codes, scales, zeros, minima = zip(*(_coded(unpacked(piece), form) for piece in source.tensors), strict=True)
        self._minima = np.ascontiguousarray(_joined(minima).T) if form.minima else None
        self._group = form.group
        width = k * self._copies
        given = {"w": _joined(codes).reshape(n, width // BLOCK, -1), "scales": _joined(scales).reshape(-1)}
        if any((piece != _ZEROS[form.bits]).any() for piece in zeros):
            given["zeros"] = _joined(zeros).reshape(-1)
        self._session = _session(n, width, form.bits, given)

    def __call__(self, x: Tensor, values: np.ndarray) -> np.ndarray:
        given = np.concatenate([values] * self._copies, axis=1) if self._copies > 1 else values
        y: np.ndarray = self._session.run(["y"], {"x": given})[0]
        if self._minima is None:
            return y
        scales = x.parts[1].reshape(len(values), -1, 2)
        if self._group == BLOCK:
            sums = scales[:, :, 1]
        else:
            each = x.parts[0].reshape(len(values), -1, self._copies, self._group).sum(axis=3, dtype=np.int32)
            sums = (each * scales[:, :, :1]).reshape(len(values), -1).astype(np.float32)
        y += sums @ self._minima
        return y


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _coded(w: Tensor, form: _Form) -> tuple[np.ndarray, ...]:
    """Codes u8 [N, copies * K * bits / 8], scales f32 and zero points u8 [N, copies * K / 32], and minima f32 [N, K /
    group] (empty without them)."""
    n, k = w.shape
    parts = [p.reshape(n * k // w.type.block, -1) for p in w.parts]
    q = integers(w.dtype, parts).reshape(n, k).view(np.uint8)  # modulo 256: also with the centre
    scale, minimum = factors(w.dtype, parts, np.float32)
    scale = scale.reshape(n, -1)
    if (each := k // form.group // scale.shape[1]) > 1:
        scale = np.repeat(scale, each, axis=1)
    least = np.float32(form.centre) * scale if form.minima else np.empty((n, 0), np.float32)
    if minimum is not None:
        least += np.repeat(minimum.reshape(n, -1), scale.size // minimum.size, axis=1)
    copies = BLOCK // form.group
    zero = _zero(w.type)
    q = q + np.uint8((zero - form.centre) % 256)
    if copies > 1:
        spread = np.full((n, copies, k // BLOCK, copies, form.group), zero, np.uint8)
        for i in range(copies):
            spread[:, i, :, i] = q.reshape(n, -1, copies, form.group)[:, :, i]
        q, scale = spread.reshape(n, -1), scale.reshape(n, -1, copies).swapaxes(1, 2)
    scale = np.ascontiguousarray(scale).reshape(n, -1)
    zeros = np.full(scale.shape, zero, np.uint8)
    if form.bits == 4:
        q = q[:, ::2] | (q[:, 1::2] << np.uint8(4))
        zeros = np.full((n, -(-scale.shape[1] // 2)), zero | zero << 4, np.uint8)
    return q, scale, zeros, least


# --- sessions


def _session(n: int, k: int, bits: int, given: Mapping[str, np.ndarray]) -> Any:
    """A session of y [T, n] = MatMulNBits(x [T, k], w, scales[, zeros]). One thread computes: Product splits. The arrays
    are given beside the model, since a session keeps what is inside; one operation has nothing to optimise."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_external_initializers([*given], [ort.OrtValue.ortvalue_from_numpy(a) for a in given.values()])
    return ort.InferenceSession(_model(n, k, bits, given), options, providers=["CPUExecutionProvider"])


def _model(n: int, k: int, bits: int, given: Mapping[str, np.ndarray]) -> bytes:
    """The ONNX model of a session, its arrays declared as external data."""
    numbers = {"N": n, "K": k, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
    attributes = [field(5, field(1, name.encode()) + field(3, v) + field(20, 2)) for name, v in numbers.items()]
    inputs = b"".join(field(1, name.encode()) for name in ("x", *given))
    node = inputs + field(2, b"y") + field(4, b"MatMulNBits") + b"".join(attributes) + field(7, _DOMAIN)
    graph = [field(1, node), field(2, b"product")]
    for name, data in given.items():
        dims, kind = b"".join(field(1, d) for d in data.shape), field(2, 1 if data.dtype == np.float32 else 2)
        place = field(13, field(1, b"location") + field(2, name.encode()))
        graph.append(field(5, dims + kind + field(8, name.encode()) + place + field(14, 1)))
    for number, what, width in ((11, b"x", k), (12, b"y", n)):
        rows_by_width = field(1, field(2, b"T")) + field(1, field(1, width))
        kind_and_shape = field(1, field(1, 1) + field(2, rows_by_width))
        graph.append(field(number, field(1, what) + field(2, kind_and_shape)))
    versions = field(8, field(1, b"") + field(2, 21)) + field(8, field(1, _DOMAIN) + field(2, 1))
    return field(1, 10) + versions + field(7, b"".join(graph))
