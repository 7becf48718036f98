"""One pass of a plan whose segments run on several devices: which segments are complete, on which device, and by which
ticket.

`step` goes as far as the pass can without waiting for another device twice: it completes the segment that runs there,
submits what follows on the main device and starts the next segment elsewhere. Stepping the passes in flight one after
another therefore keeps both devices busy: while a segment of one pass runs on the NPU, a segment of another runs on the
GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybrid.core.device import Program, StepTime
from hybrid.core.errors import DeviceLost
from hybrid.planning.pipeline import needs, written

if TYPE_CHECKING:  # multi.py makes InFlight, which keeps a reference to the program and device that made it
    from hybrid.devices.multi import PassProgram


@dataclass(frozen=True, slots=True)
class Event:
    """A segment submitted to the main device, or complete on another one with its results delivered."""

    device: str
    ticket: int
    """Of that device."""


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """A segment's program as it ran, for times: the program keeps them until the next pass of its pipeline slot."""

    program: Program
    device: str
    submitted: float
    """time.perf_counter() then."""


class InFlight:
    """A pass of `program`. number: its ticket of the multi-device. earlier: the passes in flight before it, oldest
    first."""

    def __init__(self, program: PassProgram, number: int, earlier: Sequence[InFlight]) -> None:
        self.program, self.device, self.number = program, program.device, number
        self.events: list[Event] = []
        """Of the segments complete so far, in order."""
        self.runs: list[SegmentRun] = []
        self.ticket = 0
        """The main device's, of the last segment that was submitted to it."""
        self.begin = time.perf_counter()
        self._elsewhere: Event | None = None  # the segment len(events), while another device runs it
        self._needs = [(e, needs(e.program.segments, program.segments)) for e in earlier]

    @property
    def complete(self) -> bool:
        """Whether every segment has been submitted to the main device or completed elsewhere."""
        return len(self.events) == len(self.program.segments)

    def step(self) -> None:
        """Complete the segment that another device runs, then submit segments up to and including the next one
        elsewhere."""
        self._complete_elsewhere()
        while not self.complete:
            where = self.program.where(len(self.events))
            self._wait_for_earlier(where)
            if where != self.device.backend:
                self._start_elsewhere(where)
                return
            self._submit()
        self._needs.clear()  # and with it the references to earlier passes

    def reach(self, segment: int) -> Event:
        """The event of a segment, after as many steps as it needs."""
        while len(self.events) <= segment:
            self.step()
        return self.events[segment]

    def abandon(self) -> None:
        """Wait until nothing of this pass runs on another device. Its errors follow from the failure that led here:
        dropped."""
        if self._elsewhere is not None and (other := self.device.others.get(self._elsewhere.device)) is not None:
            with suppress(Exception):
                other.wait(self._elsewhere.ticket)
        self._elsewhere = None

    def times(self) -> tuple[StepTime, ...]:
        """Steps of every segment, in seconds from `begin`. A segment whose device keeps no comparable clock is placed
        at the time of its submit, or after what that device did before."""
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
        """Reach the segments of earlier passes that the next segment depends on. The main device keeps the order of its
        submits; another device needs them to have finished there."""
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
        """Start the next segment on another device, once the main one has finished what comes before it."""
        device, segment = self.device, len(self.events)
        steps, control = self.program.segments[segment].steps, self.program.plan.control
        if self.ticket:
            device.main.wait(self.ticket)
        try:
            program = self.program.segment_program(segment)
            device.transfers.send(where, steps, set(written(steps)), control)
            self._elsewhere = Event(where, program.submit())
            self.runs.append(SegmentRun(program, device.others[where].name, time.perf_counter()))
        except DeviceLost:  # the main one's
            raise
        except Exception as error:  # whatever the other device's driver, files or sources raise
            device.fail_over(where, error)
            self.step()

    def _complete_elsewhere(self) -> None:
        """Wait for the segment on another device and fetch its results. One that failed, or whose device another pass
        has failed over, runs again on the fallback: what it reads is unchanged."""
        event, self._elsewhere = self._elsewhere, None
        if event is None:
            return
        steps, tensors = self.program.segments[len(self.events)].steps, self.program.plan.tensors
        results = written(steps)
        try:
            if event.device not in self.device.others:
                self.runs.pop()
                return
            self.device.others[event.device].wait(event.ticket)
            self.device.transfers.fetch(event.device, results, {n: tensors[n].shape[0] for n in results}, event.ticket)
        except DeviceLost:
            raise
        except Exception as error:
            self.runs.pop()
            self.device.fail_over(event.device, error)
            return
        self.events.append(event)
