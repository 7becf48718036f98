"""Which waits a recording allows: workgroups of one dispatch, as many as are resident at once, and no dispatch for
another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.cooperative import HPARAMS, engine, layers, tuned
from conformance.support.devices import Devices
from conformance.support.synthetic import write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.kernel import Kernel
from hybrid.kernels.vulkan.memory import Buffer, Slice
from hybrid.kernels.vulkan.recorder import Dispatch, Recorder, hazards

KERNEL = Kernel("waits", 3, 0, (64, 1, 1), writes=frozenset({2}))


def recorder(cores: int = 4, cooperative: bool = True) -> tuple[Recorder, Mapping[str, Any]]:
    """A recorder, and the memory that its dispatches read and write."""
    memory = Buffer(1 << 20, "device")
    device = SimpleNamespace(max_groups=(65535,) * 3, cores=cores)
    own = {"reads": [Slice(memory, 256, 16)], "writes": [Slice(memory, 512, 16)]}
    return Recorder(device, Slice(memory, 0, 32), cooperative), own


def test_counters_are_of_one_dispatch() -> None:
    rec, own = recorder()
    first, second = rec.counters(4), rec.counters(4)
    for box in (first, second):
        rec.dispatch(KERNEL, own["reads"], [box])
    for box in (first, second):
        with pytest.raises(VulkanError, match="waits binds counters of another dispatch"):
            rec.dispatch(KERNEL, own["reads"], [box])
        with pytest.raises(VulkanError, match="waits binds counters of another dispatch"):
            rec.dispatch(KERNEL, [box], own["writes"])


@pytest.mark.parametrize("grid", [(4,), (2, 2), (1, 2, 2)])
def test_workgroups_that_wait_for_one_another_are_as_many_as_are_resident(grid: tuple[int, ...]) -> None:
    rec, own = recorder(cores=4)
    rec.dispatch(KERNEL, **own, grid=grid, resident=True)
    rec, own = recorder(cores=3)
    with pytest.raises(VulkanError, match="workgroups wait for one another; 3 are surely resident at once"):
        rec.dispatch(KERNEL, **own, grid=grid, resident=True)
    rec.dispatch(KERNEL, **own, grid=grid)


def test_a_program_without_waits_refuses_a_dispatch_that_waits() -> None:
    rec, own = recorder(cooperative=False)
    with pytest.raises(VulkanError, match="wait for one another, which this program excludes"):
        rec.dispatch(KERNEL, **own, resident=True)
    rec.dispatch(KERNEL, **own)


SLICES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=3)


@given(st.lists(st.tuples(SLICES, SLICES), max_size=12))
def test_dispatches_that_share_a_written_tensor_have_a_barrier(drawn: list[Any]) -> None:
    buffers = [Buffer(64, "device"), Buffer(64, "device")]

    def slices(some: list[tuple[int, int, int]]) -> tuple[Slice, ...]:
        return tuple(Slice(buffers[b], at, size) for b, at, size in some)

    dispatches = [Dispatch(KERNEL, slices(reads), slices(writes), b"", (1, 1, 1), None, 0) for reads, writes in drawn]
    barriers = hazards(dispatches, Slice(Buffer(16, "grids"), 0, 0))

    def touched(some: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
        return {(b, at + i) for b, at, size in some for i in range(size)}

    for later in range(len(drawn)):
        for before in range(later):
            reads, writes = (touched(x) for x in drawn[later])
            read, written = (touched(x) for x in drawn[before])
            if writes & (read | written) or reads & written:
                assert any(b is not None for b in barriers[before + 1 : later + 1])


def test_a_program_without_waits_has_no_kernel_that_waits(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = devices.get("vulkan")
    merges: list[int] = []
    choose = device.kernel

    def kernel(name: str, **constants: int) -> Any:
        merges.extend([constants["MERGE"]] if name.startswith("decode_attention.") else [])
        return choose(name, **constants)

    monkeypatch.setattr(device, "kernel", kernel)
    with tuned(device, merge=2):
        made = engine(device, open_checkpoint(write_hf(tmp_path, HPARAMS, dtype="f32")))
        plan = made.runner.plan("decode", 1, 1)
        for cooperative, merge in ((True, 2), (False, 1)):
            merges.clear()
            program = device.compile(plan, cooperative=cooperative)
            assert layers(program) == (HPARAMS.n_layers if cooperative else 0)
            assert merges == [merge] * HPARAMS.n_layers


def test_a_program_samples_after_every_wait_that_may_time_out(devices: Devices, tmp_path: Path) -> None:
    """The fault word is written without the recorder's knowledge: a barrier separates it from its reader."""
    device = devices.get("vulkan")
    with tuned(device, merge=2):
        recording = device.compile(
            engine(device, open_checkpoint(write_hf(tmp_path, HPARAMS))).runner.plan("decode", 1, 1)
        ).recording
    names = [d.kernel.name.partition(".")[0] for d in recording.dispatches]
    last = max(i for i, name in enumerate(names) if name in ("layer", "decode_attention"))
    (sample,) = (i for i, name in enumerate(names) if name == "sample")
    assert last < sample and any(b is not None for b in recording.barriers[last + 1 : sample + 1])
