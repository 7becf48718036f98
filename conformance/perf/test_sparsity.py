"""Sparse feed-forwards: unions of columns by hand, an instrumented model with unchanged results, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, tiny_gemma3n, write_hf
from hybrid.devices.opening import Opened
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.perf.roofline.model import bandwidth, estimate
from hybrid.perf.roofline.work import subject
from hybrid.perf.sparsity import TOGETHER, Union, saved, unions
from hybrid.perf.sparsity.__main__ import Watched, main
from hybrid.spec.devicesheet import find_sheet
from hybrid.spec.model import find_model


def test_unions_by_hand() -> None:
    """Two layers of 64 and 32: in text t every token needs row t of both, and token i of layer 0 row 32 + i too."""
    above = []
    for t in range(40):
        wide, narrow = np.zeros((32, 64), bool), np.zeros((32, 32), bool)
        wide[:, t % 32] = narrow[:, t % 32] = True
        wide[np.arange(32), 32 + np.arange(32)] = True
        above.append([wide, narrow])
    found = unions(above, above)
    assert found[0].up == found[0].down == found[0].consecutive == pytest.approx(3 / 96)
    assert found[0].blocks == pytest.approx(1)  # each of three blocks of 32 has a column
    for u, n in zip(found, TOGETHER, strict=True):
        assert u.consecutive == pytest.approx((2 + n) / 96)  # one text: its own row, and one of each token's
        assert u.up <= 3 * n / 96 + 1e-9 and (n == 1 or u.up > u.consecutive)
    with pytest.raises(ValueError, match="the shortest has 31"):
        unions([[a[:31] for a in text] for text in above], above)


def test_savings_by_hand() -> None:
    """q4_0: 10 layers of 8192 x 2048, half a byte a code and a sixteenth of a byte a scale."""
    sheet, model = find_sheet("radeon-780m"), subject("gemma3n-e2b", "q4_0")
    (one,) = saved([Union(1, 0.05, 0.04, 0.75, 0.05)], model, find_model("gemma3n-e2b").hparams(), "q4_0", 256, sheet)
    elements, rate = 10 * 8192 * 2048, bandwidth(sheet, "expected")
    assert one.up == pytest.approx(elements * 0.5625 * 0.95 / rate)
    assert one.down == pytest.approx(elements * (0.5 * 0.96 + 0.0625 * 0.25) / rate)
    declared = estimate(model.decode(1, 256), sheet, "expected").seconds  # which omits 95 % of up
    assert one.seconds == pytest.approx(declared + one.up)


def test_a_watched_model_computes_the_same(tmp_path: Path) -> None:
    folder, ids = write_hf(tmp_path, tiny_gemma3n(), dtype="f32"), list(range(4, 44))
    watched = Watched()
    device = CpuDevice(overrides={"fused_ffn": watched})
    with hybrid.load(folder, "cpu", ctx=64) as plain, hybrid.load(folder, Opened(device, device), ctx=64) as model:
        wanted = plain.logits(ids)
        watched.above, watched.active = [], []  # the warm-up pass
        np.testing.assert_array_equal(model.logits(ids), wanted)
    above, active = watched.taken(2)
    assert [a.shape for a in above] == [(40, 96), (40, 64)]  # layers may differ in width
    for a, b in zip(above, active, strict=True):
        assert 0.02 < a.mean() < 0.25 and not np.any(b & ~a)  # of normal gates a tenth; gates below contribute zero


def test_the_command_says_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = str(write_hf(tmp_path / "m", tiny_gemma3n(), dtype="f32")), tmp_path / "text"
    text.write_text("the cat sat on the mat and the dog on the log " * 40)
    given = [folder, "--text", str(text), "--texts", "2", "--length", "40"]
    assert main([*given[:-1], "16"]) == 1 and "texts of 32 tokens" in capsys.readouterr().err
    assert main([*given, "--for", "gemma4-e2b"]) == 2 and "none of its layers is sparse" in capsys.readouterr().err
    assert main([folder, "--text", str(tmp_path / "none")]) == 2 and "--text" in capsys.readouterr().err
    if LONG:  # plans of a published size for six numbers of sequences
        assert main([*given, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert [u["tokens"] for u in said["measured"]] == [s["tokens"] for s in said["modelled"]] == list(TOGETHER)
        assert main(given) == 0 and "measured, of up's rows" in capsys.readouterr().out
        dense = str(write_hf(tmp_path / "d", tiny(), dtype="f32"))
        assert main([dense, *given[1:]]) == 1 and "has no sparse feed-forward" in capsys.readouterr().err
