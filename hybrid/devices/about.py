"""What a measurement says of the device that it was made on."""

from __future__ import annotations

from typing import Any


def provenance(device: str) -> str:
    """What times of a device, by its name, are."""
    if "sim-" in device:
        return "measured on this host; its NPU is simulated, so these are no speeds of an NPU"
    return "measured"


def driver_of(device: Any) -> str:
    """Driver and version of a Vulkan device; NumPy's of the cpu."""
    import numpy as np

    return f"NumPy {np.__version__}" if device.backend == "cpu" else str(device.report.driver)


def kernels_of(device: Any) -> str | None:
    """Digest of the SPIR-V that a Vulkan device runs; None for the cpu."""
    from hybrid.kernels.vulkan.kernel import kernels_digest

    return None if device.name == "cpu" else kernels_digest()
