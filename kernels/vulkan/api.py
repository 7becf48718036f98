"""The `vulkan` package (cffi over the loader) and the backend's errors.

`vk`: constructors, constants and wrapped functions. `lib`: raw driver functions, for frequent calls.
"""

from __future__ import annotations

import importlib
from typing import Any

from hybrid.core.errors import DeviceLost

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


class VulkanLost(VulkanError, DeviceLost):
    """The driver reported the device as lost, or work exceeded its time bound: close the device and open it again."""


class ForkedDevice(VulkanError):
    """The device was opened by the process from which this one was forked."""


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
        raise VulkanLost(lost_message("the Vulkan device", doing))
    kind = OutOfDeviceMemory if name.startswith("VK_ERROR_OUT_OF") else VulkanError
    raise kind(f"{name} while {doing}")


def forked_message(device: str) -> str:
    return (
        f"{device} was open when this process was forked from its parent, and drivers do not survive that: load the model in "
        "a spawned process (multiprocessing.set_start_method('spawn')), or fork before it is loaded"
    )


def late_message(device: str, ticket: int, seconds: float) -> str:
    waited = f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    return (
        f"{device} has not finished submit {ticket} within {waited}, its bound (HYBRID_VULKAN_TIMEOUT sets the seconds): a "
        "kernel or the driver hangs, or another program holds the GPU (the kernel log, dmesg, may say which); "
        "close the model and load it again; its memory is not freed until the work ends"
    )


def lost_message(device: str, doing: str) -> str:
    """One line: what happened, what it may come from, what to do."""
    return (
        f"{device} was lost while {doing}: the driver's watchdog stopped a kernel that ran too long, a fault of this or "
        "another program reset the GPU, its memory ran out, or it was removed or suspended (the kernel log, dmesg, says "
        "which); close the model and load it again"
    )
