"""Roofs for the reported shares: this run's probes if fast enough, else the device sheet's peaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybrid.bench.measure import Row
from hybrid.bench.probe import Probes
from hybrid.spec.devicesheet import DeviceSheet

TRUSTED = 0.93  # of the sheet's reached rate: a slower copy probe is not used as a roof


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Rates that shares refer to (None: unknown), and their sources."""

    gb_s: float
    of_bytes: str
    tflops: float | None
    of_flops: str

    def share_of_bytes(self, row: Row) -> float:
        return row.gb_per_second / self.gb_s

    def share_of_flops(self, row: Row) -> float | None:
        return row.tflops / self.tflops if self.tflops else None


def ceiling(probes: Probes, sheet: DeviceSheet | None) -> Ceiling:
    """The probes' rates; the sheet's if the copy probe is slower than TRUSTED or a probe is missing."""
    gb_s, of_bytes = probes.copy_gb_s, "the copy probe of this run"
    reached = sheet.reached.bandwidth_gb_s if sheet else None
    peak = sheet.peak.bandwidth_gb_s if sheet else None
    if reached and peak and probes.copy_gb_s < TRUSTED * reached.value:
        gb_s = peak.value
        of_bytes = (
            f"the sheet's peak, since the copy probe reached only {probes.copy_gb_s:.0f} of {reached.value:g} GB/s"
        )
    tflops, of_flops = probes.matrix_tflops, "the matrix probe of this run"
    if tflops is None and sheet and sheet.peak.f16_tflops:
        tflops, of_flops = sheet.peak.f16_tflops.value, "the sheet's peak, no matrix probe"
    return Ceiling(gb_s, of_bytes, tflops, of_flops if tflops else "nothing: no ceiling is known")


def impossible(rows: Iterable[Row], probes: Probes, sheet: DeviceSheet | None) -> list[str]:
    """A line for each rate above the device's peak, which indicates a measurement error."""
    if sheet is None:
        return []
    peak = sheet.peak
    most = max((f.value for f in (peak.f32_tflops, peak.f16_tflops, peak.int8_tops) if f), default=None)
    figures = [("copy probe", probes.copy_gb_s, probes.matrix_tflops)]
    figures += [(row.name, row.gb_per_second, row.tflops) for row in rows]
    found = []
    for name, gb_s, tflops in figures:
        if peak.bandwidth_gb_s and gb_s > peak.bandwidth_gb_s.value:
            found.append(f"{name}: {gb_s:.0f} GB/s is above the {peak.bandwidth_gb_s.value:g} of {sheet.device.name}")
        if most and tflops and tflops > most:
            found.append(f"{name}: {tflops:.0f} TFLOPS is above the {most:g} of {sheet.device.name}")
    return found
