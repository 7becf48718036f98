"""One plan on several devices: segments run in order, and what one device writes reaches the other before it reads.

The main device holds everything; another one holds what its steps use, in the same memory or as a copy (carrier.py). A device
that fails is replaced as the schedule says, for the rest of the run, and the reason is kept for the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, Literal, cast

from hybrid.carrier import Carrier
from hybrid.devices import Opened
from hybrid.planner import Segment, segments
from hybrid.spec import load_ops
from hybrid.spec.device import Counters, Device, Program, StepTime
from hybrid.spec.plan import Plan, Step, TensorDecl
from hybrid.spec.schedule import Schedule
from hybrid.spec.tensor import Source, Tensor


def with_others(opened: Opened, schedule: Schedule, npu: Literal["npu", "sim"]) -> Opened:
    """The opened device, joined by the NPU where the schedule places steps on it. Where there is none, the schedule's
    fallback takes its steps over and the reason is listed; without a fallback RuntimeError."""
    steps = (*schedule.before, *schedule.layer, *schedule.after)
    if not any(s.device == "npu" for s in steps):
        return opened
    from kernels.npu.device import NpuDevice
    from kernels.npu.xrt import NpuUnavailable

    main, backend = opened.device, opened.device.name.partition(":")[0]
    try:
        return Opened(cast(Device, PlacedDevice(main, backend, {"npu": NpuDevice(npu)}, schedule.fallback)), opened.passed_over)
    except NpuUnavailable as error:
        if "npu" not in schedule.fallback:
            main.close()
            raise RuntimeError(f"schedule {schedule.schedule.name}: {error}") from None
        placed = PlacedDevice(main, backend, {}, schedule.fallback)
        return Opened(cast(Device, placed), (*opened.passed_over, f"npu: {error}"))


class PlacedDevice:
    """hybrid.spec.device.Device over a main device and others by the name that steps use."""

    def __init__(self, main: Device, backend: str, others: Mapping[str, Device], fallback: Mapping[Any, str]) -> None:
        self.main, self.backend_of_main, self.others = main, backend, dict(others)
        self.fallback = dict(fallback)
        self.name = " + ".join([main.name, *(d.name for d in others.values())])
        self.drives = frozenset({backend, *others, *fallback})
        self.carrier = Carrier(main, self.others)
        self.copies = self.carrier.carried
        self.failures: list[str] = []
        """Why a device's steps run elsewhere by now."""
        self._tickets = 0
        self._last: dict[int, int] = {}

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
        return self.main.read(name, start, stop, self._last.get(ticket) if ticket is not None else None)

    def peek(self, name: str, row: int, column: int, ticket: int | None = None) -> int:
        return self.main.peek(name, row, column, self._last.get(ticket) if ticket is not None else None)

    def reserve(self, arena_bytes: int) -> None:
        self.main.reserve(arena_bytes)
        for device in self.others.values():
            device.reserve(arena_bytes)

    def wait(self, ticket: int | None = None) -> None:
        self.main.wait(self._last.get(ticket) if ticket is not None else None)

    def memory(self) -> Mapping[str, int]:
        held = dict(self.main.memory())
        for name, device in self.others.items():
            own = {**device.memory()}
            own["state"] -= self.carrier.shared_with(name)
            held |= {f"{name}.{k}": v for k, v in own.items() if v}
        return held

    def close(self) -> None:
        for device in self.others.values():
            device.close()
        self.main.close()

    # --- plans

    def compile(self, plan: Plan, profile: bool = False) -> Program:
        return PlacedProgram(self, plan, profile)

    def submitted(self, ticket: int) -> int:
        """A ticket of this device for one of the main device's."""
        self._tickets += 1
        self._last[self._tickets] = ticket
        return self._tickets


class PlacedProgram:
    """A plan cut where the device changes; each segment compiled by its device, the fallback's when it is needed."""

    def __init__(self, device: PlacedDevice, plan: Plan, profile: bool) -> None:
        self.device, self.plan, self.profile = device, plan, profile
        self.segments = segments(plan)
        self._programs: dict[tuple[int, str], Program] = {}
        self._times: list[StepTime] = []
        for i in range(len(self.segments)):
            self._program(i)

    def submit(self, times: int = 1) -> int:
        ticket = 0
        for _ in range(times):
            self._times = []
            for i in range(len(self.segments)):
                ticket = self._segment(i, ticket)
        return self.device.submitted(ticket)

    def times(self) -> Sequence[StepTime]:
        return tuple(self._times)

    def _where(self, i: int) -> str:
        """The device of a segment now: its own, or what takes its place."""
        name = self.segments[i].device
        return name if name == self.device.backend_of_main or name in self.device.others else self.device.backend_of_main

    def _program(self, i: int) -> Program:
        where = self._where(i)
        if (i, where) not in self._programs:
            steps = tuple(replace(s, device=where) for s in self.segments[i].steps)
            used = {"control", *(n for s in steps for n in s.args.values())}
            part = replace(self.plan, name=f"{self.plan.name}.{i}", steps=steps, tensors={n: self.plan.tensors[n] for n in used})
            if where != self.device.backend_of_main:
                self.device.carrier.hold(where, sorted(used))
            owner = self.device.main if where == self.device.backend_of_main else self.device.others[where]
            self._programs[i, where] = owner.compile(part, profile=self.profile)
        return self._programs[i, where]

    def _segment(self, i: int, ticket: int) -> int:
        device, segment, where = self.device, self.segments[i], self._where(i)
        if where == device.backend_of_main:
            ticket = self._program(i).submit()
            for name in written(segment):
                device.carrier.wrote(name)
            if self.profile:
                device.main.wait(ticket)
                self._note(self._program(i), "")
            return ticket
        try:
            results = written(segment)
            device.carrier.carry(where, segment.steps, set(results))
            device.others[where].wait(self._program(i).submit())
            device.carrier.bring(where, results, {n: self.plan.tensors[n].shape[0] for n in results})
            self._note(self._program(i), f" on {device.others[where].name}")
        except RuntimeError as error:
            if where not in device.fallback:
                raise
            device.failures.append(f"{where}: {error}")
            device.others.pop(where).close()
            return self._segment(i, ticket)
        return ticket

    def _note(self, program: Program, suffix: str) -> None:
        """Times of a segment, after those before it."""
        end = max((t.start + t.duration for t in self._times), default=0.0)
        self._times += [StepTime(t.name + suffix, t.op, t.layer, end + t.start, t.duration) for t in program.times()]


def written(segment: Segment) -> list[str]:
    """Tensors that a segment's steps write: results, scratch and state; `control` where an operation sets words of it."""
    ops = load_ops()

    def of(step: Step) -> list[str]:
        spec = ops[step.op]
        made = [step.args[n] for n in (*spec.outputs, *spec.scratch, *spec.state)]
        return made + (["control"] if spec.op.writes_control else [])

    return list(dict.fromkeys(n for s in segment.steps for n in of(s)))
