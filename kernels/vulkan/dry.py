"""Record a plan without a device: dispatches and barriers of each step, and its tuning-table queries.

Needs the manifest, no driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from hybrid.core.plan import Plan, TensorDecl
from hybrid.kernels.vulkan import columns, modules
from hybrid.kernels.vulkan.features import Report, choose_subgroup
from hybrid.kernels.vulkan.kernel import SPIRV, Kernel, most_polls
from hybrid.kernels.vulkan.memory import Buffer, Slice
from hybrid.kernels.vulkan.ops import BINDINGS
from hybrid.kernels.vulkan.recorder import Recorder, Recording
from hybrid.kernels.vulkan.spirv import written
from hybrid.kernels.vulkan.steps import record_steps
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor, chunk_rows, part_bytes
from hybrid.kernels.vulkan.tuning import DEFAULT, Asked, Tuning, device_class, traits


@lru_cache(maxsize=1)
def manifest() -> dict[str, Any]:
    """The SPIR-V manifest, by kernel name."""
    return json.loads((SPIRV / "manifest.json").read_text())


@cache
def _written(name: str, constants: tuple[tuple[int, int], ...]) -> frozenset[int]:
    return written(modules.read(SPIRV, name), dict(constants))


class DryDevice:
    """Stand-in for the device that bindings query, from the manifest and given limits."""

    def __init__(
        self,
        subgroup_size: int = 32,
        max_range: int = 2**32 - 1,
        features: Callable[[str], bool] = lambda feature: False,
        tuning: str = DEFAULT,
        cores: int = 1,
        shared_bytes: int = 32768,
        storage_buffers: int = 32,
    ) -> None:
        self.subgroup_size, self.max_range, self.max_threads = subgroup_size, max_range, 1024
        self.has = features  # optional ones only choose between kernels
        self.max_groups = (2**31 - 1, 65535, 65535)
        self.cores, self.shared_bytes, self.storage_buffers = cores, shared_bytes, storage_buffers
        self.tuning = Tuning(tuning, cores)
        self.polls = most_polls("discrete")
        self._manifest = manifest()

    @classmethod
    def like(cls, report: Report) -> DryDevice:
        """A DryDevice that plans and chooses kernels as the reported device does."""
        size, limits = choose_subgroup(report), report.limits
        most = min(limits.max_storage_range, limits.max_buffer, limits.max_allocation)
        return cls(
            size,
            most,
            cache(report.has),
            device_class(traits(report, size)),
            limits.cores,
            limits.shared_bytes,
            limits.storage_buffers,
        )

    def kernel(self, name: str, **constants: int) -> Kernel:
        entry = self._manifest[name]
        ids = {entry["constants"][k]: int(v) & 0xFFFFFFFF for k, v in constants.items()}
        return Kernel(
            name,
            entry["bindings"],
            entry["push"],
            (0, 0, 0),
            writes=frozenset(entry["writes"]),
            writes_now=lambda: _written(name, tuple(ids.items())),
        )

    def second_layout(self, dtype: str, shape: tuple[int, ...]) -> int:
        return columns.second_layout(self.tuning, dtype, shape)

    def by_columns(self, w: DeviceTensor) -> DeviceTensor:
        """As VulkanDevice.by_columns, with placeholder memory."""
        return _tensor(TensorDecl(w.name + columns.SUFFIX, w.dtype, w.shape, "weight"), self.max_range)


@dataclass(frozen=True, slots=True)
class Count:
    """Counts by step name. The grid kernel counts towards the step after it."""

    dispatches: dict[str, int]
    barriers: dict[str, int]


def count(plan: Plan, device: DryDevice | None = None) -> Count:
    """Record a plan and count, by default for a device with subgroups of 32 and no optional features."""
    recording = record(plan, device or DryDevice())
    counts = Count(dict.fromkeys((s.name for s in plan.steps), 0), dict.fromkeys((s.name for s in plan.steps), 0))
    for dispatch, barrier in zip(recording.dispatches, recording.barriers, strict=True):
        counts.dispatches[plan.steps[dispatch.step].name] += 1
        counts.barriers[plan.steps[dispatch.step].name] += barrier is not None
    return counts


def scratch_bytes(plan: Plan, device: DryDevice) -> int:
    """Scratch bytes of the plan's kernels besides its arena: partial results, dequantised weights."""
    return _recorder(plan, device).scratch_bytes


def asked(plan: Plan, device: Any) -> list[Asked]:
    """Tuning-table queries that compiling the plan on this Vulkan device would make."""
    dry = DryDevice(device.subgroup_size, device.max_range, device.has)
    with dry.tuning.watched() as questions:
        record(plan, dry)
    return questions


def record(plan: Plan, device: DryDevice) -> Recording:
    """Record a plan for a DryDevice."""
    return _recorder(plan, device).finish()


def _recorder(plan: Plan, device: DryDevice) -> Recorder:
    """Recorder with all steps recorded, before barriers and the grid kernel are inserted."""
    tensors = {name: _tensor(decl, device.max_range) for name, decl in plan.tensors.items()}
    recorder = Recorder(device, tensors[plan.control].parts[0])
    record_steps(recorder, plan, tensors, BINDINGS.__getitem__)
    return recorder


@lru_cache(maxsize=4096)
def _tensor(decl: TensorDecl, max_range: int) -> DeviceTensor:
    """A tensor with placeholder memory. Activations are never split."""
    whole = [(0, decl.shape[0] if decl.shape else 1, decl.dtype)]
    split = chunk_rows(decl, max_range) if decl.kind == "weight" else whole
    chunks = tuple(
        Chunk(
            row, rows, tuple(Slice(Buffer(n, "dry"), 0, n) for n in part_bytes(dtype, (rows, *decl.shape[1:]))), dtype
        )
        for row, rows, dtype in split
    )
    return DeviceTensor(decl.name, decl.dtype, decl.shape, chunks)
