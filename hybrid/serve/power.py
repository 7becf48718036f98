"""Energy of the whole device since the server started, if the machine can measure it (hybrid/devices/energy.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hybrid.devices.energy import Meter

SAMPLE = 0.5
"""Seconds between two readings of a power sensor."""


class Joules:
    """A meter's counter, or its power integrated over time. While a sensor is unreadable (a sleeping GPU) it adds
    nothing."""

    def __init__(self, meter: Meter, clock: Callable[[], float] = time.monotonic) -> None:
        self.source, self._clock, self._counter = meter.source, clock, meter.counter
        self._power = meter.power if meter.counter is None else None
        self._first = self._counter() if self._counter is not None else 0.0
        self._sum, self._last = 0.0, (clock(), self._watts())

    def read(self) -> float | None:
        """Joules up to now, or up to the last reading; None if the meter is unreadable."""
        if self._counter is None:
            return self._sum if self._power is not None else None
        try:
            return self._counter() - self._first
        except OSError:
            return None

    def look(self) -> None:
        """Read the sensor and add the trapezoid since the last reading."""
        (before, watts), now, fresh = self._last, self._clock(), self._watts()
        if watts is not None and fresh is not None:
            self._sum += (watts + fresh) / 2 * (now - before)
        self._last = now, fresh

    async def watch(self) -> None:
        """Read the sensor every SAMPLE seconds, forever; returns at once without a power sensor."""
        while self._power is not None:
            await asyncio.sleep(SAMPLE)
            await asyncio.to_thread(self.look)

    def _watts(self) -> float | None:
        try:
            return self._power() if self._power is not None else None
        except OSError:
            return None
