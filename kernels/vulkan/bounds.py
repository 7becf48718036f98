"""Time bound of a wait for submitted work, in proportion to its declared cost.

    seconds = floor + NEIGHBOURS * SLACK * (bytes / bandwidth + operations / speed)

bandwidth and speed are the device sheet's peaks, else those of the slowest device of its class. SLACK is the allowed
slowdown against the peaks, NEIGHBOURS the number of programs that may share the device. The floor covers what no
operation declares: context switches, evicted memory, driver compilation.

A CPU driver computes and compiles in this process's own threads, and other processes may starve it. Its work is late
when both wall time and this process's CPU time exceed the bound, or wall time exceeds STARVED times the bound.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.core.plan import Plan
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.instance import DeviceInfo
from hybrid.spec.cost import Cost, step_cost
from hybrid.spec.op import load_ops

NEIGHBOURS = 20
SLACK = 10  # exact kernels in float32 reach a third of an H200's peak, the smallest dispatches far less
FLOOR_S, CPU_FLOOR_S = 10.0, 60.0  # of a real GPU; of a CPU driver, whose threads compete for cores
STARVED = 10
PEAK_SHARE = 3  # by which kernels are expected to be slower than the peaks, at most
SUBMIT_S = {"amd": 1.0, "intel": 1.0}
"""By vendor: their drivers reset a ring whose submit takes several seconds, and all that runs on it is lost."""
CLASSES = {"discrete": (50.0, 1.0), "integrated": (20.0, 0.2), "cpu": (2.0, 0.002)}  # GB/s, TFLOPS in float32
OTHER = CLASSES["integrated"]  # virtual devices, and those of no stated kind


@dataclass(frozen=True, slots=True)
class Bounds:
    """Parameters of one device's bounds. flat: seconds for every wait, regardless of cost."""

    floor: float
    gb_s: float
    tflops: float
    flat: float | None = None
    own: bool = False
    """The device computes in this process's threads."""
    submit: float | None = None
    """Seconds that one submit may last; None: as long as it takes."""

    def __post_init__(self) -> None:
        if not (self.floor > 0 and self.gb_s > 0 and self.tflops > 0 and (self.flat is None or self.flat > 0)):
            raise ValueError(f"bounds must be above 0: {self}")

    def seconds(self, cost: Cost) -> float:
        """Bound for work of this cost with nothing queued before it."""
        if self.flat is not None:
            return self.flat
        at_peak = cost.nbytes / (self.gb_s * 1e9) + cost.flops / (self.tflops * 1e12)
        return self.floor + NEIGHBOURS * SLACK * at_peak

    def parts(self, costs: Sequence[Cost]) -> list[tuple[int, Cost]]:
        """Where to cut a program whose steps cost so much: (end, cost of the steps up to it), ascending; a step is never
        cut."""
        found, spent, now = list[tuple[int, Cost]](), 0.0, Cost()
        for i, cost in enumerate(costs):
            seconds = PEAK_SHARE * (cost.nbytes / (self.gb_s * 1e9) + cost.flops / (self.tflops * 1e12))
            if self.submit is not None and spent and spent + seconds > self.submit:
                found.append((i, now))
                spent, now = 0.0, Cost()
            spent, now = spent + seconds, now + cost
        return [*found, (len(costs), now)]

    def late(self, bound: float, waited: float, spent: float) -> float | None:
        """Seconds to report as exceeded, or None while the wait is in time. waited: seconds so far; spent: CPU seconds
        of this process in them."""
        if not self.own or self.flat is not None:
            return bound if waited > bound else None
        return waited if min(waited, spent) > bound or waited > STARVED * bound else None


def bounds_of(info: DeviceInfo, timeout: float | None = None, vendor: str = "") -> Bounds:
    """Bounds of a device by its sheet, else its class. timeout, or HYBRID_VULKAN_TIMEOUT, makes them flat."""
    from hybrid.spec.devicesheet import sheet_for  # not needed to record a plan without a device

    sheet = sheet_for(info.label)
    peak = sheet.peak if sheet else None
    gb_s, tflops = CLASSES.get(info.kind, OTHER)
    if peak and peak.bandwidth_gb_s:
        gb_s = peak.bandwidth_gb_s.value
    if peak and peak.f32_tflops:
        tflops = peak.f32_tflops.value
    floor = CPU_FLOOR_S if info.kind == "cpu" else FLOOR_S
    return Bounds(
        floor, gb_s, tflops, _asked() if timeout is None else timeout, info.kind == "cpu", SUBMIT_S.get(vendor)
    )


def declared(plan: Plan) -> Cost:
    """Cost of a plan at its full context. Steps of undeclared operations (test kernels) cost nothing."""
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
