"""Device memory: large blocks, each one VkDeviceMemory under one VkBuffer, and slices of them.

Pools: `device` (weights, state, activations); `host` (host memory that kernels read: weights without room in `device`,
outside the budget); `shared` (mapped, on the device if possible: io that the host writes and kernels read); `read`
(mapped and cached: io that the host reads). Where all memory is mapped (CPU drivers, integrated GPUs), `device` blocks
are mapped too.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.core.device import Counters
from hybrid.core.numeric import np
from hybrid.core.plan import ALIGN
from hybrid.kernels.vulkan.api import OutOfDeviceMemory, check, ffi, lib, vk
from hybrid.kernels.vulkan.features import Limits

MIB = 1 << 20
BLOCK_BYTES = {"device": 128 * MIB, "host": 128 * MIB, "shared": 16 * MIB, "read": 16 * MIB}
_LOCAL, _VISIBLE, _COHERENT, _CACHED = 1, 2, 4, 8
# Property flags, wanted and unwanted, in order of preference; coherent only, so that no flush is needed.
_PREFERENCE = {
    "device": ((_LOCAL, 0),),
    "host": ((_VISIBLE | _COHERENT, _LOCAL), (_VISIBLE | _COHERENT, 0)),
    "shared": ((_LOCAL | _VISIBLE | _COHERENT, 0), (_VISIBLE | _COHERENT, 0)),
    "read": ((_VISIBLE | _COHERENT | _CACHED, 0), (_VISIBLE | _COHERENT, 0)),
}


def best_type(pool: str, flags: Sequence[int]) -> int:
    """The memory type for a pool, by the types' property flags. OutOfDeviceMemory if there is none."""
    for want, avoid in _PREFERENCE[pool]:
        for i, have in enumerate(flags):
            if have & (want | avoid) == want:
                return i
    raise OutOfDeviceMemory(f"the device has no memory type for the {pool} pool")


def align_up(n: int, to: int = ALIGN) -> int:
    return -(-n // to) * to


class FreeList:
    """Offsets of one block: first fit in address order, adjacent ranges merged when freed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.holes: list[tuple[int, int]] = [(0, size)] if size else []  # (offset, size), sorted

    def take(self, nbytes: int) -> int | None:
        """Offset (a multiple of ALIGN) of a range of at least nbytes, or None."""
        nbytes = align_up(max(nbytes, 1))
        for i, (offset, size) in enumerate(self.holes):
            if size >= nbytes:
                self.holes[i : i + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range that take() returned."""
        nbytes = align_up(max(nbytes, 1))
        insort(self.holes, (offset, nbytes))
        merged: list[tuple[int, int]] = []
        for start, size in self.holes:
            if merged and start < sum(merged[-1]):
                raise ValueError(f"range {offset}+{nbytes} was freed twice")
            if merged and start == sum(merged[-1]):
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self.holes = merged

    @property
    def empty(self) -> bool:
        return self.holes == [(0, self.size)]


class Buffer:
    """A VkBuffer over one block of memory; `view` is its mapping as bytes, or None."""

    __slots__ = ("free", "handle", "memory", "pool", "size", "view")

    def __init__(self, size: int, pool: str, handle: Any = None, memory: Any = None, view: np.ndarray | None = None):
        self.size, self.pool, self.handle, self.memory, self.view = size, pool, handle, memory, view
        self.free = FreeList(size)


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of a buffer, as bound by kernels and tracked for hazards."""

    buffer: Buffer
    offset: int
    size: int

    def sub(self, offset: int, size: int) -> Slice:
        """A part of this slice; `offset` counts from its start and must be a multiple of ALIGN to be bound."""
        if offset < 0 or size < 0 or offset + size > align_up(self.size):
            raise ValueError(f"slice of {self.size} bytes has no range {offset}+{size}")
        return Slice(self.buffer, self.offset + offset, size)

    def overlaps(self, other: Slice) -> bool:
        return (
            self.buffer is other.buffer
            and self.offset < other.offset + other.size
            and other.offset < self.offset + self.size
        )

    @property
    def bytes(self) -> np.ndarray:
        """The mapped bytes; only for slices of mapped buffers."""
        if self.buffer.view is None:
            raise TypeError("this memory is not mapped")
        return self.buffer.view[self.offset : self.offset + self.size]


class Memory:
    """Allocates slices by pool and purpose, within a budget."""

    def __init__(
        self,
        physical: Any,
        device: Any,
        limits: Limits,
        counters: Counters,
        budget_extension: bool,
        budget: int | None = None,
        pending: Callable[[], bool] = lambda: False,
    ) -> None:
        """pending: whether hung work uses the device's memory; then nothing is freed."""
        self.pending = pending
        self.physical, self.device, self.limits, self.counters = physical, device, limits, counters
        self.budget_extension, self.budget = budget_extension, budget
        self.properties = vk.vkGetPhysicalDeviceMemoryProperties(physical)
        self.blocks: dict[str, list[Buffer]] = {pool: [] for pool in _PREFERENCE}
        self.imported: list[Buffer] = []
        """Imported host pages (hostmemory.py), one tensor part each."""
        self.held: dict[str, int] = {}
        self.types = {pool: self._type(pool) for pool in _PREFERENCE}

    def _type(self, pool: str) -> int:
        # Buffers of one usage have the same memoryTypeBits (guaranteed by the specification): a small buffer is enough.
        probe = self.buffer(256)
        bits = vk.vkGetBufferMemoryRequirements(self.device, probe).memoryTypeBits
        vk.vkDestroyBuffer(self.device, probe, None)
        kinds, many = self.properties.memoryTypes, self.properties.memoryTypeCount
        return best_type(pool, [kinds[i].propertyFlags if bits >> i & 1 else 0 for i in range(many)])

    def flags(self, pool: str) -> int:
        return self.properties.memoryTypes[self.types[pool]].propertyFlags

    def heap(self, pool: str) -> int:
        return self.properties.memoryTypes[self.types[pool]].heapIndex

    def available(self, pool: str) -> int:
        """Bytes that can still be allocated in a pool's heap; over all processes where the driver reports it."""
        most, used = self._heap_bytes(self.heap(pool))
        left = most - used
        if self.budget is not None and pool != "host":
            own = (b.size for p, blocks in self.blocks.items() if p != "host" for b in blocks)
            left = min(left, self.budget - sum(own))
        return max(0, left)

    def host_room(self, device: int) -> int:
        """Bytes of the host pool, with those that are allocated, beside `device` bytes of the device's pool."""
        heap = self.heap("host")
        return max(0, self._heap_bytes(heap)[0] - (device if heap == self.heap("device") else 0))

    def _heap_bytes(self, heap: int) -> tuple[int, int]:
        """(bytes of a heap that this process may allocate, bytes that it has allocated)."""
        if self.budget_extension:
            budget = vk.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
            info = vk.VkPhysicalDeviceMemoryProperties2(pNext=budget)
            lib.vkGetPhysicalDeviceMemoryProperties2(self.physical, ffi.addressof(info))
            return budget.heapBudget[heap], budget.heapUsage[heap]
        own = sum(b.size for p, blocks in self.blocks.items() if self.heap(p) == heap for b in blocks)
        return self.properties.memoryHeaps[heap].size, own

    def allocate(self, nbytes: int, purpose: str, pool: str = "device") -> Slice:
        """A slice at an offset that is a multiple of ALIGN. Raises OutOfDeviceMemory naming purpose and sizes."""
        for block in self.blocks[pool]:
            offset = block.free.take(nbytes)
            if offset is not None:
                break
        else:
            block = self._block(nbytes, purpose, pool)
            offset = block.free.take(nbytes)
            assert offset is not None, "a new block holds what it was made for"
        self.counters.allocations += 1
        self.held[purpose] = self.held.get(purpose, 0) + align_up(nbytes)
        return Slice(block, offset, nbytes)

    def release(self, piece: Slice, purpose: str) -> None:
        """Free a slice of allocate(); an empty block returns to the driver."""
        if self.pending():
            return
        block = piece.buffer
        if block.pool == "imported":
            self.held[purpose] -= piece.size
            self.imported.remove(block)
            self._destroy(block)
            return
        block.free.give(piece.offset, piece.size)
        self.held[purpose] -= align_up(piece.size)
        if block.free.empty and (len(self.blocks[block.pool]) > 1 or block.size > BLOCK_BYTES[block.pool]):
            self.blocks[block.pool].remove(block)
            self._destroy(block)

    def _block(self, nbytes: int, purpose: str, pool: str) -> Buffer:
        wanted, available = align_up(max(nbytes, 1)), self.available(pool)
        out = f"out of {'host' if pool == 'host' else 'device'} memory"
        size = BLOCK_BYTES[pool]
        # Large tensors get a separate block, small ones share one; near the budget a block is as small as its tensor.
        size = wanted if wanted > size // 2 or size > available // 2 else size
        limit = min(self.limits.max_buffer, self.limits.max_allocation)
        if size > available or size > limit:
            what = f"{wanted / MIB:.1f} MiB for {purpose}"
            if size > limit:
                raise OutOfDeviceMemory(
                    f"{what} is more than one allocation of this device may hold "
                    f"({limit / MIB:.0f} MiB); use a smaller context or fewer rows per pass"
                )
            held = ", ".join(f"{k} {v / MIB:.1f}" for k, v in self.held.items() if v) or "nothing"
            raise OutOfDeviceMemory(
                f"{out}: {what} requested, {available / MIB:.1f} MiB available "
                f"(held, MiB: {held}); use a smaller context, a smaller weight type or another "
                "device"
            )
        try:
            return self._create(size, pool)
        except OutOfDeviceMemory:
            raise OutOfDeviceMemory(
                f"{out}: the driver refused {size / MIB:.1f} MiB for {purpose} "
                f"although {available / MIB:.1f} MiB were reported as available"
            ) from None

    def buffer(self, size: int, more: Any = None) -> Any:
        """A VkBuffer without memory; `more` is chained to its create info."""
        usage = (
            vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        )
        out = ffi.new("VkBuffer *")
        info = vk.VkBufferCreateInfo(pNext=more, size=size, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE)
        check(lib.vkCreateBuffer(self.device, ffi.addressof(info), ffi.NULL, out), f"creating a buffer of {size} bytes")
        return out[0]

    def _create(self, size: int, pool: str) -> Buffer:
        handle = self.buffer(size)
        need = vk.vkGetBufferMemoryRequirements(self.device, handle)
        info = vk.VkMemoryAllocateInfo(allocationSize=need.size, memoryTypeIndex=self.types[pool])
        out = ffi.new("VkDeviceMemory *")
        try:
            check(lib.vkAllocateMemory(self.device, ffi.addressof(info), ffi.NULL, out), f"allocating {size} bytes")
        except Exception:
            vk.vkDestroyBuffer(self.device, handle, None)
            raise
        vk.vkBindBufferMemory(self.device, handle, out[0], 0)
        view = None
        if self.flags(pool) & (_VISIBLE | _COHERENT) == _VISIBLE | _COHERENT:
            mapped = ffi.new("void **")
            check(lib.vkMapMemory(self.device, out[0], 0, need.size, 0, mapped), f"mapping {size} bytes")
            view = np.frombuffer(ffi.buffer(mapped[0], size), np.uint8)
        block = Buffer(size, pool, handle, out[0], view)
        self.blocks[pool].append(block)
        return block

    def _destroy(self, block: Buffer) -> None:
        vk.vkDestroyBuffer(self.device, block.handle, None)
        vk.vkFreeMemory(self.device, block.memory, None)
        block.handle = block.view = None

    def close(self) -> None:
        """Return every block to the driver."""
        self.held.clear()
        for blocks in (self.imported, *self.blocks.values()):
            while blocks:
                self._destroy(blocks.pop())
