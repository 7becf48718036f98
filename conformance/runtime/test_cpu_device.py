"""The device `cpu` implements the protocol: live rows, prefixes of stored tensors, budget, guards, clear refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.support.devices import open_backend
from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.kernels.oracle import ORACLE
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.quant.codec import dequantise, quantise
from hybrid.spec import load_ops

H, N, T = 64, 96, 4
X = np.random.default_rng(1).standard_normal((T, H)).astype(np.float32)
W_NORM = np.random.default_rng(2).standard_normal(H).astype(np.float32)


def small_plan(rows: int = T, weight: str = "q4_0", act: str = "q8_act", offset: int = 0) -> Plan:
    """y = linear(rmsnorm(x)): one activation between two io tensors."""
    decls = [
        TensorDecl("control", "u32", (8,), "io"),
        TensorDecl("x", "f32", (rows, H), "io"),
        TensorDecl("norm.weight", "f32", (H,), "weight"),
        TensorDecl("w.weight", weight, (N, H), "weight"),
        TensorDecl("h", act, (rows, H), "activation", offset),
        TensorDecl("y", "f32", (rows, N), "io"),
    ]
    bind = {"T": rows, "H": H, "K": H, "N": N}
    steps = (
        Step("rmsnorm", "norm", {k: bind[k] for k in "TH"}, {"x": "x", "w": "norm.weight", "y": "h"}, {"eps": 1e-6}),
        Step("linear", "proj", {k: bind[k] for k in "TKN"}, {"x": "h", "w": "w.weight", "y": "y"}),
    )
    return Plan(f"small.{rows}", rows, 0, steps, {d.name: d for d in decls}, offset + decls[4].nbytes)


def opened(plan: Plan, live: int = T, **options: Any) -> CpuDevice:
    device = CpuDevice(**options)
    fill(device, plan, live)
    return device


def fill(device: Any, plan: Plan, live: int = T) -> None:
    w = quantise(np.random.default_rng(3).standard_normal((N, H)), plan.tensors["w.weight"].dtype)
    values = {"x": Tensor.of(X[: plan.rows]), "norm.weight": Tensor.of(W_NORM), "w.weight": w}
    for decl in plan.tensors.values():
        if decl.kind != "activation":
            device.store(decl, values.get(decl.name))
    device.write("control", Tensor.of(np.array([live], np.uint32)))


def expected(weight: str = "q4_0", act: str = "q8_act") -> np.ndarray:
    w = quantise(np.random.default_rng(3).standard_normal((N, H)), weight)
    (h,) = ORACLE["rmsnorm"](x=X, w=W_NORM, eps=1e-6)
    return dequantise(quantise(h, act), np.float64) @ dequantise(w, np.float64).T


@pytest.mark.parametrize("guard", [0, 64])
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("weight, act", [("q4_0", "q8_act"), ("q8_0", "f16"), ("bf16", "f32"), ("f32", "f32")])
def test_a_plan_computes_and_keeps_its_guards(weight: str, act: str, budget: int | None, guard: int) -> None:
    plan = small_plan(weight=weight, act=act)
    device = opened(plan, memory_budget=budget, guard=guard, products=False)
    program = device.compile(plan)
    for byte in (0x00, 0xFF):
        device.poison(byte, ["y"])
        device.wait(program.submit())
        assert np.allclose(device.read("y").array, expected(weight, act), atol=2e-2 if act == "q8_act" else 1e-2)
    assert device.check_guards() == []
    assert device.memory()["dequantised"] == (0 if budget == 0 or weight == "f32" else 4 * N * H)
    if budget is None and act == "q8_act":  # the same codes as the definition's, so only float rounding differs
        assert np.abs(device.read("y").array - expected(weight, act)).max() < 1e-4


def test_only_live_rows_are_computed() -> None:
    plan = small_plan()
    device = opened(plan, live=3)
    device.write("y", Tensor.of(np.full((T, N), 5, np.float32)))
    program = device.compile(plan)
    program.submit()
    y = device.read("y").array
    assert (y[3] == 5).all() and not (y[:3] == 5).any()
    device.write("control", Tensor.of(np.array([T + 1], np.uint32)))
    with pytest.raises(ValueError, match="5 live rows in a plan for 4"):
        program.submit()
    device.write("control", Tensor.of(np.array([0], np.uint32)))
    before = device.counters.copy()
    program.submit()
    assert device.counters.minus(before).dispatches == 0


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_any_word_of_a_tensor_counts_live_rows(backend: str) -> None:
    plan = small_plan()
    counted = replace(plan.steps[1], counts="experts", extent="3")
    decls = {**plan.tensors, "experts": TensorDecl("experts", "u32", (8,), "io")}
    plan = replace(plan, steps=(plan.steps[0], counted), tensors=decls)
    with open_backend(backend) as device:
        fill(device, plan)
        program = device.compile(plan)
        for live in (2, 0, T):
            device.write("experts", Tensor.of(np.array([9, 9, 9, live, 0, 9, 9, 9], np.uint32)))
            device.write("y", Tensor.of(np.full((T, N), 5, np.float32)))
            device.wait(program.submit())
            y = device.read("y").array
            assert (y[live:] == 5).all() and np.allclose(y[:live], expected()[:live], atol=2e-2)
    with pytest.raises(ValueError, match="undeclared tensors"):
        replace(plan, steps=(replace(counted, counts="others"),))


def test_a_smaller_bucket_uses_a_prefix_of_what_is_stored() -> None:
    large, small = small_plan(), small_plan(rows=2)
    device = opened(large, live=2)
    device.compile(small).submit()
    y = device.read("y").array
    assert np.abs(y[:2] - expected()[:2]).max() < 1e-4 and not y[2:].any()
    with pytest.raises(ValueError, match="only the first axis may be smaller"):
        device.compile(small_plan(rows=8))


def test_counters_and_times() -> None:
    plan = small_plan()
    device = opened(plan)
    program = device.compile(plan, profile=True)
    before = device.counters.copy()
    ticket = program.submit(times=3)
    device.wait(ticket)
    delta = device.counters.minus(before)
    assert (delta.submits, delta.dispatches, delta.allocations, delta.recordings) == (1, 6, 0, 0)
    assert [t.name for t in program.times()] == ["norm", "proj"] and all(t.duration > 0 for t in program.times())
    device.read("y", 1, 3)
    device.write("x", Tensor.of(X[:1]))
    delta = device.counters.minus(before)
    assert (delta.bytes_down, delta.bytes_up) == (2 * N * 4, H * 4)
    with pytest.raises(ValueError, match="no such ticket"):
        device.wait(ticket + 1)


def test_an_override_replaces_a_function() -> None:
    plan = small_plan()
    device = opened(plan, overrides={"linear": lambda **given: (ORACLE["linear"](**given)[0] + 1,)})
    device.compile(plan).submit()
    assert np.abs(device.read("y").array - expected() - 1).max() < 1e-4


def test_a_write_into_a_guard_band_is_named() -> None:
    plan = small_plan()
    device = opened(plan, guard=16)

    def overrun(**given: Any) -> tuple[np.ndarray, ...]:
        view = given["w"]
        np.lib.stride_tricks.as_strided(view, (view.size + 1,), view.strides)[-1] = 1
        return ORACLE["rmsnorm"](**given)

    device.functions["rmsnorm"] = overrun
    device.compile(plan).submit()
    assert device.check_guards() == ["norm.weight"]


def test_weights_come_from_parts_and_writes_reach_compiled_programs() -> None:
    plan = small_plan(weight="bf16", act="f32")
    device = opened(plan)
    program = device.compile(plan)
    w = quantise(np.random.default_rng(9).standard_normal((N, H)), "bf16")
    made: list[int] = []

    def part(a: int, b: int) -> Tensor:
        made.append(a)
        return w.rows(a, b)

    device.store(plan.tensors["w.weight"], parts=[lambda: part(0, 32), lambda: part(32, N)])
    assert made == [0, 32]
    program.submit()
    (h,) = ORACLE["rmsnorm"](x=X, w=W_NORM, eps=1e-6)
    assert np.allclose(device.read("y").array, h @ dequantise(w, np.float64).T, atol=1e-4)
    device.write("w.weight", Tensor.empty("bf16", (N - 1, H)), row=1)
    program.submit()
    assert not device.read("y").array[:, 1:].any() and device.read("y").array[:, 0].all()
    with pytest.raises(ValueError, match=r"w\.weight: 32 rows given for a tensor of 96"):
        device.store(plan.tensors["w.weight"], parts=[lambda: part(0, 16), lambda: part(0, 16)])


def test_refusals_name_the_step_and_the_fix() -> None:
    plan = small_plan()
    device = CpuDevice()
    with pytest.raises(ValueError, match="no tensor 'control' is stored on the cpu device"):
        device.compile(plan)
    device = opened(plan)
    with pytest.raises(ValueError, match="cannot write f32"):
        device.write("x", Tensor.of(X), row=1)
    with pytest.raises(ValueError, match=r"declared f32 \(64,\), got f16"):
        device.store(plan.tensors["norm.weight"], Tensor.of(W_NORM.astype(np.float16)))
    short = Plan("short", T, 0, plan.steps, plan.tensors, 0)
    with pytest.raises(ValueError, match=r"step norm: activation h at byte 0 needs .* set Plan.arena_bytes"):
        device.compile(short)
    step = plan.steps[1]
    wrong = Step(step.op, step.name, step.bind, {"x": "h", "weight": "w.weight", "y": "y"})
    with pytest.raises(ValueError, match=r"step proj \(linear\): missing arguments \['w'\], unknown \['weight'\]"):
        device.compile(Plan("wrong", T, 0, (wrong,), plan.tensors, plan.arena_bytes))


def test_a_closed_device_refuses_every_call() -> None:
    plan = small_plan()
    device = opened(plan)
    program = device.compile(plan)
    device.close()
    calls = (
        program.submit,
        device.wait,
        device.memory,
        device.check_guards,
        lambda: device.read("y"),
        lambda: device.write("x", Tensor.of(X)),
        lambda: device.store(plan.tensors["x"]),
        lambda: device.compile(plan),
        lambda: device.reserve(1),
        lambda: device.poison(0),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="cpu device is closed"):
            call()
    device.close()


def test_the_region_writes_its_scratch() -> None:
    plan = small_plan()
    bind = {"T": T, "H": H, "F": N}
    decls = dict(plan.tensors)
    decls |= {
        "gu": TensorDecl("gu", "q4_0", (2 * N, H), "weight"),
        "down": TensorDecl("down", "q4_0", (H, N), "weight"),
        "mid": TensorDecl("mid", "q8_act", (T, N), "io"),
        "out": TensorDecl("out", "f32", (T, H), "io"),
    }
    args = {"x": "x", "w_gate_up": "gu", "w_down": "down", "h": "mid", "y": "out"}
    region = Plan("region", T, 0, (Step("fused_ffn", "ffn", bind, args),), decls, 0)
    device = opened(plan, live=3)
    gu = quantise(np.random.default_rng(5).standard_normal((2 * N, H)), "q4_0")
    down = quantise(np.random.default_rng(6).standard_normal((H, N)), "q4_0")
    for name, value in {"gu": gu, "down": down, "mid": None, "out": None}.items():
        device.store(decls[name], value)
    device.compile(region).submit()
    (h,) = ORACLE["geglu"](gate_up=ORACLE["linear"](x=X, w=gu)[0])
    mid = device.read("mid")
    assert np.allclose(dequantise(mid)[:3], h[:3], atol=np.abs(h).max() / 200) and not mid.parts[0][3:].any()
    assert np.allclose(device.read("out").array[:3], ORACLE["linear"](x=mid, w=down)[0][:3], atol=1e-2)


def test_every_shipped_operation_has_a_function() -> None:
    assert set(load_ops()) == set(ORACLE)


def test_an_operation_on_weights_alone_runs_without_live_rows() -> None:
    w = quantise(np.random.default_rng(4).standard_normal((N, H)), "q4_0")
    decls = {
        "control": TensorDecl("control", "u32", (8,), "io"),
        "w": TensorDecl("w", "q4_0", (N, H), "weight"),
        "y": TensorDecl("y", "f32", (N, H), "io"),
    }
    device = CpuDevice()
    for name, decl in decls.items():
        device.store(decl, w if name == "w" else None)
    step = Step("dequantize", "numbers", {"N": N, "K": H}, {"w": "w", "y": "y"})
    device.compile(Plan("alone", 0, 0, (step,), decls)).submit()
    assert np.array_equal(device.read("y").array, dequantise(w))


@pytest.mark.parametrize("given", [None, "22"])
def test_blas_threads_are_set_not_to_spin_before_loading(given: str | None) -> None:
    """Unless the user has set the variable. The library reads it once."""
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_THREAD_TIMEOUT"}
    environment |= {} if given is None else {"OPENBLAS_THREAD_TIMEOUT": given}
    code = "import hybrid, os, sys; print(os.environ['OPENBLAS_THREAD_TIMEOUT'], 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [given or "18", "False"]
