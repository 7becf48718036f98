"""The Vulkan instance: physical devices in order of preference, and validation messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybrid.kernels.vulkan.api import INSTALL, VulkanUnavailable, check, ffi, lib, require, vk
from hybrid.kernels.vulkan.features import Report, query

LAYER = "VK_LAYER_KHRONOS_validation"
KINDS = {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu", 0: "other"}
ORDER = ("discrete", "integrated", "virtual", "other", "cpu")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A physical device. `index` is its place in the order of preference: real GPUs before CPU drivers."""

    index: int
    name: str
    kind: str
    handle: Any = None

    @property
    def label(self) -> str:
        return f"vulkan:{self.index} ({self.name})"


def prefer(found: list[tuple[str, str, Any]]) -> list[DeviceInfo]:
    """Sort (name, kind, handle) by kind, drivers' order within it, and number them."""
    ranked = sorted(found, key=lambda d: ORDER.index(d[1]))
    return [DeviceInfo(i, name, kind, handle) for i, (name, kind, handle) in enumerate(ranked)]


def select(devices: list[DeviceInfo], selector: str) -> DeviceInfo:
    """`auto` or `vulkan`: the first; `vulkan:N` or `N`: that one; `gpu`: the first that is no CPU driver."""
    listed = ", ".join(d.label for d in devices) or "none"
    if selector == "gpu":
        real = [d for d in devices if d.kind != "cpu"]
        if not real:
            raise VulkanUnavailable(
                f"no Vulkan driver answers for a real GPU (found: {listed}); install the driver of "
                "your GPU, or choose --device vulkan for the CPU driver"
            )
        return real[0]
    if not devices:
        raise VulkanUnavailable(f"no Vulkan driver answers; {INSTALL}")
    if selector in ("auto", "vulkan"):
        return devices[0]
    number = selector.removeprefix("vulkan:")
    if not number.isdigit():
        raise ValueError(f"unknown Vulkan device {selector!r}; say auto, gpu, vulkan or vulkan:N. Here: {listed}")
    if int(number) >= len(devices):
        raise VulkanUnavailable(f"there is no vulkan:{number}; here: {listed}")
    return devices[int(number)]


def validation_mode(wanted: bool | str | None) -> str:
    """'' (off), 'on', or 'sync' (also synchronisation hazards), from the argument or HYBRID_VULKAN_VALIDATION."""
    if wanted is None:
        wanted = os.environ.get("HYBRID_VULKAN_VALIDATION", "")
    if wanted == "sync":
        return "sync"
    return "on" if wanted not in (False, "", "0") else ""


class Instance:
    """Owns the VkInstance and, with validation, its messenger. `on_message` receives what the layer reports."""

    def __init__(self, validation: str = "", on_message: Callable[[str], None] | None = None) -> None:
        require()
        self.handle: Any = None
        self.messenger: Any = None
        self.layer_version: int | None = None
        """specVersion of the validation layer, if enabled."""
        layers = [LAYER] if validation else []
        if validation:
            versions = {p.layerName: p.specVersion for p in vk.vkEnumerateInstanceLayerProperties()}
            self.layer_version = versions.get(LAYER)
        if validation and self.layer_version is None:
            raise VulkanUnavailable(
                f"validation was asked for, but {LAYER} is not installed; on Debian: apt-get "
                "install vulkan-validationlayers"
            )
        app = vk.VkApplicationInfo(
            pApplicationName="hybrid-kernels", pEngineName="hybrid-kernels", apiVersion=vk.VK_MAKE_VERSION(1, 3, 0)
        )
        chain = None
        if validation:
            chain = self._messenger_info(on_message or (lambda text: None))
            if validation == "sync":
                more = [vk.VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT]
                chain = vk.VkValidationFeaturesEXT(
                    pNext=chain, pEnabledValidationFeatures=more, enabledValidationFeatureCount=1
                )
        info = vk.VkInstanceCreateInfo(
            pNext=chain,
            pApplicationInfo=app,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=layers,
            enabledExtensionCount=len(layers),
            ppEnabledExtensionNames=["VK_EXT_debug_utils"] if validation else [],
        )
        try:
            self.handle = vk.vkCreateInstance(info, None)
        except vk.VkErrorIncompatibleDriver:
            raise VulkanUnavailable(f"no Vulkan driver answers; {INSTALL}") from None
        if validation:
            self._create_messenger()

    def _messenger_info(self, on_message: Callable[[str], None]) -> Any:
        def report(severity: int, kinds: int, data: Any, user: Any) -> int:
            on_message(ffi.string(data.pMessage).decode(errors="replace"))
            return 0

        info = vk.VkDebugUtilsMessengerCreateInfoEXT(
            messageSeverity=vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
            | vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
            messageType=vk.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT,
        )
        # The package's own pfn hook is process-wide; every instance here needs its own callback.
        self._callback = ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", report)
        info.pfnUserCallback = self._callback
        self._info = info
        return info

    def _function(self, name: str) -> Any:
        found = lib.vkGetInstanceProcAddr(self.handle, name.encode())
        return ffi.cast(f"PFN_{name}", found)

    def _create_messenger(self) -> None:
        out = ffi.new("VkDebugUtilsMessengerEXT *")
        self._info.pNext = ffi.NULL
        create = self._function("vkCreateDebugUtilsMessengerEXT")
        check(create(self.handle, ffi.addressof(self._info), ffi.NULL, out), "creating the validation messenger")
        self.messenger = out[0]

    def devices(self) -> list[DeviceInfo]:
        """Physical devices, real GPUs first."""
        try:
            handles = list(vk.vkEnumeratePhysicalDevices(self.handle))
        except vk.VkErrorInitializationFailed:
            handles = []
        found = []
        for h in handles:
            p = vk.vkGetPhysicalDeviceProperties(h)
            found.append((p.deviceName, KINDS.get(p.deviceType, "other"), h))
        return prefer(found)

    def close(self) -> None:
        if self.messenger is not None:
            self._function("vkDestroyDebugUtilsMessengerEXT")(self.handle, self.messenger, ffi.NULL)
            self.messenger = None
        if self.handle is not None:
            vk.vkDestroyInstance(self.handle, None)
            self.handle = None


def list_devices() -> list[DeviceInfo]:
    """Every Vulkan device of this machine in the order of preference. Raises VulkanUnavailable without a loader."""
    return [device for device, _ in survey()]


def survey() -> list[tuple[DeviceInfo, Report]]:
    """Every device with its features, extensions, limits and memory heaps: what `hybrid.doctor` prints."""
    instance = Instance()
    try:
        return [(DeviceInfo(d.index, d.name, d.kind), query(instance.handle, d.handle)) for d in instance.devices()]
    finally:
        instance.close()
