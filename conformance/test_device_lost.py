"""What happens when a device does not finish in time, is lost, or belongs to another process: one line that says so, an end
that does not hang, and a new start in the same process."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.devices import need_compiler, open_backend
from conformance.models import MODELS
from conformance.test_vulkan_runtime import BINDINGS, SPIRV, X, chain, open_toys, prepare
from hybrid import generate
from hybrid.checkpoint import open_checkpoint
from hybrid.cost import Cost, plan_cost
from hybrid.engine import Engine
from hybrid.spec.errors import DeviceLost
from hybrid.spec.plan import Step
from hybrid.spec.tensor import Tensor
from kernels.vulkan import bounds, timeline
from kernels.vulkan.api import vk
from kernels.vulkan.bounds import CPU_FLOOR_S, FLOOR_S, Bounds, bounds_of
from kernels.vulkan.build import build
from kernels.vulkan.device import free_left
from kernels.vulkan.instance import DeviceInfo
from kernels.vulkan.recorder import Recorder
from kernels.vulkan.tensors import DeviceTensor

DEMO = MODELS / "demo-gemma3-q8_0.gguf"
STOP = 3  # the word of control that ends the kernel below
SPINS = {"cpu": (512, 65535)}  # groups, and most looks of each, at which llvmpipe leaves a loop: 20 s
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
bindings = 3
push = 4
"""


def spin(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """Looks at a word of control until the host has set it, which this file's tests do when they have seen enough."""
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
    """A device whose waits take 0.3 s at most, and a submitted kernel on it that does not end before stop()."""

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
        """Let the kernel end, and free what was left behind."""
        if self.queue.handle is None:  # its memory too
            return
        self.words[STOP] = 1
        end = time.monotonic() + 30
        while self.queue.handle is not None and time.monotonic() < end:
            free_left()
            time.sleep(0.01)
        assert self.queue.handle is None, "what a closed device left behind was not freed when its work had ended"


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


def test_a_kernel_that_does_not_end_is_given_up_and_another_device_opened(
        spinning: Spinning, caplog: pytest.LogCaptureFixture) -> None:
    device, begin = spinning.device, time.monotonic()
    with pytest.raises(DeviceLost) as error:
        device.wait(spinning.ticket)
    one_line(error.value, device.name, f"submit {spinning.ticket} after 0.3 s", "hangs", "another program", "load it again")
    waited = time.monotonic() - begin
    calls: tuple[Callable[[], Any], ...] = (
        device.wait, lambda: device.read("y"), lambda: device.write("y", Tensor.of(X)), lambda: device.compile(chain({})),
        lambda: device.drop("y"), device.reset,
    )  # fmt: skip
    for call in calls:  # at once: nobody waits for the same thing twice
        with pytest.raises(DeviceLost, match="hangs"):
            call()
    device.close()
    device.close()
    assert time.monotonic() - begin < waited + 5
    assert spinning.queue.reached() < spinning.ticket, "the kernel has ended: this has shown nothing"
    assert f"{device.name} was closed while work that does not end runs on it" in caplog.text
    toys_work()


def test_closing_while_a_kernel_does_not_end_does_not_hang(spinning: Spinning) -> None:
    """Nobody has waited for it before."""
    begin = time.monotonic()
    spinning.device.close()
    assert time.monotonic() - begin < 10 and spinning.queue.reached() < spinning.ticket
    toys_work()


def test_memory_of_work_that_does_not_end_is_not_freed_under_it(spinning: Spinning) -> None:
    """Whoever releases what it holds when the error passes by."""
    pool = spinning.device.memory_pool
    piece = pool.allocate(1 << 28, "scratch")  # a block of its own
    with pytest.raises(DeviceLost):
        spinning.device.wait()
    pool.release(piece, "scratch")
    assert piece.buffer.handle is not None and pool.held["scratch"] >= 1 << 28


# --- what drivers answer ---------------------------------------------------------------------------------------------


class Driver:
    """The driver, with some of its functions replaced."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        self._functions, self._driver = functions, timeline.lib

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(self._driver, name)


@pytest.mark.parametrize("function", ["vkQueueSubmit", "vkWaitSemaphores", "vkGetSemaphoreCounterValue"])
def test_a_lost_device_says_why_it_may_be_and_can_be_opened_again(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_toys() as device:
        prepare(device)
        program = device.compile(chain({}))
        device.wait(program.submit())
        functions = {function: lambda *args: vk.VK_ERROR_DEVICE_LOST}
        if function == "vkGetSemaphoreCounterValue":  # asked when a wait is long
            functions["vkWaitSemaphores"] = lambda *args: vk.VK_TIMEOUT
        monkeypatch.setattr(timeline, "lib", Driver(**functions))
        with pytest.raises(DeviceLost) as error:
            device.wait(program.submit())
        one_line(error.value, device.name, "was lost while", "watchdog", "another program", "memory ran out", "removed", "again")
        monkeypatch.undo()
        for call in (program.submit, device.wait, lambda: device.read("y")):
            with pytest.raises(DeviceLost, match="was lost while"):
                call()
    assert device.handle is None, "a lost device was not freed"
    toys_work()


class Machine:
    """A driver without a GPU and its clock: a wait takes 0.2 s, and submits finish at the given seconds."""

    def __init__(self, *finished: float) -> None:
        self.now, self.finished = 0.0, finished
        self.driver = Driver(vkWaitSemaphores=self.wait, vkGetSemaphoreCounterValue=self.value)

    def monotonic(self) -> float:
        return self.now

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
        finished: tuple[float, ...], waited: float | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "floor", "per_gb", "per_tflop"),
    [
        ("NVIDIA H200", "discrete", FLOOR_S, 200 / 4800, 200 / 67), ("Some GPU", "discrete", FLOOR_S, 200 / 50, 200 / 1.0),
        ("Some APU", "integrated", FLOOR_S, 200 / 20, 200 / 0.2), ("What is it", "virtual", FLOOR_S, 200 / 20, 200 / 0.2),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", "cpu", CPU_FLOOR_S, 200 / 2, 200 / 0.002),
    ],
)  # fmt: skip
def test_bounds_follow_the_sheet_or_the_class(name: str, kind: str, floor: float, per_gb: float, per_tflop: float) -> None:
    found = bounds_of(DeviceInfo(0, name, kind))
    assert floor >= 10 and found.seconds(Cost()) == floor
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


def test_passes_uploads_and_downloads_carry_their_cost() -> None:
    """A pass's is what its operations declare, as often as it runs; of copies, bytes read and written."""
    with open_backend("vulkan") as opened, open_checkpoint(DEMO) as checkpoint:
        device: Any = opened
        queue = device._queue
        engine = Engine(checkpoint, device, ctx=32)
        engine.prefill({0: [2, 3, 4]})
        device.wait(engine.submit_decode((0,), 3))
        plan = engine.program("decode", 1, 1).plan
        one = plan_cost(plan)
        assert queue._running[-1][1]() == Cost(3 * one.flops, 3 * one.nbytes) and one.nbytes > checkpoint.file_bytes / 2
        piece, data = device.memory_pool.allocate(1 << 20, "scratch"), np.zeros(1 << 20, np.uint8)
        for copy in (device.transfer.upload, device.transfer.download):
            copy(piece, data)
            device.wait()
            assert queue._running[-1][1]() == Cost(nbytes=2 << 20)
        device.transfer.fill(piece, 0)
        assert queue._running[-1][1]() == Cost(nbytes=1 << 20)
        device.memory_pool.release(piece, "scratch")


# --- commands and models ---------------------------------------------------------------------------------------------


def test_a_command_ends_in_one_line_and_an_exit_code_of_its_own(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lost while the weights are loaded, and in the middle of the text."""
    open_backend("vulkan").close()
    command = [str(DEMO), "--device", "vulkan", "--prompt", "def f(", "-n", "4", "--ctx", "64"]
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
        assert error.startswith("error: vulkan:") and "was lost while submitting" in error and error.count("\n") == 1, error
    lost_at = -1
    assert generate.main(command) == 0 and capsys.readouterr().out == text


def test_a_model_whose_device_was_lost_is_closed_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    open_backend("vulkan").close()
    with hybrid.load(DEMO, "vulkan", ctx=64) as model:
        text = "".join(model.generate("def f(", 8))
        pieces = model.generate("def f(", 8)
        next(pieces)
        monkeypatch.setattr(timeline, "lib", Driver(vkWaitSemaphores=lambda *args: vk.VK_ERROR_DEVICE_LOST))
        with pytest.raises(hybrid.DeviceLost, match="was lost while waiting"):
            list(pieces)
        monkeypatch.undo()
        with pytest.raises(hybrid.DeviceLost, match="load it again"):
            list(model.generate("def f(", 8))
    with hybrid.load(DEMO, "vulkan", ctx=64) as model:
        assert "".join(model.generate("def f(", 8)) == text


# --- other processes -------------------------------------------------------------------------------------------------

FORKED = """
import os, signal, sys
import hybrid
from kernels.vulkan import api, memory, program, timeline, transfer
class Untouchable:
    def __getattr__(self, name):
        print("touched", name, flush=True)
        os._exit(9)
model = hybrid.load(sys.argv[1], "vulkan", ctx=64)
text = "".join(model.generate("def f(", 8))
pieces = model.generate("def f(", 8)
began = next(pieces)
sys.stdout.flush()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that hangs ends by this, with another status
    for module in (api, memory, program, timeline, transfer):
        module.lib = module.vk = Untouchable()
    uses = {
        "generate": lambda: list(model.generate("def f(", 8)), "go on": lambda: list(pieces),
        "logits": lambda: model.logits([2, 3]), "session": lambda: list(model.generate("def f(", 8, session=model.session())),
        "peek": lambda: model.engine.device.peek("history", 0, 1), "wait": lambda: model.engine.device.wait(),
        "read": lambda: model.engine.device.read("history"), "load": lambda: hybrid.load(sys.argv[1], "vulkan", ctx=64),
    }
    for name, use in uses.items():
        try:
            use()
            print(name, "was done")
        except RuntimeError as error:
            print(name, "::", error)
    with hybrid.load(sys.argv[1], "cpu", ctx=64) as other:
        print("cpu ::", other.device)
    if sys.argv[2] == "close":
        model.close()
    sys.exit(7)
_, status = os.waitpid(child, 0)
print("child ::", os.waitstatus_to_exitcode(status))
print("parent ::", began + "".join(pieces) == text and "".join(model.generate("def f(", 8)) == text)
"""


@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_forked_process_is_told_that_the_model_is_not_its_own_and_ends(how: str) -> None:
    open_backend("vulkan").close()
    done = subprocess.run([sys.executable, "-c", FORKED, str(DEMO), how], capture_output=True, text=True, timeout=180, check=False)
    said = dict(line.split(" :: ", 1) for line in done.stdout.splitlines() if " :: " in line)
    assert "was done" not in done.stdout and said.pop("cpu") == "cpu", done.stdout
    assert said.pop("child") == "7" and said.pop("parent") == "True" and not done.returncode, done.stdout + done.stderr
    assert len(said) == 8
    for text in said.values():
        assert "was open when this process was forked" in text and "spawn" in text, text
    assert not done.stderr, done.stderr
