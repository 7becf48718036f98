"""Targets match arithmetic by hand; advice fits in memory; impossible records are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest

from conformance.support.profile import LONG
from hybrid.core.errors import SpecError
from hybrid.perf import targets
from hybrid.perf.record import schema as record
from hybrid.perf.roofline import __main__ as roofline
from hybrid.perf.targets import search
from hybrid.spec.devicesheet import find_sheet
from hybrid.spec.model import load_models

pytestmark = pytest.mark.slow

APU = find_sheet("radeon-780m")
BY_HAND = {
    "27b-11-at-25gb": ("no", "282 GB/s"),
    "27b-15": ("yes", "together: q4_0, B=4, context 256; one sequence: with a draft that is right"),
    "27b-token-50ms": ("needs", "even then borderline"),
    "27b-50": ("yes", "B=16"),
    "27b-81": ("yes", "B=32"),
    "27b-200": ("no", "at most 28 speculating"),
    "27b-361": ("no", "19.6 of 17.2 T operations"),
    "27b-1500": ("no", "of 17.2 T operations"),
    "3n-400": ("yes", "B=16"),
    "3n-800": ("borderline", "B=32"),
    "27b-first-100ms": ("no", "171 ms"),
    "27b-first-500ms": ("yes", "cached prefix"),
    "npu-2gb": ("no", "gemma3-1b"),
    "27b-npu-down": ("by means", "1.14 times as quick, between 0.8 and 1.35"),
    "parallel-queues": ("by means", "+31.0 %"),
    "sparse-attention": ("by means", "+7."),
    "27b-draft-igpu": ("by means", "8.31 with k=4 at a=0.6"),
    "27b-draft-npu": ("by means", "7.65 with k=3 at a=0.6"),
    "27b-draft-cpu": ("by means", "20.1 with k=8 at a=0.9"),
    "27b-lookup": ("by means", "10.3 with k=8 at a=0.6"),
}


@pytest.fixture(scope="module")
def judged():
    """In the short profile all except Gemma 3n's, which are slow to plan."""
    return {t.id: targets.judge(t, APU, "H200") for t in targets.load_targets() if LONG or not t.id.startswith("3n-")}


def test_every_target_has_a_verdict(judged):
    assert len(targets.load_targets()) == 31 and len(judged) == (31 if LONG else 28)
    for row in judged.values():
        assert row.verdict and row.how and row.bound and row.modelled


@pytest.mark.parametrize("name", [name for name in BY_HAND if LONG or not name.startswith("3n-")])
def test_verdicts_are_those_by_hand(judged, name):
    verdict, words = BY_HAND[name]
    assert judged[name].verdict == verdict and words in judged[name].how


def test_a_verdict_names_its_draft(judged):
    for row in judged.values():
        if row.verdict == "needs":
            assert row.needs.startswith("a draft that is right 0.")
            assert row.shown == f"needs {row.needs}"
        elif row.verdict in ("yes", "borderline"):  # the basis of an answer comes first in it
            assert not row.needs and "draft" not in row.how.partition("; one sequence")[0]
        assert row.together == (row.how.startswith("together") and row.verdict != "no")
    assert sum(r.verdict == "needs" for r in judged.values()) == 2


@pytest.mark.parametrize("sheet", ["hawk-point-npu", "lavapipe", "phoenix-npu", "ryzen-apu"])
def test_a_sheet_that_nothing_can_be_modelled_on_is_refused_before_anything_is(monkeypatch, capsys, sheet):
    monkeypatch.setattr(targets, "judge", None)
    assert targets.main(["--device", sheet]) == 1
    said = capsys.readouterr().err
    assert f"specs/devices/{sheet}.toml: [peak] has no " in said and "use h200, radeon-780m" in said
    assert roofline.main(["gemma3-27b", "--device", sheet]) == 1


def test_a_device_that_shares_its_memory_with_nothing_is_judged_too():
    answers = {
        t.id: targets.judge(t, find_sheet("h200"), "H200")
        for t in targets.load_targets()
        if t.kind in ("means", "bytes")
    }
    assert answers["27b-npu-down"].verdict == "no" and "no NPU shares" in answers["27b-npu-down"].how
    assert answers["parallel-queues"].verdict == "no" and "no second engine" in answers["parallel-queues"].how
    assert answers["27b-11-at-25gb"].verdict == "yes"
    assert (
        answers["27b-draft-npu"].verdict == "no"
        and "does not share this device's memory" in answers["27b-draft-npu"].how
    )
    assert answers["27b-draft-igpu"].verdict == "by means"


def test_prompts_within_half_a_second_are_short(judged):
    tokens = int(judged["27b-first-500ms"].modelled.split()[0])
    assert 40 <= tokens <= 90


def test_advice_fits_and_suffices():
    found = list(islice(targets.advice(16 << 30, 50, 256, APU), None if LONG else 1))  # largest first
    assert [s.config.model for s in found][:2] == ["gemma4-26b-a4b", "gemma4-12b"][: 2 if LONG else 1]
    for s in found:
        assert s.expected >= 50
        assert search.memory_of(s.config.model, s.config.dtype, s.config.batch, 256, APU) <= 16 << 30


def test_sizes_of_every_family_are_modelled(capsys):
    """A token of one sequence reads its weights once (in the long profile of Gemma 4 E2B, else of models that are quick
    to plan); more than the device's memory is starred; a wrong name is an error."""
    name, least = ("gemma4-e2b", 1.2e9) if LONG else ("gemma3-270m", 1.4e8)
    (small,) = targets.sizes(targets.names(name), 256, APU)
    alone, _, many, prompt = small.passes
    streamed = search.model_of(name, "q4_0", APU).decode(1, 256).streamed
    assert alone.ceiling == pytest.approx(89.6e9 / streamed) and alone.bound == "memory"
    assert least < streamed < 1.2 * least and streamed < alone.memory < many.memory < 16 << 30 and prompt.bound == "f16"
    assert all(0 < p.expected < p.ceiling and p.fits for p in small.passes)
    tight = replace(small, passes=tuple(replace(p, fits=False) for p in small.passes))
    assert "16.0 GiB" in targets.sizes_table([tight], APU) and "*:" not in targets.sizes_table([small], APU)
    assert targets.names("*") == tuple(sorted(targets.names("*"), key=lambda n: load_models()[n].model.parameters))
    assert {n.partition("-")[0] for n in targets.names("*")} == {"gemma3", "gemma3n", "gemma4"}
    assert targets.main(["--models", "gemma5"]) == 1 and "no model is called 'gemma5'" in capsys.readouterr().err
    assert targets.main(["--models", "*", "--want", "5", "--memory", "1GiB"]) == 2


def test_drafts_are_of_the_same_family_and_count_as_memory():
    drafts = {name: search.draft_of(name) for name in load_models() if not name.endswith("-assistant")}
    assert drafts == {
        **dict.fromkeys(
            ("embeddinggemma-2", "embeddinggemma-300m", "gemma3-270m", "gemma3-1b", "gemma3n-e2b", "gemma3n-e4b")
        ),
        **dict.fromkeys(("gemma3-4b", "gemma3-12b", "gemma3-27b"), "gemma3-1b"),
        **{f"gemma4-{size}": f"gemma4-{size}-assistant" for size in ("e2b", "e4b", "12b", "31b", "26b-a4b")},
    }
    assert {search.draft_of(f"{name}-assistant") for name in drafts if name.startswith("gemma4")} == {None}
    plain = search.Config("gemma3-4b", "q4_0", 1, 256)
    beside = search.needed(replace(plain, draft=(4, 0.8)), APU) - search.needed(plain, APU)
    assert beside == search.memory_of("gemma3-1b", "q4_0", 1, 256, APU)
    assert not list(search.drafted("gemma3n-e4b", 256, APU))
    with pytest.raises(ValueError, match="gemma3n-e4b has no draft"):
        search.best_drafts("gemma3n-e4b", 0.8, 256, APU)


def test_command_wants_both_numbers(capsys):
    assert targets.main(["--memory", "16GiB"]) == 2
    assert "belong together" in capsys.readouterr().err


PROOF = {"command": "pytest conformance/ops/test_kernels.py", "passed": 900, "failed": 0, "kernels": "0123456789abcdef"}
RUN = {
    "model": "gemma3-27b",
    "dtype": "q4_0",
    "phase": "decode",
    "batch": 1,
    "context": 256,
    "tokens_per_second": 85.0,
    "command": "python -m hybrid.bench --random gemma3-27b",
}
RECORD = {
    "schema": 1,
    "device": "NVIDIA H200",
    "driver": "580.159.04",
    "clock": "not locked",
    "commit": "4564b6f",
    "date": "2026-11-20",
    "kernels": "0123456789abcdef",
    "conformance": PROOF,
    "runs": [RUN],
}


def made(**changes):
    return record.Record.model_validate_json(json.dumps({**RECORD, **changes}))


def test_a_record_is_kept_and_found(tmp_path):
    path = record.add(made(), tmp_path)
    record.add(made(runs=[{**RUN, "batch": 8, "tokens_per_second": 300.0}]), tmp_path)
    kept = record.load_record(path)
    assert [r.batch for r in kept.runs] == [1, 8] and path.name == "2026-11-20-nvidia-h200-4564b6f.json"
    assert [r.batch for _, r in record.newest([kept], "H200")] == [1, 8]
    with pytest.raises(SpecError, match="commit them first"):
        record.add(made(kernels="other", conformance={**PROOF, "kernels": "other"}), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conformance": {**PROOF, "failed": 1}}, "failed"),
        ({"conformance": {**PROOF, "passed": 0}}, "passed"),
        ({"conformance": {**PROOF, "kernels": "other"}}, "prove these first"),
        ({"runs": [{**RUN, "tokens_per_second": 320.0}]}, "is above what NVIDIA H200 allows"),
        ({"commit": "unknown"}, "commit"),
    ],
)
def test_unproved_and_impossible_records_are_refused(tmp_path, changes, words):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**RECORD, **changes}))
    with pytest.raises(SpecError, match=words):
        record.load_record(path)
