"""Watts of the GPU, where the kernel says them: amdgpu's sensor (hwmon), which any user may read. Other drivers keep theirs
behind tools of their own; then there is no figure rather than a guess."""

from __future__ import annotations

from pathlib import Path

SENSORS = Path("/sys/class/hwmon")


def watts(sensors: Path = SENSORS) -> float | None:
    """The sum over amdgpu's sensors, of which a machine with one GPU has one; None where there is none."""
    found = [w for folder in _folders(sensors) if (w := _read(folder)) is not None]
    return sum(found) if found else None


def _folders(sensors: Path) -> list[Path]:
    try:
        return [f for f in sorted(sensors.iterdir()) if (f / "name").read_text().strip() == "amdgpu"]
    except OSError:
        return []


def _read(folder: Path) -> float | None:
    """power1_average of older chips, power1_input of newer ones; microwatts."""
    for name in ("power1_average", "power1_input"):
        try:
            return int((folder / name).read_text()) / 1e6
        except (OSError, ValueError):  # not of this chip, or asleep
            continue
    return None
