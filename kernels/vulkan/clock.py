"""VK_EXT_calibrated_timestamps: device ticks on the host's clock, so that a trace has one time axis."""

from __future__ import annotations

from typing import Any

from hybrid.kernels.vulkan.api import check, ffi, lib, vk

_INFO = 1000184000  # VK_STRUCTURE_TYPE_CALIBRATED_TIMESTAMP_INFO_EXT, which the vulkan package numbers wrongly
_DOMAINS = ("VK_TIME_DOMAIN_DEVICE_KHR", "VK_TIME_DOMAIN_CLOCK_MONOTONIC_KHR")


def host_seconds(device: Any, ticks: int) -> float | None:
    """When a timestamp of `device` (a VulkanDevice) was taken, in seconds of time.perf_counter (on Linux:
    CLOCK_MONOTONIC). None where the driver does not calibrate."""
    if not device.has("calibrated_timestamps"):
        return None
    found = lib.vkGetDeviceProcAddr(device.handle, b"vkGetCalibratedTimestampsEXT")
    if found == ffi.NULL:
        return None
    ask = ffi.cast("PFN_vkGetCalibratedTimestampsEXT", found)
    infos = ffi.new("VkCalibratedTimestampInfoEXT[2]")
    for info, domain in zip(infos, _DOMAINS, strict=True):
        info.sType, info.timeDomain = _INFO, getattr(vk, domain)
    now, deviation = ffi.new("uint64_t[2]"), ffi.new("uint64_t *")
    check(ask(device.handle, 2, infos, now, deviation), "calibrating timestamps")
    mask = (1 << device.timestamp_bits) - 1
    ago = (now[0] - ticks) & mask
    return float(now[1] * 1e-9 - ago * device.report.limits.timestamp_period * 1e-9)
