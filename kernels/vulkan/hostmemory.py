"""VK_EXT_external_memory_host: a buffer over pages that the host has already."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from hybrid.spec.hostmemory import NotShareable, whole_pages
from kernels.vulkan.api import check, ffi, lib, vk
from kernels.vulkan.memory import Buffer, Memory, Slice

_HOST = 0x80  # VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
_MAPPED = 2 | 4  # host-visible and coherent


def import_pages(memory: Memory, array: np.ndarray, purpose: str) -> Slice:
    """The pages under an array as device memory, for memory.release() to give up. NotShareable where the device or the
    memory do not allow it."""
    if memory.flags("device") & _MAPPED != _MAPPED:
        raise NotShareable("the device has memory of its own: its tensors stay there")
    address, nbytes = whole_pages(array)
    found = lib.vkGetDeviceProcAddr(memory.device, b"vkGetMemoryHostPointerPropertiesEXT")
    if found == ffi.NULL:
        raise NotShareable("the device lacks VK_EXT_external_memory_host")
    _demand_alignment(memory.physical)
    properties = ffi.new("VkMemoryHostPointerPropertiesEXT *")
    properties.sType = vk.VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT
    pointer = ffi.cast("void *", address)
    ask = ffi.cast("PFN_vkGetMemoryHostPointerPropertiesEXT", found)
    check(ask(memory.device, _HOST, pointer, properties), f"asking about host memory at {address:#x}")
    kinds = memory.properties.memoryTypes
    usable = [i for i in range(memory.properties.memoryTypeCount)
              if properties.memoryTypeBits >> i & 1 and kinds[i].propertyFlags & _MAPPED == _MAPPED]
    if not usable:
        raise NotShareable("the device imports host memory, but into no coherent type")
    external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=_HOST)
    handle = memory.buffer(nbytes, external)
    imported = vk.VkImportMemoryHostPointerInfoEXT(handleType=_HOST, pHostPointer=pointer)
    info = vk.VkMemoryAllocateInfo(pNext=imported, allocationSize=nbytes, memoryTypeIndex=usable[0])
    out = ffi.new("VkDeviceMemory *")
    result = lib.vkAllocateMemory(memory.device, ffi.addressof(info), ffi.NULL, out)
    if result != 0:
        vk.vkDestroyBuffer(memory.device, handle, None)
        check(result, f"importing {nbytes} bytes of host memory")
    vk.vkBindBufferMemory(memory.device, handle, out[0], 0)
    block = Buffer(nbytes, "imported", handle, out[0], array.reshape(-1).view(np.uint8))
    memory.imported.append(block)
    memory.held[purpose] = memory.held.get(purpose, 0) + array.nbytes
    return Slice(block, 0, array.nbytes)


def _demand_alignment(physical: Any) -> None:
    host = vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
    asked = vk.VkPhysicalDeviceProperties2(pNext=host)
    lib.vkGetPhysicalDeviceProperties2(physical, ffi.addressof(asked))
    if host.minImportedHostPointerAlignment > mmap.PAGESIZE:
        raise NotShareable(f"the device imports memory in units of {host.minImportedHostPointerAlignment} bytes, "
                           f"pages have {mmap.PAGESIZE}")
