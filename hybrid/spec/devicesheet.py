"""Device sheets: specified or measured performance limits of devices, each figure with its source."""

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
    """A number and its source."""

    value: float = Field(gt=0)
    provenance: Literal["measured", "published", "modelled"]
    source: Annotated[str, Field(min_length=1)]


class DeviceHead(Model):
    name: str
    kind: Literal["discrete", "integrated", "cpu", "npu", "apu"]
    """apu: resources that several devices of one chip share."""
    match: str
    """Regular expression, searched in the driver's device name."""
    summary: str = ""
    shares: str | None = None
    """The sheet of the memory that this device shares with other devices."""

    @field_validator("match")
    @classmethod
    def _validate_match(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as e:
            raise ValueError(f"{value!r} is not a regular expression: {e}") from None
        return value


class Peak(Model):
    """Peak rates; a measured rate above the peak is a measurement error."""

    bandwidth_gb_s: Figure | None = None
    """Memory bandwidth in 1e9 bytes per second."""
    f32_tflops: Figure | None = None
    f16_tflops: Figure | None = None
    """Rate of f16 matrix instructions; None without them."""
    int8_tops: Figure | None = None
    """Rate of int8 matrix instructions; None without them."""
    dot4_tops: Figure | None = None
    """Rate of packed 4x8 dot products in vector instructions."""


class Reached(Peak):
    """Rates that well-optimised programs have reached; missing figures default to the peak."""


class Costs(Model):
    """Fixed overheads in microseconds."""

    submit_us: Figure | None = None
    """An empty submit and its wait."""
    dependent_dispatch_us: Figure | None = None
    """A small dispatch that depends on the previous one."""
    independent_dispatch_us: Figure | None = None
    drain_us: Figure | None = None
    """Drain and ramp between two dependent dispatches that each fill the device."""


class Limits(Model):
    """Limits for planning; a present device's driver takes precedence."""

    subgroup: int | None = None
    max_storage_range: int | None = None
    shared_bytes: int | None = None
    memory_bytes: int | None = None
    """Device memory available to models."""
    capabilities: tuple[Capability, ...] = ()
    """Driver features that affect planning."""


class DeviceSheet(Model):
    """One file of specs/devices."""

    schema_version: Literal[1] = Field(alias="schema")
    device: DeviceHead
    peak: Peak
    reached: Reached = Reached()
    costs: Costs = Costs()
    limits: Limits = Limits()
    npu: Npu | None = None
    """Tiles, descriptors and rates of an NPU."""


@lru_cache(maxsize=1)
def load_sheets() -> dict[str, DeviceSheet]:
    """All sheets by file name. Raises SpecError for an invalid one."""
    sheets = {p.stem: load_toml(p, DeviceSheet) for p in sorted(SHEETS.glob("*.toml"))}
    for name, sheet in sheets.items():
        if sheet.device.shares is not None and sheet.device.shares not in sheets:
            known = nearest(sheet.device.shares, sheets)
            raise SpecError(f"specs/devices/{name}.toml: device.shares: no sheet {sheet.device.shares!r}{known}")
    return sheets


def find_sheet(name: str) -> DeviceSheet:
    """A sheet by the name of its file. SpecError with the nearest name if there is none."""
    known = load_sheets()
    if name not in known:
        raise SpecError(f"no device sheet is called {name!r}{nearest(name, known)}")
    return known[name]


def sheet_for(device_name: str) -> DeviceSheet | None:
    """The sheet that matches a device's name, such as `vulkan:0 (NVIDIA H200)`; None: unknown."""
    sheets = (s for s in load_sheets().values() if s.device.kind != "apu")
    return next((s for s in sheets if re.search(s.device.match, device_name)), None)
