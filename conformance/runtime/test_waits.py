"""Host waits: bounds by declared cost and queued work, progress, and the cost attached to each submit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.runtime.test_vulkan_runtime import open_toys
from conformance.support.devices import Devices, Driver, open_another, shared_device
from conformance.support.models import BOTH, MODELS, demo
from conformance.support.texts import greedy
from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import DeviceLost
from hybrid.devices.opening import Opened
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.vulkan import bounds, timeline
from hybrid.kernels.vulkan.api import vk
from hybrid.kernels.vulkan.bounds import CPU_FLOOR_S, FLOOR_S, PEAK_SHARE, Bounds, bounds_of
from hybrid.kernels.vulkan.instance import DeviceInfo
from hybrid.planning.cost import Cost, plan_cost


class Machine:
    """A driver without a GPU, with fake clocks: a wait takes 0.2 s, of which the process gets a share of a processor,
    and submits finish at the given seconds."""

    def __init__(self, *finished: float, share: float = 1.0) -> None:
        self.now, self.finished, self.share = 0.0, finished, share
        self.driver = Driver(vkWaitSemaphores=self.wait, vkGetSemaphoreCounterValue=self.value)

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.share * self.now

    def done(self) -> int:
        return sum(self.now >= at for at in self.finished)

    def wait(self, handle: Any, info: Any, nanoseconds: int) -> int:
        self.now += 0.2
        return 0 if self.done() >= info.pValues[0] else int(vk.VK_TIMEOUT)

    def value(self, handle: Any, semaphore: Any, out: Any) -> int:
        out[0] = self.done()
        return 0


@pytest.mark.parametrize(
    ("finished", "waited", "why"),
    [
        ((24.9, 49.8, 74.7), None, "each within its own 25 s from the end of the one before"),
        ((10.0, 200.0, 200.0), 10 + 2 * 25, "from the end of the first, what two may take"),
        ((200.0, 200.0, 200.0), 3 * 25, "what three may take"),
    ],
)
def test_a_wait_is_bounded_by_what_is_queued_and_begins_anew_with_progress(
    finished: tuple[float, ...], waited: float | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_toys() as device:
        queue = device._queue
        assert queue is not None
        queue.bounds = Bounds(floor=0.001, gb_s=1.0, tflops=1.0)
        cost = Cost(nbytes=10**9 * 25 // (bounds.NEIGHBOURS * bounds.SLACK))  # 25 s
        machine = Machine(*finished)
        monkeypatch.setattr(timeline, "lib", machine.driver)
        monkeypatch.setattr(timeline, "time", machine)
        queue._running.extend((ticket, lambda: cost) for ticket in (1, 2, 3))
        queue.ticket = 3
        if waited is None:
            queue.wait_ticket(3)
            assert machine.now >= finished[-1], why
        else:
            with pytest.raises(DeviceLost, match="hangs"):
                queue.wait_ticket(3)
            assert machine.now == pytest.approx(waited, abs=1), why
        monkeypatch.undo()
        queue.gone, queue.pending, queue.ticket = None, False, 0


@pytest.mark.parametrize(
    ("own", "share", "waited"), [(False, 0.0, 25), (True, 2.0, 25), (True, 0.5, 50), (True, 0.0, 25 * bounds.STARVED)]
)
def test_a_cpu_driver_is_timed_by_its_processor_time(
    own: bool, share: float, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the processor time that a CPU driver received counts; a GPU uses none."""
    with open_toys() as device:
        queue = device._queue
        assert queue is not None
        queue.bounds = Bounds(floor=25.0, gb_s=1.0, tflops=1.0, own=own)
        machine = Machine(10_000.0, share=share)
        monkeypatch.setattr(timeline, "lib", machine.driver)
        monkeypatch.setattr(timeline, "time", machine)
        queue._running.append((1, Cost))
        queue.ticket = 1
        with pytest.raises(DeviceLost, match=f"within {waited} s"):
            queue.wait_ticket(1)
        assert machine.now == pytest.approx(waited, abs=1)
        monkeypatch.undo()
        queue.gone, queue.pending, queue.ticket = None, False, 0


@pytest.mark.parametrize(
    ("name", "kind", "floor", "per_gb", "per_tflop"),
    [
        ("NVIDIA H200", "discrete", FLOOR_S, 200 / 4800, 200 / 67),
        ("Some GPU", "discrete", FLOOR_S, 200 / 50, 200 / 1.0),
        ("Some APU", "integrated", FLOOR_S, 200 / 20, 200 / 0.2),
        ("What is it", "virtual", FLOOR_S, 200 / 20, 200 / 0.2),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", "cpu", CPU_FLOOR_S, 200 / 2, 200 / 0.002),
    ],
)
def test_bounds_follow_the_sheet_or_the_class(
    name: str, kind: str, floor: float, per_gb: float, per_tflop: float
) -> None:
    found = bounds_of(DeviceInfo(0, name, kind))
    assert floor >= 10 and found.seconds(Cost()) == floor and found.own == (kind == "cpu")
    assert found.seconds(Cost(nbytes=10**9)) == pytest.approx(floor + per_gb)
    assert found.seconds(Cost(flops=10**12)) == pytest.approx(floor + per_tflop)


def test_seconds_that_are_asked_for_override_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo(0, "NVIDIA H200", "discrete")
    monkeypatch.setenv("HYBRID_VULKAN_TIMEOUT", "7.5")
    assert bounds_of(info).seconds(Cost(nbytes=10**15)) == 7.5 and bounds_of(info, 3.0).seconds(Cost()) == 3.0
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("HYBRID_VULKAN_TIMEOUT", wrong)
        with pytest.raises(RuntimeError, match=f"HYBRID_VULKAN_TIMEOUT='{wrong}' is no number of seconds above 0"):
            bounds_of(info)


@pytest.mark.slow
def test_passes_uploads_and_downloads_carry_their_cost() -> None:
    """A pass's cost is what its operations declare, for each run; of copies, bytes read and written."""
    with shared_device("vulkan") as opened, open_checkpoint(MODELS / "demo-gemma3-q8_0.gguf") as checkpoint:
        device: Any = opened
        queue = device._queue
        engine = Engine(checkpoint, device, EngineConfig(ctx=32))
        greedy(engine, [2, 3, 4], 3)
        program = engine.runner.program("decode", 1, 1)
        one = plan_cost(program.plan)
        assert queue._running[-1][1]() == Cost(one.flops, one.nbytes) and one.nbytes > checkpoint.file_bytes / 2
        device.wait(program.submit(3))
        assert queue._running[-1][1]() == Cost(3 * one.flops, 3 * one.nbytes)
        piece, data = device.memory_pool.allocate(1 << 20, "scratch"), np.zeros(1 << 20, np.uint8)
        for copy in (device.transfer.upload, device.transfer.download):
            copy(piece, data)
            device.wait()
            assert queue._running[-1][1]() == Cost(nbytes=2 << 20)
        device.transfer.fill(piece, 0)
        assert queue._running[-1][1]() == Cost(nbytes=1 << 20)
        device.memory_pool.release(piece, "scratch")


def test_programs_are_cut_where_a_submit_would_last_too_long() -> None:
    of = Bounds(1.0, gb_s=1.0, tflops=1.0, submit=1.0)
    fifth = Cost(flops=10**12 // (5 * PEAK_SHARE))
    assert [end for end, _ in of.parts([fifth] * 12)] == [5, 10, 12]
    assert [end for end, _ in of.parts([fifth.times(20), fifth])] == [1, 2], "a step is not cut"
    assert of.parts([fifth] * 3) == [(3, fifth.times(3))] and of.parts([]) == [(0, Cost())]
    assert [end for end, _ in replace(of, submit=None).parts([fifth] * 99)] == [99]
    info = DeviceInfo(0, "Radeon 780M", "integrated")
    assert bounds_of(info, vendor="amd").submit == 1.0 and bounds_of(info, vendor="nvidia").submit is None


def test_a_text_is_the_same_in_many_submits(devices: Devices) -> None:
    """Prefill splits into many submits; a short decode step stays one submit."""
    counted, texts = [], ()
    asked: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    for limit in (None, 0.05, 1e-9):
        device = open_another(devices.get("vulkan"))
        device.queue.bounds = replace(device.queue.bounds, submit=limit)
        with hybrid.load(demo(layers=BOTH), Opened(device, device), ctx=128) as model:
            ids = model.submit(list(range(2, 90)), **asked).result().ids
            before = model.engine.counters.copy()
            again = model.submit(list(range(2, 90)), **asked).result().ids
            found = model.engine.counters.minus(before)
            counted.append((found.submits, found.dispatches))
            assert again == ids
            assert ids == (texts := texts or ids) and len(set(ids)) > 1
    (plain, dispatches), (_, few), (most, many) = counted
    assert dispatches == few == many and plain < 10 and most > dispatches // 2
