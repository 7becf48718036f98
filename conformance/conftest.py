"""Fixtures and profiles of the suite.

HYBRID_CONFORMANCE=long        many random examples, every named workload and dtype combination
HYBRID_REQUIRE_VULKAN=1        a missing Vulkan device is a failure, not a skip
HYBRID_VULKAN_DEVICE=vulkan:1  which one
HYBRID_VULKAN_VALIDATION=1     with the validation layer; any message fails the test in which it appears
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from conformance.devices import Devices
from conformance.expected import apply_expected
from conformance.profile import LONG

_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile("ci", derandomize=True, max_examples=5, deadline=None, database=None,
                          suppress_health_check=_SLOW)  # fmt: skip
settings.register_profile("long", max_examples=150, deadline=None, suppress_health_check=_SLOW, print_blob=True)
settings.load_profile("long" if LONG else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    apply_expected(items)


@pytest.fixture(scope="session", autouse=True)
def what_was_proved(request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]) -> None:
    """With --junitxml: which kernels, on which device, by which command (perf.record asks)."""
    if request.config.getoption("xmlpath", None) is None:
        return
    from kernels.vulkan.instance import list_devices, select
    from perf.record import kernels_digest

    device = select(list_devices(), os.environ.get("HYBRID_VULKAN_DEVICE", "auto"))
    record_testsuite_property("device", device.name)
    record_testsuite_property("kernels", kernels_digest())
    record_testsuite_property("command", " ".join(["python -m pytest", *request.config.invocation_params.args]))


@pytest.fixture(scope="session")
def open_devices() -> Iterator[Devices]:
    opened = Devices()
    yield opened
    opened.close()


@pytest.fixture
def devices(open_devices: Devices) -> Iterator[Devices]:
    """The session's devices; whatever the validation layer says during a test fails that test."""
    yield open_devices
    open_devices.inspect()
