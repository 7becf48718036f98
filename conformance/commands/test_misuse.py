"""Wrong calls get an error at once, in words, and once."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import hybrid
from conformance.support.models import BOTH, GOLDEN, MODELS, demo
from conformance.support.profile import LONG
from hybrid import generate, inspect, perplexity
from hybrid.cli import CACHES, PRECISIONS
from hybrid.engine.runner import Runner
from hybrid.kernels.vulkan.kernel import warn_once, write_cache
from hybrid.perf import ablate, op, tune
from hybrid.perf.npu import __main__ as npu
from hybrid.planning.planner import PrecisionName, Target

MODEL = MODELS / "demo-gemma3-q8_0.gguf"


@pytest.mark.parametrize(
    ("module", "options"),
    [(generate, ("--kv", "--precision")), (inspect, ("--kv", "--precision")), (perplexity, ("--precision",))],
)
def test_unknown_precisions_and_caches_are_wrong_usage(module, options, capsys):
    for option in options:
        args = [str(MODEL), option, "best"] + ([str(GOLDEN / "held-out.txt")] if module is perplexity else [])
        with pytest.raises(SystemExit) as stopped:
            module.main(args)
        error = capsys.readouterr().err
        assert (
            stopped.value.code == 2 and f"argument {option}: invalid choice: 'best'" in error and error.count("\n") == 1
        ), error


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (op, ["linear", "--seconds", "nan"]),
        (op, ["linear", "--footprint", "-1"]),
        (op, ["linear", "--seconds", "inf"]),
        (tune, ["--margin", "nan"]),
        (tune, ["--seconds", "0"]),
        (npu, ["--placement", "--tokens", "0"]),
        (ablate, [str(MODEL), "-r", "0"]),
        (ablate, [str(MODEL), "--depth", "-1"]),
        (ablate, [str(MODEL), "--tokens", "1.5"]),
    ],
)
def test_numbers_that_measure_nothing_are_wrong_usage(module, options, capsys):
    with pytest.raises(SystemExit) as stopped:
        module.main(options)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and f"argument {'-r/--repetitions' if '-r' in options else options[-2]}: " in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_command_options_match_plan_options():
    assert get_args(PrecisionName) == PRECISIONS
    assert get_args(get_type_hints(Target)["kv"]) == CACHES


def test_an_unwritable_cache_folder_is_reported_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write_cache(tmp_path / "file" / "cache.bin", b"x")
        assert len(caplog.records) == 1 and "file/cache.bin cannot be written" in caplog.text
        write_cache(tmp_path / "good" / "cache.bin", b"x")
    assert (tmp_path / "good" / "cache.bin").exists() and len(caplog.records) == 1


def test_values_that_are_no_text_are_not_encoded():
    with hybrid.load(MODEL, "cpu") as model:
        for wrong, kind in ((None, "NoneType"), (3, "int"), (b"x", "bytes"), ([], "list")):
            with pytest.raises(TypeError, match=f"^text to encode must be a str, not {kind}$"):
                model.encode(wrong)
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be pickled, copied or sent .* hybrid\.load\('.*q8_0\.gguf'\)"):
                attempt(model)
        assert model.encode("") == model.encode("", bos=True) and model.encode("", bos=False) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["linaer"], "no operation 'linaer'; did you mean 'linear'?"),
        (["linear", "--workload", "gemma9"], "has no workload gemma9"),
    ],
)
def test_timing_an_unknown_operation_prints_the_error_alone(args, message, capsys):
    assert op.main([*args, "--device", "cpu"]) == 1
    shown = capsys.readouterr()
    assert not shown.out and message in shown.err


@pytest.mark.slow
def test_short_chunks_share_passes(monkeypatch, capsys, tmp_path):
    """A pass reads every weight: one for each chunk of two tokens made --chunk 2 a hundred times as slow as --chunk
    512."""
    passes: list[int] = []
    start = Runner.start
    monkeypatch.setattr(Runner, "start", lambda runner, p: passes.append(p.number) or start(runner, p))
    (tmp_path / "t.txt").write_text((GOLDEN / "held-out.txt").read_text()[:250])
    args = [str(demo("f32", layers=None if LONG else BOTH)), str(tmp_path / "t.txt"), "--chunk", "2", "--limit", "1"]
    found = []
    for together in (512, 2):  # 32 sequences at a time, and one
        monkeypatch.setattr(perplexity, "_PASS_ROWS", together)
        passes.clear()
        assert perplexity.main([*args, "--device", "cpu", "--json"]) == 0
        found.append((json.loads(capsys.readouterr().out), len(passes)))
    (many, few_passes), (one, passes_of_one) = found
    assert many["nats_per_token"] == pytest.approx(one["nats_per_token"], abs=1e-5)
    assert many["predictions"] == one["predictions"] == one["documents"] == passes_of_one > 40
    assert few_passes == -(-passes_of_one // 32)


@pytest.mark.slow
def test_several_sequences_give_the_logits_of_each(tmp_path: Path):
    """In separate slots, beside one that is in use, of any length."""
    import numpy as np

    sequences = [[2, 5], [2, 9, 11, 40, 7], [2], list(range(2, 60)), [3, 4]]
    with hybrid.load(MODEL, "cpu", precision="exact", ctx=64, slots=3) as model:
        alone = np.concatenate([model.logits(ids) for ids in sequences])
        text = "".join(model.generate([2, 4], 9, ignore_eos=True))
        pieces = model.generate([2, 4], 9, ignore_eos=True)
        begun = next(pieces)
        together = np.concatenate(list(model.engine.logits_of(sequences)))
        assert np.abs(together - alone).max() < 1e-3 and begun + "".join(pieces) == text
