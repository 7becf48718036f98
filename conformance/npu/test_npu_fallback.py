"""Every failure on the NPU ends in the schedule's fallback: the text is complete, and one line says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.devices import MultiDevice
from conformance.support.models import BOTH, demo
from conformance.support.paths import ATTENTION, ROOT
from conformance.support.profile import LONG
from conformance.support.pyxrt_standin import NAME, folder_of, installed, standin
from conformance.support.texts import ask, greedy
from hybrid import doctor
from hybrid.core.errors import DeviceLost, SpecError
from hybrid.devices.multi import cause
from hybrid.engine.loading import plans_of_model
from hybrid.kernels.npu import xrt_sim
from hybrid.kernels.npu.artefact import ArtefactError, find
from hybrid.kernels.npu.build import build_sim, default_folder
from hybrid.kernels.npu.build import main as build_main
from hybrid.kernels.npu.device import NoRoom, NpuDevice
from hybrid.kernels.npu.iron import IronError
from hybrid.kernels.npu.needed import designs
from hybrid.kernels.npu.xrt import NpuUnavailable, open_host

FILE = demo(layers=BOTH)  # the same calls in each layer
PROMPT, CTX = "def read_file(path):", 64

pytestmark = [pytest.mark.usefixtures("sim_machine"), pytest.mark.slow]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with everything that gemma3-hybrid needs on an NPU; the stand-in loads the simulator's files."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        seen: set[Any] = set()
        for schedule, slots in (("gemma3-hybrid", None), (ATTENTION, 2)):
            for plan in plans_of_model(str(FILE), str(schedule), CTX, slots, backend="cpu"):
                for design in designs(plan, seen):
                    build_sim(design, default_folder(False))
        assert seen
    return cache


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with load() as model:  # no pyxrt: only the main device
        assert model.device == "cpu" and len(model.passed_over) == 1
        return text(model)


@pytest.fixture
def cache(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(built))
    yield built


def load(schedule: Any = "gemma3-hybrid", **options: Any) -> hybrid.Model:
    return hybrid.load(FILE, "cpu", schedule, ctx=CTX, **options)


def text(model: hybrid.Model) -> list[int]:
    return greedy(model.engine, model.encode(PROMPT), 8)


def said(model: hybrid.Model) -> str:
    """The one line about the NPU."""
    lines = [*model.passed_over, *model.engine.device.failures]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_driver_and_no_toolchain_is_the_whole_text_and_one_line(tmp_path: Path) -> None:
    """The most common machine: XRT is installed, no design was ever built, and no compiler could build one."""
    command = [sys.executable, "-m", "hybrid.generate", str(FILE), "--schedule", "gemma3-hybrid", "--device", "cpu"]
    command += ["--ctx", str(CTX), "--prompt", PROMPT, "--max-tokens", "8", "--ignore-eos"]
    path = os.pathsep.join([str(folder_of(tmp_path)), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    alone = subprocess.run([*command], capture_output=True, text=True)
    assert (done.returncode, alone.returncode) == (0, 0), done.stderr
    assert done.stdout == alone.stdout and len(done.stdout) > len(PROMPT)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and "generated 8" in lines[0] and "(fallback)" in lines[0], done.stderr
    assert lines[1].startswith("passed over: npu: ") and "are not built" in lines[1] and "kernels.npu.build" in lines[1]
    assert not list(tmp_path.rglob("*.xclbin")), "no design was built"


def test_with_its_designs_the_standin_runs(cache: Path, plain: list[int]) -> None:
    """Precondition of the tests below. The simulator runs the designs."""
    with installed(standin()), load() as model:
        assert NAME in model.device and not model.passed_over
        assert len(text(model)) == len(plain) and not model.engine.device.failures
        assert _host(model).counters.runs > 0


def _host(model: hybrid.Model) -> Any:
    device: Any = model.engine.device
    assert isinstance(device, MultiDevice)
    return device.others["npu"].host  # type: ignore[attr-defined]


def test_one_missing_stream_is_found_before_the_first_pass(cache: Path, plain: list[int], tmp_path: Path) -> None:
    design = next(d for p in plans_of_model(str(FILE), "gemma3-hybrid", CTX, backend="cpu") for d in designs(p, set()))
    stream = find(default_folder(False), design).stream
    aside = stream.rename(tmp_path / stream.name)
    try:
        with installed(standin()), load() as model:
            assert "1 designs of plan" in said(model) and stream.name in said(model)
            assert text(model) == plain
    finally:
        aside.rename(stream)


def test_an_old_binding_has_single_runs_or_is_refused(
    cache: Path, plain: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pyxrt has runlists from XRT 2.20 on. Without them, jobs run one by one; without required calls, the fallback."""
    (tmp_path / "version.json").write_text(json.dumps({"BUILD_VERSION": "2.18.0"}))
    monkeypatch.setenv("XILINX_XRT", str(tmp_path))
    with installed(standin("runlist")), load(ATTENTION, slots=2) as model:
        ids = model.encode(PROMPT)
        both = [ask(model.engine, ids[at:], 1) for at in (0, 1)]
        assert [len(handle.result().ids) for handle in both] == [1, 1]
        counters = _host(model).counters
        assert counters.runs > 0 == counters.runlists and not model.engine.device.failures
    with installed(standin("hw_context")), load() as model:
        assert "XRT 2.18.0 lacks hw_context: install XRT 2.20 or newer" in said(model) and text(model) == plain

    def no_overload(*_: Any) -> None:
        raise TypeError("device(): incompatible constructor arguments")

    module = standin()
    monkeypatch.setattr(module, "device", no_overload)
    with installed(module), load() as model:
        assert "TypeError: device(): incompatible" in said(model) and text(model) == plain
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    found = [f for f in doctor._npu() if f.name == "pyxrt"]
    assert (
        found[0].state == "optional"
        and "XRT 2.18.0; 2.20 or newer" in found[0].detail
        and "one by one" in found[0].detail
    )


def test_doctor_names_the_minimum(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XILINX_XRT", str(tmp_path))  # no version.json
    (found,) = [f for f in doctor._npu() if f.name == "pyxrt"]
    assert found.state == "optional" and "2.20" in found.fix
    with installed(standin()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
        (found,) = [f for f in doctor._npu() if f.name == "pyxrt"]
        assert found.state == "ok" and "no version.json" in found.detail


@pytest.mark.parametrize("when", ["opened", "prepared", "run", "waited"])
def test_a_device_that_disappears(when: str, cache: Path, plain: list[int]) -> None:
    module = standin()
    with installed(module):
        if when == "opened":
            setattr(module, "device", _gone)  # noqa: B010
        with load() as model:
            if when == "prepared":
                xrt_sim._present[0] = False
            elif when in ("run", "waited"):
                xrt_sim.faults.vanish_after = 0 if when == "run" else 2
            found = text(model)
            assert found == plain if when != "waited" else len(found) == len(plain)
            assert "o such device" in said(model) or "Could not open" in said(model)


def _gone(index: int) -> Any:
    raise RuntimeError(f"Could not open device with index '{index}'")


ERRORS = (
    ArtefactError("x.bin is missing"),
    IronError("aie: no placement="),
    SpecError("design: over a limit"),
    KeyError("digest"),
    FileNotFoundError(2, "No such file or directory", "x.bin"),
    AttributeError("module 'pyxrt' has no attribute 'run'"),
    RuntimeError("driver"),
    MemoryError(),
    OSError("pages"),
)
PLACES = ("host", "enqueue", "compile", "adopt", "reserve")
# Every error somewhere and every place with some error; in the long profile all combinations.
RAISED = [(e, w) for i, e in enumerate(ERRORS) for j, w in enumerate(PLACES) if LONG or i % len(PLACES) == j]


@pytest.mark.parametrize(("error", "where"), RAISED, ids=[f"{w}-{type(e).__name__}" for e, w in RAISED])
def test_every_kind_of_error_ends_in_the_fallback(
    error: Exception, where: str, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    if where not in ("host", "enqueue"):
        monkeypatch.setattr(NpuDevice, where, fail)
    with load(npu="sim") as model:
        if where == "host":
            monkeypatch.setattr(_host(model), "run", fail)
        if where == "enqueue":
            monkeypatch.setattr(NpuDevice, "enqueue", fail)
        if where in ("adopt", "reserve"):
            assert cause(error) in said(model), "before the first pass"
        assert text(model) == plain
        assert cause(error) in said(model) and "\n" not in said(model)


def test_a_lost_main_device_is_no_failure_of_the_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    with load(npu="sim") as model:
        device: Any = model.engine.device

        def lost(*_: Any, **__: Any) -> None:
            raise DeviceLost("the GPU is gone")

        monkeypatch.setattr(device.transfers, "send", lost)
        with pytest.raises(DeviceLost):
            text(model)
        assert not device.failures


def test_without_a_fallback_every_error_is_one_of_the_run() -> None:
    from hybrid.spec.schedule import named_schedule

    schedule = named_schedule("gemma3-hybrid").model_copy(update={"fallback": {}})
    with hybrid.load(FILE, "cpu", schedule, ctx=CTX, npu="sim") as model:
        _host(model).folder = Path("/nowhere")
        _host(model)._loaded.clear()
        with pytest.raises(RuntimeError, match=r"npu: .*no artefact"):
            text(model)


def test_buffers_over_the_budget_are_refused_before_the_first_pass(
    monkeypatch: pytest.MonkeyPatch, plain: list[int]
) -> None:
    usual = NpuDevice.__init__
    monkeypatch.setattr(NpuDevice, "__init__", lambda self, *a, **k: usual(self, *a, **k, budget=1000))
    with load(npu="sim") as model:
        assert "GiB of buffer objects, the budget is 0.00 GiB" in said(model) and text(model) == plain
    with NpuDevice("sim") as device, pytest.raises(NoRoom, match="the budget is 1000"):
        device.room(1001)


def test_a_pass_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator's designs too: they are made when a plan is compiled."""
    with load(npu="sim") as model:
        monkeypatch.setattr("hybrid.kernels.npu.device.build_sim", lambda *_: pytest.fail("built during a pass"))
        text(model)
        assert not model.engine.device.failures
        assert np.isfinite(model.logits(model.encode(PROMPT))).all()


def test_the_build_lists_what_a_model_needs(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    """A fixed set, and a small one: a conversation of 4096 positions with 27B."""
    assert build_main(["--list", str(FILE), "--ctx", str(CTX)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(": built") for line in lines[:-1]) and lines[-1].endswith(
        f"built in {default_folder(False)}"
    )
    assert build_main(["--list", "gemma3-27b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) - 1 == 3 and all(line.endswith("not built") for line in lines[:-1]) and "of 2 fabrics" in lines[-1]
    )
    assert build_main(["--list", "gemma3-27b", "--schedule", str(ATTENTION)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) - 1 <= 48 and "of 1 fabrics" in lines[-1]
    assert build_main(["--for", str(FILE), "small.norm"]) == 2
    assert build_main(["--for", str(FILE), "--ctx", str(CTX), "--sim"]) == 0


def test_any_error_of_loading_a_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyxrt.py").write_text("raise SystemError('built for another CPython')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NpuUnavailable, match="SystemError: built for another"):
        open_host("npu", tmp_path)
