"""Device sheets: what a device's makers or our own runs say it can do at most, each figure with its source."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, field_validator

from hybrid.spec.load import ROOT, Model, load_toml

SHEETS = ROOT / "specs" / "devices"


class Figure(Model):
    """A number and where it comes from."""

    value: float = Field(gt=0)
    provenance: Literal["measured", "published", "modelled"]
    source: Annotated[str, Field(min_length=1)]


class DeviceHead(Model):
    name: str
    kind: Literal["discrete", "integrated", "cpu", "npu"]
    match: str
    """Regular expression, searched in the device's name as it reports it."""
    summary: str = ""

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
    int8_tops: Figure | None = None


class Limits(Model):
    """What planning must respect; the driver's own answers win when the device is there."""

    subgroup: int | None = None
    max_storage_range: int | None = None
    shared_bytes: int | None = None


class DeviceSheet(Model):
    """One file of specs/devices."""

    schema_version: Literal[1] = Field(alias="schema")
    device: DeviceHead
    peak: Peak
    limits: Limits = Limits()


@lru_cache(maxsize=1)
def load_sheets() -> dict[str, DeviceSheet]:
    """All sheets by file name. Raises SpecError for one that is wrong."""
    return {p.stem: load_toml(p, DeviceSheet) for p in sorted(SHEETS.glob("*.toml"))}


def sheet_for(device_name: str) -> DeviceSheet | None:
    """The sheet whose pattern occurs in a device's name, such as `vulkan:0 (NVIDIA H200)`; None: not known."""
    return next((s for s in load_sheets().values() if re.search(s.device.match, device_name)), None)
