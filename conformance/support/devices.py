"""Devices for tests, opened once per process and option. A missing Vulkan device is reported."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import pytest

from conformance.support.profile import LONG
from hybrid.core.device import Device
from hybrid.devices.multi import MultiDevice
from hybrid.devices.opening import Opened, beside
from hybrid.harness import GUARD as GUARD  # tests take it from here
from hybrid.planning.passes import capabilities_of
from hybrid.spec.fields import BackendName
from hybrid.spec.schedule import Schedule

T = TypeVar("T")
BACKENDS: tuple[BackendName, ...] = ("cpu", "vulkan")
INTERPRETED = "interpreted"
"""A backend beside these, and a value of HYBRID_VULKAN_DEVICE: a Vulkan device whose kernels NumPy runs, as on a GPU
with matrix units (conformance/harness/interpreter)."""
SHARE = 16
"""In the short profile one test of matrix units in so many is interpreted."""
OP_BACKENDS: tuple[BackendName, ...] = (*BACKENDS, "npu")  # the NPU runs single operations, in the simulator


class Devices:
    """get(backend, **options) -> an open device. After each test `inspect()` asks the validation layer for messages."""

    def __init__(self) -> None:
        self._open: dict[tuple[Any, ...], Any] = {}

    def get(self, backend: str, **options: Any) -> Any:
        key = (backend, *sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()))
        if key not in self._open:
            self._open[key] = open_backend(backend, **options)
        return self._open[key]

    def inspect(self) -> None:
        """Raise if the Vulkan validation layer has reported anything (HYBRID_VULKAN_VALIDATION=1)."""
        for device in self._open.values():
            check_validation(device)

    def close(self) -> None:
        devices, self._open = list(self._open.values()), {}
        for device in devices:
            device.close()


def open_backend(backend: str, **options: Any) -> Device:
    """A device of a backend. Without Vulkan: skipped with the reason, or failed under HYBRID_REQUIRE_VULKAN=1."""
    if backend == "cpu":
        from hybrid.kernels.oracle.device import CpuDevice

        return CpuDevice(**options)
    if backend == "npu":
        from hybrid.kernels.npu.device import NpuDevice

        return NpuDevice("sim", **options)
    from hybrid.kernels.vulkan.device import VulkanUnavailable, open_device

    selector = os.environ.get("HYBRID_VULKAN_DEVICE", "auto")
    try:
        if INTERPRETED in (backend, selector):
            from hybrid.harness.interpreter.device import InterpretedDevice

            return InterpretedDevice("auto", **options)
        return open_device(selector, **options)
    except VulkanUnavailable as error:
        without_vulkan(error)


_kept: list[Any] = []


@atexit.register
def _close_kept() -> None:
    while _kept:
        _kept.pop().close()


def shared_device(backend: str, **options: Any) -> Any:
    """A device for a test that needs no VkDevice of its own: on Vulkan a sibling of one that the process keeps, so that
    pipelines are built once. In the short profile it has no validation layer; that runs with the commands' whole
    models, every operation and the runtime's tests. options: those of VulkanDevice that a sibling may set. Skips or
    fails as open_backend does."""
    if backend != "vulkan":
        return open_backend(backend, **options)
    if _kept and _kept[0]._queue.gone is not None:  # a device loss affects all siblings
        _close_kept()
    if not _kept:
        _kept.append(open_backend("vulkan", validation=None if LONG else False))
    return _kept[0].sibling(**options)


def for_model(backend: str, schedule: Schedule | None = None) -> Opened:
    """The device argument for hybrid.load: a shared one, with sim-npu1 where the schedule places steps on it."""
    device = shared_device(backend)
    opened = Opened(device, device)
    return opened if schedule is None else beside(opened, schedule, "sim")


def main_device(device: Any) -> Any:
    """The main device of a pair, or the device itself: for attributes of its backend."""
    return device.main if isinstance(device, MultiDevice) else device


def check_validation(device: Any) -> None:
    """Raise if the Vulkan validation layer has reported anything of a device."""
    main = main_device(device)
    if main.backend == "vulkan":
        main.check_validation()


def own_memory(device: Any) -> bool:
    """Whether a device computes on memory that the host cannot map: a discrete GPU."""
    main = main_device(device)
    return main.backend == "vulkan" and main.memory_pool.flags("device") & 2 == 0  # VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT


def planned_on(dry: Any) -> dict[str, Any]:
    """Footprint's arguments for a device, as kernels.vulkan.dry records for it."""
    from hybrid.kernels.vulkan.dry import scratch_bytes

    return {
        "capabilities": capabilities_of(dry.has),
        "beside": lambda plan: scratch_bytes(plan, dry),
        "again": dry.second_layout,
    }


def without_vulkan(error: Exception) -> NoReturn:
    """Skip the running test, or fail it under HYBRID_REQUIRE_VULKAN=1."""
    if os.environ.get("HYBRID_REQUIRE_VULKAN") == "1":
        pytest.fail(f"HYBRID_REQUIRE_VULKAN=1, but no Vulkan device: {error}", pytrace=False)
    pytest.skip(f"no Vulkan device: {error}")


def need_compiler() -> None:
    """Skip the running test where shaders cannot be compiled, or fail it under HYBRID_REQUIRE_COMPILER=1."""
    if importlib.util.find_spec("slangpy") is None:
        without_compiler("mutated and new shaders need the compiler: pip install -e .[kernels]")


def need_cxx() -> None:
    """The same for the C++ compiler of the NPU's tile kernels."""
    from hybrid.kernels.npu.compile import NoCompiler, gxx

    try:
        gxx()
    except NoCompiler as error:
        without_compiler(str(error))


def without_compiler(said: str) -> NoReturn:
    """Skip the running test, or fail it under HYBRID_REQUIRE_COMPILER=1."""
    if os.environ.get("HYBRID_REQUIRE_COMPILER") == "1":
        pytest.fail(f"HYBRID_REQUIRE_COMPILER=1, but {said}", pytrace=False)
    pytest.skip(said)


def open_another(device: Any, **options: Any) -> Any:
    """A Vulkan device of the same kind."""
    return open_backend(INTERPRETED if is_interpreted(device) else device.backend, **options)


def open_for_binding(device: Any, **options: Any) -> Any:
    """A Vulkan device of the same kind and options for a binding that may be wrong. On a CPU driver and where NumPy
    interprets it shares the pipelines, which take longer to compile than to run; a GPU may be lost."""
    if device.info.kind == "cpu" or is_interpreted(device):
        return device.sibling(**options)
    return open_another(device, **options)


def is_interpreted(device: Any) -> bool:
    return getattr(device, "interpreted", False)


class MatrixDevices:
    """devices(**options) -> a Vulkan device with matrix units: this machine's, else the interpreter on the available
    driver. The short profile interprets a share of the tests, which changes with the kernels."""

    def __init__(self, devices: Devices, test: str) -> None:
        self.devices, self.test = devices, test

    def __call__(self, **options: Any) -> Any:
        device = self.devices.get("vulkan", **options)
        if has_matrix_units(device):
            return device
        if not interpreted_now(self.test):
            pytest.skip(f"{device.name} has no matrix units; HYBRID_CONFORMANCE=long interprets this")
        return self.devices.get(INTERPRETED, **options)


def has_matrix_units(device: Any) -> bool:
    """Whether kernels for matrix units are ever selected on a Vulkan device."""
    return device.has("f16_matrices") and device.subgroup_size == 32


def share_of(device: Any, cases: Sequence[T], share: int) -> Sequence[T]:
    """All cases. Of interpreted ones, one in so many, which change with the kernels."""
    from hybrid.kernels.vulkan.kernel import kernels_digest

    return cases[int(kernels_digest(), 16) % share :: share] if is_interpreted(device) else cases


def interpreted_now(test: str) -> bool:
    """Whether the running profile interprets this test of matrix units."""
    from hybrid.kernels.vulkan.kernel import kernels_digest

    return LONG or int.from_bytes(hashlib.sha256(f"{kernels_digest()} {test}".encode()).digest()[:4]) % SHARE == 0


def spy_kernels(device: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A set that collects the names of the kernels that a Vulkan device selects from now on."""
    chosen: set[str] = set()
    choose = device.kernel

    def kernel(name: str, **constants: int) -> Any:
        chosen.add(name)
        return choose(name, **constants)

    monkeypatch.setattr(device, "kernel", kernel)
    return chosen


def left_zero(device: Any, program: Any) -> bool:
    """Whether the memory that a Vulkan program's kernels expect and leave zero is zero. Does not wait."""
    for piece in program.zeroed:
        held = np.full(piece.size, 0xFF, np.uint8)
        device.transfer.download(piece, held)
        if held.any():
            return False
    return True


class Driver:
    """The Vulkan driver as kernels.vulkan.timeline calls it (its `lib`), with some functions replaced."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        from hybrid.kernels.vulkan.api import lib

        self._functions, self._driver = functions, lib

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(self._driver, name)
