"""A started run and a submitted plan on the NPU progress by themselves: states, order, errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.npu.test_npu_host import G, _opened, job
from hybrid.core.plan import CONTROL, CONTROL_WORDS, Plan, Step, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.kernels.npu import xrt_sim
from hybrid.kernels.npu.artefact import find
from hybrid.kernels.npu.build import build_sim
from hybrid.kernels.npu.designs import gemm_i8
from hybrid.kernels.npu.device import NpuDevice
from hybrid.kernels.npu.xrt import NpuError
from hybrid.spec import load_ops

pytestmark = pytest.mark.usefixtures("sim_machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sim")
    build_sim(gemm_i8(G), out)
    return out


def _bound(folder: Path, seed: int = 0) -> tuple[Any, Any, Any, np.ndarray]:
    """(context, run, its output buffer, the expected output): arguments set by hand, not started. The context comes
    first, so that it is dropped last."""
    device, context, kernel = _opened(folder)
    flags, up = xrt_sim.bo.flags, xrt_sim.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
    made, expected = job(seed=seed)
    data = find(folder, made.design).stream.read_bytes()
    insts = xrt_sim.bo(device, len(data), flags.cacheable, kernel.group_id(1))
    insts.map()[:] = data
    insts.sync(up)
    one = xrt_sim.run(kernel)
    for i, value in enumerate((3, insts, len(data))):
        one.set_arg(i, value)
    for i, (name, array) in enumerate(made.design.arguments):
        buffer = xrt_sim.bo(device, array.nbytes, flags.host_only, kernel.group_id(3 + i))
        if name in made.inputs:
            buffer.map()[:] = np.ascontiguousarray(made.inputs[name]).tobytes()
        buffer.sync(up)
        one.set_arg(3 + i, buffer)
    return context, one, buffer, expected


def test_a_started_run_progresses_by_itself(folder: Path) -> None:
    """start returns at once, state shows the machine's progress, wait with a timeout returns the state, and a running
    run cannot be started again."""
    states, down = xrt_sim.ert_cmd_state, xrt_sim.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE
    _context, one, out, expected = _bound(folder)
    assert one.state() == one.wait() == states.ERT_CMD_STATE_NEW
    with xrt_sim._computing:  # the machine is busy with another run
        one.start()
        assert one.wait(1) in (states.ERT_CMD_STATE_QUEUED, states.ERT_CMD_STATE_SUBMITTED)
        with pytest.raises(RuntimeError, match="can't launch"):
            one.start()
    one._done.wait()  # without a wait: it has run
    assert one.state() == states.ERT_CMD_STATE_COMPLETED
    out.sync(down)
    assert (np.frombuffer(out.map(), np.int32).reshape(expected.shape) == expected).all()
    one.start()
    assert one.wait() == states.ERT_CMD_STATE_COMPLETED


def test_runs_of_one_device_end_in_the_order_of_their_starts(folder: Path) -> None:
    """Also after one that fails: its context is broken, and runs started in it are aborted."""
    states = xrt_sim.ert_cmd_state
    _context, one, _, _ = _bound(folder)
    more = [xrt_sim.run(one._kernel) for _ in range(2)]
    for run in more:
        for i, value in one._args.items():
            run.set_arg(i, value)
    xrt_sim.faults.timeout_after = 1
    with xrt_sim._computing:
        for run in (one, *more):
            run.start()
    assert more[1].wait() == states.ERT_CMD_STATE_ABORT
    assert (one.state(), more[0].state()) == (states.ERT_CMD_STATE_COMPLETED, states.ERT_CMD_STATE_TIMEOUT)


def test_a_device_that_vanished_takes_no_run(folder: Path) -> None:
    _context, one, _, _ = _bound(folder)
    xrt_sim.faults.vanish_after = 0
    one.start()
    for again in (one.wait, one.wait, one.start):
        with pytest.raises(RuntimeError, match="No such device"):
            again()


# --- the device: a worker runs submitted plans


def _rows_plan(device: NpuDevice) -> tuple[Any, np.ndarray]:
    """(a program of one matmul_i8, its x) with everything stored."""
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((16, 32), (16, 32)))
    spec = load_ops()["matmul_i8"]
    decls = {
        "control": TensorDecl("control", "u32", (CONTROL_WORDS,), "io"),
        "x": TensorDecl("x", "i8", x.shape, "io"),
        "w": TensorDecl("w", "i8", w.shape, "weight"),
        "y": TensorDecl("y", "i32", (16, 16), "io"),
    }
    control = np.zeros(CONTROL_WORDS, np.uint32)
    control[CONTROL["rows"]] = 16
    for name, value in (("control", control), ("x", x), ("w", w), ("y", np.zeros((16, 16), np.int32))):
        device.store(decls[name], Tensor.of(value, decls[name].dtype))
    bind = spec.solve({n: decls[n].shape for n in ("x", "w")}, {})
    step = Step("matmul_i8", "product", bind, {n: n for n in ("x", "w", "y")}, device="npu")
    return device.compile(Plan("p", 16, 1, (step,), decls)), x.astype(np.int64) @ w.T.astype(np.int64)


def test_submitting_returns_at_once_and_later_calls_keep_order() -> None:
    """Writes between passes wait for earlier passes, results for their pass, and wait() raises errors."""
    with NpuDevice("sim") as device:
        program, expected = _rows_plan(device)
        device.wait(program.submit())
        assert (device.read("y").array == expected).all()
        with xrt_sim._computing:
            first = program.submit()
            device.write("x", Tensor.of(np.zeros((16, 32), np.int8), "i8"))
            second = program.submit()
            assert first < second and not any(f.done() for f in device._begun.values())
            settle = threading.Thread(target=device.wait, args=(first,))
            settle.start()
            assert settle.is_alive()
        settle.join()
        assert not device.read("y").array.any() and device.counters.submits == 3
        with pytest.raises(ValueError, match="no such ticket"):
            device.wait(second + 1)
        xrt_sim.faults.timeout_after = 0
        failed = program.submit()
        with pytest.raises(NpuError, match="TIMEOUT"):
            device.wait(failed)
        device.wait(failed)
        device.write("x", Tensor.of(np.ones((16, 32), np.int8), "i8"))
        device.wait(program.submit())
        assert device.read("y").array.any()


def test_a_closed_device_ends_what_runs_and_never_begins_the_rest() -> None:
    device = NpuDevice("sim")
    program, _ = _rows_plan(device)
    ran: list[int] = []
    device.functions["matmul_i8"] = lambda **given: (ran.append(1), given["x"])[1:]
    with xrt_sim._computing:
        device.enqueue(xrt_sim._computing.acquire)
        program.submit()
        closing = threading.Thread(target=device.close)
        closing.start()
        while not device._worker._shutdown:
            pass
    closing.join()
    xrt_sim._computing.release()
    assert not ran
    with pytest.raises(RuntimeError, match="closed"):
        program.submit()
