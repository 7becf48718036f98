"""Buffers over existing memory: the host's pages (VK_EXT_external_memory_host), or what another driver exported
(VK_KHR_external_memory_fd, dma-bufs with VK_EXT_external_memory_dma_buf)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from hybrid.core.hostmemory import NotShareable, pages, whole_pages
from hybrid.kernels.vulkan.api import check, ffi, lib, vk
from hybrid.kernels.vulkan.memory import Buffer, Memory, Slice

_HOST = 0x80  # VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
OPAQUE_FD, DMA_BUF = 0x1, 0x200  # VK_EXTERNAL_MEMORY_HANDLE_TYPE_*
_MAPPED = 2 | 4  # host-visible and coherent


def import_pages(memory: Memory, array: np.ndarray, purpose: str) -> Slice:
    """Import the pages under an array as device memory; free them with memory.release(). NotShareable where the device
    or the memory does not allow it."""
    if memory.flags("device") & _MAPPED != _MAPPED:
        raise NotShareable("the device has memory of its own: its tensors stay there")
    address, nbytes = whole_pages(array)
    _demand_function(memory, b"vkGetMemoryHostPointerPropertiesEXT", "VK_EXT_external_memory_host")
    _demand_alignment(memory.physical)
    pointer = ffi.cast("void *", address)
    usable = _coherent(
        memory,
        _types(
            memory,
            "vkGetMemoryHostPointerPropertiesEXT",
            "VkMemoryHostPointerPropertiesEXT",
            vk.VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT,
            _HOST,
            pointer,
        ),
    )
    imported = vk.VkImportMemoryHostPointerInfoEXT(handleType=_HOST, pHostPointer=pointer)
    return _allocate(memory, imported, _HOST, nbytes, usable, array, purpose)


def import_fd(
    memory: Memory, has: Callable[[str], bool], fd: int, array: np.ndarray, purpose: str, kind: int = DMA_BUF
) -> Slice:
    """Import another driver's buffer as device memory. `array` is its mapping; the caller keeps the descriptor. kind:
    handle type. An OPAQUE_FD comes from a device of the same driver and keeps its memory type."""
    for name in ("VK_KHR_external_memory_fd", *(["VK_EXT_external_memory_dma_buf"] if kind == DMA_BUF else [])):
        if not has(name):
            raise NotShareable(f"the device lacks {name}")
    usable = memory.types["device"]
    if kind == DMA_BUF:
        usable = _coherent(
            memory,
            _types(
                memory,
                "vkGetMemoryFdPropertiesKHR",
                "VkMemoryFdPropertiesKHR",
                vk.VK_STRUCTURE_TYPE_MEMORY_FD_PROPERTIES_KHR,
                kind,
                fd,
            ),
        )
    own = os.dup(fd)  # owned by the driver once it is imported
    try:
        return _allocate(
            memory,
            vk.VkImportMemoryFdInfoKHR(handleType=kind, fd=own),
            kind,
            pages(array.nbytes),
            usable,
            array,
            purpose,
        )
    except BaseException:
        os.close(own)
        raise


def _types(memory: Memory, function: str, struct: str, kind: int, handle_type: int, handle: Any) -> int:
    """Bits of the memory types that an external handle may be imported into."""
    properties = ffi.new(f"{struct} *")
    properties.sType = kind
    ask = ffi.cast(f"PFN_{function}", lib.vkGetDeviceProcAddr(memory.device, function.encode()))
    check(
        ask(memory.device, handle_type, handle, properties), f"asking about memory that is to be imported ({function})"
    )
    return int(properties.memoryTypeBits)


def _coherent(memory: Memory, bits: int) -> int:
    kinds = memory.properties.memoryTypes
    for i in range(memory.properties.memoryTypeCount):
        if bits >> i & 1 and kinds[i].propertyFlags & _MAPPED == _MAPPED:
            return i
    raise NotShareable("the device imports this memory, but into no coherent type")


def _allocate(
    memory: Memory, imported: Any, kind: int, nbytes: int, memory_type: int, array: np.ndarray, purpose: str
) -> Slice:
    """A buffer over imported memory; `array` is its host mapping."""
    handle = memory.buffer(nbytes, vk.VkExternalMemoryBufferCreateInfo(handleTypes=kind))
    info = vk.VkMemoryAllocateInfo(pNext=imported, allocationSize=nbytes, memoryTypeIndex=memory_type)
    out = ffi.new("VkDeviceMemory *")
    result = lib.vkAllocateMemory(memory.device, ffi.addressof(info), ffi.NULL, out)
    if result != 0:
        vk.vkDestroyBuffer(memory.device, handle, None)
        check(result, f"importing {nbytes} bytes of memory")
    vk.vkBindBufferMemory(memory.device, handle, out[0], 0)
    block = Buffer(nbytes, "imported", handle, out[0], array.reshape(-1).view(np.uint8))
    memory.imported.append(block)
    memory.held[purpose] = memory.held.get(purpose, 0) + array.nbytes
    return Slice(block, 0, array.nbytes)


def _demand_function(memory: Memory, name: bytes, extension: str) -> None:
    if lib.vkGetDeviceProcAddr(memory.device, name) == ffi.NULL:
        raise NotShareable(f"the device lacks {extension}")


def _demand_alignment(physical: Any) -> None:
    host = vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
    asked = vk.VkPhysicalDeviceProperties2(pNext=host)
    lib.vkGetPhysicalDeviceProperties2(physical, ffi.addressof(asked))
    if host.minImportedHostPointerAlignment > mmap.PAGESIZE:
        raise NotShareable(
            f"the device imports memory in units of {host.minImportedHostPointerAlignment} bytes, "
            f"pages have {mmap.PAGESIZE}"
        )
