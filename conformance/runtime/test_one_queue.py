"""Devices on one queue: their submits run in one order, and they share no other state."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.runtime.test_vulkan_runtime import BINDINGS, SPIRV, X, chain, decl, open_toys, prepare
from hybrid.core.plan import TensorDecl
from hybrid.kernels.vulkan.api import VulkanError


def test_devices_on_one_queue_run_in_order_and_share_no_state() -> None:
    device = open_toys()
    other = device.sibling(bindings=BINDINGS, spirv=SPIRV)
    try:
        programs = []
        for one, factor in ((device, 2.0), (other, 3.0)):
            prepare(one)
            programs.append(one.compile(chain({"scale": factor})))
        before = device.counters.dispatches
        tickets = [p.submit() for p in (*programs, *programs)]
        assert tickets == sorted(set(tickets)), "one order"
        other.wait(tickets[3])
        device.wait(tickets[2])
        assert device.counters.dispatches == before + 2 * programs[0].dispatches, "each counts its own"
        np.testing.assert_array_equal(device.read("y").array, 2 * X)
        np.testing.assert_array_equal(other.read("y").array, 3 * X)
    finally:
        other.close()
    device.wait(programs[0].submit())
    third = device.sibling({"x": "y", "control": "control"}, bindings=BINDINGS, spirv=SPIRV)
    third.store(decl("x", "io"))
    third.store(TensorDecl("control", "u32", (7,), "io"))
    assert third.shares("x") and not third.shares("control") and not third.shares("y"), "shared where it is equal"
    third.drop("control")
    third.store(TensorDecl("control", "u32", (8,), "io"))
    third.store(decl("y"))
    third.wait([p.submit() for p in (programs[0], third.compile(chain({"scale": 3.0})))][1])
    np.testing.assert_array_equal(third.read("y").array, 6 * X, "what the first has written, without a wait")
    third.close()
    np.testing.assert_array_equal(device.read("y").array, 2 * X)
    second = device.sibling(bindings=BINDINGS, spirv=SPIRV)
    device.close()
    with pytest.raises(VulkanError, match="is closed"):
        second.check_open()
