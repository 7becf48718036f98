"""A compiled plan: one command buffer, recorded once and submitted repeatedly.

H200, empty dispatch: 1.8 us after a barrier with 1 workgroup, 2.4 with 1056; 0.16 and 0.83 us without the barrier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid.core.device import StepTime
from hybrid.core.numeric import np
from hybrid.core.plan import Plan
from hybrid.kernels.vulkan.api import VulkanError, check, ffi, lib, vk
from hybrid.kernels.vulkan.bounds import declared
from hybrid.kernels.vulkan.clock import host_seconds
from hybrid.kernels.vulkan.memory import Slice, align_up
from hybrid.kernels.vulkan.recorder import GRID_WORDS, Barrier, Dispatch, Recorder
from hybrid.spec.cost import Cost, step_cost
from hybrid.spec.op import load_ops

if TYPE_CHECKING:
    from hybrid.kernels.vulkan.device import VulkanDevice

_COMPUTE, _INDIRECT = 0x800, 0x2  # pipeline stages
_SHADER_READ, _SHADER_WRITE, _INDIRECT_READ = 0x20, 0x40, 0x1  # accesses


def _same(cost: Cost) -> Cost:
    return cost


class Program:
    """Made by VulkanDevice.compile. `dispatches` and `barriers` count one run of the plan."""

    def __init__(
        self,
        device: VulkanDevice,
        plan: Plan,
        recorder: Recorder,
        profile: bool,
        guarded: Sequence[str] = (),
        cost: Cost | None = None,
    ) -> None:
        self.device, self.plan = device, plan
        self._cost = cost  # None: the declared cost of its operations
        self.guarded = tuple(guarded)  # activations with memory of their own, on devices with guards
        self.owned: list[tuple[Slice, str]] = []  # this program's own memory, with its purpose
        self.zeroed: list[Slice] = []  # the part of `owned` that kernels expect zero and reset to zero
        self.recording = recorder.finish()
        self.dispatches = len(self.recording.dispatches)
        self.barriers = sum(b is not None for b in self.recording.barriers)
        self.pool: Any = None
        self.queries: Any = None
        self.commands: list[Any] = []
        """One command buffer, or several where a submit may last only so long (bounds.py)."""
        self.ticket = 0
        self._submits: dict[int, list[Any]] = {}
        device.programs.add(self)
        try:
            self._places = self._place(recorder)
            self._sets = self._descriptor_sets()
            if profile:
                info = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=len(plan.steps) + 1)
                self.queries = vk.vkCreateQueryPool(device.handle, info, None)
            self._record()
        except BaseException:
            self.close()
            raise

    # --- memory and descriptors --------------------------------------------------------------------------------------

    def _place(self, recorder: Recorder) -> dict[int, Slice]:
        """Memory for the recorder's placeholders, by buffer identity."""
        places: dict[int, Slice] = {}
        if self.recording.scratch_bytes:
            places[id(recorder.scratch_buffer)] = self.device.scratch(self.recording.scratch_bytes)
        zeroed = (
            (recorder.counter_buffer, self.recording.counter_bytes),
            (recorder.zeros_buffer, self.recording.zero_bytes),
        )
        for placeholder, nbytes in zeroed:
            if nbytes:
                piece = self.device.memory_pool.allocate(nbytes, "programs")
                self.owned.append((piece, "programs"))
                self.zeroed.append(piece)
                self.device.put(piece, np.zeros(nbytes, np.uint8))
                places[id(placeholder)] = piece
        if self.recording.table:
            data = np.array(self.recording.table, np.uint32).view(np.uint8)
            table = self.device.memory_pool.allocate(data.nbytes, "programs")
            grids = self.device.memory_pool.allocate(recorder.grid_slice.size, "programs")
            self.owned += [(table, "programs"), (grids, "programs")]
            self.device.put(table, data)
            places[id(recorder.table_buffer)], places[id(recorder.grid_buffer)] = table, grids
            self._grids = grids
        return places

    def _real(self, piece: Slice) -> tuple[Any, int, int]:
        """(VkBuffer, offset, range) to bind. The range is a multiple of 16 bytes, within the slice's padding. It
        includes guard bytes, since drivers drop writes outside the range."""
        most = self.device.report.limits.max_storage_range
        base = self._places.get(id(piece.buffer))
        buffer, offset = (piece.buffer, piece.offset) if base is None else (base.buffer, base.offset + piece.offset)
        return buffer.handle, offset, min(align_up(piece.size + self.device.guard, 16), buffer.size - offset, most)

    def _descriptor_sets(self) -> list[Any]:
        """One descriptor set per distinct list of slices, written once."""
        keys: dict[tuple[Any, ...], list[Dispatch]] = {}
        for d in self.recording.dispatches:
            keys.setdefault((d.kernel.bindings, *((id(s.buffer), s.offset, s.size) for s in d.slices)), []).append(d)
        if not keys:
            raise VulkanError(f"plan {self.plan.name} records no dispatch")
        total = sum(key[0] for key in keys)
        size = vk.VkDescriptorPoolSize(type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=total)
        info = vk.VkDescriptorPoolCreateInfo(maxSets=len(keys), poolSizeCount=1, pPoolSizes=[size])
        handle = self.device.handle
        self.pool = vk.vkCreateDescriptorPool(handle, info, None)
        layouts = ffi.new("VkDescriptorSetLayout[]", [users[0].kernel.set_layout for users in keys.values()])
        allocate = vk.VkDescriptorSetAllocateInfo(descriptorPool=self.pool, descriptorSetCount=len(keys))
        allocate.pSetLayouts = layouts
        sets = ffi.new("VkDescriptorSet[]", len(keys))
        check(lib.vkAllocateDescriptorSets(handle, ffi.addressof(allocate), sets), "allocating descriptor sets")
        buffers = ffi.new("VkDescriptorBufferInfo[]", total)
        writes = ffi.new("VkWriteDescriptorSet[]", len(keys))
        at, by_dispatch = 0, {}
        for i, (key, users) in enumerate(keys.items()):
            w = writes[i]
            w.sType, w.dstSet = vk.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET, sets[i]
            w.descriptorType, w.descriptorCount = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, key[0]
            w.pBufferInfo = buffers + at
            for piece in users[0].slices:
                buffers[at].buffer, buffers[at].offset, buffers[at].range = self._bindable(piece, users[0])
                at += 1
            by_dispatch.update({id(d): sets[i] for d in users})
        lib.vkUpdateDescriptorSets(handle, len(keys), writes, 0, ffi.NULL)
        self.device.counters.descriptor_writes += total
        return [by_dispatch[id(d)] for d in self.recording.dispatches]

    def _bindable(self, piece: Slice, user: Dispatch) -> tuple[Any, int, int]:
        buffer, offset, size = self._real(piece)
        step = self.plan.steps[user.step].name
        if offset % self.device.report.limits.offset_alignment:
            raise VulkanError(
                f"step {step}: {user.kernel.name} is bound at byte {offset}, which this device cannot "
                f"bind (alignment {self.device.report.limits.offset_alignment})"
            )
        if piece.size > self.device.max_range or size < 1:
            raise VulkanError(
                f"step {step}: {user.kernel.name} is bound to {piece.size} bytes; this device binds 1 to "
                f"{self.device.max_range}: use a smaller context or fewer rows per pass"
            )
        return buffer, offset, size

    # --- recording ---------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record the dispatches, into as many command buffers as the device's bound of a submit asks for."""
        costs = [Cost()] * len(self.plan.steps)
        if self.device.queue.bounds.submit is not None:
            ops = load_ops()
            costs = [step_cost(self.plan, s) if s.op in ops else Cost() for s in self.plan.steps]
        self._costs = self.device.queue.bounds.parts(costs)
        dispatches, first, step = self.recording.dispatches, 0, 0
        for part, (steps, _) in enumerate(self._costs):
            last = part == len(self._costs) - 1
            end = len(dispatches) if last else bisect_left(dispatches, steps, key=lambda d: d.step)
            self.commands.append(self.device.command_buffer())
            step = self._record_part(self.commands[-1], range(first, end), step, last)
            first = end
        self.device.counters.recordings += 1

    def _record_part(self, command: Any, part: range, step: int, last: bool) -> int:
        """Record some dispatches, the first of them of a step after `step`; returns the step of the last one."""
        begin = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT)
        check(lib.vkBeginCommandBuffer(command, ffi.addressof(begin)), "recording")
        if self.queries is not None and not part.start:
            lib.vkCmdResetQueryPool(command, self.queries, 0, len(self.plan.steps) + 1)
            self._stamp(command, 0)
        barrier = ffi.new("VkMemoryBarrier *")
        barrier.sType = vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER
        sets = ffi.new("VkDescriptorSet[1]")
        pipeline, bound = None, None
        for i in part:
            d, before, descriptors = self.recording.dispatches[i], self.recording.barriers[i], self._sets[i]
            while step < d.step:
                step += 1
                self._stamp(command, step)
            if before is not None:
                self._barrier(command, before, barrier)
            if d.kernel.pipeline != pipeline:
                lib.vkCmdBindPipeline(command, vk.VK_PIPELINE_BIND_POINT_COMPUTE, d.kernel.pipeline)
                pipeline = d.kernel.pipeline
            if (descriptors, d.kernel.layout) != bound:
                sets[0] = descriptors
                lib.vkCmdBindDescriptorSets(
                    command, vk.VK_PIPELINE_BIND_POINT_COMPUTE, d.kernel.layout, 0, 1, sets, 0, ffi.NULL
                )
                bound = descriptors, d.kernel.layout
            if d.push:
                lib.vkCmdPushConstants(
                    command, d.kernel.layout, vk.VK_SHADER_STAGE_COMPUTE_BIT, 0, len(d.push), ffi.from_buffer(d.push)
                )
            if d.entry is None:
                lib.vkCmdDispatch(command, *d.grid)
            else:
                lib.vkCmdDispatchIndirect(
                    command, self._grids.buffer.handle, self._grids.offset + 4 * GRID_WORDS * d.entry
                )
        while last and step < len(self.plan.steps):
            step += 1
            self._stamp(command, step)
        self.device.barrier_all(command)  # every command buffer ends with it, so that none needs one at its start
        check(lib.vkEndCommandBuffer(command), "recording")
        return step

    def _barrier(self, command: Any, wanted: Barrier, barrier: Any) -> None:
        source = _COMPUTE | (_INDIRECT if wanted.from_indirect else 0)
        target = _COMPUTE | (_INDIRECT if wanted.to_indirect else 0)
        barrier.srcAccessMask = _SHADER_WRITE
        barrier.dstAccessMask = _SHADER_READ | _SHADER_WRITE | (_INDIRECT_READ if wanted.to_indirect else 0)
        lib.vkCmdPipelineBarrier(command, source, target, 0, 1, barrier, 0, ffi.NULL, 0, ffi.NULL)

    def _stamp(self, command: Any, query: int) -> None:
        if self.queries is not None:
            lib.vkCmdWriteTimestamp(command, vk.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, self.queries, query)

    # --- running -----------------------------------------------------------------------------------------------------

    def submit(self, times: int = 1) -> int:
        """Start the plan `times` times in a row; returns the ticket to wait for. Allocates and records nothing."""
        if not self.commands:
            raise VulkanError(f"program {self.plan.name} is closed")
        infos = self._submits.get(times)
        if infos is None:
            infos = self._submits[times] = self._infos(times)
        for info in infos:
            self.ticket = self.device.submit(info)
        counters = self.device.counters
        counters.dispatches += times * self.dispatches
        counters.barriers += times * self.barriers
        return self.ticket

    def _infos(self, times: int) -> list[Any]:
        """The submits of so many runs: one, or one for each command buffer of each run."""
        submit_info = self.device.submit_info
        if len(self.commands) == 1:
            return [submit_info(self.commands[0], times, lambda: self.cost().times(times))]
        costs = [partial(_same, cost) for _, cost in self._costs]
        return [submit_info(command, 1, cost) for command, cost in zip(self.commands, costs, strict=True)] * times

    def cost(self) -> Cost:
        """Cost of one run, for the bound of waits."""
        if self._cost is None:
            self._cost = declared(self.plan)
        return self._cost

    def times(self, ticket: int | None = None) -> list[StepTime]:
        """Device time of each step of the last run, from timestamps; waits for it. Empty without profile=True."""
        if self.queries is None or not self.ticket:
            return []
        data = self._stamps()
        valid = np.uint64((1 << self.device.timestamp_bits) - 1)
        ticks = ((data - data[0]) & valid).astype(np.float64) * self.device.report.limits.timestamp_period * 1e-9
        dispatched, found = {d.step for d in self.recording.dispatches}, list[StepTime]()
        for i, s in enumerate(self.plan.steps):
            within = (
                None if i in dispatched else found[-1].within or found[-1].name
            )  # part of a fused group (groups.py)
            took = float(max(0.0, ticks[i + 1] - ticks[i]))
            found.append(StepTime(s.name, s.op, s.layer, float(ticks[i]), took, within=within))
        return found

    def began(self, ticket: int | None = None) -> float | None:
        """See hybrid.core.device.Program."""
        if self.queries is None or not self.ticket:
            return None
        return host_seconds(self.device, int(self._stamps()[0]))

    def _stamps(self) -> np.ndarray:
        """Raw timestamps of the last run, uint64 [steps + 1]; waits for it."""
        self.device.wait(self.ticket)
        n = len(self.plan.steps) + 1
        data = np.zeros(n, np.uint64)
        flags = vk.VK_QUERY_RESULT_64_BIT | vk.VK_QUERY_RESULT_WAIT_BIT
        found = lib.vkGetQueryPoolResults(
            self.device.handle, self.queries, 0, n, data.nbytes, ffi.from_buffer(data), 8, flags
        )
        self.device.check(found, "reading timestamps")
        return data

    def close(self) -> None:
        """Free the command buffer, descriptors and this program's own memory. Waits for its last submit."""
        if self.commands:
            self.device.wait(self.ticket)
        for command in self.commands:
            self.device.free_command(command)
        if self.pool is not None:
            vk.vkDestroyDescriptorPool(self.device.handle, self.pool, None)
        if self.queries is not None:
            vk.vkDestroyQueryPool(self.device.handle, self.queries, None)
        for piece, purpose in self.owned:
            self.device.memory_pool.release(piece, purpose)
        for name in self.guarded:
            self.device.drop(name)
        self.pool = self.queries = None
        self.commands, self.owned, self.guarded = [], [], ()
        self.device.programs.discard(self)
