"""Fixtures and profiles of the suite.

HYBRID_CONFORMANCE=long         many random examples, every named workload and dtype combination
HYBRID_CONFORMANCE=quick        a share of each test's parameters, no slow tests (conformance/support/profile.py)
HYBRID_REQUIRE_VULKAN=1         a missing Vulkan device is a failure, not a skip
HYBRID_REQUIRE_COMPILER=1       so is a missing shader compiler (for mutated and new shaders) or C++ compiler
HYBRID_VULKAN_DEVICE=vulkan:1   the Vulkan device to test
HYBRID_VULKAN_VALIDATION=1      with the validation layer; any message fails the test in which it appears
HYBRID_ROUGH_PRODUCTS=1         cpu's products sum in an order that depends on their shape (conformance/support/rough.py)
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.junitxml import xml_key
from hypothesis import HealthCheck, Phase, settings

from conformance.support import proof, rough
from conformance.support.devices import Devices, MatrixDevices, need_cxx, without_compiler
from conformance.support.expected import apply_expected
from conformance.support.profile import PROFILE, QUICK, quick

_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile(
    "ci", derandomize=True, max_examples=1 if QUICK else 3, deadline=None, database=None, suppress_health_check=_SLOW
)
settings.register_profile("long", max_examples=150, deadline=None, suppress_health_check=_SLOW, print_blob=True)
settings.register_profile("quick", settings.get_profile("ci"))
settings.register_profile("trial", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(PROFILE)


# Mesa caches compiled kernels in XDG_CACHE_HOME, which some tests move: the shared part is compiled once.
os.environ.setdefault("MESA_SHADER_CACHE_DIR", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
# Compiling a tile kernel of the NPU takes longer than most tests' use of it; inlining saves nothing there.
os.environ.setdefault("CXXFLAGS", "-Og -finline-small-functions -finline-functions")
# Plans, cases and checkpoints are kept: the default threshold of 700 objects spends a tenth of the time on collection.
gc.set_threshold(20_000)
if rough.wanted():
    rough.install()
proof.leave_out()


def pytest_sessionstart(session: pytest.Session) -> None:
    """A run on modules of other sources would prove the wrong kernels."""
    if hasattr(session.config, "workerinput"):
        return
    from hybrid.kernels.vulkan.build import RENEW, BuildError, stale

    try:
        old = stale()
    except BuildError as error:
        raise pytest.UsageError(str(error)) from None
    if old:
        more = f" and {len(old) - 1} more" if len(old) > 1 else ""
        raise pytest.UsageError(f"kernels/vulkan/spirv: {old[0]}{more} was built from other sources: run {RENEW}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    apply_expected(items)
    if QUICK:
        items[:] = quick(items)


def pytest_collection_finish() -> None:
    # freeze thousands of tests and modules: otherwise each collection scans them, which takes a third of a second
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --junitxml, record which kernels were proved, on which device, by which command (read by perf.record). The
    process that writes the file records it, so that a run on many processes has it too."""
    xml = session.config.stash.get(xml_key, None)
    if xml is None:
        return
    from hybrid.kernels.vulkan.api import VulkanUnavailable
    from hybrid.kernels.vulkan.instance import list_devices, select
    from hybrid.kernels.vulkan.kernel import kernels_digest

    try:
        device = select(list_devices(), os.environ.get("HYBRID_VULKAN_DEVICE", "auto"))
    except VulkanUnavailable:
        return  # the file then proves no kernel, and perf.record reports what is missing
    xml.add_global_property("device", device.name)
    xml.add_global_property("kernels", kernels_digest())
    xml.add_global_property("command", " ".join(["python -m pytest", *session.config.invocation_params.args]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _compiled()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _compiled()


def _compiled() -> Iterator[None]:
    """Skip the test at its first tile kernel where no compiler is installed: a simulated NPU compiles kernels on
    demand."""
    try:
        return (yield)
    except RuntimeError as error:
        npu = sys.modules.get("hybrid.kernels.npu.compile")
        if npu is None or not isinstance(error, npu.NoCompiler):
            raise
        without_compiler(str(error))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report where the tests of matrix units ran, if they did not run here."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return  # reading the records takes longer than running a mutant's tests
    from conformance.support import units

    if wanted := units.left_out((r.nodeid, r.longrepr[2]) for r in skipped if isinstance(r.longrepr, tuple)):
        from hybrid.kernels.vulkan.kernel import kernels_digest
        from hybrid.perf.record.schema import load_records

        terminalreporter.write_line(units.elsewhere(wanted, load_records(), kernels_digest()))


@pytest.fixture(scope="session")
def open_devices() -> Iterator[Devices]:
    opened = Devices()
    yield opened
    opened.close()


@pytest.fixture
def devices(open_devices: Devices) -> Iterator[Devices]:
    """The session's devices. Any message of the validation layer during a test fails that test."""
    yield open_devices
    open_devices.inspect()


@pytest.fixture
def matrices(devices: Devices, request: pytest.FixtureRequest) -> MatrixDevices:
    """Vulkan devices with matrix units: this machine's, else interpreted ones."""
    return MatrixDevices(devices, request.node.nodeid)


@pytest.fixture
def sim_machine() -> Iterator[None]:
    """An open simulated NPU without pending faults; what a test changes in it is reset after the test."""
    from hybrid.kernels.npu import xrt_sim

    need_cxx()
    xrt_sim.reset()
    yield
    xrt_sim.reset()
