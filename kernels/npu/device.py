"""The device `npu`: a plan whose operations run as designs on an XDNA NPU, or, when asked for, on sim-npu1.

XDNA shares the host's memory, so tensors are the NumPy device's; only the computing unit differs. Resident operands,
weights and the keys and values of sequences, have a second copy in buffer objects, in the designs' layout: memory()
shows it as `tiled`. A plan whose operands do not fit the budget, or whose designs are not
built, is refused by compile() and reserve(): nothing is built while text is generated. A submitted plan runs in a
separate thread (lay out operands, start and await runs, assemble results), so that the host continues meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as settle
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hybrid.core.device import Program, StepTime
from hybrid.core.hostmemory import Exported, over
from hybrid.core.plan import Plan, TensorDecl
from hybrid.core.tensor import Source, Tensor
from hybrid.kernels.host.device import HostDevice
from hybrid.kernels.host.memory import usable_bytes
from hybrid.kernels.npu.artefact import ArtefactError, find
from hybrid.kernels.npu.build import build_npu, build_sim, default_folder, tools
from hybrid.kernels.npu.design import Design
from hybrid.kernels.npu.needed import designs, resident_bytes
from hybrid.kernels.npu.ops import OPS
from hybrid.kernels.npu.resident import Resident
from hybrid.kernels.npu.views import KeyViews
from hybrid.kernels.npu.xrt import Host, Job, open_host

Made = TypeVar("Made", Resident, np.ndarray)


class NoRoom(RuntimeError):
    """A plan's operands do not fit the budget for buffer objects."""


class NpuDevice(HostDevice):
    """hybrid.core.device.Device. kind: `npu`, or `sim` for the simulator. folder: built designs (default: the cache
    folder). budget: bytes of buffer objects for operands that stay (default: half of the memory that is free when it is
    opened). builds: compile() builds missing designs with the toolchain, which takes minutes each (npu_capture).

    Raises NpuUnavailable where there is no NPU or no XRT. Steps of operations without a design are refused by
    compile()."""

    backend = "npu"

    def __init__(
        self,
        kind: str = "npu",
        *,
        folder: Path | None = None,
        guard: int = 0,
        ops: Mapping[str, Any] | None = None,
        budget: int | None = None,
        builds: bool = False,
    ) -> None:
        self.host: Host = open_host(kind, folder or default_folder(kind == "sim"))
        functions = {name: partial(function, self) for name, function in OPS.items()}
        super().__init__(self.host.name, functions, memory_budget=0, guard=guard, ops=ops)
        self.builds = builds or self.host.simulated
        self.budget = usable_bytes() // 2 if budget is None else budget
        self.views = KeyViews(self.room)
        self._worker = ThreadPoolExecutor(1, self.name)
        self._tickets = 0
        self._begun: dict[int, Future[Any]] = {}
        """Passes and writes given to the worker and not yet waited for, by ticket."""
        self._tiled: dict[Any, tuple[np.ndarray, Resident]] = {}
        self._noted: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self._kept_for = self.generation
        self._prepared: set[Any] = set()
        self._planned: dict[Any, int] = {}
        """Bytes of the operands that stay, of every plan prepared so far, by what they are made of."""

    # --- designs and operands, before the first pass

    def reserve(self, arena_bytes: int, plans: Iterable[Plan] = ()) -> None:
        """See Device.reserve; and what compile() would refuse later is refused now."""
        self._rest()
        super().reserve(arena_bytes)
        for plan in plans:
            self.prepare(plan)

    def prepare(self, plan: Plan, own: bool = False) -> None:
        """own: the plan's steps are all this device's, else those placed on it.

        Every design that the plan's steps may run is built, the simulator's on the way, and every operand that stays
        fits the budget. ArtefactError names how many designs are missing and what builds them, NoRoom the bytes."""
        self._planned |= resident_bytes(plan, own)
        held = sum(self._planned.values())
        if held > self.budget:
            raise NoRoom(
                f"{self.name}: weights and caches in the NPU's order take {held / 2**30:.2f} GiB of buffer objects, the budget is "
                f"{self.budget / 2**30:.2f} GiB: place fewer steps there, or shorten the context"
            )
        missing = []
        for design in designs(plan, self._prepared, own):
            try:
                find(self.host.folder, design)
            except ArtefactError as error:
                if not self.builds:
                    missing.append((design.name, error))
                elif self.host.simulated:
                    build_sim(design, self.host.folder)
                else:
                    self._build(design)
        if missing:
            names = ", ".join(sorted({name for name, _ in missing}))
            raise ArtefactError(
                f"{len(missing)} designs of plan {plan.name} are not built ({names}): {missing[0][1]}; python -m kernels.npu.build "
                "--list MODEL names what a model needs, and --for MODEL builds it"
            )

    def _build(self, design: Design) -> None:
        toolchain, lacks = tools()
        if toolchain is None:
            raise ArtefactError(f"{design.name} is not built, and the toolchain is not whole: {'; '.join(lacks)}")
        try:
            build_npu(design, self.host.folder, toolchain)
        except RuntimeError as error:
            raise ArtefactError(f"{design.name} is not built: {error}") from error

    def run(self, jobs: Sequence[Job]) -> None:
        """Execute designs. NpuError for a run that fails, ArtefactError for a design that is not built."""
        self.host.run(jobs)
        self.counters.dispatches += len(jobs) - 1  # the step itself counts one

    def room(self, nbytes: int) -> Resident:
        held = sum(r.bytes.size for _, r in self._tiled.values()) + sum(v.room.bytes.size for v in self.views)
        if held + nbytes > self.budget:
            raise NoRoom(f"{self.name}: {held + nbytes} bytes of operands that stay, the budget is {self.budget}")
        return self.host.room(nbytes)

    def kept(self, source: np.ndarray, use: Any, make: Callable[[], np.ndarray], nbytes: int) -> Resident:
        """See ops.Npu: in a buffer object."""

        def made() -> Resident:
            room = self.room(nbytes)
            room.bytes[:] = make()
            room.changed(0, nbytes)
            return room

        return self._once(self._tiled, source, use, made)

    def noted(self, source: np.ndarray, use: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """See ops.Npu."""
        return self._once(self._noted, source, use, make)

    def _once(
        self, table: dict[Any, tuple[np.ndarray, Made]], source: np.ndarray, use: Any, make: Callable[[], Made]
    ) -> Made:
        """What was made of an array, by its address: the array is kept too, so that no other takes the address."""
        if self._kept_for != self.generation:
            self._forget_others()
        key = (source.ctypes.data, source.shape, use)
        if key not in table:
            table[key] = (source, make())
        return table[key][1]

    def _forget_others(self) -> None:
        """Drop what was made of arrays that are no tensor's any more: stored or written anew since."""
        known = {part.ctypes.data for name in self._tensors for part in self._parts(name)}
        for table in (self._tiled, self._noted):
            for key in [k for k in table if k[0] not in known]:
                del table[key]
        self.views.keep(known)
        self._kept_for = self.generation

    def _parts(self, name: str) -> Sequence[np.ndarray]:
        tensor = self._tensors[name]
        return tensor.parts if isinstance(tensor, Tensor) else ()

    def forget(self, name: str) -> None:
        """The main device has written a cache in a pass that no run here has seen: views of it begin anew. In the order
        of submits and writes."""
        self.enqueue(partial(self._forget_views, name))

    def _forget_views(self, name: str) -> None:
        for part in self._parts(name):
            for view in self.views.on(part.ctypes.data):
                view.forget()

    # --- the worker: passes, and writes between them, in the order in which they came

    def enqueue(self, work: Callable[[], Any]) -> int:
        """A ticket for work of the worker's."""
        self.check_open()
        self._tickets += 1
        self._begun[self._tickets] = self._worker.submit(work)
        return self._tickets

    def wait(self, ticket: int | None = None) -> None:
        """See Device.wait. Raises what a pass or write up to that ticket raised (NpuError, ...), once."""
        self.check_open()
        if ticket is not None and ticket > self._tickets:
            raise ValueError(f"no such ticket: {ticket}; the last submit was {self._tickets}")
        for one in [t for t in self._begun if ticket is None or t <= ticket]:
            self._begun.pop(one).result()

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        """See Device.write; while a pass runs, after those submitted so far."""

        written = super().write

        def work() -> None:
            written(name, value, row)
            for view in [v for part in self._parts(name) for v in self.views.on(part.ctypes.data)]:
                view.stale.update(range(row, row + value.shape[0]))

        self.enqueue(work)

    def compile(self, plan: Plan, profile: bool = False, cooperative: bool = True) -> Program:
        """See Device.compile, and prepare."""
        self._rest()
        self.prepare(plan, own=True)
        return NpuProgram(self, super().compile(plan, profile, cooperative))

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        self._rest()
        if decl.name in self._tensors:
            self._forget_views(decl.name)
        super().store(decl, value, parts)

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        self._rest()
        super().adopt(decl, value, fds)

    def export(self, decl: TensorDecl) -> Exported:
        """Memory for a tensor in XRT's buffers, to be imported by other drivers. NotShareable where the binding
        cannot."""
        self._rest()
        made: list[tuple[Any, int]] = []

        def room(nbytes: int) -> Any:
            made.append(self.host.export(nbytes))
            return made[-1][0].map()

        try:
            value = over(decl, room)
        except BaseException:
            for _, fd in made:
                os.close(fd)
            raise
        for part in value.parts:
            part.fill(0)
        return Exported(value, tuple(fd for _, fd in made), tuple(buffer for buffer, _ in made))

    def poison(self, byte: int, names: Sequence[str] = ()) -> None:
        super().poison(byte, names)
        for name in names:
            self._forget_views(name)

    def reset(self) -> None:
        self._rest()
        super().reset()
        self._tiled.clear()
        self._noted.clear()
        self._planned.clear()
        self.views.clear()

    def _rest(self) -> None:
        """Until the worker has nothing to do; what failed is left for those who wait for it."""
        settle(self._begun.values())

    def memory(self) -> dict[str, int]:
        self._rest()
        kept = [r for _, r in self._tiled.values()] + [v.room for v in self.views]
        return {**super().memory(), "tiled": sum(r.bytes.size for r in kept)}

    def close(self) -> None:
        """What runs ends, what has not begun never does."""
        self._worker.shutdown(cancel_futures=True)
        self._begun.clear()
        super().close()
        self.host.close()


class NpuProgram:
    """A compiled plan that the device's worker runs."""

    def __init__(self, device: NpuDevice, bound: Program) -> None:
        self.device, self.bound, self.plan = device, bound, bound.plan

    def submit(self, times: int = 1) -> int:
        return self.device.enqueue(partial(self.bound.submit, times))

    def times(self, ticket: int | None = None) -> Sequence[StepTime]:
        return self.bound.times()

    def began(self, ticket: int | None = None) -> float | None:
        return self.bound.began()
