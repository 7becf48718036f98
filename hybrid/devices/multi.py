"""Run one plan on several devices. Segments run in order, with transfers before each read of another device's results.

The main device stores every tensor. A secondary device has the tensors of its steps, in shared memory or as copies
(transfers.py). Prefill passes may overlap: each has a pipeline slot with its own rows and activations
(planning/pipeline.py), and advances when the host waits (inflight.py). Slots are internal. A failed secondary device is
replaced by the schedule's fallback for the rest of the run; reports give the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from typing import Any

from hybrid.core.device import Counters, Device, Program, StepTime
from hybrid.core.errors import DeviceLost
from hybrid.core.plan import Plan, TensorDecl
from hybrid.core.tensor import Source, Tensor
from hybrid.devices.inflight import InFlight
from hybrid.devices.transfers import Transfers
from hybrid.planning.pipeline import for_pipeline_slot, name_in_slot
from hybrid.planning.segments import segments


class MultiDevice:
    """hybrid.core.device.Device over a main device and secondary devices by backend name.

    fallback: backend of a secondary device -> the one that takes over after a failure; always the main one so far.
    depth: most overlapping prefill passes."""

    def __init__(self, main: Device, others: Mapping[str, Device], fallback: Mapping[Any, str], depth: int = 1) -> None:
        self.main, self.others = main, dict(others)
        self.fallback, self.depth = dict(fallback), depth
        self.name = " + ".join([main.name, *(d.name for d in others.values())])
        self.backend, self.drives = main.backend, frozenset({main.backend, *others, *fallback})
        self.transfers = Transfers(main, self.others)
        self.failures: list[str] = []
        self.in_flight: list[InFlight] = []
        """Incomplete passes, oldest first."""
        self._tickets = 0
        self._arena = 0  # bytes of a pipeline slot's activations
        self._next = 0  # pipeline slot of the next prefill pass
        self._slots: dict[int, int] = {}  # ticket of a recent pass -> its pipeline slot
        self._own: set[str] = set()  # per-pass tensors
        self._main_tickets: dict[int, int] = {}  # of complete passes: this device's ticket -> the main device's

    @property
    def counters(self) -> Counters:
        """The sum over all devices."""
        all_of = [self.main.counters, *(d.counters for d in self.others.values())]
        return Counters(**{f.name: sum(getattr(c, f.name) for c in all_of) for f in fields(Counters)})

    @property
    def copies(self) -> str:
        return str(self.transfers.counts)

    @property
    def threads(self) -> str:
        return self.main.threads

    @property
    def available(self) -> int | None:
        return self.main.available

    @property
    def exact(self) -> bool:
        return self.main.exact

    @property
    def unified(self) -> bool:
        return self.main.unified

    def host_room(self, memory: int) -> int:
        return self.main.host_room(memory)

    def few_rows(self, hidden: int, experts: int) -> int:
        return self.main.few_rows(hidden, experts)

    def second_layout(self, dtype: str, shape: tuple[int, ...]) -> int:
        return self.main.second_layout(dtype, shape)

    def has(self, feature: str) -> bool:
        return self.main.has(feature)

    # --- tensors: the main device's

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        for slot in range(self.depth if decl.per_pass else 1):
            self.transfers.store(replace(decl, name=name_in_slot(decl.name, slot)), value, parts)
        if decl.per_pass:
            self._own.add(decl.name)

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        self.main.adopt(decl, value, fds)

    def loading(self, nbytes: int, plans: Iterable[Plan] = ()) -> AbstractContextManager[None]:
        """See Device. Of a plan of several devices each prepares its share when that is compiled."""
        return self.main.loading(nbytes)

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        self.main.write(name, value, row)
        self.transfers.mark_written(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, ticket: int | None = None) -> Tensor:
        if name in self._own:
            name = name_in_slot(name, self._slots.get(self._tickets if ticket is None else ticket, 0))
        return self.main.read(name, start, stop, self._main_ticket(ticket))

    def peek(self, name: str, row: int, column: int, ticket: int | None = None) -> int:
        return self.main.peek(name, row, column, self._main_ticket(ticket))

    def reserve(self, arena_bytes: int, plans: Iterable[Plan] = ()) -> None:
        """Reserve on the main device. Secondary devices allocate activations when their segments are compiled, and all
        allocate kernel scratch then; but they report missing resources for `plans` now."""
        plans, self._arena = tuple(plans), arena_bytes
        self.main.reserve(self.depth * arena_bytes)
        for name, device in tuple(self.others.items()):
            try:
                device.reserve(0, plans)
            except Exception as error:
                self.fail_over(name, error)

    def check_open(self) -> None:
        self.main.check_open()

    def wait(self, ticket: int | None = None) -> None:
        self.main.wait(self._main_ticket(ticket))
        if ticket is None:  # all are complete
            self._main_tickets.clear()

    def memory(self) -> Mapping[str, int]:
        """See Device.memory. Secondary devices' bytes are named such as `npu.state` and exclude shared memory."""
        held = dict(self.main.memory())
        for name, device in self.others.items():
            own = {**device.memory()}
            own["state"] -= self.transfers.shared_with(name)
            held |= {f"{name}.{k}": v for k, v in own.items() if v}
        return held

    def shares(self, name: str) -> bool:
        return self.main.shares(name)

    def sibling(self, lent: Mapping[str, str] | None = None) -> Device:
        return self.main.sibling(lent)

    def close(self) -> None:
        self.in_flight.clear()
        for device in self.others.values():
            device.close()
        self.main.close()

    # --- plans

    @property
    def passes_ahead(self) -> int:
        return max(1, self.depth)

    @property
    def overlaps(self) -> bool:
        return self.depth > 1

    def compile(self, plan: Plan, profile: bool = False, cooperative: bool = True) -> Program:
        return MultiProgram(self, plan, profile, cooperative)

    def next_slot(self) -> int:
        """The least recently used pipeline slot."""
        self._next = (self._next + 1) % self.depth
        return self._next

    def launch(self, program: PassProgram) -> int:
        """Start a pass; returns its ticket. A pass in a pipeline slot may overlap passes in other slots and advances
        when the host waits. A pass without a slot runs alone and is complete on return."""
        slot = program.slot
        self._complete(lambda f: slot is None or f.program.slot == slot)
        self._tickets += 1
        self._slots[self._tickets] = slot or 0
        self._slots.pop(self._tickets - 8 * self.depth, None)
        started = program.last = InFlight(program, self._tickets, tuple(self.in_flight))
        self.in_flight.append(started)
        if slot is None:
            self._complete(lambda f: f is started)
        else:
            self._step(started)
        return self._tickets

    def fail_over(self, where: str, error: Exception) -> None:
        """Close a failed device and run its steps on its fallback from now on. Drops other passes' queued work on it
        and waits for running work, so that it writes nothing later. Adds one line with the cause to `failures`. Without
        a fallback, raises a RuntimeError (`error` itself if it is one)."""
        if where not in self.fallback:
            if isinstance(error, RuntimeError):
                raise error
            raise RuntimeError(f"{where}: {cause(error)}") from error
        if where in self.others:
            self.failures.append(f"{where}: {cause(error)}")
            with suppress(Exception):  # the cause is reported; a lost device may fail to close
                self.others.pop(where).close()

    def _main_ticket(self, ticket: int | None) -> int | None:
        """The main device's ticket for one of this device's, once its pass (None: every pass) is complete."""
        if ticket is not None and ticket > self._tickets:
            raise ValueError(f"no such ticket: {ticket}; the last submit was {self._tickets}")
        self._complete(lambda f: ticket is None or f.number == ticket)
        return None if ticket is None else self._main_tickets.get(ticket, 0)  # 0: before everything submitted

    def _complete(self, wanted: Callable[[InFlight], bool]) -> None:
        """Step all passes in flight, the oldest first, until those wanted are complete."""
        while any(wanted(f) for f in self.in_flight):
            for one in self._order():
                self._step(one)
                if not any(wanted(f) for f in self.in_flight):
                    break

    def _order(self) -> Sequence[InFlight]:
        return tuple(self.in_flight)

    def _step(self, one: InFlight) -> None:
        try:
            one.step()
        except BaseException:
            for other in self.in_flight:
                other.abandon()
            self.in_flight.clear()
            raise
        self._main_tickets |= {f.number: f.ticket for f in self.in_flight if f.complete}
        self.in_flight = [f for f in self.in_flight if not f.complete]


def cause(error: Exception) -> str:
    """One line for a report, with the error's type if the text is unclear without it."""
    text = " ".join(str(error).split())
    told = isinstance(error, (RuntimeError, ValueError)) and text
    return text if told else f"{type(error).__name__}: {text}"


class MultiProgram:
    """A plan compiled for every pipeline slot; a plan that never overlaps (decode) is compiled once."""

    def __init__(self, device: MultiDevice, plan: Plan, profile: bool, cooperative: bool) -> None:
        self.device, self.plan, self.profile = device, plan, profile
        if device.depth == 1 or plan.phase == "decode":
            self.passes = [PassProgram(device, plan, None, profile, cooperative)]
        else:
            plans = [for_pipeline_slot(plan, slot, device._arena) for slot in range(device.depth)]
            self.passes = [PassProgram(device, p, slot, profile, cooperative) for slot, p in enumerate(plans)]
        self._last: dict[int, InFlight] = {}  # by ticket

    def submit(self, times: int = 1) -> int:
        ticket = 0
        for _ in range(times):
            one = self.passes[0 if len(self.passes) == 1 else self.device.next_slot()]
            ticket = self.device.launch(one)
            if self.profile and one.last is not None:
                self._last = {t: p for t, p in self._last.items() if t > ticket - 2 * self.device.depth}
                self._last[ticket] = one.last
        return ticket

    def times(self, ticket: int | None = None) -> Sequence[StepTime]:
        one = self._finished(ticket)
        return () if one is None else one.times()

    def began(self, ticket: int | None = None) -> float | None:
        one = self._finished(ticket)
        return None if one is None else one.begin

    def _finished(self, ticket: int | None) -> InFlight | None:
        return self._last.get(max(self._last, default=0) if ticket is None else ticket)


class PassProgram:
    """A plan cut into segments, each compiled by its device, or by the fallback when needed. slot: its pipeline slot;
    None: it runs alone."""

    def __init__(self, device: MultiDevice, plan: Plan, slot: int | None, profile: bool, cooperative: bool) -> None:
        self.device, self.plan, self.profile, self.cooperative = device, plan, profile, cooperative
        self.slot, self.segments = slot, segments(plan)
        self.last: InFlight | None = None
        """Its last pass."""
        self._programs: dict[tuple[int, str], Program] = {}
        for i in range(len(self.segments)):
            where = self.where(i)
            try:
                self.segment_program(i)
            except DeviceLost:
                raise
            except Exception as error:
                if where == device.backend:
                    raise
                device.fail_over(where, error)  # before the first pass: missing files, too little memory
                self.segment_program(i)

    def where(self, i: int) -> str:
        """The backend that runs a segment now: its own or the fallback."""
        name, device = self.segments[i].device, self.device
        return name if name in device.others else device.backend

    def segment_program(self, i: int) -> Program:
        """A segment's program on the device that runs it now."""
        where, device = self.where(i), self.device
        if (i, where) not in self._programs:
            steps = tuple(replace(s, device=where) for s in self.segments[i].steps)
            used = {self.plan.control, *(n for s in steps for n in (*s.args.values(), s.counts) if n)}
            tensors = {n: self.plan.tensors[n] for n in used}
            arena = max((d.offset + d.nbytes for d in tensors.values() if d.kind == "activation"), default=0)
            segment = replace(self.plan, name=f"{self.plan.name}.{i}", steps=steps, tensors=tensors, arena_bytes=arena)
            if where != device.backend:
                device.transfers.hold(where, sorted(used))
            owner = device.main if where == device.backend else device.others[where]
            self._programs[i, where] = owner.compile(segment, self.profile, self.cooperative)
        return self._programs[i, where]
