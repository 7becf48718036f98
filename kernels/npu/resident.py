"""Resident operands in buffer objects: weights in the designs' order, a sequence's keys and values.

A buffer has a host copy and a device copy that only sync joins. A writer to `bytes` reports the range with
`changed`; a run syncs only these ranges.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Resident:
    """One buffer object of `nbytes` bytes. `bytes`: its host copy, uint8."""

    def __init__(self, buffer: Any, nbytes: int) -> None:
        self.buffer = buffer
        self.bytes = np.frombuffer(buffer.map(), np.uint8)[:nbytes]
        self.written = 0
        """Bytes that the host has written, by `changed`."""
        self._changed: list[tuple[int, int]] = []

    def changed(self, start: int, stop: int, written: int | None = None) -> None:
        """Bytes start..stop of the host copy are to reach the device before the next run. written: how many of them the
        host wrote (default: all)."""
        self._changed.append((start, stop))
        self.written += stop - start if written is None else written

    def flush(self, to_device: Any) -> int:
        """Bring what changed to the device; returns bytes."""
        synced, end = 0, 0
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self._changed):
            if merged and start <= end:
                merged[-1] = (merged[-1][0], max(end, stop))
            else:
                merged.append((start, stop))
            end = merged[-1][1]
        for start, stop in merged:
            self.buffer.sync(to_device, stop - start, start)
            synced += stop - start
        self._changed.clear()
        return synced


class Pages:
    """A buffer in this process's memory, for what runs designs without XRT: tests, and perf.npu's host term."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes, np.uint8)

    def map(self) -> memoryview:
        return self._bytes.data

    def sync(self, direction: Any, size: int | None = None, offset: int = 0) -> None:
        """Nothing to join: there is one copy."""


def in_pages(nbytes: int) -> Resident:
    return Resident(Pages(nbytes), nbytes)
