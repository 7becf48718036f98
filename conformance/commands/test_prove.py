"""hybrid.prove: a sound device is proved, and devices that lie are told by kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.mutation.mutate import load, mutated_spirv
from conformance.support.devices import Devices, need_compiler
from conformance.support.paths import MODELS, ROOT
from conformance.support.profile import LONG
from conformance.support.proof import FIRST_PROOF
from hybrid import doctor, prove, proving
from hybrid.core.dtypes import CACHE_CHOICES
from hybrid.devices import opening
from hybrid.devices.opening import NoDevice
from hybrid.devices.proofs import report_path
from hybrid.kernels.vulkan.api import VulkanLost
from hybrid.kernels.vulkan.build import sources, variants
from hybrid.kernels.vulkan.device import VulkanDevice, open_device
from hybrid.kernels.vulkan.features import Feature, Report, choose_subgroup, with_subgroup
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.kernels.vulkan.program import Program
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.perf.mesa import installed

pytestmark = pytest.mark.slow

DRAFT = str(MODELS / "demo-gemma3-draft-q8_0.gguf")
LIES = (
    "half of each unit not written",
    "mean over one element fewer",
    "the new key is not rotated",
    "a position's block is that of the next one",
    "gemv: half of the lanes left out of the sum",
)
"""Shaders that compute something else, by their mutants' names. A CPU driver compiles the last ones for a minute."""


@pytest.fixture(autouse=True)
def own_cache(devices: Devices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices.get("vulkan")  # or the test is skipped
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.skipif(not LONG, reason="another driver compiles all kernels: in the long profile")
def test_debian_13s_llvmpipe_is_proved() -> None:
    """With every type of cache. It counts barriers otherwise than Debian 12's."""
    others = [m for m in installed() if m.launcher]
    icds = [m.icd.with_name("lvp_icd.json") for m in others]
    if not icds or not icds[0].exists():
        pytest.skip("Debian 13's Mesa is not here: python -m perf.mesa fetch")
    packages = [p for p in sys.path if p.endswith("site-packages")]
    drivers = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(icds[0]))
    env = {**os.environ, **drivers, "PYTHONPATH": os.pathsep.join([str(ROOT), *packages])}
    env.pop("HYBRID_VULKAN_VALIDATION", None)
    command = [*others[0].launcher, os.path.realpath(sys.executable), "-m", "hybrid.prove", DRAFT, "--json"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert "llvmpipe" in report["driver"] and any(".q8_0." in p["kernel"] for p in report["proofs"])


def test_a_sound_device_is_proved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command writes a report without anything personal; doctor knows it."""
    if not LONG:
        own_caches(monkeypatch)
    assert prove.main([DRAFT, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kernels"] == kernels_digest() and len(said["proofs"]) > 10
    assert all(p["cases"] and not p["error"] and p["worst"] <= 1 for p in said["proofs"])
    assert all(t["apart"] < proving.APART and t["lead"] < proving.LEAD for t in said["texts"])
    (file,) = (tmp_path / "hybrid-kernels" / "proofs").iterdir()
    assert json.loads(file.read_text()) == said and str(Path.home()) not in file.read_text()
    found = [f for f in doctor._vulkan() if f.name.endswith(": kernels")]
    assert [f.state for f in found if f.detail.startswith(f"{len(said['proofs'])} proved")] == ["ok"]
    file.write_text("{}")
    assert "ok" not in {f.state for f in doctor._vulkan() if f.name.endswith(": kernels")}


def test_every_cache_and_wanted_rows_are_proved() -> None:
    """Caches of all types that --kv offers, and steps on the rows whose logits are wanted; a first load has its own."""
    subjects = [partial(prove.opened_model, str(MODELS / "demo-gemma4-q8_0.gguf"))]
    with closing(open_device()) as device:
        wanted, dry, _ = proving.wanted_by(subjects, device)
        own, _, _ = proving.wanted_by(subjects, device, few=True)
    cases = [trial.case for trial in proving.trials(wanted, dry)]
    for op, kinds in (("decode_attention", True), ("attention", False)):
        found = {c.dtypes["k_cache"] for c in cases if c.op == op and bool(c.kinds) >= kinds}
        assert found == set(CACHE_CHOICES) - {"auto"}, op
    assert {c.op for c in cases if c.wanted} >= {"rmsnorm", "linear", "attention"}
    assert not [name for name in own.kernels if name.startswith(("decode_attention.q8_0", "attention.q8_0"))]


def own_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other types of cache than the plans', each a kernel that a CPU driver compiles."""
    monkeypatch.setattr(proving.Wanted, "add_caches", lambda self, plan, dry: None)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without texts: what is told apart by kernels must be told by their cases."""
    own_caches(monkeypatch)
    monkeypatch.setattr(prove, "ON_CPU", 0)


def wrong(opened: Callable[..., VulkanDevice]) -> set[str]:
    return {p.kernel for p in proving.prove(opened, [partial(prove.opened_model, DRAFT)]).proofs if p.error}


def lose_writes(monkeypatch: pytest.MonkeyPatch, lost: Callable[[str], bool]) -> None:
    """A driver that leaves a program's last dispatch out where it is of such a kernel."""
    place = Program._place

    def shorter(self: Program, recorder: Recorder) -> Any:
        done = self.recording
        if len(done.dispatches) > 1 and lost(done.dispatches[-1].kernel.name):
            done.dispatches.pop()
            done.barriers.pop()
        return place(self, recorder)

    monkeypatch.setattr(Program, "_place", shorter)


def of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads prove their kernels first, as they do outside of tests."""
    monkeypatch.setattr("hybrid.ready.proved", FIRST_PROOF)


@pytest.mark.skipif(not LONG, reason="slow; first loads notice a wrong kernel in the short profile")
@pytest.mark.parametrize("name", LIES)
def test_a_kernel_that_computes_something_else_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_compiler()
    small(monkeypatch)
    (mutant,) = (m for m in load() if m.name == name)
    changed = {v.module for v in variants() if mutant.path in sources(v.source)}
    with closing(open_device()) as device:
        wanted, dry, _ = proving.wanted_by([partial(prove.opened_model, DRAFT)], device)
    selected = {kernel for trial in proving.trials(wanted, dry) for kernel in trial.selects}
    spirv = mutated_spirv(mutant, selected, tmp_path / "mutant")
    found = wrong(lambda **options: open_device(spirv=spirv, **options))
    assert found & changed, found


@pytest.mark.skipif(not LONG, reason="slow; first loads replace wrong kernels in the short profile")
def test_other_kernels_are_found_and_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device whose tuned kernels are wrong, and whose plain ones are not: loads take those, and say so."""
    need_compiler()
    small(monkeypatch)
    (mutant,) = (m for m in load() if m.name == LIES[0])
    spirv = mutated_spirv(mutant, {v.module for v in variants()}, tmp_path / "mutant")

    def opened(selector: str = "auto", **options: Any) -> VulkanDevice:
        return open_device(selector, **options, **({} if options.get("tuning") == "default" else {"spirv": spirv}))

    monkeypatch.setattr("hybrid.kernels.vulkan.device.open_device", opened)
    monkeypatch.setattr(proving, "ROUTES", proving.ROUTES[1:3])
    assert prove.main([DRAFT]) == 1
    assert "runs with {'tuning': 'default'} instead" in capsys.readouterr().out
    with hybrid.load(DRAFT, "vulkan", ctx=64) as model:
        (line,) = model.engine.device.failures
        assert "computes wrong results in embed.q8_0" in line and "runs with {'tuning': 'default'}" in line
        text = model.submit([2, 7, 8], max_tokens=8).result().ids
    with hybrid.load(DRAFT, "cpu", ctx=64) as model:
        assert model.submit([2, 7, 8], max_tokens=8).result().ids == text


def test_a_device_without_a_proved_way_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with closing(open_device()) as device:
        path = report_path(device.info.name, device.report.driver, kernels_digest())
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"wrong": ["embed.q8_0"], "options": None, "proofs": [], "plans": []}))
    with pytest.raises(NoDevice, match=r"wrong results in embed\.q8_0 .* no other kernels are proved"):
        opening.open_device("vulkan")
    (found,) = (f for f in doctor._vulkan() if f.detail.startswith("wrong with this driver"))
    assert found.state == "missing"
    path.write_text(json.dumps({"wrong": ["embed.q8_0"], "options": {"spirv": "elsewhere"}, "proofs": [], "plans": []}))
    opening.open_device("vulkan").device.close()  # an option that no route has: the report is not believed


@pytest.mark.skipif(not LONG, reason="slow; first loads notice lost writes in the short profile")
def test_writes_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Results then depend on what memory held before."""
    small(monkeypatch)
    monkeypatch.setattr(proving, "ROUTES", ())
    lose_writes(monkeypatch, lambda name: name.startswith("rmsnorm."))
    assert prove.main([DRAFT, "--device", "vulkan"]) == 1
    out = capsys.readouterr().out
    assert "rmsnorm.q8_act" in out and "WRONG" in out.splitlines()[-2]


@pytest.mark.parametrize("reset", [False, True], ids=["hang", "reset"])
def test_a_kernel_that_the_device_does_not_survive_is_named(monkeypatch: pytest.MonkeyPatch, reset: bool) -> None:
    """The other kernels are proved on a device opened anew. A hang ends by the wait's bound, a reset at once."""
    small(monkeypatch)
    submit, wait = Program.submit, VulkanDevice.wait
    late = set[int]()

    def hanging(self: Program, *args: Any, **kwargs: Any) -> int:
        ticket = submit(self, *args, **kwargs)
        if any(d.kernel.name.startswith("rmsnorm.") for d in self.recording.dispatches):
            late.add(id(self.device))
            if reset:
                self.device.queue.gone = lambda: VulkanLost("the driver reset the device")
        return ticket

    def bounded(self: VulkanDevice, ticket: int | None = None) -> None:
        if id(self) in late:
            late.remove(id(self))
            raise VulkanLost("work has not ended within its bound")
        wait(self, ticket)

    monkeypatch.setattr(Program, "submit", hanging)
    monkeypatch.setattr(VulkanDevice, "wait", bounded)
    report = proving.prove(open_device, [partial(prove.opened_model, DRAFT)], few=True)
    errors = {p.kernel: p.error for p in report.proofs if p.error}
    assert "rmsnorm.q8_act" in errors and len(errors) < 4
    assert all("VulkanLost" not in e and "rmsnorm[" in e for e in errors.values())
    assert sum(p.cases > 0 for p in report.proofs if not p.error) > 10


def test_a_first_load_proves_its_kernels_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_models(monkeypatch)
    with hybrid.load(DRAFT, "vulkan", ctx=64, prove=False) as model:
        used = {d.kernel.name for p in model.engine.device.programs for d in p.recording.dispatches}
    folder = tmp_path / "hybrid-kernels" / "proofs"
    assert not folder.exists()
    covering = proving._covering
    monkeypatch.setattr(proving, "_covering", lambda proofs, some: covering(proofs.keys() - {"sample.256"}, some))
    with hybrid.load(DRAFT, "vulkan", ctx=64):
        pass
    (file,) = folder.iterdir()
    report = proving.Report.read(file)
    cases = {p.kernel: p.cases for p in report.proofs}
    assert used <= cases.keys() and report.unproved == ["sample.256"] and report.models == [Path(DRAFT).name]
    assert "that no small case runs: sample.256" in caplog.text
    proved = proving.prove
    monkeypatch.setattr(proving, "prove", lambda *args, **kwargs: pytest.fail("proved again"))
    with hybrid.load(DRAFT, "vulkan", ctx=64):
        pass
    monkeypatch.setattr(proving, "prove", proved)
    with hybrid.load(DRAFT, "vulkan", ctx=64, precision="exact"):
        pass
    now = proving.Report.read(file)
    assert {p.kernel for p in now.proofs} > cases.keys() and len(now.plans) == 2  # others of another precision
    assert all(p.cases == cases[p.kernel] for p in now.proofs if p.kernel in cases)


def test_a_first_load_takes_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose int8 activations are wrong runs in float32, writes what cpu writes, and says so."""
    of_models(monkeypatch)
    lose_writes(monkeypatch, lambda name: name.endswith(".q8_act"))
    monkeypatch.setattr(proving, "ROUTES", ({"tuning": "default"}, {"subgroup": 64}, {"exact": True}))
    for _ in range(2):
        with hybrid.load(DRAFT, "vulkan", ctx=64) as model:
            (line,) = model.engine.device.failures
            assert "q8_act" in line and "runs with {'exact': True}" in line
            assert model.engine.runner.config.precision == "exact"
            text = model.submit([2, 7, 8], max_tokens=8).result().ids
    with hybrid.load(DRAFT, "cpu", ctx=64, precision="exact") as model:
        assert model.submit([2, 7, 8], max_tokens=8).result().ids == text
    monkeypatch.setattr(proving, "ROUTES", ())
    lose_writes(monkeypatch, lambda name: name.startswith("linear."))
    with pytest.raises(NoDevice, match=r"computes wrong results in .*, and no other kernels are proved"):
        hybrid.load(DRAFT, "vulkan", ctx=64, weights="f16")


def test_a_draft_model_is_proved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(
        "hybrid.ready.proved", lambda opened, checkpoint, *more: asked.append(checkpoint.path.name) or True
    )
    with hybrid.load(MODELS / "demo-gemma3-q8_0.gguf", "vulkan", ctx=64, draft=DRAFT):
        pass
    assert asked == ["demo-gemma3-q8_0.gguf", Path(DRAFT).name]


def test_a_subgroup_size_that_the_device_lacks_is_refused() -> None:
    with closing(open_device()) as device:
        report = device.report
    limits = replace(report.limits, min_subgroup=32, max_subgroup=64)
    wide = replace(report, limits=limits, features=with_choice(report))
    assert choose_subgroup(wide) == 32 and choose_subgroup(with_subgroup(wide, 64)) == 64
    for size in (16, 48, 128):
        with pytest.raises(ValueError, match=f"no subgroups of {size}: this device has 32 to 64"):
            with_subgroup(wide, size)


def with_choice(report: Report) -> tuple[Feature, ...]:
    chosen = ("subgroupSizeControl", "required subgroup size")
    return tuple(replace(f, present=f.present or f.name in chosen) for f in report.features)


@pytest.mark.parametrize(
    ("apart", "lead", "faults", "error"),
    [
        (0.01, 0.0, "", ""),
        (0.9, 0.0, "", "logits or vectors differ by 0.90 standard deviations"),
        (0.01, 2.0, "", "a token is 2.00 standard deviations below cpu's choice"),
        (0.01, 0.0, "an aborted step", "an aborted step"),
    ],
)
def test_a_text_that_differs_is_an_error(apart: float, lead: float, faults: str, error: str) -> None:
    report = proving.Report("GPU", "driver", "0", [], texts=[proving.Text("m.gguf", apart, lead, faults)])
    assert proving.Text("m.gguf", apart, lead, faults).error == error
    assert report.sentence.startswith(
        "WRONG on GPU: m.gguf" if error else "proved: 0 kernels and the texts of 1 models"
    )
