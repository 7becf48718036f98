"""The interpreter of compute kernels: it computes what a driver does, and rejects faults that drivers accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conformance.support.devices import GUARD, INTERPRETED, Devices, need_compiler
from conformance.support.profile import LONG
from hybrid.harness import run_case
from hybrid.harness.fixed import one_each, variant
from hybrid.harness.interpreter import machine, matrices
from hybrid.harness.interpreter.module import read
from hybrid.harness.interpreter.values import Fault, NotInterpreted
from hybrid.harness.sizes import base_bind
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.spec import load_ops

SPECS = load_ops()
KERNEL = """
[[vk::binding(1)]] RWStructuredBuffer<int> y;
struct Push {{ int n; int wrong; }};
[[vk::push_constant]] Push push;
groupshared int held[128];
[shader("compute")] [numthreads(64, 1, 1)]
void main(uint3 at : SV_DispatchThreadID, uint3 thread : SV_GroupThreadID)
{{
    int t = int(thread.x), i = int(at.x);
    {body}
}}
"""
Run = Callable[..., np.ndarray]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(body, n, wrong, groups) -> y, int32 [n], of a kernel of 64 threads."""
    need_compiler()
    from hybrid.kernels.vulkan.build import compile_variant, variants

    def call(body: str, n: int = 128, wrong: int = 0, groups: int = 2) -> np.ndarray:
        (tmp_path / "k.slang").write_text(KERNEL.format(body=body))
        (tmp_path / "k.toml").write_text('[[kernel]]\nname = "k"\n')
        code, _ = compile_variant(variants(tmp_path)[0])
        y, push = np.full(n, -1, np.int32), np.array([n, wrong], np.int32)
        machine.run(read(code, {}), "k", [np.zeros(4, np.uint8), y.view(np.uint8)], push.tobytes(), (groups, 1, 1))
        return y

    return call


def test_diverged_lanes_reconverge(run: Run) -> None:
    """Loops of another length for each lane, with breaks, a switch, and values from before the last lane finished."""
    found = run("""
        int sum = 0, last = 0;
        for (int k = 0; k < t % 7 + 1; k++)
        {
            if (k == 4) break;
            if (k % 2 == 1) continue;
            last = k * 10 + t;
            sum += last;
        }
        switch (t % 3) { case 0: sum = -sum; break; case 1: sum += 1000; break; default: sum -= last; break; }
        y[i] = sum * 2 + int(WaveActiveSum(t % 2 == 0 ? last : 1));
    """)
    wanted = np.zeros((2, 64), np.int64)
    last = np.array([[2 * (min(t % 7, 3) // 2) * 10 + t for t in range(64)]] * 2)
    for t in range(64):
        sums = sum(k * 10 + t for k in range(min(t % 7 + 1, 4)) if k % 2 == 0)
        wanted[:, t] = 2 * (-sums if t % 3 == 0 else sums + 1000 if t % 3 == 1 else sums - last[0, t])
    of = np.where(np.arange(64) % 2 == 0, last, 1).reshape(2, 2, 32).sum(-1)
    assert (found.reshape(2, 64) == wanted + np.repeat(of, 32, axis=-1)).all()


SHIFT = "held[t] = i * i; {barrier} y[i] = held[(t + 32) % 64];"


def test_shared_memory_is_handed_on_by_a_barrier_alone(run: Run) -> None:
    wanted = np.concatenate([np.roll(np.arange(64 * g, 64 * g + 64) ** 2, -32) for g in (0, 1)])
    assert (run(SHIFT.format(barrier="GroupMemoryBarrierWithGroupSync();")) == wanted).all()
    with pytest.raises(
        Fault, match="k: byte 128 of shared memory is read by one subgroup after another has used it, with no bar"
    ):
        run(SHIFT.format(barrier=""))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("int v = held[(t + 32) % 64]; held[t] = i; y[i] = v;", "is written by one subgroup after another has used it"),
        (
            "held[t % 32] = i; GroupMemoryBarrierWithGroupSync(); y[i] = held[t % 32];",
            "two subgroups write the same shared memory",
        ),
        ("if (t < 32) GroupMemoryBarrierWithGroupSync(); y[i] = 1;", "a barrier that not all of a workgroup reach"),
        ("y[i + push.wrong] = 1;", r"binding 1 has 512 bytes, accessed were 4 to 516"),
        ("y[i] = y[i - push.wrong];", "binding 1 has 512 bytes"),
        ("int v = i; while (push.wrong == 1) v = v * 3 + y[0]; y[i] = v;", "an endless loop"),
        ("if (t % 2 == 0) y[i] = WaveReadLaneAt(i, 1); else y[i] = 0;", "a lane reads an inactive lane's value"),
    ],
)
def test_faults_that_drivers_accept_are_raised(run: Run, body: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_BLOCKS", 2000)
    with pytest.raises(Fault, match=said):
        run(body, wrong=1)


def test_unsupported_instructions_are_not_faults(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an uninterpreted mutant would count as caught."""
    monkeypatch.delitem(machine.OPERATIONS, 132)  # OpIMul
    with pytest.raises(NotInterpreted, match=r"k: opcode 132: .*not known"):
        run("y[i] = i * i;")


def test_workgroups_that_hand_one_another_something_do_not_all_run_together(run: Run) -> None:
    """The first workgroup must not see later workgroups' data."""
    found = run(
        """
        int old = 0;
        if (t == 0) { y[64 + i / 64] = 7; InterlockedAdd(y[0], 1, old); if (old == -1) y[1] = y[127]; }
    """,
        groups=64,
    )
    assert found[0] == 63 and (found[64:] == 7).all() and found[1] == -1


@pytest.mark.parametrize("columns", [8, 16])
def test_lanes_hold_every_element_of_a_matrix_once(columns: int) -> None:
    values, shape = np.arange(2 * 16 * columns).reshape(2, 16, columns), (16, columns, 1)
    held = matrices.held(values, shape)
    assert held.shape == (64, columns // 2) and sorted(held.ravel()) == list(range(values.size))
    assert (matrices.dense(held, 64, shape) == values).all()


def test_the_device_says_what_kernels_ask_of_lanes(devices: Devices) -> None:
    """probe_lanes.slang, run by the interpreter."""
    device = devices.get(INTERPRETED, guard=GUARD)
    assert device.has("f16_matrices") and device.report.lanes and device.report.fused


EVERY = sorted(op for op, spec in SPECS.items() if spec.runs_on("vulkan"))


@pytest.mark.slow
@pytest.mark.parametrize("op", EVERY if LONG else EVERY[int(kernels_digest(), 16) % 8 :: 8])  # alternating
def test_kernels_without_matrix_units_compute_what_they_do_on_a_driver(devices: Devices, op: str) -> None:
    device, spec = devices.get(INTERPRETED, guard=GUARD), SPECS[op]
    choices = one_each(spec.dtype_choices("vulkan"))
    for i, dtypes in enumerate(choices):
        if LONG or i == int(kernels_digest(), 16) % len(choices):
            run_case(spec, device, variant(spec, base_bind(spec), dtypes, i))
