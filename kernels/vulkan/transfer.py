"""Copies between host arrays and device memory through a ring of mapped chunks, in queue order.

Uploads are packed into a chunk and submitted together: when it is full, and before any other submit. The host fills one
chunk while the device copies another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid.kernels.vulkan.api import vk
from hybrid.kernels.vulkan.memory import MIB, Memory, Slice, align_up
from hybrid.spec.cost import Cost

if TYPE_CHECKING:
    from hybrid.kernels.vulkan.device import VulkanDevice

CHUNK_BYTES = 8 * MIB
SLOTS = 3


class _Slot:
    __slots__ = ("command", "copies", "staging", "ticket", "used")

    def __init__(self, command: Any, staging: Slice) -> None:
        self.command, self.staging = command, staging
        self.ticket, self.used = 0, 0
        self.copies: list[tuple[Any, int, int, int]] = []  # destination, its offset, staging offset, bytes


class Transfer:
    """One per device. `chunk` is the size of a staging chunk in bytes."""

    def __init__(self, device: VulkanDevice, memory: Memory, chunk: int = CHUNK_BYTES) -> None:
        self.device, self.memory, self.chunk = device, memory, chunk
        self.slots: list[_Slot] = []
        self.turn = 0
        self.pending = False

    def _slot(self) -> _Slot:
        """The next chunk of the ring, free for the host; allocated on first use."""
        while len(self.slots) < SLOTS:
            staging = self.memory.allocate(self.chunk, "staging", "read")
            self.slots.append(_Slot(self.device.command_buffer(), staging))
        slot = self.slots[self.turn]
        if not slot.copies:
            self.device.wait_ticket(slot.ticket)
        return slot

    def upload(self, target: Slice, data: np.ndarray) -> None:
        """Write bytes (u8 array, in axis order) to the start of `target`; visible to everything submitted later."""
        data, done = np.ascontiguousarray(data).reshape(-1), 0
        while done < data.size:
            slot = self._slot()
            n = min(data.size - done, self.chunk - slot.used)
            if n == 0:
                self.flush()
                continue
            start = slot.staging.offset + slot.used
            slot.staging.bytes[slot.used : slot.used + n] = data[done : done + n]
            slot.copies.append((target.buffer, target.offset + done, start, n))
            slot.used = min(self.chunk, align_up(slot.used + n))
            self.pending = True
            done += n

    def flush(self) -> None:
        """Submit the queued uploads."""
        if not self.pending:
            return
        slot = self.slots[self.turn]
        begin(self.device, slot.command)
        for i, (buffer, offset, start, n) in enumerate(slot.copies):
            if i:  # a later write of the same rows must win
                self.device.barrier_all(slot.command)
            region = vk.VkBufferCopy(srcOffset=start, dstOffset=offset, size=n)
            vk.vkCmdCopyBuffer(slot.command, slot.staging.buffer.handle, buffer.handle, 1, [region])
        slot.ticket = submit(self.device, slot.command, 2 * slot.used)
        slot.copies, slot.used, self.pending = [], 0, False
        self.turn = (self.turn + 1) % SLOTS

    def download(self, source: Slice, out: np.ndarray) -> None:
        """Copy `source` into bytes (u8 array, in the order of its axes), after everything submitted so far."""
        flat = (out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)).reshape(-1)
        self.flush()
        waiting: list[tuple[_Slot, int, int]] = []

        def collect() -> None:
            slot, start, n = waiting.pop(0)
            self.device.wait_ticket(slot.ticket)
            flat[start : start + n] = slot.staging.bytes[:n]

        for start in range(0, out.size, self.chunk):
            if len(waiting) == SLOTS:
                collect()
            slot, n = self._slot(), min(self.chunk, out.size - start)
            begin(self.device, slot.command)
            region = vk.VkBufferCopy(srcOffset=source.offset + start, dstOffset=slot.staging.offset, size=n)
            vk.vkCmdCopyBuffer(slot.command, source.buffer.handle, slot.staging.buffer.handle, 1, [region])
            slot.ticket = submit(self.device, slot.command, 2 * n)
            waiting.append((slot, start, n))
            self.turn = (self.turn + 1) % SLOTS
        while waiting:
            collect()
        if not out.flags.c_contiguous:
            out[...] = flat.reshape(out.shape)

    def fill(self, target: Slice, byte: int) -> None:
        """Set every byte of `target`, in queue order."""
        words = target.size // 4 * 4  # the command fills whole words
        if words:
            self.flush()
            slot = self._slot()
            begin(self.device, slot.command)
            vk.vkCmdFillBuffer(slot.command, target.buffer.handle, target.offset, words, byte * 0x01010101)
            slot.ticket = submit(self.device, slot.command, words)
            self.turn = (self.turn + 1) % SLOTS
        if words < target.size:
            tail = Slice(target.buffer, target.offset + words, target.size - words)
            self.upload(tail, np.full(tail.size, byte, np.uint8))


def begin(device: VulkanDevice, command: Any) -> None:
    """Start recording for one submit. Every earlier submit ended with a barrier."""
    vk.vkBeginCommandBuffer(command, vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT))


def submit(device: VulkanDevice, command: Any, nbytes: int) -> int:
    """End and submit what `begin` started; returns the ticket. nbytes: bytes moved. Visible to everything submitted
    later."""
    device.barrier_all(command)
    vk.vkEndCommandBuffer(command)
    device.counters.transfers += 1
    return device.submit_command(command, Cost(nbytes=nbytes))
