"""Provenance of measurements: device, driver, kernels."""

from __future__ import annotations

from typing import Any


def provenance(device: str) -> str:
    """`measured`, or a warning for a simulated device, by the device's name."""
    if "sim-" in device:
        return "measured on this host; its NPU is simulated, so these are no speeds of an NPU"
    return "measured"


def driver_of(device: Any) -> str:
    """Driver and version, from the device's report; NumPy's version for a device without one."""
    import numpy as np

    report = getattr(device, "report", None)
    return f"NumPy {np.__version__}" if report is None else str(report.driver)


def kernels_of(device: Any) -> str | None:
    """Digest of the SPIR-V that a Vulkan device runs; None for others."""
    from hybrid.kernels.vulkan.kernel import kernels_digest

    return kernels_digest() if device.backend == "vulkan" else None
