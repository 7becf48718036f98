"""Binding of group_experts."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """places i32 [T,K] of the live pairs by expert, order i32 [T*K] and spans u32 [X,2] of the experts, and the pairs' number."""
    device, pairs = rec.device, step.bind["T"] * step.bind["K"]
    threads = min(max(device.subgroup_size, min(pairs, 1024) // 64 * 64), device.max_threads)
    rec.dispatch(
        rec.kernel("group_experts", SUBGROUP=device.subgroup_size, WG=threads),
        reads=t["experts"].parts,
        writes=[p for name in ("places", "order", "spans", "pairs") for p in t[name].parts],
        push=struct.pack("<3I", CONTROL[step.extent], step.bind["T"], step.bind["K"]),
        grid=(step.bind["X"],),
    )
