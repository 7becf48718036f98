"""The device `npu`: a plan whose operations run as designs on an XDNA NPU, or, when asked for, on sim-npu1.

XDNA shares the host's memory, so tensors are the NumPy device's; what differs is who computes. Operands that stay (weights)
are kept a second time in the order in which the designs read them: memory() shows it as `tiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kernels.npu.artefact import ArtefactError, find
from kernels.npu.build import build_npu, build_sim, default_folder, tools
from kernels.npu.design import Design
from kernels.npu.ops import OPS
from kernels.npu.xrt import Host, Job, open_host
from kernels.oracle.device import CpuDevice


class NpuDevice(CpuDevice):
    """hybrid.spec.device.Device. kind: `npu`, or `sim` for the simulator. folder: built designs (default: the cache folder).

    Raises NpuUnavailable where there is no NPU or no XRT. Steps of operations without a design are refused by compile()."""

    backend = "npu"

    def __init__(
        self, kind: str = "npu", *, folder: Path | None = None, guard: int = 0, ops: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(memory_budget=0, guard=guard, ops=ops)
        self.host: Host = open_host(kind, folder or default_folder(kind == "sim"))
        self.name = self.host.name
        self.functions = {name: partial(function, self) for name, function in OPS.items()}
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

    def memory(self) -> dict[str, int]:
        return {**super().memory(), "tiled": sum(a.nbytes for a in self._tiled.values())}

    def close(self) -> None:
        super().close()
        self.host.close()
