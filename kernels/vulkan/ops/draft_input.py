"""Binding of draft_input."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

READS = ("x", "positions", "slots", "next_position", "hidden", "guessed")


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,2*W]: x[T,W] beside the slot's hidden state; at i32 [T]."""
    rows, fours = step.bind["T"], step.bind["W"] // 4
    rec.dispatch(
        rec.kernel("draft_input"),
        reads=[p for name in READS for p in t[name].parts],
        writes=[*t["y"].parts, *t["at"].parts],
        push=struct.pack("<3I", rows, fours, step.bind["S"]),
        grid=(-(-fours // 64), Live("rows", cap=rows), 1),
    )
