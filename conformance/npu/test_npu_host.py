"""The host's side: pyxrt's call sequence against the simulator, and every failure of a run."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.kernels.npu import xrt_sim
from hybrid.kernels.npu.artefact import encode, find, stem
from hybrid.kernels.npu.build import build_sim
from hybrid.kernels.npu.check import npu_limits
from hybrid.kernels.npu.designs import gemm_i8, shipped
from hybrid.kernels.npu.designs.gemm import Gemm
from hybrid.kernels.npu.device import NpuDevice
from hybrid.kernels.npu.tiles import tile_weights
from hybrid.kernels.npu.xrt import Host, Job, NpuError, NpuUnavailable, open_host

G = Gemm(64, 64, 32, 16, 32, 16, 1)


pytestmark = pytest.mark.usefixtures("sim_machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sim")
    for g in (G, replace(G, M=128), replace(G, K=32), *(replace(G, K=32 * k) for k in range(3, 9))):
        build_sim(gemm_i8(g), out)
    return out


def job(g: Gemm = G, seed: int = 0) -> tuple[Job, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, w = (rng.integers(-128, 128, (n, g.K)).astype(np.int8) for n in (g.M, g.N))
    made = Job(gemm_i8(g), {"A": a, "B": tile_weights(w, g)}, {"C": np.zeros((g.M, g.N), np.int32)})
    return made, a.astype(np.int64) @ w.T.astype(np.int64)


def test_a_run_gives_the_product_and_a_second_one_allocates_nothing(folder: Path) -> None:
    host = open_host("sim", folder)
    for seed in range(3):
        made, expected = job(seed=seed)
        host.run([made])
        assert (made.outputs["C"] == expected).all()
    assert (
        host.name == "sim-npu1"
        and host.counters.contexts == 1
        and host.counters.buffers == 4
        and host.counters.runs == 3
    )


def test_one_xclbin_serves_several_sizes_and_a_batch_is_a_runlist(folder: Path) -> None:
    host = open_host("sim", folder)
    jobs = [job(G, 1), job(replace(G, M=128), 2), job(G, 3)]
    host.run([made for made, _ in jobs])
    assert all((made.outputs["C"] == expected).all() for made, expected in jobs)
    assert host.counters.contexts == 1 and host.counters.runlists == 1 and host.counters.runs == 3
    assert len(list(folder.glob(f"{stem(gemm_i8(G))}*.bin"))) == 2


def test_more_fabrics_than_contexts_drop_the_whole_cache(folder: Path) -> None:
    """The driver opens six, and dropping one of several breaks the others."""
    host = open_host("sim", folder)
    for k in (2, 1, 3, 4, 5, 6, 7, 8, 2):
        made, expected = job(replace(G, K=32 * k), k)
        host.run([made])
        assert (made.outputs["C"] == expected).all()
    assert host.counters.contexts == 9 and len(host._loaded) == 3
    one = next(iter(host._loaded))
    host._loaded.pop(one).close()
    with pytest.raises(NpuError, match="ABORT"):
        host.run([job(replace(G, K=64))[0]])


def test_instructions_share_a_heap(folder: Path) -> None:
    """The driver's heap for a device is 64 MiB; dropped instructions are freed. Data buffers are the host's memory."""
    device, flags = xrt_sim.device(0), xrt_sim.bo.flags
    whole = npu_limits().heap_bytes.value
    gc.collect()  # dropped by other tests; buffers that their devices still hold stay
    first = xrt_sim.bo(device, whole - xrt_sim.heap_taken() - 64, flags.cacheable, 1)
    xrt_sim.bo(device, 8192, flags.host_only, 3)
    with pytest.raises(RuntimeError, match=f"heap of {whole} bytes is full"):
        xrt_sim.bo(device, 8192, flags.cacheable, 1)
    with pytest.raises(NpuError, match="heap"):
        open_host("sim", folder).run([job(replace(G, M=128))[0], job()[0]])
    del first
    xrt_sim.bo(device, 8192, flags.cacheable, 1)
    host = open_host("sim", folder)
    made, expected = job()
    host.run([made])
    assert (made.outputs["C"] == expected).all()


# --- failures


@pytest.mark.parametrize(
    ("fault", "kind"), [("timeout_after", "timeout"), ("silent_after", "silent"), ("vanish_after", "gone")]
)
def test_failures_of_a_run_are_distinguished(folder: Path, fault: str, kind: str) -> None:
    host = open_host("sim", folder)
    host.run([job()[0]])
    setattr(xrt_sim.faults, fault, 0)
    with pytest.raises(NpuError) as error:
        host.run([job()[0]])
    assert error.value.kind == kind and "sim-npu1" in str(error.value)
    if kind != "gone":
        made, expected = job(seed=5)
        host.run([made])  # the caches were dropped: a new context works
        assert (made.outputs["C"] == expected).all()


def test_a_run_of_a_chain_that_fails_fails_the_chain(folder: Path) -> None:
    host = open_host("sim", folder)
    xrt_sim.faults.timeout_after = 1
    with pytest.raises(NpuError) as error:
        host.run([job(G, 1)[0], job(G, 2)[0]])
    assert error.value.kind == "timeout"


class _NoSync(Host):
    """Mutants of the host: one sync omitted."""

    drop_up = drop_down = False

    def _send(self, made: Job, buffers: Any, to_device: Any) -> None:
        if self.drop_up:
            keep = xrt_sim.bo.sync
            xrt_sim.bo.sync = lambda *a, **k: None  # type: ignore[assignment,method-assign]
            try:
                super()._send(made, buffers, to_device)
            finally:
                xrt_sim.bo.sync = keep  # type: ignore[method-assign]
        else:
            super()._send(made, buffers, to_device)

    def _take(self, made: Job, buffers: Any, from_device: Any) -> None:
        if self.drop_down:
            buffers = {k: type("Unsynced", (), {"map": b.map, "sync": lambda *a: None})() for k, b in buffers.items()}
        super()._take(made, buffers, from_device)


@pytest.mark.parametrize("which", ["drop_up", "drop_down"])
def test_a_missing_sync_shows(folder: Path, which: str) -> None:
    """Host and device have separate copies: without the sync the other side sees old bytes."""
    host = _NoSync(xrt_sim, folder)  # type: ignore[arg-type]
    setattr(host, which, True)
    made, expected = job()
    try:
        host.run([made])
    except NpuError as error:
        assert error.kind == "silent"
        return
    assert not (made.outputs["C"] == expected).all()


def _opened(folder: Path) -> tuple[Any, Any, Any]:
    """(device, context, kernel) opened by hand, as in the reference."""
    device = xrt_sim.device(0)
    binary = xrt_sim.xclbin(str(find(folder, gemm_i8(G)).xclbin))
    device.register_xclbin(binary)
    context = xrt_sim.hw_context(device, binary.get_uuid())
    return device, context, xrt_sim.kernel(context, binary.get_kernels()[0].get_name())


def test_wrong_arguments_end_as_they_do_on_the_hardware(folder: Path) -> None:
    device, _context, kernel = _opened(folder)
    states, flags = xrt_sim.ert_cmd_state, xrt_sim.bo.flags
    data = find(folder, gemm_i8(G)).stream.read_bytes()
    insts = xrt_sim.bo(device, len(data), flags.cacheable, kernel.group_id(1))
    insts.map()[:] = data
    buffers = [
        xrt_sim.bo(device, a.nbytes, flags.host_only, kernel.group_id(3 + i))
        for i, (_, a) in enumerate(gemm_i8(G).arguments)
    ]
    assert kernel(3, insts, len(data), *buffers).wait() == states.ERT_CMD_STATE_ERROR  # instructions were not synced
    with pytest.raises(xrt_sim.WouldCrash):
        kernel(3, insts, len(data), *buffers, buffers[0])
    with pytest.raises(xrt_sim.WouldCrash):
        xrt_sim.bo(xrt_sim.bo(buffers[0], 64, 0), 32, 0)
    for wrong in (
        (1, insts, len(data), *buffers),
        (3, insts, len(data), buffers[0], "no buffer", buffers[2]),
        (3, insts, len(data) - 8, *buffers),
        (3, buffers[0], len(data), *buffers),
    ):
        _context = kernel = None  # a context released later would break the new one
        _, _context, kernel = _opened(folder)
        insts.sync(xrt_sim.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE)
        assert kernel(*wrong).wait() == states.ERT_CMD_STATE_ERROR
    with pytest.raises(RuntimeError):
        xrt_sim.device(1)
    with pytest.raises(RuntimeError):
        xrt_sim.kernel(_context, "other")


def test_a_design_whose_depth_is_wrong_ends_in_a_timeout(tmp_path: Path) -> None:
    from hybrid.kernels.npu.artefact import write
    from hybrid.kernels.npu.emitter import emit

    design = shipped()["small.attention"]()
    shallow = replace(
        design,
        fifos=tuple(
            replace(f, depth=1) if f.name.startswith("kv") and "_in" not in f.name else f for f in design.fifos
        ),
    )
    write(tmp_path, shallow, "by hand: no check", emit(shallow).encode(), encode(shallow))
    inputs = {n: np.zeros(a.size, np.uint16) for n, a in design.arguments if n != "o"}
    inputs["q"].reshape(-1, design.fifo("q0_0").array.size)[:, -32:].view(np.int32)[:, 4] = (
        2  # both key tiles are visible
    )
    with pytest.raises(NpuError, match="ERT_CMD_STATE_TIMEOUT") as error:
        open_host("sim", tmp_path).run([Job(shallow, inputs, {"o": np.zeros(design.argument("o").size, np.uint16)})])
    assert error.value.kind == "timeout"


def test_a_simulator_is_never_taken_unasked(folder: Path) -> None:
    with pytest.raises(NpuUnavailable, match="pyxrt"):
        open_host("npu", folder)
    with pytest.raises(ValueError, match="npu or sim"):
        open_host("auto", folder)
    assert NpuDevice("sim").name == "sim-npu1"
