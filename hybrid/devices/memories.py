"""Memory sizes to compare a model's footprint with: of present devices and of a size that a user gives. Opens no
device."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNITS = "matrix units"
"""Column of `needs` for Vulkan devices with f16 matrix units, which have larger prefill chunks."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory size, and its column of `needs`. host: bytes of host memory for weights that do not fit."""

    device: str
    bytes: int
    needs: str
    host: int = 0
    problem: str | None = None
    dry: Any = None
    """The dry-run device (kernels.vulkan.dry) of a present device."""

    def as_dict(self) -> dict[str, Any]:
        found = {"device": self.device, "bytes": self.bytes, "needs": self.needs}
        return found if self.problem is None else {**found, "problem": self.problem}


def asked_of(devices: Sequence[Memory]) -> dict[str, Any]:
    """Columns of `needs`: Vulkan without and with matrix units, every present device, the cpu."""
    from hybrid.kernels.vulkan.dry import DryDevice

    kinds = {"vulkan": DryDevice(), UNITS: DryDevice(features=lambda feature: feature == "f16_matrices")}
    return {**kinds, **{m.needs: m.dry for m in devices if m.dry is not None}, "cpu": None}


def alike(asked: Mapping[str, Any]) -> dict[tuple[str, frozenset[str]], dict[str, Any]]:
    """The entries of `asked_of`, grouped by what determines their plans: backend (which may re-encode weight types) and
    capabilities."""
    from hybrid.planning.passes import capabilities_of

    groups: dict[tuple[str, frozenset[str]], dict[str, Any]] = {}
    for name, dry in asked.items():
        key = ("cpu", frozenset[str]()) if dry is None else ("vulkan", capabilities_of(dry.has))
        groups.setdefault(key, {})[name] = dry
    return groups


def memories(given: int | None) -> list[Memory]:
    """Memory sizes to compare with: the given one, every Vulkan device's, and the cpu device's limit."""
    from hybrid.devices.opening import NoDevice
    from hybrid.kernels.host.memory import usable_bytes

    kinds = (("", "vulkan"), (f", {UNITS}", UNITS)) if given is not None else ()
    found = [Memory(f"--memory{what}", given or 0, needs, sys.maxsize) for what, needs in kinds]
    try:
        found += _vulkan()
    except NoDevice as error:
        found.append(Memory("vulkan", 0, "vulkan", problem=str(error)))
    return [*found, Memory("cpu", usable_bytes(), "cpu")]


def _vulkan() -> list[Memory]:
    """The largest device-local heap of each Vulkan device, without opening it."""
    from hybrid.devices.opening import NoDevice

    try:
        from hybrid.kernels.vulkan.api import VulkanUnavailable
        from hybrid.kernels.vulkan.dry import DryDevice
        from hybrid.kernels.vulkan.instance import survey
    except ImportError as error:
        raise NoDevice(f"the Vulkan backend cannot be imported ({error})") from None
    try:
        return [
            Memory(
                i.label,
                max(n for n, own in r.heaps if own),
                i.label,
                max((n for n, own in r.heaps if not own), default=0),
                dry=DryDevice.like(r),
            )
            for i, r in survey()
        ]
    except VulkanUnavailable as error:
        raise NoDevice(str(error)) from None
