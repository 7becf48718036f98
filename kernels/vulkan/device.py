"""The Vulkan device: named tensors in sub-allocated memory, and plans compiled into command buffers.

with open_device("vulkan") as device:
    device.store(decl, value); program = device.compile(plan); device.wait(program.submit())
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.core.device import Counters, SingleDevice
from hybrid.core.errors import nearest
from hybrid.core.plan import IN_HOST_MEMORY, Plan, TensorDecl
from hybrid.kernels.vulkan import alive, columns, lanes
from hybrid.kernels.vulkan.alive import free_left
from hybrid.kernels.vulkan.api import ForkedDevice, VulkanError, VulkanUnavailable, forked_message
from hybrid.kernels.vulkan.dry import DryDevice, scratch_bytes
from hybrid.kernels.vulkan.groups import Binding
from hybrid.kernels.vulkan.instance import DeviceInfo, list_devices
from hybrid.kernels.vulkan.kernel import Kernel, KernelCache, most_polls
from hybrid.kernels.vulkan.memory import MIB, Memory, Slice, align_up
from hybrid.kernels.vulkan.ops import BINDINGS
from hybrid.kernels.vulkan.program import Program
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.repack import Loader
from hybrid.kernels.vulkan.steps import record_steps
from hybrid.kernels.vulkan.store import Storage
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor, part_bytes, rows_of, split_rows
from hybrid.kernels.vulkan.timeline import Queue, Submit
from hybrid.kernels.vulkan.transfer import CHUNK_BYTES, Transfer
from hybrid.kernels.vulkan.tuning import Tuning, device_class, traits
from hybrid.spec.cost import Cost

__all__ = ["DeviceInfo", "VulkanDevice", "VulkanUnavailable", "free_left", "list_devices", "open_device"]

log = logging.getLogger("hybrid.vulkan")
MOST_BUILDERS = 16  # threads that build pipelines


def open_device(selector: str = "auto", **options: Any) -> VulkanDevice:
    """Open a Vulkan device: `auto` or `vulkan` (real GPUs before CPU drivers), `gpu` (a real one only), `vulkan:N`.

    Options are VulkanDevice's. Raises VulkanUnavailable with what to install or to choose.
    """
    return VulkanDevice(selector, **options)


class VulkanDevice(Storage, SingleDevice):
    """hybrid.core.device.Device on Vulkan; bindings see it as `rec.device`.

    selector: see open_device. spirv: folder of built kernels. bindings: replacement bindings by operation. max_range:
    lower limit (bytes) of one storage buffer; larger weights are split. guard: guard bytes around every tensor,
    activations included, for check_guards(). budget: most bytes of device memory. validation: True, 'sync' or None
    (HYBRID_VULKAN_VALIDATION decides). timeout: seconds for every wait (None: HYBRID_VULKAN_TIMEOUT, else in
    proportion to the submitted cost: bounds.py). staging: bytes of one staging chunk. tuning: another class's table
    (kernels/vulkan/tuning.py). without: features (see `has`) to disable, to test kernels of lesser devices. subgroup:
    lanes of a subgroup, where the device has several sizes (ValueError). exact: `auto` computes in float32
    (Device.exact). on: an open device whose queue this one shares (`sibling`).

    After a device loss or timeout every call raises VulkanLost: close() the device and open another. In a forked
    child the parent's device raises ForkedDevice.
    """

    backend = "vulkan"
    passes_ahead = 2
    queue_type: type[Queue] = Queue
    memory_type: type[Memory] = Memory
    kernels_type: type[KernelCache] = KernelCache
    program_type: type[Program] = Program

    def __init__(
        self,
        selector: str = "auto",
        *,
        spirv: Path | None = None,
        bindings: Mapping[str, Binding] | None = None,
        max_range: int | None = None,
        guard: int = 0,
        budget: int | None = None,
        validation: bool | str | None = None,
        timeout: float | None = None,
        staging: int = CHUNK_BYTES,
        tuning: str | None = None,
        without: Collection[str] = (),
        subgroup: int | None = None,
        exact: bool = False,
        on: VulkanDevice | None = None,
    ) -> None:
        self._queue: Queue | None = None
        self.unfreed: Queue | None = None
        """Queue of a device that was closed while its work was running."""
        self._closing = ExitStack()  # everything made here, freed in reverse order
        self._siblings: weakref.WeakSet[VulkanDevice] = weakref.WeakSet()
        if parent := alive.parent():
            raise ForkedDevice(forked_message(parent))
        free_left()
        if on is None:
            q = self.queue_type(selector, validation, timeout, subgroup)
            self._closing.callback(q.close)
        else:
            q = on.queue
            on._siblings.add(self)
        self._queue, self.handle, self.counters = q, q.handle, Counters()
        self.name, self.info, self.report = q.info.label, q.info, q.report
        self.unified = q.info.kind in ("integrated", "cpu")
        self.exact = exact if on is None else on.exact
        self.subgroup_size, self.timestamp_bits = q.subgroup_size, q.timestamp_bits
        # A weight's chunk is one binding in one allocation; the limit of an allocation may be lower.
        limits = self.report.limits
        self.max_range = min(
            limits.max_storage_range, limits.max_buffer, limits.max_allocation, max_range or sys.maxsize
        )
        self.max_groups, self.max_threads, self.polls = limits.groups, q.max_threads, most_polls(q.info.kind)
        self.cores, self.shared_bytes, self.storage_buffers = limits.cores, limits.shared_bytes, limits.storage_buffers
        self.tuning = Tuning(tuning or device_class(traits(self.report, self.subgroup_size)), self.cores)
        self.bindings: Mapping[str, Binding] = BINDINGS if bindings is None else bindings
        self.programs: set[Program] = set()
        self._arena: Slice | None = None
        self._scratch: list[Slice] = []
        self.command_buffer, self.free_command, self.barrier_all = q.command_buffer, q.free_command, q.barrier_all
        self.submit_info, self._submit_now = q.submit_info, q.submit_now
        self.wait_ticket, self.check = q.wait_ticket, q.check
        try:
            self.report = replace(q.report, hidden=q.report.known(without)) if on is None else on.report
            memory = self.memory_type(
                q.info.handle,
                self.handle,
                self.report.limits,
                self.counters,
                self.report.has("memory_budget"),
                budget,
                lambda: q.pending,
            )
            self._closing.callback(memory.close)
            super().__init__(memory, Transfer(self, memory, staging), self.max_range, guard)
            self._closing.callback(self.clear_names)
            builders = 1 if q.info.kind == "cpu" else min(os.cpu_count() or 1, MOST_BUILDERS)
            self._kernels: KernelCache = self.kernels_type(
                self.handle,
                self.report,
                self.subgroup_size,
                spirv,
                self.counters,
                builders,
                None if on is None else on._kernels,
            )
            self._closing.callback(self._kernels.close)
            if on is None:
                self.report = replace(self.report, **lanes.measured(self))
        except BaseException:
            self.close()
            raise
        alive.devices.add(self)

    @property
    def queue(self) -> Queue:
        self.check_open()
        assert self._queue is not None
        return self._queue

    def shares(self, name: str) -> bool:
        """Whether a tensor belongs to the device whose queue this one shares."""
        return name in self._lent and self._tensors.get(name) is self._lent[name]

    def sibling(self, lent: Mapping[str, str] | None = None, **options: Any) -> VulkanDevice:
        """Another device on the same queue, with its own tensors and programs.

        Submits to both run in one order, without context switches. Pipelines are built once for both. A device loss
        affects both. Closing this device closes the sibling. lent: see Device.sibling."""
        made = type(self)(on=self, **options)
        made._lent = {theirs: self.tensor(ours) for theirs, ours in (lent or {}).items()}
        return made

    # --- interface for bindings ---------------------------------------------------------------------------------------

    def kernel(self, name: str, **constants: int) -> Kernel:
        """A kernel of the SPIR-V folder, built on first use and cached."""
        self.check_open()
        return self._kernels.get(name, constants)

    def kernels_named(self, prefix: str) -> list[str]:
        """Built modules whose names begin with `prefix`."""
        return self._kernels.named(prefix)

    def has(self, feature: str) -> bool:
        """Whether `cooperative_matrix`, or any feature or extension of the report, is present and enabled."""
        return self.report.has(feature)

    def few_rows(self, hidden: int, experts: int) -> int:
        return self.tuning.few_rows(hidden, experts)

    def second_layout(self, dtype: str, shape: tuple[int, ...]) -> int:
        return columns.second_layout(self.tuning, dtype, shape)

    # --- weights -----------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self, nbytes: int, plans: Iterable[Plan] = ()) -> Iterator[None]:
        """See Device.loading. Allocates three staging slots of at most repack.LOAD_BYTES, twice that where the device
        cannot compute on host memory. After an error the tensors stored within are dropped."""
        self.check_open()
        if self.loader is not None:
            raise VulkanError(f"{self.name} is loading already")
        before, loader = set(self._tensors), Loader(self, self.memory_pool, nbytes)
        self.loader = loader
        try:
            with loader:
                yield
                loader.drain()
        except BaseException:
            self.loader = None
            for name in set(self._tensors) - before:
                self.drop(name)
            raise
        finally:
            self.loader = None

    # --- plans -------------------------------------------------------------------------------------------------------

    def reserve(self, arena_bytes: int, plans: Iterable[Plan] = ()) -> None:
        """Grow the activation arena to at least this size, before plans are compiled into it.

        Also allocates scratch memory for the kernels of `plans`: growing it later would keep the smaller pieces."""
        self.check_open()
        self._reserve_scratch(plans)
        if self._arena is not None:
            if arena_bytes <= self._arena.size:
                return
            if self.programs:
                raise VulkanError(
                    f"the arena of {self._arena.size} bytes is in use by programs; reserve {arena_bytes} earlier"
                )
            self.memory_pool.release(self._arena, "activations")
            self._arena = None
        if arena_bytes:
            self._arena = self.memory_pool.allocate(arena_bytes, "activations")

    def _reserve_scratch(self, plans: Iterable[Plan]) -> None:
        dry = DryDevice.like(self.report)
        dry.tuning = self.tuning
        if most := max((scratch_bytes(p, dry) for p in plans), default=0):
            self.scratch(most)

    def scratch(self, nbytes: int) -> Slice:
        """Scratch memory for steps' temporaries, shared by all programs. A larger request adds an allocation."""
        if not (fitting := [s for s in self._scratch if s.size >= nbytes]):
            fitting = [self.memory_pool.allocate(nbytes, "scratch")]
            self._scratch += fitting
        return fitting[0]

    def compile(
        self, plan: Plan, profile: bool = False, cooperative: bool = True, bindings: Mapping[str, Binding] | None = None
    ) -> Program:
        """Build pipelines, write descriptors, record commands. With `profile`, times() returns each step's time.
        `bindings`: for this program, instead of the device's."""
        if profile and not self.timestamp_bits:
            raise VulkanError(f"{self.name} has no timestamps on its queue; run without profiling")
        self.reserve(0 if self.guard else plan.arena_bytes)
        recorder = Recorder(self, self.tensor(plan.control).parts[0], cooperative)
        owned: list[str] = []
        try:
            tensors = {name: self._bind(plan, decl, owned) for name, decl in plan.tensors.items()}
            record_steps(
                recorder, plan, tensors, lambda op: _binding(op, self.bindings if bindings is None else bindings)
            )
        except BaseException:
            for name in owned:
                self.drop(name)
            raise
        program = self.program_type(self, plan, recorder, profile, owned)
        self._kernels.save()
        return program

    def _bind(self, plan: Plan, decl: TensorDecl, owned: list[str]) -> DeviceTensor:
        """The tensor of a declaration: the first rows of a stored tensor, or its range of the arena."""
        if decl.kind != "activation":
            stored = self.tensor(decl.name)
            if stored.dtype != decl.dtype or (decl.kind == "weight" and stored.shape != decl.shape):
                raise ValueError(
                    f"plan {plan.name} declares {decl.name} as {decl.dtype}{list(decl.shape)}; stored is "
                    f"{stored.dtype}{list(stored.shape)}"
                )
            return stored.prefix(decl.shape)
        if self.guard:  # activations get separate memory, so that a write past the end is detected
            name = f"{plan.name}:{decl.name}"
            while name in self._tensors:
                name += "'"
            owned.append(name)
            return self.add(TensorDecl(name, decl.dtype, decl.shape, "activation"), "device")
        split_rows(decl, self.max_range)  # raises for a tensor that cannot be bound
        if self._arena is None or decl.offset + decl.nbytes > plan.arena_bytes:
            raise ValueError(
                f"plan {plan.name}: {decl.name} at {decl.offset} is outside its arena of {plan.arena_bytes} bytes"
            )
        at, parts = decl.offset, []
        for size in part_bytes(decl.dtype, decl.shape):
            parts.append(self._arena.sub(at, size))
            at += align_up(size)
        return DeviceTensor(
            decl.name, decl.dtype, decl.shape, (Chunk(0, rows_of(decl.shape), tuple(parts), decl.dtype),)
        )

    # --- running -----------------------------------------------------------------------------------------------------

    def submit(self, info: Submit) -> int:
        """Submit prepared commands (Program.submit does), after the queued uploads."""
        if self.loader is not None:
            self.loader.drain()
        if self.transfer.pending:
            self.transfer.flush()
        ticket = self._submit_now(info)
        self.counters.submits += 1
        return ticket

    def submit_command(self, command: Any, cost: Cost) -> int:
        """Submit a command buffer that belongs to no program, without flushing uploads."""
        self.counters.submits += 1
        return self._submit_now(self.submit_info(command, 1, lambda: cost))

    def wait(self, ticket: int | None = None) -> None:
        """Wait until that submit, or everything submitted (queued uploads included), has finished."""
        if self._queue is None:
            return
        if ticket is None:
            if self.loader is not None:
                self.loader.drain()
            self.transfer.flush()
            ticket = self._queue.ticket
        self.wait_ticket(ticket)

    @property
    def available(self) -> int:  # type: ignore[override]
        """See Device.available."""
        return self.memory_pool.available("device")

    def host_room(self, memory: int) -> int:
        """See Device.host_room."""
        return self.memory_pool.host_room(memory)

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose; adds `scratch` and `programs` (grids) to the protocol's."""
        names = ("weights", IN_HOST_MEMORY, "state", "io", "activations", "staging", "scratch", "programs")
        return {name: self.memory_pool.held.get(name, 0) for name in names}

    def poison(self, byte: int, names: Sequence[str] = ()) -> None:
        """Fill all activations, scratch memory and the stored tensors `names` with a byte."""
        self.check_open()
        self.wait()
        pieces = [*self._scratch, *([self._arena] if self._arena else []), *self.slices(names)]
        pieces += [piece for program in self.programs for piece in self.slices(program.guarded)]
        for piece in pieces:
            self.fill(piece, byte)
        self.wait()

    def reset(self) -> None:
        """Free every program, tensor and arena; kernels stay. For tests that use one device for many cases."""
        self.wait()
        for program in list(self.programs):
            program.close()
        for name in list(self._tensors):
            self.drop(name)
        for piece in self._scratch:
            self.memory_pool.release(piece, "scratch")
        if self._arena is not None:
            self.memory_pool.release(self._arena, "activations")
        self._arena, self._scratch = None, []

    # --- closing ------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self._queue is None:
            raise VulkanError(f"the device {self.name} is closed; open it again")
        if self._queue.gone is not None:
            raise self._queue.gone()

    def at_close(self, call: Callable[[], object]) -> None:
        """Register a call for when the device is closed and its work has ended, before its objects are destroyed."""
        self._closing.callback(call)

    def forked(self) -> None:
        """Mark the device unusable in a forked child."""
        if self._queue is not None:
            self._queue.forked()

    def check_validation(self) -> None:
        """Raise with what the validation layer has reported so far (device opened with validation)."""
        if self._queue is not None:
            self._queue.check_validation()

    def close(self) -> None:
        """Free every Vulkan object, in order; then raise if the validation layer reported anything.

        Waits for submitted work, within its bound. Objects of work that is still running are kept (logged), since
        drivers may hang or crash on destroying them; free_left frees them once the work has ended. A forked child
        releases nothing."""
        q, self._queue = self._queue, None
        if q is None:
            return
        alive.devices.discard(self)
        for sibling in list(self._siblings):
            sibling.close()
        settled, level = False, logging.WARNING if q.gone is None else logging.INFO  # an error was already raised
        try:
            settled = q.settled()
        finally:  # also after an interrupt
            if not settled:
                self._leave(q, level)
        if settled:
            self.free(q)

    def _leave(self, q: Queue, level: int) -> None:
        """Keep all objects: the driver, or the parent process, still uses them."""
        self.unfreed = q
        alive.left.append(self)
        if os.getpid() == q.process:
            held = sum(self.memory_pool.held.values()) / MIB
            log.log(
                level,
                "%s was closed while its work was still running: %.0f MiB of its memory are not freed until the work or "
                "this process ends",
                self.name,
                held,
            )

    def free(self, q: Queue) -> None:
        """Destroy the device's objects; its work has ended."""
        try:
            for program in list(self.programs):
                program.close()
        finally:
            self._closing.close()
        self.handle, self._arena, self._scratch = None, None, []
        q.check_validation()

    def __enter__(self) -> VulkanDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_queue", None) is not None and not sys.is_finalizing():
            self.close()


def _binding(op: str, bindings: Mapping[str, Binding]) -> Binding:
    if op not in bindings:
        raise VulkanError(
            f"the Vulkan backend has no binding for operation {op!r}{nearest(op, sorted(bindings))}; a new one is "
            f"kernels/vulkan/ops/{op}.py"
        )
    return bindings[op]
