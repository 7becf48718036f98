"""One plan on several devices: segments run in order, and what one device writes reaches the other before it reads.

The main device holds everything; another one holds what its steps use, in the same memory or as a copy (carrier.py). Passes
in different lanes overlap (flight.py, lanes.py): they advance in turn whenever the host waits for one of them. A device that
fails is replaced as the schedule says, for the rest of the run, and the reason is kept for the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

from hybrid.core.device import Counters, Device, Program, StepTime
from hybrid.core.plan import Plan, TensorDecl
from hybrid.core.tensor import Source, Tensor
from hybrid.devices.inflight import Flight
from hybrid.devices.transfers import Carrier
from hybrid.planning.planner import segments


class PlacedDevice:
    """hybrid.core.device.Device over a main device and others by the name that steps use. lanes: passes that may overlap."""

    def __init__(
        self, main: Device, backend: str, others: Mapping[str, Device], fallback: Mapping[Any, str], lanes: int = 1
    ) -> None:
        self.main, self.backend_of_main, self.others = main, backend, dict(others)
        self.fallback, self.lanes = dict(fallback), lanes
        self.name = " + ".join([main.name, *(d.name for d in others.values())])
        self.drives = frozenset({backend, *others, *fallback})
        self.carrier = Carrier(main, self.others)
        self.copies = self.carrier.carried
        self.failures: list[str] = []
        """Why a device's steps run elsewhere by now."""
        self.flights: list[Flight] = []
        """Passes that are not submitted whole yet, oldest first."""
        self._tickets = 0
        self._last: dict[int, int] = {}  # the main device's ticket of a pass that is submitted whole, by this one's

    def __getattr__(self, name: str) -> Any:
        """What only some devices have (check_validation, ...) is the main one's."""
        return getattr(self.main, name)

    @property
    def counters(self) -> Counters:
        all_of = [self.main.counters, *(d.counters for d in self.others.values())]
        return Counters(**{f.name: sum(getattr(c, f.name) for c in all_of) for f in fields(Counters)})

    # --- tensors: the main device's

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        self.carrier.store(decl, value, parts)

    def loading(self, nbytes: int) -> AbstractContextManager[None]:
        return self.main.loading(nbytes)

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        self.main.write(name, value, row)
        self.carrier.wrote(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, ticket: int | None = None) -> Tensor:
        return self.main.read(name, start, stop, self._landed(ticket))

    def peek(self, name: str, row: int, column: int, ticket: int | None = None) -> int:
        return self.main.peek(name, row, column, self._landed(ticket))

    def reserve(self, arena_bytes: int, plans: Iterable[Plan] = ()) -> None:
        """Of the main device; others make room for what their segments keep to themselves when these are compiled, and all of
        them then for what their kernels take beside it."""
        self.main.reserve(arena_bytes)

    def check_open(self) -> None:
        self.main.check_open()

    def wait(self, ticket: int | None = None) -> None:
        self.main.wait(self._landed(ticket))
        if ticket is None:  # all are done
            self._last.clear()

    def memory(self) -> Mapping[str, int]:
        held = dict(self.main.memory())
        for name, device in self.others.items():
            own = {**device.memory()}
            own["state"] -= self.carrier.shared_with(name)
            held |= {f"{name}.{k}": v for k, v in own.items() if v}
        return held

    def close(self) -> None:
        self.flights.clear()
        for device in self.others.values():
            device.close()
        self.main.close()

    # --- plans

    def compile(self, plan: Plan, profile: bool = False, cooperative: bool = True) -> Program:
        return PlacedProgram(self, plan, profile, cooperative)

    def launch(self, program: PlacedProgram) -> int:
        """Begin a pass; returns its ticket. One that has a lane goes on while others do, as waits demand; one without runs
        alone and is submitted whole."""
        lane = program.plan.lane
        self._land(lambda f: lane is None or f.program.plan.lane == lane)
        self._tickets += 1
        flight = program.flight = Flight(program, self._tickets, tuple(self.flights))
        self.flights.append(flight)
        if lane is None:
            self._land(lambda f: f is flight)
        else:
            self._turn(flight)
        return self._tickets

    def give_up(self, where: str, error: RuntimeError) -> None:
        """Do without a device from now on; raises `error` where the schedule names nobody in its place. Work of other
        passes that it has not begun is dropped, what it is doing ends first: nothing is written behind their backs."""
        if where not in self.fallback:
            raise error
        if where in self.others:
            self.failures.append(f"{where}: {error}")
            self.others.pop(where).close()

    def _landed(self, ticket: int | None) -> int | None:
        """The main device's ticket for one of this device's, once its pass (None: every pass) is submitted whole."""
        if ticket is not None and ticket > self._tickets:
            raise ValueError(f"no such ticket: {ticket}; the last submit was {self._tickets}")
        self._land(lambda f: ticket is None or f.number == ticket)
        return None if ticket is None else self._last.get(ticket, 0)  # 0: before everything submitted

    def _land(self, wanted: Callable[[Flight], bool]) -> None:
        """Let passes take turns, the oldest first, until those wanted are submitted whole; the others stay where they are."""
        while any(wanted(f) for f in self.flights):
            for flight in self._order():
                self._turn(flight)
                if not any(wanted(f) for f in self.flights):
                    break

    def _order(self) -> Sequence[Flight]:
        return tuple(self.flights)

    def _turn(self, flight: Flight) -> None:
        try:
            flight.turn()
        except BaseException:
            for one in self.flights:
                one.abandon()
            self.flights.clear()
            raise
        self._last |= {f.number: f.ticket for f in self.flights if f.done}
        self.flights = [f for f in self.flights if not f.done]


class PlacedProgram:
    """A plan cut where the device changes; each segment compiled by its device, the fallback's when it is needed."""

    def __init__(self, device: PlacedDevice, plan: Plan, profile: bool, cooperative: bool) -> None:
        self.device, self.plan, self.profile, self.cooperative = device, plan, profile, cooperative
        self.segments = segments(plan)
        self.flight: Flight | None = None
        """Its last pass."""
        self._programs: dict[tuple[int, str], Program] = {}
        for i in range(len(self.segments)):
            self.part(i)

    def submit(self, times: int = 1) -> int:
        ticket = 0
        for _ in range(times):
            ticket = self.device.launch(self)
        return ticket

    def times(self) -> Sequence[StepTime]:
        return self.flight.times() if self.profile and self.flight is not None else ()

    def began(self) -> float | None:
        return self.flight.begin if self.profile and self.flight is not None else None

    def where(self, i: int) -> str:
        """The device of a segment now: its own, or what takes its place."""
        name, device = self.segments[i].device, self.device
        return name if name in device.others else device.backend_of_main

    def part(self, i: int) -> Program:
        """A segment's program on the device that it runs on now."""
        where, device = self.where(i), self.device
        if (i, where) not in self._programs:
            steps = tuple(replace(s, device=where) for s in self.segments[i].steps)
            used = {self.plan.control, *(n for s in steps for n in s.args.values())}
            tensors = {n: self.plan.tensors[n] for n in used}
            arena = max((d.offset + d.nbytes for d in tensors.values() if d.kind == "activation"), default=0)
            part = replace(self.plan, name=f"{self.plan.name}.{i}", steps=steps, tensors=tensors, arena_bytes=arena)
            if where != device.backend_of_main:
                device.carrier.hold(where, sorted(used))
            owner = device.main if where == device.backend_of_main else device.others[where]
            self._programs[i, where] = owner.compile(part, self.profile, self.cooperative)
        return self._programs[i, where]
