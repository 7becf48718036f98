"""Weight loading: from a file into device memory, through mapped staging slots.

Several threads read a piece of the file into a slot. The device copies it into its own memory if it cannot compute on
host memory. A kernel then splits ggml blocks into the parts of our storage types. Meanwhile the host fills the next
slot.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Packed
from hybrid.kernels.vulkan.api import VulkanError, VulkanLost, check, ffi, lib, vk
from hybrid.kernels.vulkan.kernel import Kernel
from hybrid.kernels.vulkan.memory import MIB, Memory, Slice, align_up
from hybrid.kernels.vulkan.tensors import Chunk, rows_of
from hybrid.kernels.vulkan.transfer import begin, submit
from hybrid.kernels.vulkan.types import QUANTISED

if TYPE_CHECKING:
    from hybrid.kernels.vulkan.device import VulkanDevice

REPACKED = QUANTISED  # types that have a kernel; others are split on the host
LOAD_BYTES = 32 * MIB
SLOTS = 3
MAX_THREADS = 8
_UNIT = 32  # elements per thread of the kernel
_THREADS = 64  # of a workgroup
_SPARE = 4  # the kernel reads words that begin at half words
_LEAST_READ = MIB  # smallest read of a separate thread
_STAGING = "staging"


def takes(packed: Packed) -> bool:
    """Whether a loader reads this type; otherwise the host splits it."""
    return packed.dtype in REPACKED or not DTYPES[packed.dtype].quantised


@dataclass(slots=True, eq=False)
class _Slot:
    """`staging`: mapped, filled by the host. `raw`: read by the kernel; the same memory where the device computes on
    it. `damaged`: a mapped word that the kernel sets for a scale that is not finite."""

    command: Any
    staging: Slice
    raw: Slice
    damaged: Slice
    sets: dict[int, Any]
    """Descriptor sets by number of bindings."""
    ticket: int = 0
    owner: tuple[str, Packed] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Fill:
    """A piece of a tensor being read into a slot, then written to `parts` from block `first` on, counted row by row
    (plain types: from byte `first` of their one part). Without a slot: read straight into its place."""

    name: str
    packed: Packed
    reads: list[Future[None]]
    nbytes: int
    parts: tuple[Slice, ...] = ()
    first: int = 0
    slot: _Slot | None = None


class Loader:
    """Loader of one model on one device. `nbytes`: approximate total. Used by one thread."""

    def __init__(self, device: VulkanDevice, memory: Memory, nbytes: int) -> None:
        self.device, self.memory = device, memory
        self.size = align_up(min(max(nbytes, 1), LOAD_BYTES))
        # Device-local and mapped memory: CPU drivers, integrated GPUs.
        self.direct = memory.types["read"] == memory.types["device"]
        self.threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self.workers = ThreadPoolExecutor(self.threads, thread_name_prefix="load")
        self.slots: list[_Slot] = []
        self.turn = 0
        self.filling: deque[_Fill] = deque()
        self.pool: Any = None
        self._held: list[Slice] = []

    # --- interface for store ------------------------------------------------------------------------------------------

    def put(self, name: str, packed: Packed, row: int, chunks: Sequence[Chunk]) -> None:
        """Start loading all rows of `packed` as rows row.. of tensor `name`. Raises, for this or an earlier tensor, its
        reader's errors, and the file's error for scales that are not finite."""
        rows, row_bytes = rows_of(packed.shape), packed.nbytes // max(1, rows_of(packed.shape))
        for chunk in chunks:
            first, last = max(row, chunk.row), min(row + rows, chunk.row + chunk.rows)
            if first >= last:
                continue
            if chunk.dtype != packed.dtype:
                raise ValueError(f"rows {first} to {last - 1} of {name} are {chunk.dtype}, not {packed.dtype}")
            begin, end = (first - row) * row_bytes, (last - row) * row_bytes
            if DTYPES[packed.dtype].quantised:
                self._blocks(name, packed, begin, end, chunk.parts, (first - chunk.row) * row_bytes)
            else:
                self._bytes(name, packed, begin, end, chunk.parts[0], (first - chunk.row) * row_bytes)

    def drain(self) -> None:
        """Wait until everything is in device memory. Raises as `put` does."""
        while self.filling:
            self._finish(self.filling.popleft())
        for slot in self.slots:
            self._free(slot)

    def cancel(self, name: str) -> None:
        """Stop loading a tensor that is about to be dropped. Submitted work still writes to its memory."""
        gone = [f for f in self.filling if f.name == name]
        wait([r for f in gone for r in f.reads])
        self.filling = deque(f for f in self.filling if f.name != name)
        for slot in self.slots:
            if slot.owner is not None and slot.owner[0] == name:
                self.device.wait_ticket(slot.ticket)
                slot.owner, slot.damaged.bytes[:] = None, 0

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        """Free everything. Waits for reads in progress, which write into the slots."""
        self.workers.shutdown(wait=True, cancel_futures=True)
        self.filling.clear()
        try:
            for slot in self.slots:
                self.device.wait_ticket(slot.ticket)
        except VulkanLost:
            self.device.at_close(self._free_all)  # unfinished work keeps its objects until then
            raise
        self._free_all()

    def _free_all(self) -> None:
        for slot in self.slots:
            self.device.free_command(slot.command)
        if self.pool is not None:
            vk.vkDestroyDescriptorPool(self.device.handle, self.pool, None)
        for piece in self._held:
            self.memory.release(piece, _STAGING)
        self.slots, self._held, self.pool = [], [], None

    # --- reading -----------------------------------------------------------------------------------------------------

    def _blocks(self, name: str, packed: Packed, begin: int, end: int, parts: tuple[Slice, ...], to: int) -> None:
        """Load bytes begin..end of the tensor, whole blocks, slot by slot. `to`: their destination, in bytes of the
        file."""
        block = _block_bytes(packed.dtype)
        most = min(self.size // block, self.device.max_groups[0] * _THREADS // _units(packed.dtype))
        if most < 1:
            raise VulkanError(f"a slot of {self.size} bytes holds no block of {packed.dtype}")
        for at in range(begin, end, most * block):
            n = min(most * block, end - at)
            self._into_slot(name, packed, at, n, parts, (to + at - begin) // block)

    def _bytes(self, name: str, packed: Packed, begin: int, end: int, target: Slice, to: int) -> None:
        if target.buffer.view is not None:
            reads = self._read(packed, begin, target.bytes[to : to + end - begin])
            self._queue(_Fill(name, packed, reads, end - begin))
            return
        for at in range(begin, end, self.size):
            self._into_slot(name, packed, at, min(self.size, end - at), (target,), to + at - begin)

    def _into_slot(self, name: str, packed: Packed, at: int, n: int, parts: tuple[Slice, ...], first: int) -> None:
        slot = self._slot()
        self._queue(_Fill(name, packed, self._read(packed, at, slot.staging.bytes[:n]), n, parts, first, slot))

    def _read(self, packed: Packed, at: int, out: np.ndarray) -> list[Future[None]]:
        """Fill `out` from byte `at` of the tensor, in parallel: reading releases the GIL."""
        step = max(_LEAST_READ, align_up(-(-out.size // self.threads), 4096))
        return [self.workers.submit(packed.read_into, at + i, out[i : i + step]) for i in range(0, out.size, step)]

    def _queue(self, fill: _Fill) -> None:
        """Queue a read, and finish the fill before it meanwhile."""
        self.filling.append(fill)
        while len(self.filling) > 1:
            self._finish(self.filling.popleft())

    def _finish(self, fill: _Fill) -> None:
        wait(fill.reads)
        for read in fill.reads:
            read.result()
        if fill.slot is not None:
            self._submit(fill, fill.slot)
        self.device.counters.bytes_up += fill.nbytes

    # --- device side --------------------------------------------------------------------------------------------------

    def _slot(self) -> _Slot:
        """The next slot of the ring, free for the host."""
        if len(self.slots) < SLOTS:
            self.slots.append(self._make_slot())
            return self.slots[-1]
        slot = self.slots[self.turn]
        self.turn = (self.turn + 1) % SLOTS
        self._free(slot)
        return slot

    def _free(self, slot: _Slot) -> None:
        """Wait for the device's use of a slot; raise if it found a damaged block."""
        self.device.wait_ticket(slot.ticket)
        owner, slot.owner = slot.owner, None
        if owner is None or not slot.damaged.bytes.any():
            return
        slot.damaged.bytes[:] = 0
        name, packed = owner
        packed.load()  # raises, with the place
        raise VulkanError(
            f"{name}: the device found a scale that is not finite, the host finds none: the file changes "
            "while it is read, or the device's memory is at fault"
        )

    def _make_slot(self) -> _Slot:
        staging = self._allocate(self.size + _SPARE, "read")
        damaged = self._allocate(4, "read")
        damaged.bytes[:] = 0
        raw = staging if self.direct else self._allocate(self.size + _SPARE, "device")
        return _Slot(self.device.command_buffer(), staging, raw, damaged, {})

    def _allocate(self, nbytes: int, pool: str) -> Slice:
        piece = self.memory.allocate(nbytes, _STAGING, pool)
        self._held.append(piece)
        return piece

    def _submit(self, fill: _Fill, slot: _Slot) -> None:
        device, command, packed = self.device, slot.command, fill.packed
        begin(device, command)
        if not DTYPES[packed.dtype].quantised:
            target = fill.parts[0]
            _copy(command, slot.staging, target.buffer.handle, target.offset + fill.first, fill.nbytes)
        else:
            if slot.raw is not slot.staging:
                _copy(command, slot.staging, slot.raw.buffer.handle, slot.raw.offset, fill.nbytes)
                device.barrier_all(command)
            kernel = device.kernel(f"repack.{packed.dtype}")
            units = _units(packed.dtype)
            count = fill.nbytes // _block_bytes(packed.dtype) * units
            push = struct.pack("<III", fill.first * units, count, packed.shape[-1] // _UNIT)
            self._dispatch(command, kernel, self._bind(slot, kernel, fill.parts), push, count)
        slot.ticket = submit(device, command, 4 * fill.nbytes)  # copied, and repacked
        slot.owner = fill.name, packed

    def _bind(self, slot: _Slot, kernel: Kernel, parts: Sequence[Slice]) -> Any:
        """The slot's descriptor set for this kernel and these parts; the slot's last dispatch has finished."""
        if kernel.bindings not in slot.sets:
            slot.sets[kernel.bindings] = self._new_set(kernel)
        pieces, most = (slot.raw, slot.damaged, *parts), self.device.report.limits.max_storage_range
        buffers = ffi.new("VkDescriptorBufferInfo[]", len(pieces))
        for info, piece in zip(buffers, pieces, strict=True):
            # Whole 16-byte words, and guard bytes if any: drivers drop writes outside the range.
            size = min(align_up(piece.size + self.device.guard, 16), piece.buffer.size - piece.offset)
            info.buffer, info.offset, info.range = piece.buffer.handle, piece.offset, min(size, most)
        write = ffi.new("VkWriteDescriptorSet[1]")
        write[0].sType, write[0].dstSet = vk.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET, slot.sets[kernel.bindings]
        write[0].descriptorType, write[0].descriptorCount = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, len(pieces)
        write[0].pBufferInfo = buffers
        lib.vkUpdateDescriptorSets(self.device.handle, 1, write, 0, ffi.NULL)
        self.device.counters.descriptor_writes += len(pieces)
        return slot.sets[kernel.bindings]

    def _new_set(self, kernel: Kernel) -> Any:
        if self.pool is None:
            sets = len(REPACKED) * SLOTS
            size = vk.VkDescriptorPoolSize(type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=8 * sets)
            info = vk.VkDescriptorPoolCreateInfo(maxSets=sets, poolSizeCount=1, pPoolSizes=[size])
            self.pool = vk.vkCreateDescriptorPool(self.device.handle, info, None)
        layouts = ffi.new("VkDescriptorSetLayout[1]", [kernel.set_layout])
        allocate = vk.VkDescriptorSetAllocateInfo(descriptorPool=self.pool, descriptorSetCount=1)
        allocate.pSetLayouts = layouts
        out = ffi.new("VkDescriptorSet[1]")
        check(
            lib.vkAllocateDescriptorSets(self.device.handle, ffi.addressof(allocate), out), "allocating descriptor sets"
        )
        return out[0]

    def _dispatch(self, command: Any, kernel: Kernel, descriptors: Any, push: bytes, count: int) -> None:
        compute, sets = vk.VK_PIPELINE_BIND_POINT_COMPUTE, ffi.new("VkDescriptorSet[1]", [descriptors])
        lib.vkCmdBindPipeline(command, compute, kernel.pipeline)
        lib.vkCmdBindDescriptorSets(command, compute, kernel.layout, 0, 1, sets, 0, ffi.NULL)
        lib.vkCmdPushConstants(
            command, kernel.layout, vk.VK_SHADER_STAGE_COMPUTE_BIT, 0, len(push), ffi.from_buffer(push)
        )
        lib.vkCmdDispatch(command, -(-count // _THREADS), 1, 1)
        self.device.counters.dispatches += 1


def _copy(command: Any, source: Slice, target: Any, offset: int, nbytes: int) -> None:
    region = vk.VkBufferCopy(srcOffset=source.offset, dstOffset=offset, size=nbytes)
    vk.vkCmdCopyBuffer(command, source.buffer.handle, target, 1, [region])


def _block_bytes(dtype: str) -> int:
    return DTYPES[dtype].nbytes((DTYPES[dtype].block,))


def _units(dtype: str) -> int:
    """Threads per block."""
    return DTYPES[dtype].block // _UNIT
