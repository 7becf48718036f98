"""Open the devices of a schedule: the first usable device of --device's chain, and the secondary devices of placed
steps (the NPU, or the host `cpu`, whose weights stay in their file).

The result lists unusable devices with reasons: no fallback is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from hybrid.core.device import Device
from hybrid.planning.pipeline import pipeline_depth
from hybrid.spec.schedule import Schedule, find_schedule

NpuKind = Literal["npu", "sim"]


class NoDevice(RuntimeError):
    """No device of the chain is usable; the line gives the reason for each."""


@dataclass(frozen=True, slots=True)
class Opened:
    """`device` runs plans; `main` is the main device (the same object without secondary devices). passed_over: for each
    unusable device, a line with the reason."""

    device: Device
    main: Device
    passed_over: tuple[str, ...] = ()


def open_devices(schedule: Schedule, device: str = "auto", npu: NpuKind = "npu") -> Opened:
    """The first usable device of the schedule's chain `device`, with the NPU (`sim`: its simulator) if the schedule
    places steps on it. If the NPU is missing, the schedule's fallback runs these steps. Raises NoDevice, ValueError for
    an unknown chain, RuntimeError for a missing NPU without a fallback."""
    opened = _first(schedule.chain(device))
    try:
        return beside(opened, schedule, npu)
    except BaseException:
        opened.main.close()
        raise


@contextmanager
def opening_devices(schedule: Schedule, device: str = "auto", npu: NpuKind = "npu") -> Iterator[Callable[[], Opened]]:
    """Run `open_devices` in a thread while the block does other work (driver calls release the GIL). The yielded
    function waits for the result. If the block fails, the devices are closed."""
    with ThreadPoolExecutor(1, "open") as background:
        opening = background.submit(open_devices, schedule, device, npu)
        try:
            yield opening.result
        except BaseException:
            if opening.exception() is None:  # waits
                opening.result().device.close()
            raise


def open_again(opened: Opened, schedule: Schedule, lent: Mapping[str, str] | None = None) -> Opened:
    """Sibling devices for a second model, such as a draft model (Device.sibling, also `lent`). Raises as open_devices
    does."""
    again = opened.main.sibling(lent)
    try:
        return beside(Opened(again, again), schedule)
    except BaseException:
        again.close()
        raise


def open_device(name: str) -> Opened:
    """The device for --device without a schedule (one operation, a probe). `gpu`: a real GPU, no fallback."""
    return _first(("vulkan:gpu",) if name == "gpu" else find_schedule("gemma3").chain(name))


def _first(chain: Sequence[str]) -> Opened:
    reasons: list[str] = []
    for name in chain:
        try:
            device = _open(name)
            return Opened(device, device, tuple(reasons))
        except NoDevice as e:
            reasons.append(f"{name}: {e}")
    raise NoDevice("; ".join(reasons))


def _open(name: str) -> Device:
    kind, _, selector = name.partition(":")
    return OPENERS[kind](selector)


def _cpu(selector: str) -> Device:
    from hybrid.kernels.oracle.device import CpuDevice  # backends are imported on first use: each takes its time

    return CpuDevice()


def _vulkan(selector: str) -> Device:
    try:
        from hybrid.kernels.vulkan.api import VulkanUnavailable
        from hybrid.kernels.vulkan.device import open_device
    except ImportError as e:
        raise NoDevice(f"the Vulkan backend cannot be imported ({e}); install the package vulkan") from None
    from hybrid.devices.proofs import known, report_path
    from hybrid.kernels.vulkan.kernel import kernels_digest

    try:
        device = open_device(selector or "auto")
        found = known(report_path(device.info.name, device.report.driver, kernels_digest()))
        if found is None or not found.wrong:
            return device
        device.close()
        wrong = f"{device.name} computes wrong results in {', '.join(found.wrong)} (python -m hybrid.prove)"
        if found.options is None:
            raise NoDevice(f"{wrong}, and no other kernels are proved")
        device = open_device(selector or "auto", **found.options)
        device.failures = (f"{wrong}: runs with {found.options}",)
        return device
    except VulkanUnavailable as e:
        raise NoDevice(str(e)) from None


OPENERS: dict[str, Callable[[str], Device]] = {"vulkan": _vulkan, "cpu": _cpu}
"""By backend (spec.fields.MAIN_DEVICES); given what follows the colon of --device. NoDevice says why it cannot be used."""


def beside(opened: Opened, schedule: Schedule, npu: NpuKind = "npu") -> Opened:
    """The main device with the secondary devices on which the schedule places steps. Raises as open_devices does;
    closes no device on errors."""
    wanted = set(schedule.elsewhere) - {opened.main.backend}
    if not wanted:
        return opened
    from hybrid.devices.multi import MultiDevice  # imported only for multi-device schedules

    others: dict[str, Device] = {}
    passed_over, depth = opened.passed_over, 1
    if "cpu" in wanted:
        from hybrid.kernels.oracle.device import CpuDevice  # lazy: backend imports are slow

        others["cpu"] = CpuDevice(memory=0)  # weights placed on the host stay in their file
    if "npu" in wanted:
        from hybrid.kernels.npu.device import NpuDevice  # likewise
        from hybrid.kernels.npu.xrt import NpuUnavailable

        try:
            others["npu"], depth = NpuDevice(npu), pipeline_depth(schedule)
        except Exception as error:  # NpuUnavailable, or any error of a driver library
            why = str(error) if isinstance(error, NpuUnavailable) else f"{type(error).__name__}: {error}"
            if "npu" not in schedule.fallback:
                raise RuntimeError(f"schedule {schedule.schedule.name}: {why}") from None
            passed_over = (*passed_over, f"npu: {why}")
    return Opened(MultiDevice(opened.main, others, schedule.fallback, depth), opened.main, passed_over)
