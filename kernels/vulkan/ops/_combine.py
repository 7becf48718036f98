"""Merge of the partial results of attention and decode_attention, and their output parts."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

COMBINE = 64 * 4  # elements per workgroup of attention_combine.slang
OUTPUTS = {"f32": 0, "f16": 1, "q8_act": 2}  # as in any_output.slang


def two_parts(o: DeviceTensor) -> list[Slice]:
    """The parts of an output as any_output.slang binds them."""
    return [o.parts[0], o.parts[-1]]


def seen(t: Mapping[str, DeviceTensor]) -> str:
    """The tensor of what each row sees (visible.slang)."""
    return "views" if "views" in t else "positions"


def views(t: Mapping[str, DeviceTensor]) -> dict[str, int]:
    """The constants of visible.slang."""
    return {"VIEWS": 1} if "views" in t else {}


def window_of(step: Step) -> int:
    """Most positions that a row sees; 0: all."""
    return int(step.attrs.get("window", 0))


def record_combine(
    rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], part_o: Slice, part_ml: Slice, splits: int, min_split: int
) -> None:
    """Merge the partial results of attention, view_attention or decode_attention into o."""
    rows, heads, d = (step.bind[axis] for axis in ("T", "HQ", "D"))
    kernel = rec.kernel(f"attention_combine.{t['o'].dtype}", SUBGROUP=rec.device.subgroup_size, **views(t))
    push = struct.pack("<7I", rows, heads, d // 4, window_of(step), splits, min_split, CONTROL[step.extent])
    rec.dispatch(
        kernel,
        [part_o, part_ml, *t[seen(t)].parts],
        [*t["o"].parts],
        push,
        (-(-heads * d // COMBINE), Live(step.extent, cap=rows)),
    )
