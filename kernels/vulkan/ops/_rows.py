"""Recording the row kernels of AltUp's streams (altup_rows.slang): one workgroup per row."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.ops.rmsnorm import row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


@dataclass(frozen=True, slots=True)
class Parts:
    """The kept partials of a product: f32 [count*T,H], which the row kernel adds up (partials.slang)."""

    at: Slice
    count: int


def record_rows(
    rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], reads: Sequence[str], writes: Sequence[str]
) -> None:
    """One dispatch of the operation's kernel for the live rows; a last output `y` is f32, f16 or q8_act."""
    _record(rec, step, t, [p for name in reads for p in t[name].parts], writes)


def record_sum(
    rec: Recorder,
    step: Step,
    t: Mapping[str, DeviceTensor],
    reads: Sequence[str],
    writes: Sequence[str],
    parts: Parts | None,
) -> None:
    """As record_rows, for a kernel whose first input may be kept partials; the kernel then writes their sum."""
    given, beside, count = with_parts([p for name in reads for p in t[name].parts], t[writes[0]].parts[0], parts)
    _record(rec, step, t, given, writes, (beside,), count)


def with_parts(reads: Sequence[Slice], some: Slice, parts: Parts | None) -> tuple[list[Slice], Slice, bytes]:
    """The kernel's reads, where it writes the first input's sum (`some` without partials: a binding needs some buffer),
    and the end of its push constants."""
    given, whole, count = ([*reads], some, 1) if parts is None else ([parts.at, *reads[1:]], reads[0], parts.count)
    return given, whole, struct.pack("<I", count)


def _record(
    rec: Recorder,
    step: Step,
    t: Mapping[str, DeviceTensor],
    reads: Sequence[Slice],
    writes: Sequence[str],
    beside: Sequence[Slice] = (),
    more: bytes = b"",
) -> None:
    rows, hidden, device = step.bind["T"], step.bind["H"], rec.device
    dtype = f".{t['y'].dtype}" if writes[-1] == "y" else ""
    kernel = rec.kernel(
        f"{step.op}{dtype}",
        STREAMS=step.bind.get("A", 1),
        **row_sizes(hidden, device.subgroup_size, device.max_threads),
    )
    push = (
        struct.pack("<2I2f", CONTROL[step.extent], rows, step.attrs.get("eps", 0.0), step.attrs.get("least", 0.0))
        + more
    )
    rec.dispatch(
        kernel, reads, [*(p for name in writes for p in t[name].parts), *beside], push, (Live(step.extent, cap=rows),)
    )
