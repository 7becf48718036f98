"""The perplexity command against numbers computed whole, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.support.devices import open_backend
from conformance.support.models import GOLDEN, demo
from conformance.support.models import nats as nats_of
from conformance.support.synthetic import tiny, write_hf
from hybrid.engine.runner import Runner
from hybrid.perplexity import Running, _lines, main

HELD_OUT = GOLDEN / "held-out.txt"
# Documents share passes, and sums depend on the rows of a pass: in float32 logits of one model differ by 2e-4 at most.
SAME = 1e-4


@pytest.mark.slow
@pytest.mark.blas
def test_the_held_out_loss_of_the_demonstration_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The beginnings of two documents; test_models checks all of them against the golden loss."""
    path = demo("f32")
    assert main([str(path), str(HELD_OUT), "--device", "cpu", "--limit", "2", "--chunk", "40", "--cut", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    with hybrid.load(path, device="cpu", ctx=40) as model:
        ids = [model.encode(d)[:40] for d in HELD_OUT.read_text().split("\n\f\n")[:2]]
        want = np.concatenate([nats_of(model.logits(i), i) for i in ids])
    assert report["predictions"] == want.size == 45 and report["tokens_left_out"] == 256
    assert report["nats_per_token"] == pytest.approx(want.mean(), abs=SAME)
    assert report["nats_error"] == pytest.approx(want.std(ddof=1) / math.sqrt(want.size), rel=SAME)
    assert report["perplexity"] == pytest.approx(math.exp(report["nats_per_token"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_hf(root / "a", tiny(), dtype="f32")
    write_hf(root / "b", tiny(), dtype="f32", seed=1)
    write_hf(root / "c", tiny(vocab=321), dtype="f32")
    (root / "text.txt").write_text("the thing in there\n\f\nabcd \u00e9t\u00e9 abc bc cd\n\f\na")
    return root


@pytest.mark.slow
@pytest.mark.blas
def test_divergence_from_a_reference(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.perplexity._ROW_ELEMENTS", 1000)  # a few rows at a time
    a, b, text = str(folder / "a"), str(folder / "b"), str(folder / "text.txt")
    assert main([a, text, "--device", "cpu", "--chunk", "200", "--kl", b, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    kl, same, loss = [], [], []
    with hybrid.load(a, device="cpu") as ours, hybrid.load(b, device="cpu") as theirs:
        for document in Path(text).read_text().split("\n\f\n"):
            ids = ours.encode(document)
            q, p = (np.exp(m.logits(ids)[:-1].astype(np.float64)) for m in (ours, theirs))
            p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
            kl.append((p * np.log(p / q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
            loss.append(nats_of(theirs.logits(ids), ids))
    found = report["reference"]
    assert found["kl_mean"] == pytest.approx(np.concatenate(kl).mean(), rel=SAME) and found["kl_mean"] > 0.01
    assert found["kl_max"] == pytest.approx(np.concatenate(kl).max(), rel=SAME)
    assert found["top_1_agreement"] == pytest.approx(np.concatenate(same).mean())
    assert found["nats_per_token"] == pytest.approx(np.concatenate(loss).mean(), abs=SAME) and "experts" not in found
    assert main([a, text, "--device", "cpu", "--chunk", "200", "--weights", "q8_0", "--kl", "exact", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["precision"]["weights"] == ["q8_0"] and 0 < own["reference"]["kl_mean"] < 0.01
    assert own["reference"]["nats_per_token"] == pytest.approx(report["nats_per_token"], abs=SAME)


def test_other_experts_of_a_mixture_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The share of rows whose experts differ between int8 and float32 activations, and their divergence."""
    path = str(demo(name="demo-gemma4-moe", layers=(0, 1, 2)))
    args = [path, str(HELD_OUT), "--device", "cpu", "--limit", "2", "--chunk", "48", "--cut", "--kl", "exact", "--json"]
    assert main(args) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["reference"]["experts"]
    assert _lines(report)[-1].startswith(f"other experts   {100 * found['rows_with_others']:.2f} % of rows")
    shares, kl = [], []
    with hybrid.load(path, "cpu", ctx=48) as ours, hybrid.load(path, "cpu", ctx=48, precision="exact") as theirs:
        for document in HELD_OUT.read_text().split("\n\f\n")[:2]:
            ids = ours.encode(document)[:48]
            (a,), (b,) = (list(m.engine.forced([ids])) for m in (ours, theirs))
            for at in range(len(ids) - 1):
                pairs = zip(a.experts, b.experts, strict=True)
                shares.append(np.mean([{*x[at].tolist()} != {*y[at].tolist()} for x, y in pairs]))
                q, p = (np.exp(m.rows[at].astype(np.float64)) for m in (a, b))
                p, q = p / p.sum(), q / q.sum()
                kl.append((p * np.log(p / q)).sum())
    some, kl = np.array(shares) > 0, np.array(kl)
    assert 0 < some.sum() < some.size
    assert found["rows_with_others"] == pytest.approx(np.mean(shares))
    assert found["predictions_with_others"] == pytest.approx(some.mean())
    assert found["kl_mean_with_others"] == pytest.approx(kl[some].mean(), rel=0.02)
    assert found["kl_mean_with_same"] == pytest.approx(kl[~some].mean(), rel=0.02)


def test_documents_are_cut_or_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, text = str(folder / "a"), str(folder / "text.txt")
    with hybrid.load(a, device="cpu") as model:
        lengths = [len(model.encode(d)) for d in Path(text).read_text().split("\n\f\n")]
    counts = {}
    for name, more in (("cut", ["--cut"]), ("whole", []), ("one", ["--separator", "", "--chunk", "100"])):
        assert main([a, text, "--device", "cpu", "--chunk", "5", *more, "--json"]) == 0
        counts[name] = json.loads(capsys.readouterr().out)
    assert counts["cut"]["predictions"] == sum(min(n, 5) - 1 for n in lengths)
    assert counts["cut"]["tokens_left_out"] == sum(max(n - 5, 0) for n in lengths)
    assert counts["whole"]["predictions"] == sum(n - 1 for n in lengths) and counts["whole"]["tokens_left_out"] == 0
    assert counts["one"]["documents"] == 1
    assert main([a, text, "--device", "cpu", "--chunk", "5", "--cut", "--progress"]) == 0
    out = capsys.readouterr()
    assert "tokens left out" in out.out and "perplexity" in out.out and "100%" in out.err


def test_unmeasurable_inputs_are_errors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, text = str(folder / "a"), str(folder / "text.txt")
    (tmp_path / "empty").write_text("\n\f\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for args, words in (
        ([a, str(tmp_path / "empty")], "holds no text"),
        ([a, str(tmp_path / "bytes")], "not UTF-8"),
        ([a, str(tmp_path / "none")], "No such file"),
        ([a, text], "context of 256"),
        ([a, text, "--chunk", "200", "--kl", str(folder / "c")], "nothing can be compared"),
    ):
        assert main([*args, "--device", "cpu"]) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    with pytest.raises(SystemExit):
        main([a, text, "--chunk", "1"])


def test_running_sums() -> None:
    values = np.random.default_rng(0).normal(3, 2, 1000)
    sums = Running()
    for part in np.split(values, [1, 10, 10, 600]):
        sums.add(part)
    assert sums.mean == pytest.approx(values.mean()) and sums.most == values.max()
    assert sums.error == pytest.approx(values.std(ddof=1) / math.sqrt(1000), rel=1e-9)
    assert math.isnan(Running().mean) and math.isnan(Running().error)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_decode_passes_are_those_of_generation(
    folder: Path, capsys: pytest.CaptureFixture[str], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text by prompts and by decode passes, alone and three together; each pass has one row of a document."""
    if backend == "vulkan":
        open_backend(backend).close()  # skips without one
    rows: list[int] = []
    submit = Runner._program_of
    monkeypatch.setattr(Runner, "_program_of", lambda self, p: rows.append(p.rows) or submit(self, p))
    text = [
        str(folder / "a"),
        str(folder / "text.txt"),
        "--device",
        backend,
        "--chunk",
        "30",
        "--kl",
        "exact",
        "--json",
    ]
    reports = []
    for more in ([], ["--phase", "decode"], ["--phase", "decode", "--batch", "3"]):
        rows.clear()
        assert main([*text, *more]) == 0
        reports.append(json.loads(capsys.readouterr().out))
        assert (max(rows) > 3) if not more else max(rows) == (3 if "3" in more else 1)
    prompt, alone, together = reports
    assert [r["phase"] for r in reports] == ["prompt", "decode", "decode"]
    for report in (alone, together):
        assert report["predictions"] == prompt["predictions"]
        assert report["nats_per_token"] == pytest.approx(prompt["nats_per_token"], abs=SAME)
        assert report["reference"]["kl_mean"] < 1e-6
    with pytest.raises(SystemExit):
        main([*text, "--batch", "2"])
