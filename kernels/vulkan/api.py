"""The `vulkan` package (cffi over the loader), its absence and its errors.

`vk` has constructors, constants and wrapped functions; `lib` the driver's own, for what is called often.
"""

from __future__ import annotations

import importlib
from typing import Any

vk: Any = None
lib: Any = None
ffi: Any = None
MISSING = ""
try:
    vk = importlib.import_module("vulkan")
    lib, ffi = vk.lib, vk.ffi
except ImportError as error:
    MISSING = f"the Python package 'vulkan' cannot be imported ({error}); do: pip install vulkan"
except OSError:  # the package opens the loader when it is imported
    MISSING = "no Vulkan loader (libvulkan.so.1); on Debian do: apt-get install libvulkan1 mesa-vulkan-drivers"

INSTALL = "on Debian: apt-get install mesa-vulkan-drivers libvulkan1 (or the driver of your GPU)"


class VulkanUnavailable(RuntimeError):
    """No usable Vulkan device; the message says what to install or to choose."""


class VulkanError(RuntimeError):
    """A Vulkan call failed, or a request is beyond what the device allows."""


class DeviceLost(VulkanError):
    """The driver gave the device up (a fault or a hang in a kernel); open it again."""


class OutOfDeviceMemory(VulkanError, MemoryError):
    """More memory was asked for than the device has left."""


def require() -> None:
    """Raise VulkanUnavailable where the bindings or the loader are missing."""
    if vk is None:
        raise VulkanUnavailable(f"Vulkan is not available: {MISSING}")


def result_name(result: int) -> str:
    """VK_ERROR_... of a VkResult."""
    for name in dir(vk):
        if name.startswith(("VK_ERROR_", "VK_TIMEOUT", "VK_INCOMPLETE")) and getattr(vk, name) == result:
            return name
    return f"VkResult {result}"


def check(result: int, doing: str) -> None:
    """Raise if a driver call did not return VK_SUCCESS."""
    if result == 0:
        return
    name = result_name(result)
    if name == "VK_ERROR_DEVICE_LOST":
        raise DeviceLost(f"the Vulkan device was lost while {doing}: a kernel faulted or ran too long; close it, open "
                         "it again, and look for the cause with HYBRID_VULKAN_VALIDATION=1")
    kind = OutOfDeviceMemory if name.startswith("VK_ERROR_OUT_OF") else VulkanError
    raise kind(f"{name} while {doing}")
