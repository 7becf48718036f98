"""hybrid.prove: a sound device is proved, and devices that lie are told by kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.mutation.mutate import load, mutated_spirv
from conformance.support.devices import Devices, need_compiler
from conformance.support.paths import MODELS
from conformance.support.profile import LONG
from hybrid import doctor, prove
from hybrid.devices import opening
from hybrid.devices.opening import NoDevice
from hybrid.devices.proofs import report_path
from hybrid.kernels.vulkan.build import sources, variants
from hybrid.kernels.vulkan.device import VulkanDevice, open_device
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.kernels.vulkan.program import Program
from hybrid.kernels.vulkan.recorder import Recorder

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


def test_a_sound_device_is_proved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command writes a report without anything personal; doctor knows it."""
    assert prove.main([DRAFT, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kernels"] == kernels_digest() and len(said["proofs"]) > 10
    assert all(p["cases"] and not p["error"] and p["worst"] <= 1 for p in said["proofs"])
    assert all(t["apart"] < prove.APART and t["lead"] < prove.LEAD for t in said["texts"])
    (file,) = (tmp_path / "hybrid-kernels" / "proofs").iterdir()
    assert json.loads(file.read_text()) == said and str(Path.home()) not in file.read_text()
    found = [f for f in doctor._vulkan() if f.name.endswith(": kernels")]
    assert [f.state for f in found if f.detail.startswith(f"{len(said['proofs'])} proved")] == ["ok"]
    file.write_text("{}")
    assert "ok" not in {f.state for f in doctor._vulkan() if f.name.endswith(": kernels")}


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without texts: what is told apart by kernels must be told by their cases."""
    monkeypatch.setattr(prove, "ON_CPU", 0)


def wrong(opened: Callable[..., VulkanDevice]) -> set[str]:
    return {p.kernel for p in prove.prove(opened, [DRAFT]).proofs if p.error}


@pytest.mark.parametrize("name", LIES if LONG else LIES[:2])
def test_a_kernel_that_computes_something_else_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_compiler()
    small(monkeypatch)
    (mutant,) = (m for m in load() if m.name == name)
    changed = {v.module for v in variants() if mutant.path in sources(v.source)}
    spirv = mutated_spirv(mutant, {v.module for v in variants()}, tmp_path / "mutant")
    found = wrong(lambda **options: open_device(spirv=spirv, **options))
    assert found & changed, found


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
    monkeypatch.setattr(prove, "ROUTES", prove.ROUTES[1:3])
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
    path.write_text(json.dumps({"wrong": ["embed.q8_0"], "options": None, "proofs": []}))
    with pytest.raises(NoDevice, match=r"wrong results in embed\.q8_0 .* no other kernels are proved"):
        opening.open_device("vulkan")
    (found,) = (f for f in doctor._vulkan() if f.detail.startswith("wrong with this driver"))
    assert found.state == "missing"
    path.write_text(json.dumps({"wrong": ["embed.q8_0"], "options": {"spirv": "elsewhere"}, "proofs": []}))
    opening.open_device("vulkan").device.close()  # an option that no route has: the report is not believed


def test_writes_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A driver that leaves a program's last dispatch out: results depend on what memory held before."""
    small(monkeypatch)
    monkeypatch.setattr(prove, "ROUTES", ())

    place = Program._place

    def shorter(self: Program, recorder: Recorder) -> Any:
        done = self.recording
        if len(done.dispatches) > 1 and done.dispatches[-1].kernel.name.startswith("rmsnorm."):
            done.dispatches.pop()
            done.barriers.pop()
        return place(self, recorder)

    monkeypatch.setattr(Program, "_place", shorter)
    assert prove.main([DRAFT, "--device", "vulkan"]) == 1
    out = capsys.readouterr().out
    assert "rmsnorm.q8_act" in out and "WRONG" in out.splitlines()[-2]


@pytest.mark.parametrize(
    ("apart", "lead", "faults", "error"),
    [
        (0.01, 0.0, "", ""),
        (0.9, 0.0, "", "logits differ by 0.90 standard deviations"),
        (0.01, 2.0, "", "a token is 2.00 standard deviations below cpu's choice"),
        (0.01, 0.0, "an aborted step", "an aborted step"),
    ],
)
def test_a_text_that_differs_is_an_error(apart: float, lead: float, faults: str, error: str) -> None:
    report = prove.Report("GPU", "driver", "0", [], texts=[prove.Text("m.gguf", apart, lead, faults)])
    assert prove.Text("m.gguf", apart, lead, faults).error == error
    assert report.sentence.startswith(
        "WRONG on GPU: m.gguf" if error else "proved: 0 kernels and the texts of 1 models"
    )
