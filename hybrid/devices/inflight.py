"""Progress of one pass whose segments run on several devices: completed segments, their devices and tickets.

`step` advances the pass with at most one wait for a secondary device. It completes the segment running there, submits
the following segments on the main device, and starts the next secondary segment. Stepping all passes in flight in turn
keeps both devices busy: one pass's segment runs on the NPU while another pass's runs on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybrid.core.device import Program, StepTime
from hybrid.core.errors import DeviceLost
from hybrid.planning.pipeline import needs, results, written

if TYPE_CHECKING:  # avoids an import cycle: multi.py imports this module
    from hybrid.devices.multi import PassProgram


@dataclass(frozen=True, slots=True)
class Event:
    """A segment submitted to the main device, or completed on a secondary one with its results copied back."""

    device: str
    ticket: int
    """The device's ticket."""


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """A segment's run, for step times. Its program keeps the times until the next pass of its pipeline slot."""

    program: Program
    device: str
    submitted: float
    """time.perf_counter() at the submit."""


class InFlight:
    """A pass of `program`. number: its ticket of the multi-device. earlier: the earlier passes in flight, oldest
    first."""

    def __init__(self, program: PassProgram, number: int, earlier: Sequence[InFlight]) -> None:
        self.program, self.device, self.number = program, program.device, number
        self.events: list[Event] = []
        """Events of the completed segments, in order."""
        self.runs: list[SegmentRun] = []
        self.ticket = 0
        """The main device's ticket of the last segment submitted to it."""
        self.begin = time.perf_counter()
        self._elsewhere: Event | None = None  # segment len(events), while it runs on a secondary device
        self._needs = [(e, needs(e.program.segments, program.segments)) for e in earlier]

    @property
    def complete(self) -> bool:
        """Whether every segment has been submitted to the main device or completed elsewhere."""
        return len(self.events) == len(self.program.segments)

    def step(self) -> None:
        """Complete the segment running on a secondary device, then submit segments up to and including the next
        secondary one."""
        self._complete_elsewhere()
        while not self.complete:
            where = self.program.where(len(self.events))
            self._wait_for_earlier(where)
            if where != self.device.backend:
                self._start_elsewhere(where)
                return
            self._submit()
        self._needs.clear()  # drops references to earlier passes

    def reach(self, segment: int) -> Event:
        """Step until a segment is complete; returns its event."""
        while len(self.events) <= segment:
            self.step()
        return self.events[segment]

    def abandon(self) -> None:
        """Wait until no secondary device runs a segment of this pass. Errors are ignored: they follow from the failure
        that caused the abandonment."""
        if self._elsewhere is not None and (other := self.device.others.get(self._elsewhere.device)) is not None:
            with suppress(Exception):
                other.wait(self._elsewhere.ticket)
        self._elsewhere = None

    def times(self) -> tuple[StepTime, ...]:
        """Step times of every segment, in seconds from `begin`. Without a comparable device clock, a segment starts at
        its submit or after the device's previous segment."""
        found: list[StepTime] = []
        for run in self.runs:
            began = run.program.began()
            if began is None:
                before = (t.start + t.duration for t in found if t.device == run.device)
                began = max(run.submitted, self.begin + max(before, default=0.0))
            suffix = f" on {run.device}" if run.device else ""
            at = began - self.begin
            found += [
                replace(t, name=t.name + suffix, start=at + t.start, device=run.device) for t in run.program.times()
            ]
        return tuple(found)

    def _wait_for_earlier(self, where: str) -> None:
        """Complete the segments of earlier passes that the next segment depends on. The main device runs submits in
        order; a secondary device must wait until the main device has finished them."""
        for earlier, wanted in self._needs:
            for segment in wanted[len(self.events)]:
                event = earlier.reach(segment)
                if event.device != where and event.device == self.device.backend:
                    self.device.main.wait(event.ticket)

    def _submit(self) -> None:
        segment, program = len(self.events), self.program.segment_program(len(self.events))
        submitted = time.perf_counter()
        self.ticket = program.submit()
        for name in written(self.program.segments[segment].steps):
            self.device.transfers.mark_written(name)
        self.runs.append(SegmentRun(program, "", submitted))
        self.events.append(Event(self.device.backend, self.ticket))

    def _start_elsewhere(self, where: str) -> None:
        """Start the next segment on a secondary device after the main device has finished the previous segments."""
        device, segment = self.device, len(self.events)
        steps, control = self.program.segments[segment].steps, self.program.plan.control
        if self.ticket:
            device.main.wait(self.ticket)
        try:
            program = self.program.segment_program(segment)
            device.transfers.send(where, steps, set(written(steps)), control, self.program.plan.tensors)
            self._elsewhere = Event(where, program.submit())
            self.runs.append(SegmentRun(program, device.others[where].name, time.perf_counter()))
        except DeviceLost:  # of the main device
            raise
        except Exception as error:  # any error of the secondary device's driver, files or sources
            device.fail_over(where, error)
            self.step()

    def _complete_elsewhere(self) -> None:
        """Wait for the segment on the secondary device and fetch its results. If it failed, or another pass has failed
        over its device, run it on the fallback; its inputs are unchanged."""
        event, self._elsewhere = self._elsewhere, None
        if event is None:
            return
        steps, tensors = self.program.segments[len(self.events)].steps, self.program.plan.tensors
        made = results(steps)
        try:
            if event.device not in self.device.others:
                self.runs.pop()
                return
            self.device.others[event.device].wait(event.ticket)
            self.device.transfers.fetch(event.device, made, {n: tensors[n].shape[0] for n in made}, event.ticket)
        except DeviceLost:
            raise
        except Exception as error:
            self.runs.pop()
            self.device.fail_over(event.device, error)
            return
        self.events.append(event)
