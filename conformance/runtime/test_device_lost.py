"""A device that is lost or does not finish in time: a one-line error, an exit that does not hang, and a new device in
the same process."""

from __future__ import annotations

import logging
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.runtime.test_vulkan_runtime import BINDINGS, SPIRV, X, chain, open_toys, prepare
from conformance.support.devices import Driver, need_compiler, open_backend
from conformance.support.models import BOTH, demo
from hybrid import generate
from hybrid.core.errors import DeviceLost
from hybrid.core.plan import Step
from hybrid.core.tensor import Tensor
from hybrid.kernels.vulkan import timeline
from hybrid.kernels.vulkan.api import VulkanError, vk
from hybrid.kernels.vulkan.build import build
from hybrid.kernels.vulkan.device import free_left
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

STOP = 3  # the control word that ends the kernel below
SPINS = {"cpu": (512, 65535)}  # groups, and most polls of each, at which llvmpipe leaves a loop: 20 s
SHADER = """
[[vk::binding(0)]] StructuredBuffer<uint> control;
[[vk::binding(1)]] RWStructuredBuffer<float> y;
[[vk::binding(2)]] RWStructuredBuffer<uint> stop;
struct Push { uint looks; };
[[vk::push_constant]] Push push;

[shader("compute")]
[numthreads(8, 1, 1)]
void main()
{
    uint seen = 0;
    for (uint i = 0; i < push.looks && seen == 0; i++)
        InterlockedOr(stop[3], control[4], seen);
    y[0] = float(seen);
}
"""
SIDECAR = """
[[kernel]]
name = "toy.spin"
source = "spin.slang"
"""


def spin(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """Polls a control word until the host sets it."""
    groups, looks = SPINS.get(rec.device.info.kind, (1, 1 << 23))
    rec.dispatch(rec.kernel("toy.spin"), [], [t["y"].parts[0], rec.control], struct.pack("<I", looks), (groups,))


@pytest.fixture(scope="module")
def spirv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_compiler()
    folder = tmp_path_factory.mktemp("spin")
    shutil.copytree(SPIRV, folder / "spirv")
    (folder / "spin.slang").write_text(SHADER)
    (folder / "spin.toml").write_text(SIDECAR)
    build(folder, folder / "spirv", only="toy.spin")
    return folder / "spirv"


class Spinning:
    """A device whose waits take 0.3 s at most, with a submitted kernel on it that runs until stop()."""

    def __init__(self, spirv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(BINDINGS, "spin", spin)
        self.device = open_toys(spirv, timeout=0.3)
        prepare(self.device)
        self.words = self.device.tensor("control").parts[0].bytes.view(np.uint32)
        program = self.device.compile(chain({"op": "spin"}))
        queue = self.device._queue
        assert queue is not None
        self.queue, self.ticket = queue, program.submit()

    def stop(self) -> None:
        """End the kernel, and free the remaining memory."""
        if self.queue.handle is None:  # its memory too
            return
        self.words[STOP] = 1
        end = time.monotonic() + 30
        while self.queue.handle is not None and time.monotonic() < end:
            free_left()
            time.sleep(0.01)
        assert self.queue.handle is None, "a closed device's memory was not freed when its work had ended"


@pytest.fixture
def spinning(spirv: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spinning]:
    made = Spinning(spirv, monkeypatch)
    yield made
    made.device.close()
    made.stop()


def one_line(error: BaseException, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text and all(p in text for p in parts), text


def toys_work() -> None:
    with open_toys() as device:
        prepare(device)
        device.wait(device.compile(chain({"scale": 2.0})).submit())
        np.testing.assert_array_equal(device.read("y").array, 2 * X)


# --- work that does not end ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_kernel_that_does_not_end_times_out_and_another_device_opens(
    spinning: Spinning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device, begin = spinning.device, time.monotonic()
    with pytest.raises(DeviceLost) as error:
        device.wait(spinning.ticket)
    one_line(
        error.value, device.name, f"submit {spinning.ticket} within 0.3 s", "hangs", "another program", "load it again"
    )
    waited = time.monotonic() - begin
    calls: tuple[Callable[[], Any], ...] = (
        device.wait,
        lambda: device.read("y"),
        lambda: device.write("y", Tensor.of(X)),
        lambda: device.compile(chain({})),
        lambda: device.drop("y"),
        device.reset,
    )
    for call in calls:  # at once: a second wait for the same work returns immediately
        with pytest.raises(DeviceLost, match="hangs"):
            call()
    device.close()
    device.close()
    assert time.monotonic() - begin < waited + 5
    assert spinning.queue.reached() < spinning.ticket, "the kernel has ended: this test proves nothing"
    (record,) = caplog.records
    assert "was closed while its work was still running" in record.message and record.levelno == logging.INFO, (
        "said twice"
    )
    toys_work()


@pytest.mark.slow
def test_closing_while_a_kernel_does_not_end_does_not_hang(
    spinning: Spinning, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an earlier wait."""
    begin = time.monotonic()
    spinning.device.close()
    assert time.monotonic() - begin < 10 and spinning.queue.reached() < spinning.ticket
    (record,) = caplog.records  # no error has reported it
    assert "was closed while its work was still running" in record.message and record.levelno == logging.WARNING
    toys_work()


@pytest.mark.slow
def test_memory_of_work_that_does_not_end_is_not_freed_under_it(spinning: Spinning) -> None:
    """When the error unwinds through code that releases memory."""
    pool = spinning.device.memory_pool
    piece = pool.allocate(1 << 28, "scratch")  # a separate block
    with pytest.raises(DeviceLost):
        spinning.device.wait()
    pool.release(piece, "scratch")
    assert piece.buffer.handle is not None and pool.held["scratch"] >= 1 << 28


@pytest.mark.slow
def test_devices_on_one_queue_are_lost_and_freed_together(spinning: Spinning, spirv: Path) -> None:
    other = spinning.device.sibling(bindings=BINDINGS, spirv=SPIRV)
    with pytest.raises(DeviceLost):
        spinning.device.wait(spinning.ticket)
    with pytest.raises(DeviceLost, match="hangs"):
        other.wait()
    spinning.device.close()
    with pytest.raises(VulkanError, match="is closed"):
        other.check_open()
    assert other.handle is not None, "the kernel still runs: no object of either may be destroyed"
    spinning.stop()
    assert other.handle is None
    toys_work()


# --- driver errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["vkQueueSubmit", "vkWaitSemaphores", "vkGetSemaphoreCounterValue"])
def test_a_lost_device_lists_causes_and_can_be_reopened(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_toys() as device:
        prepare(device)
        program = device.compile(chain({}))
        device.wait(program.submit())
        functions = {function: lambda *args: vk.VK_ERROR_DEVICE_LOST}
        if function == "vkGetSemaphoreCounterValue":  # queried during a long wait
            functions["vkWaitSemaphores"] = lambda *args: vk.VK_TIMEOUT
        monkeypatch.setattr(timeline, "lib", Driver(**functions))
        with pytest.raises(DeviceLost) as error:
            device.wait(program.submit())
        one_line(
            error.value,
            device.name,
            "was lost while",
            "watchdog",
            "another program",
            "memory ran out",
            "removed",
            "again",
        )
        monkeypatch.undo()
        for call in (program.submit, device.wait, lambda: device.read("y")):
            with pytest.raises(DeviceLost, match="was lost while"):
                call()
    assert device.handle is None, "a lost device was not freed"
    toys_work()


# --- commands and models ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_command_ends_in_one_line_and_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lost while the weights are loaded, and in the middle of the text."""
    open_backend("vulkan").close()
    command = [str(demo(layers=BOTH)), "--device", "vulkan", "--prompt", "def f(", "-n", "4", "--ctx", "64"]
    count, lost_at, real = 0, -1, timeline.lib.vkQueueSubmit

    def submit(*args: Any) -> int:
        nonlocal count
        count += 1
        return int(vk.VK_ERROR_DEVICE_LOST) if count == lost_at else int(real(*args))

    monkeypatch.setattr(timeline, "lib", Driver(vkQueueSubmit=submit))
    assert generate.main(command) == 0
    text = capsys.readouterr().out
    for at in (1, count - 1):
        count, lost_at = 0, at
        assert generate.main(command) == 3
        error = capsys.readouterr().err
        assert error.startswith("error: vulkan:") and "was lost while submitting" in error and error.count("\n") == 1, (
            error
        )
    lost_at = -1
    assert generate.main(command) == 0 and capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("answer", "said"), [("VK_ERROR_DEVICE_LOST", "was lost while waiting"), ("VK_TIMEOUT", "within 0.3 s")]
)
@pytest.mark.slow
def test_a_model_whose_device_was_lost_or_late_is_closed_and_loaded_again(
    answer: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_backend("vulkan").close()
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HYBRID_VULKAN_TIMEOUT", "0.3" if answer == "VK_TIMEOUT" else "")
    with hybrid.load(demo(layers=BOTH), "vulkan", ctx=64) as model:
        monkeypatch.delenv("HYBRID_VULKAN_TIMEOUT")
        text = "".join(model.generate("def f(", 8))
        pieces = model.generate("def f(", 8)
        next(pieces)
        monkeypatch.setattr(timeline, "lib", Driver(vkWaitSemaphores=lambda *args: int(getattr(vk, answer))))
        with pytest.raises(hybrid.DeviceLost, match=said):
            list(pieces)
        with pytest.raises(hybrid.DeviceLost, match="load it again"):
            list(model.generate("def f(", 8))
        if answer == "VK_ERROR_DEVICE_LOST":  # the real work must have ended when the device is freed
            monkeypatch.undo()
    assert ("its work was still running" in caplog.text) == (answer == "VK_TIMEOUT")
    monkeypatch.undo()
    with hybrid.load(demo(layers=BOTH), "vulkan", ctx=64) as model:
        assert "".join(model.generate("def f(", 8)) == text
