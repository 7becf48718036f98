"""Energy measurement by NVML, amdgpu's hwmon or RAPL.

    NVIDIA GPU      NVML's energy counter (package nvidia-ml-py), or its power, sampled
    AMD GPU         power1_average or power1_input of amdgpu's hwmon, sampled
    CPU             RAPL's package counters, often readable by root only

Readings are of the whole board, other processes included, without the power supply. Counters update every 20 to 100
ms, so energies of runs shorter than SHORTEST are not reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORTEST = 0.5  # seconds
SAMPLE = 0.05  # seconds between two power readings


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of `seconds` of runs. source: the counter; if joules is None, the reason why there is none."""

    joules: float | None
    seconds: float
    source: str

    @property
    def watts(self) -> float | None:
        return None if self.joules is None else self.joules / self.seconds

    def per(self, tokens: int) -> float | None:
        """Joules per token."""
        return None if self.joules is None else self.joules / tokens

    def line(self, tokens: int) -> str:
        if self.joules is None:
            return f"energy: not available: {self.source}"
        return f"energy: {self.per(tokens):.4g} J per token, {self.watts:.1f} W ({self.source}; {self.seconds:.1f} s)"


class Meter:
    """Accumulates the energy of blocks `with meter.running():`. counter: reads joules; power: reads watts. Give one of
    them, or neither and the reason as `source`."""

    def __init__(
        self, source: str, counter: Callable[[], float] | None = None, power: Callable[[], float] | None = None
    ) -> None:
        self.source, self.counter, self.power = source, counter, power
        self._joules = self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin, before = time.perf_counter(), self.counter() if self.counter else 0.0
        with self._sampled() if self.power and not self.counter else _nothing():
            yield
        if self.counter:
            self._joules += self.counter() - before
        self._seconds += time.perf_counter() - begin

    def take(self) -> Energy:
        """Return the accumulated energy and reset."""
        found, self._joules, self._seconds = (self._joules, self._seconds), 0.0, 0.0
        if self.counter is None and self.power is None:
            return Energy(None, found[1], self.source)
        if found[1] < SHORTEST:
            return Energy(
                None, found[1], f"runs of {found[1]:.2f} s are too short for {self.source}: ask for more tokens"
            )
        return Energy(found[0], found[1], self.source)

    @contextmanager
    def _sampled(self) -> Iterator[None]:
        """Integrate power over time: sampled by a thread, and at both ends."""
        power, done, failed = self.power, threading.Event(), list[OSError]()
        assert power is not None
        last, watts = time.perf_counter(), power()

        def look() -> None:
            nonlocal last, watts
            try:
                now, fresh = time.perf_counter(), power()
            except OSError as error:  # raised at the end of the block
                failed.append(error)
                return
            self._joules += (watts + fresh) / 2 * (now - last)
            last, watts = now, fresh

        def sample() -> None:
            while not done.wait(SAMPLE) and not failed:
                look()

        thread = threading.Thread(target=sample, name="energy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        look()
        if failed:
            raise RuntimeError(f"{self.source} cannot be read any more: {failed[0]}")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def meter_for(device: Any, sys: Path = Path("/sys")) -> Meter:
    """The meter for an open device (its main device). If nothing can be read, its `source` gives the reason."""
    info = getattr(device, "info", None)
    if device.backend == "cpu" or info is None or info.kind == "cpu":
        return _rapl(sys / "class/powercap")
    name = info.name
    if "NVIDIA" in name.upper():
        return _nvml(name)
    if "AMD" in name.upper() or "RADEON" in name.upper():
        return _hwmon(sys / "class/hwmon")
    return Meter(f"no counter is known for {name}")


def _nvml(name: str) -> Meter:
    try:
        import pynvml
    except ImportError:
        return Meter("NVML is read by nvidia-ml-py: pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [h for h in handles if _text(pynvml.nvmlDeviceGetName(h)) in name] or handles
        if len(found) != 1:
            return Meter(f"NVML sees {len(found)} such GPUs, and not which of them this is: run where one is visible")
        handle = found[0]
        try:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError:
            pynvml.nvmlDeviceGetPowerUsage(handle)
            return Meter(
                "NVML's power, sampled", power=lambda: _thousandth(pynvml, pynvml.nvmlDeviceGetPowerUsage, handle)
            )
        counter = pynvml.nvmlDeviceGetTotalEnergyConsumption
        return Meter("NVML's energy counter", counter=lambda: _thousandth(pynvml, counter, handle))
    except pynvml.NVMLError as error:
        return Meter(f"NVML: {error}")


def _thousandth(pynvml: Any, ask: Callable[[Any], int], handle: Any) -> float:
    """Read milliwatts or millijoules as watts or joules. OSError if NVML fails, like the other sources."""
    try:
        return ask(handle) / 1e3
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _hwmon(folder: Path) -> Meter:
    chips = [p.parent for p in sorted(folder.glob("*/name")) if p.read_text().strip() == "amdgpu"]
    files = [f for c in chips for f in (c / "power1_average", c / "power1_input") if f.exists()]
    if len({f.parent for f in files}) > 1:
        return Meter(f"amdgpu has {len(chips)} sensors, and not which of them this GPU's is")
    if not files:
        return Meter(f"amdgpu has no power1_average or power1_input in {folder}")
    return _readable(files[:1], lambda: Meter("amdgpu's power, sampled", power=lambda: int(files[0].read_text()) / 1e6))


def _rapl(folder: Path) -> Meter:
    """The sum over CPU packages, with counter wrap-around at max_energy_range_uj."""
    packages = [p for p in sorted(folder.glob("*-rapl:*")) if p.name.count(":") == 1 and (p / "energy_uj").exists()]
    if not packages:
        return Meter(f"no RAPL counters in {folder}")

    def made() -> Meter:
        ranges = [int((p / "max_energy_range_uj").read_text()) for p in packages]
        last, turned = [int((p / "energy_uj").read_text()) for p in packages], [0] * len(packages)

        def joules() -> float:
            for i, package in enumerate(packages):
                now = int((package / "energy_uj").read_text())
                turned[i] += ranges[i] if now < last[i] else 0
                last[i] = now
            return (sum(last) + sum(turned)) / 1e6

        return Meter("RAPL, whole processors", counter=joules)

    return _readable([p / "energy_uj" for p in packages], made)


def _readable(files: Sequence[Path], made: Callable[[], Meter]) -> Meter:
    try:
        for file in files:
            int(file.read_text())
    except OSError as error:
        return Meter(f"{error.filename}: {error.strerror}")
    return made()
