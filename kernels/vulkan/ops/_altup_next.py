"""The end of a layer's AltUp streams and the next layer's prediction in one dispatch: altup_predict.slang with ADD."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops.rmsnorm import HELD, row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

OPS = ("altup_add", "altup_predict")
BUILT = "q8_act", "f16"  # types of y


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> bool:
    """streams = corrected, with rms(a) * w_post added to all but the first; then predicted, normed and y of them.

    False where the steps are unconnected, where no module is built for y, or where a workgroup might overwrite inputs
    that another row's workgroup has not read yet."""
    (add, predict), (old, new) = steps, t
    rows, hidden, device = add.bind["T"], add.bind["H"], rec.device
    follow = add.args["streams"] == predict.args["streams"] and (add.bind, add.extent) == (predict.bind, predict.extent)
    sizes, y = row_sizes(hidden, device.subgroup_size, device.max_threads), new["y"]
    if not (follow and y.dtype in BUILT and add.attrs["eps"] == predict.attrs["eps"]):
        return False
    reads = [
        p
        for x in (
            *(old[n] for n in ("corrected", "a", "w_post")),
            *(new[n] for n in ("w_router_norm", "w_router", "w_predict", "w_norm")),
        )
        for p in x.parts
    ]
    made = [p for n in ("predicted", "normed", "y") for p in new[n].parts]
    # Predicted streams may overwrite the corrected ones in place: a thread writes only what it alone has read.
    inputs = [*old["corrected"].parts, *old["a"].parts]
    clash = any(a.overlaps(b) and a != b for a in made for b in inputs)
    if clash and not (
        rows == 1 and hidden <= 4 * HELD * sizes["WG"]
    ):  # there the whole row is read before anything is written
        return False
    kernel = rec.kernel(f"altup_next.{y.dtype}", STREAMS=add.bind["A"], **sizes)
    push = struct.pack("<2I2f", CONTROL[add.extent], rows, add.attrs["eps"], 0.0)
    rec.dispatch(kernel, reads, [*old["streams"].parts, *made], push, (Live(add.extent, cap=rows),))
    return True
