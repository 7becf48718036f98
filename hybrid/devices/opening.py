"""Opening what --device asks for: the schedule's chain, tried in order, with a record of what was passed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.core.device import Device


class NoDevice(RuntimeError):
    """No device of the chain can be used; the line says why for each."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A device, and why those before it in the chain were not used."""

    device: Device
    passed_over: tuple[str, ...] = ()


def open_first(chain: Sequence[str]) -> Opened:
    """The first usable device of a chain such as ("vulkan:gpu", "cpu"). Raises NoDevice when none is."""
    reasons: list[str] = []
    for name in chain:
        try:
            return Opened(_open(name), tuple(reasons))
        except NoDevice as e:
            reasons.append(f"{name}: {e}")
    raise NoDevice("; ".join(reasons))


def _open(name: str) -> Device:
    kind, _, selector = name.partition(":")
    if kind == "cpu":
        from hybrid.kernels.oracle.device import CpuDevice

        return CpuDevice()
    try:
        from hybrid.kernels.vulkan.api import VulkanUnavailable
        from hybrid.kernels.vulkan.device import open_device
    except ImportError as e:
        raise NoDevice(f"the Vulkan backend cannot be imported ({e}); install the package vulkan") from None
    try:
        return open_device(selector or "auto")
    except VulkanUnavailable as e:
        raise NoDevice(str(e)) from None
