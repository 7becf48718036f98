"""The device `npu`: a plan whose operations run as designs on an XDNA NPU, or, when asked for, on sim-npu1.

XDNA shares the host's memory, so tensors are the NumPy device's; what differs is who computes. Operands that stay (weights)
are kept a second time in the order in which the designs read them: memory() shows it as `tiled`. A submitted plan runs in a
thread of its own (operands dealt out, runs started and awaited, results put together), so that the host goes on meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as settle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.core.device import Program, StepTime
from hybrid.core.hostmemory import Exported, over
from hybrid.core.plan import Plan, TensorDecl
from hybrid.core.tensor import Source, Tensor
from hybrid.kernels.host.device import HostDevice
from hybrid.kernels.npu.artefact import ArtefactError, find
from hybrid.kernels.npu.build import build_npu, build_sim, default_folder, tools
from hybrid.kernels.npu.design import Design
from hybrid.kernels.npu.ops import OPS
from hybrid.kernels.npu.xrt import Host, Job, open_host


class NpuDevice(HostDevice):
    """hybrid.core.device.Device. kind: `npu`, or `sim` for the simulator. folder: built designs (default: the cache folder).

    Raises NpuUnavailable where there is no NPU or no XRT. Steps of operations without a design are refused by compile()."""

    backend = "npu"

    def __init__(
        self, kind: str = "npu", *, folder: Path | None = None, guard: int = 0, ops: Mapping[str, Any] | None = None
    ) -> None:
        self.host: Host = open_host(kind, folder or default_folder(kind == "sim"))
        functions = {name: partial(function, self) for name, function in OPS.items()}
        super().__init__(self.host.name, functions, memory_budget=0, guard=guard, ops=ops)
        self._worker = ThreadPoolExecutor(1, self.name)
        self._tickets = 0
        self._begun: dict[int, Future[Any]] = {}
        """What the worker was given and nobody has waited for, by ticket: passes and writes."""
        self._tiled: dict[Any, np.ndarray] = {}
        self._tiled_for = self.generation

    def run(self, jobs: Sequence[Job]) -> None:
        """Execute designs; what is not built yet is built on the way. NpuError for a run that fails, ArtefactError where
        the toolchain is missing."""
        for job in jobs:
            try:
                find(self.host.folder, job.design)
            except ArtefactError:
                self._build(job.design)
        self.host.run(jobs)
        self.counters.dispatches += len(jobs) - 1  # the step itself counts one

    def _build(self, design: Design) -> None:
        if self.host.simulated:
            build_sim(design, self.host.folder)
            return
        toolchain, missing = tools()
        if toolchain is None:
            lacks = "; ".join(missing)
            raise ArtefactError(f"{self.host.folder}: {design.name} is not built, and the toolchain is not whole: {lacks}")
        build_npu(design, self.host.folder, toolchain)

    def kept(self, key: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An operand in the NPU's order, made once while tensors stay where they are."""
        if self._tiled_for != self.generation:
            self._tiled.clear()
            self._tiled_for = self.generation
        if key not in self._tiled:
            self._tiled[key] = make()
        return self._tiled[key]

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
        self.enqueue(partial(super().write, name, value, row))

    def compile(self, plan: Plan, profile: bool = False, cooperative: bool = True) -> Program:
        self._rest()
        return NpuProgram(self, super().compile(plan, profile, cooperative))

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        self._rest()
        super().store(decl, value, parts)

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        self._rest()
        super().adopt(decl, value, fds)

    def export(self, decl: TensorDecl) -> Exported:
        """Room for a tensor in XRT's buffers, to be imported by other drivers. NotShareable where the binding cannot."""
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

    def reset(self) -> None:
        self._rest()
        super().reset()

    def _rest(self) -> None:
        """Until the worker has nothing to do; what failed is left for those who wait for it."""
        settle(self._begun.values())

    def memory(self) -> dict[str, int]:
        self._rest()
        return {**super().memory(), "tiled": sum(a.nbytes for a in self._tiled.values())}

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

    def times(self) -> Sequence[StepTime]:
        return self.bound.times()

    def began(self) -> float | None:
        return self.bound.began()
