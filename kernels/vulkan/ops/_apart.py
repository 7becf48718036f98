"""A product and the row kernel behind it, where the device's table asks for it: the product's K splits leave their sums apart, and
the row kernel adds them up as it reads them. So no workgroup of the product waits for another's sums, which takes longer than a
small product does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops import add_norm, add_rmsnorm, altup_correct, fused_ffn, laurel_add, linear
from hybrid.kernels.vulkan.ops._linear import left_apart
from hybrid.kernels.vulkan.ops._rows import Parts
from hybrid.kernels.vulkan.ops.rmsnorm import HELD, row_sizes
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor

Tensors = Mapping[str, DeviceTensor]
PRODUCTS: dict[str, tuple[str, str, Callable[..., None]]] = {  # by operation: the last product's rows and matrix, the binding
    "linear": ("x", "w", linear.record),
    "fused_ffn": ("h", "w_down", fused_ffn.record),
}
READERS: dict[str, Callable[..., None]] = {
    "add_rmsnorm": add_rmsnorm.record,
    "add_norm": add_norm.record,
    "laurel_add": laurel_add.record,
    "altup_correct": altup_correct.record,
}
OPS = (
    ("linear", "add_rmsnorm"), ("fused_ffn", "add_rmsnorm"), ("fused_ffn", "add_norm"), ("linear", "laurel_add"),
    ("fused_ffn", "altup_correct"),
)


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Tensors]) -> bool:
    """y = product, and what its reader makes of it as `a`; y is written by the reader. False where the reader's `a` is another
    tensor, where the product is not split, where the table does not ask, where the reader's y is not f16, or where a
    row is longer than a workgroup holds."""
    (product, reader), (made, read) = steps, t
    rows, hidden, device = product.bind["T"], reader.bind["H"], rec.device
    if product.args["y"] != reader.args["a"] or (rows, product.extent) != (reader.bind["T"], reader.extent):
        return False
    x, w, of = PRODUCTS[product.op]
    if read["y"].dtype != "f16" or hidden > 4 * HELD * row_sizes(hidden, device.subgroup_size, device.max_threads)["WG"]:
        return False
    count = left_apart(rec, made[x], made[w], rows=rows)
    if not count:
        return False
    parts = Parts(rec.scratch(4 * count * rows * hidden), count)
    y, tall = made["y"], count * rows
    apart = DeviceTensor(y.name, y.dtype, (tall, hidden), (Chunk(0, tall, (parts.at,), y.dtype),))
    of(rec, product, {**made, "y": apart}, apart=count)
    READERS[reader.op](rec, reader, read, parts=parts)
    return True
