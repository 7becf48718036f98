"""One pass of a placed plan on its way: which of its segments are done, on which device, and how that is known.

A turn goes as far as the pass can without waiting for another device's work: it takes the results of the segment that runs
there, submits what follows on the main device and begins the next segment elsewhere. Passes that take turns therefore keep
both devices busy: while one pass's segment runs on the NPU, another's runs on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybrid.core.device import Program, StepTime
from hybrid.planning.pipeline import needs, written

if TYPE_CHECKING:
    from hybrid.devices.multi import PlacedProgram


@dataclass(frozen=True, slots=True)
class Event:
    """A segment that has been submitted to the main device, or whose results another one has delivered."""

    device: str
    ticket: int
    """Of that device."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A segment's program as it ran, for times: it keeps them until the lane's next pass."""

    program: Program
    device: str
    submitted: float
    """time.perf_counter() then."""


class Flight:
    """A pass of `program`. number: its ticket of the placed device. earlier: the passes in flight before it, oldest first."""

    def __init__(self, program: PlacedProgram, number: int, earlier: Sequence[Flight]) -> None:
        self.program, self.device, self.number = program, program.device, number
        self.events: list[Event] = []
        """Of the segments done so far, in order."""
        self.ran: list[Ran] = []
        self.ticket = 0
        """The main device's, of the last segment that it got."""
        self.begin = time.perf_counter()
        self._elsewhere: Event | None = None  # what runs on another device now: the segment len(events)
        self._needs = [(e, needs(e.program.segments, program.segments)) for e in earlier]

    @property
    def done(self) -> bool:
        return len(self.events) == len(self.program.segments)

    def turn(self) -> None:
        """Take what another device was doing, then submit segments up to and including the next one elsewhere."""
        self._take()
        while not self.done:
            where = self.program.where(len(self.events))
            self._await(where)
            if where != self.device.backend_of_main:
                self._begin(where)
                return
            self._submit()
        self._needs.clear()  # and with it the passes before this one

    def reach(self, segment: int) -> Event:
        """The event of a segment, after as many turns as it needs."""
        while len(self.events) <= segment:
            self.turn()
        return self.events[segment]

    def abandon(self) -> None:
        """Nothing of this pass runs on another device any more. What fails behind a first failure is its consequence."""
        if self._elsewhere is not None and (other := self.device.others.get(self._elsewhere.device)) is not None:
            with suppress(RuntimeError):
                other.wait(self._elsewhere.ticket)
        self._elsewhere = None

    def times(self) -> tuple[StepTime, ...]:
        """Steps of every segment, in seconds from `begin`. A segment whose device keeps no comparable clock stands where it
        was submitted, or after what that device did before."""
        found: list[StepTime] = []
        for ran in self.ran:
            began = ran.program.began()
            if began is None:
                before = (t.start + t.duration for t in found if t.device == ran.device)
                began = max(ran.submitted, self.begin + max(before, default=0.0))
            suffix = f" on {ran.device}" if ran.device else ""
            at = began - self.begin
            found += [replace(t, name=t.name + suffix, start=at + t.start, device=ran.device) for t in ran.program.times()]
        return tuple(found)

    def _await(self, where: str) -> None:
        """What the next segment needs of earlier passes is done, as the device that it runs on sees it: the main device
        keeps the order of its submits, another one waits for them."""
        for earlier, wanted in self._needs:
            for segment in wanted[len(self.events)]:
                event = earlier.reach(segment)
                if event.device != where and event.device == self.device.backend_of_main:
                    self.device.main.wait(event.ticket)

    def _submit(self) -> None:
        segment, program = len(self.events), self.program.part(len(self.events))
        submitted = time.perf_counter()
        self.ticket = program.submit()
        for name in written(self.program.segments[segment].steps, self.program.plan.control):
            self.device.carrier.wrote(name)
        self.ran.append(Ran(program, "", submitted))
        self.events.append(Event(self.device.backend_of_main, self.ticket))

    def _begin(self, where: str) -> None:
        """Start the next segment on another device, once the main one has finished what comes before it."""
        device, segment = self.device, len(self.events)
        steps, control = self.program.segments[segment].steps, self.program.plan.control
        if self.ticket:
            device.main.wait(self.ticket)
        try:
            program = self.program.part(segment)
            device.carrier.carry(where, steps, set(written(steps, control)), control)
            self._elsewhere = Event(where, program.submit())
            self.ran.append(Ran(program, device.others[where].name, time.perf_counter()))
        except RuntimeError as error:
            device.give_up(where, error)
            self.turn()

    def _take(self) -> None:
        """Wait for the segment on another device and bring its results. One that failed, or whose device another pass gave
        up, is left for the next in line: what it read is still there."""
        event, self._elsewhere = self._elsewhere, None
        if event is None:
            return
        steps, tensors = self.program.segments[len(self.events)].steps, self.program.plan.tensors
        results = written(steps, self.program.plan.control)
        try:
            if event.device not in self.device.others:
                self.ran.pop()
                return
            self.device.others[event.device].wait(event.ticket)
            self.device.carrier.bring(event.device, results, {n: tensors[n].shape[0] for n in results}, event.ticket)
        except RuntimeError as error:
            self.ran.pop()
            self.device.give_up(event.device, error)
            return
        self.events.append(event)
