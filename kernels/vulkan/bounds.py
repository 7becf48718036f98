"""How long the host waits for submitted work before it says that the device hangs: in proportion to the declared cost.

    seconds = floor + NEIGHBOURS * SLACK * (bytes / bandwidth + operations / speed)

bandwidth and speed are the device sheet's peaks, or where there is none what the slowest device of its class has. A
pass may take SLACK times as long as the peaks say, and beside NEIGHBOURS other programs with a like share of the device
that many times longer. The floor holds what no cost declares: switches of context, memory that was evicted, a driver
that compiles.

A CPU driver computes and compiles in this process's own threads, at a kernel's first dispatch too (llvmpipe: 6 s of
processor time for the first pass of a 13 M model, 20 s on the clock beside ten other programs). What others leave of
the processors is not its fault: there work is late when the clock and this process's processor time are beyond the
bound, or the clock STARVED times that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hybrid.core.plan import Plan
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.instance import DeviceInfo
from hybrid.spec.cost import Cost, step_cost
from hybrid.spec.op import load_ops

NEIGHBOURS = 20
SLACK = 10  # exact kernels in float32 reach a third of an H200's peak, the smallest dispatches far less
FLOOR_S, CPU_FLOOR_S = 10.0, 60.0  # of a real GPU; of a CPU driver, whose threads wait for a core as others do
STARVED = 10
CLASSES = {"discrete": (50.0, 1.0), "integrated": (20.0, 0.2), "cpu": (2.0, 0.002)}  # GB/s, TFLOPS in float32
OTHER = CLASSES["integrated"]  # virtual devices, and those of no stated kind


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one device. flat: seconds that every wait may take instead, whatever was submitted."""

    floor: float
    gb_s: float
    tflops: float
    flat: float | None = None
    own: bool = False
    """Does the device compute in this process's threads?"""

    def __post_init__(self) -> None:
        if not (self.floor > 0 and self.gb_s > 0 and self.tflops > 0 and (self.flat is None or self.flat > 0)):
            raise ValueError(f"bounds must be above 0: {self}")

    def seconds(self, cost: Cost) -> float:
        """For work of this cost with nothing queued before it."""
        if self.flat is not None:
            return self.flat
        at_peak = cost.nbytes / (self.gb_s * 1e9) + cost.flops / (self.tflops * 1e12)
        return self.floor + NEIGHBOURS * SLACK * at_peak

    def late(self, bound: float, waited: float, spent: float) -> float | None:
        """How long a wait was given, once that is over; it has lasted `waited` seconds, of which this process had
        `spent` of processor time."""
        if not self.own or self.flat is not None:
            return bound if waited > bound else None
        return waited if min(waited, spent) > bound or waited > STARVED * bound else None


def bounds_of(info: DeviceInfo, timeout: float | None = None) -> Bounds:
    """Of a device by its sheet, else its class. timeout, or HYBRID_VULKAN_TIMEOUT, makes them flat."""
    from hybrid.spec.devicesheet import sheet_for  # a plan that is recorded on no device has no use for it

    sheet = sheet_for(info.label)
    peak = sheet.peak if sheet else None
    gb_s, tflops = CLASSES.get(info.kind, OTHER)
    if peak and peak.bandwidth_gb_s:
        gb_s = peak.bandwidth_gb_s.value
    if peak and peak.f32_tflops:
        tflops = peak.f32_tflops.value
    floor = CPU_FLOOR_S if info.kind == "cpu" else FLOOR_S
    return Bounds(floor, gb_s, tflops, _asked() if timeout is None else timeout, own=info.kind == "cpu")


def declared(plan: Plan) -> Cost:
    """Cost of a plan at its full context. Steps that no operation declares (tests' own kernels) count nothing."""
    ops = load_ops()
    return sum((step_cost(plan, step) for step in plan.steps if step.op in ops), Cost())


def _asked() -> float | None:
    text = os.environ.get("HYBRID_VULKAN_TIMEOUT", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise VulkanError(f"HYBRID_VULKAN_TIMEOUT={text!r} is no number of seconds above 0")
    return seconds
