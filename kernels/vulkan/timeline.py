"""The logical device: queue, command buffers and the timeline of submits. device.py builds on it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from hybrid.kernels.vulkan.api import (
    ForkedDevice,
    VulkanError,
    VulkanLost,
    VulkanUnavailable,
    check,
    ffi,
    forked_message,
    late_message,
    lib,
    lost_message,
    vk,
)
from hybrid.kernels.vulkan.bounds import bounds_of
from hybrid.kernels.vulkan.features import (
    choose_subgroup,
    enabled_chain,
    known_to_layer,
    most_threads,
    query,
    with_subgroup,
)
from hybrid.kernels.vulkan.instance import Instance, select, validation_mode
from hybrid.spec.cost import Cost

_POLL_NS = 200_000_000  # waits return to Python this often, so that Ctrl-C works
_ALL_STAGES, _ALL_READS, _ALL_WRITES = 0x10000, 0x8000, 0x10000


class Submit(NamedTuple):
    """Prepared argument of Queue.submit_now. cost: of one submit, evaluated for long waits only."""

    info: Any
    commands: Any
    """Keeps alive what `info` points to."""
    cost: Callable[[], Cost]


class Queue:
    """One compute queue of one device. Every submit gets the next ticket of a timeline semaphore.

    The attributes are the device's: `info`, `report` (features and limits), `subgroup_size`, and `validation_messages`
    (what the validation layer said, if it is on). Several devices may share one (VulkanDevice.sibling).
    """

    def __init__(
        self, selector: str, validation: bool | str | None, timeout: float | None, subgroup: int | None = None
    ) -> None:
        self.validation_messages: list[str] = []
        self.handle: Any = None
        self.pool: Any = None
        self.timeline: Any = None
        self.process = os.getpid()
        self.gone: Callable[[], VulkanError] | None = None
        """Set once the device is unusable: makes the error that every call raises."""
        self.pending = False
        """Whether unfinished work may use the device's objects; then nothing is destroyed before it has `ended`."""
        self.ticket = self._done = 0  # the last submit, and the last that is known to have finished
        self._running: deque[tuple[int, Callable[[], Cost]]] = deque()  # submits not known to have finished
        self.validation = validation_mode(validation)
        self.instance = Instance(self.validation, self.validation_messages.append)
        try:
            self.info = select(self.instance.devices(), selector)
            self.report = query(self.instance.handle, self.info.handle)
            if subgroup is not None:
                self.report = with_subgroup(self.report, subgroup)
            self.bounds = bounds_of(self.info, timeout, self.report.vendor)
            if self.instance.layer_version is not None:
                self.report = known_to_layer(self.report, self.instance.layer_version)
            self.report.demand(self.info.label)
            self.subgroup_size, self.max_threads = choose_subgroup(self.report), most_threads(self.report)
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        families = vk.vkGetPhysicalDeviceQueueFamilyProperties(self.info.handle)
        compute = [i for i, f in enumerate(families) if f.queueFlags & vk.VK_QUEUE_COMPUTE_BIT]
        if not compute:
            raise VulkanUnavailable(f"{self.info.label} has no queue that computes; choose another device")
        # The first compute family is the general one: every driver lets it copy and take timestamps.
        family = compute[0]
        self.timestamp_bits = families[family].timestampValidBits
        features, extensions, keep = enabled_chain(self.report)
        wanted = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=family, queueCount=1, pQueuePriorities=[1.0])
        info = vk.VkDeviceCreateInfo(
            pNext=features,
            queueCreateInfoCount=1,
            pQueueCreateInfos=[wanted],
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extensions,
        )
        out = ffi.new("VkDevice *")
        check(lib.vkCreateDevice(self.info.handle, ffi.addressof(info), ffi.NULL, out), f"opening {self.info.label}")
        del keep
        self.handle = out[0]
        self.queue = vk.vkGetDeviceQueue(self.handle, family, 0)
        self.pool = vk.vkCreateCommandPool(
            self.handle,
            vk.VkCommandPoolCreateInfo(
                queueFamilyIndex=family, flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
            ),
            None,
        )
        kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
        self.timeline = vk.vkCreateSemaphore(self.handle, vk.VkSemaphoreCreateInfo(pNext=kind), None)
        # Prepared once: a submit or a wait then only sets a number.
        self._semaphore = ffi.new("VkSemaphore[1]", [self.timeline])
        self._value = ffi.new("uint64_t[1]")
        self._signal = ffi.new(
            "VkTimelineSemaphoreSubmitInfo *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO,
                "signalSemaphoreValueCount": 1,
                "pSignalSemaphoreValues": self._value,
            },
        )
        self._awaited = ffi.new("uint64_t[1]")
        self._wait = ffi.new(
            "VkSemaphoreWaitInfo *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO,
                "semaphoreCount": 1,
                "pSemaphores": self._semaphore,
                "pValues": self._awaited,
            },
        )
        self._barrier = ffi.new(
            "VkMemoryBarrier *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                "srcAccessMask": _ALL_WRITES,
                "dstAccessMask": _ALL_READS | _ALL_WRITES,
            },
        )

    def command_buffer(self) -> Any:
        info = vk.VkCommandBufferAllocateInfo(
            commandPool=self.pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        out = ffi.new("VkCommandBuffer *")
        check(lib.vkAllocateCommandBuffers(self.handle, ffi.addressof(info), out), "allocating a command buffer")
        return out[0]

    def free_command(self, command: Any) -> None:
        lib.vkFreeCommandBuffers(self.handle, self.pool, 1, ffi.new("VkCommandBuffer[1]", [command]))

    def barrier_all(self, command: Any) -> None:
        """Make everything before (copies included) visible to everything after, in later submits and on the host. Every
        command buffer ends with it. Host writes are visible to later submits without it."""
        to = _ALL_STAGES | vk.VK_PIPELINE_STAGE_HOST_BIT
        lib.vkCmdPipelineBarrier(command, _ALL_STAGES, to, 0, 1, self._barrier, 0, ffi.NULL, 0, ffi.NULL)

    def submit_info(self, command: Any, times: int, cost: Callable[[], Cost]) -> Submit:
        """Prepare submit(): the same command buffer `times` times, then the ticket. cost: of all runs."""
        if times < 1:
            raise ValueError(f"a plan is submitted 1 or more times, not {times}")
        commands = ffi.new("VkCommandBuffer[]", [command] * times)
        info = ffi.new(
            "VkSubmitInfo *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_SUBMIT_INFO,
                "pNext": self._signal,
                "commandBufferCount": times,
                "pCommandBuffers": commands,
                "signalSemaphoreCount": 1,
                "pSignalSemaphores": self._semaphore,
            },
        )
        return Submit(info, commands, cost)

    def submit_now(self, submit: Submit) -> int:
        """vkQueueSubmit; returns its ticket."""
        if self.gone is not None:
            raise self.gone()
        self._value[0] = self.ticket + 1
        self.check(lib.vkQueueSubmit(self.queue, 1, submit.info, ffi.NULL), "submitting")
        self.ticket += 1
        while self._running and self._running[0][0] <= self._done:
            self._running.popleft()
        self._running.append((self.ticket, submit.cost))
        return self.ticket

    def wait_ticket(self, ticket: int) -> None:
        """Wait until that submit has finished. Raises VulkanLost for a lost device or an exceeded bound, ValueError for
        an unknown ticket."""
        if ticket <= self._done or self.handle is None:
            return
        if self.gone is not None:
            raise self.gone()
        if ticket > self.ticket:
            raise ValueError(f"no such ticket: {ticket}; the last submit was {self.ticket}")
        self._awaited[0] = ticket
        result = lib.vkWaitSemaphores(self.handle, self._wait, _POLL_NS)
        if result == vk.VK_TIMEOUT:
            result = self._wait_long(ticket)
        self.check(result, f"waiting for submit {ticket}")
        self._done = ticket

    def _wait_long(self, ticket: int) -> int:
        """Keep waiting. A submit's bound starts when the submit before it is seen to have finished."""
        reached, since, used = self.reached(), time.monotonic(), time.process_time()
        bound = self._bound(reached, ticket)
        while (result := lib.vkWaitSemaphores(self.handle, self._wait, _POLL_NS)) == vk.VK_TIMEOUT:
            now, at = time.monotonic(), self.reached()
            if at != reached and self.bounds.flat is None:
                reached, since, used, bound = at, now, time.process_time(), self._bound(at, ticket)
            if (given := self.bounds.late(bound, now - since, time.process_time() - used)) is not None:
                raise self._lose(late_message(self.info.label, ticket, given))
        return result

    def _bound(self, reached: int, ticket: int) -> float:
        """Seconds for the submits after `reached`, up to `ticket`."""
        costs = [cost() for at, cost in self._running if reached < at <= ticket]
        return self.bounds.seconds(sum(costs, Cost()))

    def reached(self) -> int:
        """The last finished submit, queried from the device."""
        value = ffi.new("uint64_t *")
        self.check(lib.vkGetSemaphoreCounterValue(self.handle, self.timeline, value), "asking how far it is")
        return int(value[0])

    def check(self, result: int, doing: str) -> None:
        """Raise if a driver call did not return VK_SUCCESS. After a device loss every later call raises."""
        if result == vk.VK_ERROR_DEVICE_LOST:
            raise self._lose(lost_message(self.info.label, doing))
        check(result, doing)

    def _lose(self, message: str) -> VulkanError:
        self.gone, self.pending = partial(VulkanLost, message), True
        self._done = -1  # no later wait succeeds
        return self.gone()

    def settled(self) -> bool:
        """Before closing: wait for everything submitted, within its bound. False where the objects must be kept: work
        is still running, or they are the parent process's."""
        if os.getpid() != self.process:
            return False
        with suppress(VulkanLost):  # `ended` decides below
            self.wait_ticket(self.ticket)
        return self.ended(_POLL_NS)

    def ended(self, nanoseconds: int = 0) -> bool:
        """Whether everything submitted has ended, or the device is lost: then the driver answers at once."""
        self._awaited[0] = self.ticket
        result = lib.vkWaitSemaphores(self.handle, self._wait, nanoseconds)
        self.pending = result not in (vk.VK_SUCCESS, vk.VK_ERROR_DEVICE_LOST)
        return not self.pending

    def forked(self) -> None:
        """In a forked child: nothing may use the device, nor read mapped memory, which may be missing here."""
        self.gone = partial(ForkedDevice, forked_message(self.info.label))
        self._done = -1

    def check_validation(self) -> None:
        """Raise with what the validation layer has reported so far, if anything."""
        if self.validation_messages:
            found = list(dict.fromkeys(self.validation_messages))
            self.validation_messages.clear()
            raise VulkanError(f"the Vulkan validation layer reported {len(found)} problems:\n" + "\n".join(found))

    def close(self) -> None:
        """Destroy the queue's objects, the device and the instance; harmless when called again."""
        if self.handle is not None:
            if self.timeline is not None:
                vk.vkDestroySemaphore(self.handle, self.timeline, None)
            if self.pool is not None:
                vk.vkDestroyCommandPool(self.handle, self.pool, None)
            vk.vkDestroyDevice(self.handle, None)
            self.handle = self.pool = self.timeline = None
            self.gone = partial(VulkanError, f"the device {self.info.label} is closed; open it again")
        self.instance.close()
