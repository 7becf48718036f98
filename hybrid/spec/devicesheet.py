"""Device sheets: what a device's makers or our own runs say it can do at most, each figure with its source."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, field_validator

from hybrid.core.errors import SpecError, nearest
from hybrid.core.places import SPECS
from hybrid.spec.load import Model, load_toml
from hybrid.spec.npusheet import Npu
from hybrid.spec.schedule import Capability

SHEETS = SPECS / "devices"


class Figure(Model):
    """A number and where it comes from."""

    value: float = Field(gt=0)
    provenance: Literal["measured", "published", "modelled"]
    source: Annotated[str, Field(min_length=1)]


class DeviceHead(Model):
    name: str
    kind: Literal["discrete", "integrated", "cpu", "npu", "apu"]
    """apu: no device of its own, but what several devices of one chip share."""
    match: str
    """Regular expression, searched in the device's name as it reports it."""
    summary: str = ""
    shares: str | None = None
    """The sheet of the memory that this device shares with others."""

    @field_validator("match")
    @classmethod
    def _validate_match(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as e:
            raise ValueError(f"{value!r} is not a regular expression: {e}") from None
        return value


class Peak(Model):
    """Most that the device can do; a measured speed beyond it is a mistake in the measurement."""

    bandwidth_gb_s: Figure | None = None
    """Bytes per second between memory and the device, in 1e9."""
    f32_tflops: Figure | None = None
    f16_tflops: Figure | None = None
    """Of matrix instructions, where the device has them."""
    int8_tops: Figure | None = None
    """Of matrix instructions, where the device has them."""
    dot4_tops: Figure | None = None
    """Of packed 4x8 dot products in ordinary vector instructions."""


class Reached(Peak):
    """What well-written programs have got out of the device; figures that are not given fall back on the peak."""


class Costs(Model):
    """What work costs beside its bytes and arithmetic, in microseconds."""

    submit_us: Figure | None = None
    """An empty submit and the wait for it."""
    dependent_dispatch_us: Figure | None = None
    """A small dispatch that waits for the one before it."""
    independent_dispatch_us: Figure | None = None
    drain_us: Figure | None = None
    """Lost between two dependent dispatches that each fill the device: the tail of one, the ramp of the next."""


class Limits(Model):
    """What planning must respect; the driver's own answers win when the device is there."""

    subgroup: int | None = None
    max_storage_range: int | None = None
    shared_bytes: int | None = None
    memory_bytes: int | None = None
    """What models may take of the device's memory."""
    capabilities: tuple[Capability, ...] = ()
    """What the device's driver offers that changes what is planned."""


class DeviceSheet(Model):
    """One file of specs/devices."""

    schema_version: Literal[1] = Field(alias="schema")
    device: DeviceHead
    peak: Peak
    reached: Reached = Reached()
    costs: Costs = Costs()
    limits: Limits = Limits()
    npu: Npu | None = None
    """Tiles, descriptors and rates; where the device is an NPU."""


@lru_cache(maxsize=1)
def load_sheets() -> dict[str, DeviceSheet]:
    """All sheets by file name. Raises SpecError for one that is wrong."""
    sheets = {p.stem: load_toml(p, DeviceSheet) for p in sorted(SHEETS.glob("*.toml"))}
    for name, sheet in sheets.items():
        if sheet.device.shares is not None and sheet.device.shares not in sheets:
            known = nearest(sheet.device.shares, sheets)
            raise SpecError(f"specs/devices/{name}.toml: device.shares: no sheet {sheet.device.shares!r}{known}")
    return sheets


def find_sheet(name: str) -> DeviceSheet:
    """A sheet by the name of its file. SpecError with the nearest name where there is none."""
    known = load_sheets()
    if name not in known:
        raise SpecError(f"no device sheet is called {name!r}{nearest(name, known)}")
    return known[name]


def sheet_for(device_name: str) -> DeviceSheet | None:
    """The sheet whose pattern occurs in a device's name, such as `vulkan:0 (NVIDIA H200)`; None: not known."""
    sheets = (s for s in load_sheets().values() if s.device.kind != "apu")
    return next((s for s in sheets if re.search(s.device.match, device_name)), None)
