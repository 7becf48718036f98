"""A split-K product and its reader: the partials are kept, and the reader adds them up. So no workgroup of the product
waits for another's sums, which takes longer than a small product. The tuning table decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops import (
    add_norm,
    add_rmsnorm,
    altup_correct,
    decode_attention,
    fused_ffn,
    fused_qkv,
    laurel_add,
    linear,
)
from hybrid.kernels.vulkan.ops._linear import kept_partials
from hybrid.kernels.vulkan.ops._rows import Parts
from hybrid.kernels.vulkan.ops.rmsnorm import HELD, row_sizes
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor

Tensors = Mapping[str, DeviceTensor]
PRODUCTS: dict[
    str, tuple[str, str, str, Callable[..., None]]
] = {  # the last product's rows, matrix and result; its binding
    "linear": ("x", "w", "y", linear.record),
    "fused_qkv": ("x", "w", "qkv", fused_qkv.record),
    "fused_ffn": ("h", "w_down", "y", fused_ffn.record),
}
READERS: dict[str, tuple[str, Callable[..., None]]] = {  # the argument that takes the product; the reader's binding
    "add_rmsnorm": ("a", add_rmsnorm.record),
    "add_norm": ("a", add_norm.record),
    "laurel_add": ("a", laurel_add.record),
    "altup_correct": ("a", altup_correct.record),
    "decode_attention": ("qkv", decode_attention.record),
}
OPS = (
    ("linear", "add_rmsnorm"),
    ("fused_ffn", "add_rmsnorm"),
    ("fused_ffn", "add_norm"),
    ("linear", "laurel_add"),
    ("fused_ffn", "altup_correct"),
    ("fused_qkv", "decode_attention"),
    ("linear", "decode_attention"),
)


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Tensors]) -> bool:
    """Record the product and its reader; the reader writes the product's result. False where the reader reads another
    tensor, the product is not split, the table does not ask for it, or the reader takes no partials."""
    (product, reader), (made, read) = steps, t
    x, w, y, of = PRODUCTS[product.op]
    given, by = READERS[reader.op]
    rows, result = product.bind["T"], made[y]
    if product.args[y] != reader.args[given] or (rows, product.extent) != (reader.bind["T"], reader.extent):
        return False
    if reader.op != "decode_attention" and not _takes_parts(rec, reader, read):
        return False
    count = kept_partials(rec, made[x], made[w], rows=rows)
    if not count:
        return False
    width, tall = result.shape[-1], count * rows
    parts = Parts(rec.scratch(4 * tall * width), count)
    kept = DeviceTensor(result.name, result.dtype, (tall, width), (Chunk(0, tall, (parts.at,), result.dtype),))
    of(rec, product, {**made, y: kept}, partials=count)
    by(rec, reader, read, parts=parts)
    return True


def _takes_parts(rec: Recorder, reader: Step, t: Tensors) -> bool:
    """Whether a row kernel takes partials: it writes f16, and a workgroup holds a whole row."""
    hidden, device = reader.bind["H"], rec.device
    return (
        t["y"].dtype == "f16" and hidden <= 4 * HELD * row_sizes(hidden, device.subgroup_size, device.max_threads)["WG"]
    )
