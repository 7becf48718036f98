"""A Vulkan device with interpreted kernels: memory, copies and plans are a driver's (any: llvmpipe), dispatches run in
NumPy, as on a GPU with subgroups of 32 and matrix units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from hybrid.core.tensor import Packed, unpacked
from hybrid.harness.interpreter.machine import run
from hybrid.harness.interpreter.module import Module, read
from hybrid.harness.interpreter.races import Log, Touched
from hybrid.harness.interpreter.values import Fault
from hybrid.harness.interpreter.watch import Watch
from hybrid.kernels.vulkan.device import VulkanDevice
from hybrid.kernels.vulkan.features import F16_MATRIX, F16_N8, Feature, Report
from hybrid.kernels.vulkan.kernel import KernelCache
from hybrid.kernels.vulkan.memory import Buffer, Memory, Slice
from hybrid.kernels.vulkan.program import Program
from hybrid.kernels.vulkan.recorder import GRID_WORDS, Dispatch
from hybrid.kernels.vulkan.spirv import ModuleInfo
from hybrid.kernels.vulkan.timeline import Queue

NAME = "interpreted"
KEPT = 4
SHARED, INVOCATIONS, CORES, BUFFERS = 48 << 10, 1024, 132, 1 << 20  # as an H100 reports


def as_gpu(report: Report) -> Report:
    """A driver's device properties, with every optional feature and the limits of the imitated GPU."""

    def all_of(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
        return tuple(replace(f, present=f.present or f.name in GIVEN) for f in features)

    limits = replace(
        report.limits,
        shared_bytes=SHARED,
        workgroup=(INVOCATIONS, INVOCATIONS, 64),
        invocations=INVOCATIONS,
        subgroup=32,
        min_subgroup=32,
        max_subgroup=32,
        workgroup_subgroups=32,
        cores=CORES,
        storage_buffers=BUFFERS,
    )
    return replace(
        report,
        features=all_of(report.features),
        extensions=all_of(report.extensions),
        limits=limits,
        vendor="nvidia",
        driver_id="nvidia",
        matrices=(F16_MATRIX, F16_N8),
    )


GIVEN = {
    "cooperativeMatrix",
    "VK_KHR_cooperative_matrix",
    "vulkanMemoryModel",
    "vulkanMemoryModelDeviceScope",
    "shaderFloat16",
    "shaderInt8",
    "shaderInt16",
    "storageBuffer16BitAccess",
    "uniformAndStorageBuffer16BitAccess",
    "storageBuffer8BitAccess",
    "uniformAndStorageBuffer8BitAccess",
    "shaderIntegerDotProduct",
    "subgroup basic",
    "subgroup vote",
    "subgroup arithmetic",
    "subgroup ballot",
    "subgroup shuffle",
}


class InterpretedQueue(Queue):
    """A driver's queue that reports the properties of the imitated device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.report = as_gpu(self.report)
        self.info = replace(self.info, name=f"{NAME} on {self.info.name}", kind="discrete")
        self.subgroup_size, self.max_threads = 32, INVOCATIONS
        self.timestamp_bits = 0  # the interpreter has no timestamps: profiling is refused


class MappedMemory(Memory):
    """Memory that is always mapped for NumPy, also where a GPU's would not be."""

    def _type(self, pool: str) -> int:
        return super()._type("read")


class InterpretedKernels(KernelCache):
    """Modules read by the interpreter, not by the driver."""

    def _open_cache(self) -> Any:
        return None

    def _module(self, name: str, code: bytes) -> bytes:
        return code

    def _layout(self, bindings: int, push: int) -> None:
        self.set_layouts[bindings] = None

    def _pipeline(self, name: str, module: Any, ids: Mapping[int, int], info: ModuleInfo, layout: Any) -> Module:
        return read(module, ids)

    def _start(self, build: Any) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(build())
        return made

    def save(self) -> None:
        self.unsaved = False

    def close(self) -> None:
        self.kernels, self._made, self.set_layouts = {}, {}, {}


class InterpretedProgram(Program):
    """A program whose dispatches run on submit. Fault where two of them race."""

    logs: Sequence[Log] = ()
    """Access logs of the latest runs."""

    def _descriptor_sets(self) -> list[Any]:
        return []

    def _record(self) -> None:
        self.device.counters.recordings += 1

    def submit(self, times: int = 1) -> int:
        device = self.device
        device.wait()
        for _ in range(times):
            log = [self._run(d) for d in self.recording.dispatches]
            if device.watch is None:  # type: ignore[attr-defined]
                self.logs = [*self.logs[1 - KEPT :], Log(log)]
                for race in self.logs[-1].races([b is not None for b in self.recording.barriers]):
                    raise Fault(self.logs[-1].describe(race))
        counters = device.counters
        counters.submits += 1
        counters.dispatches += times * self.dispatches
        counters.barriers += times * self.barriers
        return self.ticket

    def _run(self, d: Dispatch) -> Touched:
        """Run one dispatch; returns the words that it touched."""
        device, grid = self.device, list(d.grid)
        bound = [self._place_of(s) for s in d.slices]
        touched = Touched(d.kernel.name, [(id(buffer), offset, size) for buffer, offset, size in bound])
        if d.entry is not None:
            at = self._grids.offset + 4 * GRID_WORDS * d.entry
            grid = self._view(self._grids.buffer, at, 4 * GRID_WORDS).view(np.uint32)[:3].tolist()
            touched.reads_grid((id(self._grids.buffer), at, 4 * GRID_WORDS))
        data = [self._view(*place) for place in bound]
        watch, limit = device.watch, device.limit  # type: ignore[attr-defined]
        run(d.kernel.pipeline, d.kernel.name, data, d.push, grid, watch, limit, touched)
        return touched

    def _view(self, buffer: Buffer, offset: int, size: int) -> np.ndarray:
        assert buffer.view is not None  # MappedMemory
        return buffer.view[offset : offset + size]

    def _place_of(self, piece: Slice) -> tuple[Buffer, int, int]:
        """Buffer, offset and bytes that are bound for a slice."""
        base = self._places.get(id(piece.buffer))
        buffer, offset = (piece.buffer, piece.offset) if base is None else (base.buffer, base.offset + piece.offset)
        return buffer, offset, self._real(piece)[2]


class InterpretedDevice(VulkanDevice):
    """VulkanDevice with its kernels run by NumPy."""

    interpreted = True
    watch: Watch | None = None
    """Counts instructions and accesses of programs from now on."""
    limit: int | None = None
    """Workgroups of a dispatch to run, for counting; None: all, as results need."""
    queue_type, memory_type = InterpretedQueue, MappedMemory
    kernels_type, program_type = InterpretedKernels, InterpretedProgram

    def _load_rows(self, name: str, piece: Packed, row: int) -> None:
        """Repack on the host: repack kernels are recorded separately."""
        self._put_rows(name, unpacked(piece), row, fresh=True)
