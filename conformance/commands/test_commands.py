"""Output of commands: progress, errors of wrong usage, speeds; and the models that they find."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace

import pytest

import hybrid
from conformance.support.devices import planned_on
from conformance.support.paths import MODELS
from conformance.support.synthetic import tiny, write_hf
from hybrid import generate, inspect
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.find import OLLAMA_MODEL, called, find_models
from hybrid.checkpoint.open import problem
from hybrid.cli import progress
from hybrid.core.units import show_count, show_rate
from hybrid.engine.stats import Stats
from hybrid.kernels.vulkan import build
from hybrid.kernels.vulkan.dry import DryDevice
from hybrid.perf import isa
from hybrid.perf.roofline.work import subject
from hybrid.planning import footprint as footprints
from hybrid.planning import planner
from hybrid.planning.expand import WeightInfo
from hybrid.spec.model import load_models


# ------------------------------------------------------------------------------------------------------------- progress
def test_off_a_terminal_long_work_reports_progress_within_a_step(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.02)
    said = ""
    for _ in progress.tracked(["a", "b"], "shaders"):
        end = time.monotonic() + 20
        while said.count("\n") < 2 and time.monotonic() < end:  # two lines while one step runs
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.startswith("shaders: 0 of 2, 0 s\n")
    time.sleep(0.1)
    assert not capsys.readouterr().err.rpartition("1 of 2, 0 s\n")[2], "progress continued after the end"


def test_short_work_reports_no_progress(capsys):
    with progress.progress_bar(5, "x", False, "B") as advance:
        advance(5)
    assert capsys.readouterr().err == ""


def test_a_load_off_a_terminal_reports_progress(tmp_path, monkeypatch, capsys):
    from hybrid.engine import loading

    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.001)
    old = loading._makers
    monkeypatch.setattr(loading, "_makers", lambda *a: time.sleep(0.005) or old(*a))
    assert generate.main([str(write_hf(tmp_path, tiny())), "--device", "cpu", "-n", "1"]) == 0
    said = capsys.readouterr().err
    assert all(re.search(rf"{phase}: \d+ of 100 %", said) for phase in ("load", "weights")), said


def test_amounts_are_short():
    assert [show_count(n) for n in (0, 9999, 12500, 3_250_000, 7_120_000_000)] == [
        "0",
        "9999",
        "12.5k",
        "3.25M",
        "7.12G",
    ]


# ---------------------------------------------------------------------------------------------------------- wrong usage
def test_a_name_that_no_module_or_kernel_has_is_refused_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(build, "compile_all", None)
    monkeypatch.setattr(isa, "compiled", None)
    for given in (["--check", "--only", "nope"], ["--only", "nope"]):
        with pytest.raises(SystemExit) as refused:
            build.main(given)
        assert refused.value.code == 2 and "--only nope: no module begins so" in capsys.readouterr().err
    assert isa.main(["--kernels", "nope.*"]) == 2
    assert "no kernel is called 'nope.*'" in capsys.readouterr().err
    assert isa.known("linear.gemv.*") and isa.known("rmsnorm.f32.64 SUBGROUP=5") and isa.known("*")


def test_a_built_prefix_is_compared(capsys):
    pytest.importorskip("slangpy")
    assert build.main(["--check", "--only", "geglu.f32"]) == 0
    assert capsys.readouterr().out == "1 modules are up to date\n"


@pytest.mark.parametrize(
    "option",
    [
        ["--top-p", "0"],
        ["-n", "0"],
        ["--seed", "-1"],
        ["--temperature", "nan"],
        ["--min-p", "2"],
        ["--trace", "/no/t.json"],
        ["--stop", ""],
        ["--weights", "q9"],
        ["--ctx", "0"],
    ],
)
def test_wrong_usage_is_reported_before_a_model_is_opened(monkeypatch, capsys, option):
    monkeypatch.setattr(hybrid, "load", None, raising=False)
    try:
        code = generate.main([str(MODELS / "demo-gemma3-q8_0.gguf"), "--device", "cpu", *option])
    except SystemExit as refused:
        code = refused.code
    assert code == 2 and capsys.readouterr().err.startswith("error: ")


def test_a_trace_that_can_be_written_leaves_no_file_before_it_is(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        hybrid, "load", lambda *a, **k: seen.append((tmp_path / "t.json").exists()) or sys.exit(7), raising=False
    )
    with pytest.raises(SystemExit):
        generate.main(["--trace", str(tmp_path / "t.json")])
    assert seen == [False] and not (tmp_path / "t.json").exists()
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    with pytest.raises(SystemExit):
        generate.main(["--trace", str(kept)])
    assert kept.read_text() == "old"


# --------------------------------------------------------------------------------------------------------------- speeds
def test_rates_have_the_unit_that_fits():
    shown = {
        3.4e5: "340 kFLOPS",
        1.234e12: "1.23 TFLOPS",
        6.19e14: "619 TFLOPS",
        0.0: "0 FLOPS",
        9.9949e7: "99.9 MFLOPS",
    }
    assert {value: show_rate(value, "FLOPS") for value in shown} == shown


def test_one_token_has_no_speed():
    one = Stats("cpu", (), {"weights": ("f32",)}, 5, 1, "length", 0.1, 0.1001, 1000)
    assert "generated 1 |" in one.line() and "B/s" not in one.line() and ", 0.0 tok/s" not in one.line()
    assert one.as_dict()["tokens_per_second"] is None and one.as_dict()["prompt_per_second"] > 0
    more = replace(one, tokens=3, total_seconds=0.3)
    assert (
        "generated 3, 10.0 tok/s" in more.line()
        and "10 kB/s" in more.line()
        and more.as_dict()["tokens_per_second"] == 10
    )


def test_the_cpu_is_timed_by_the_clock_that_it_has(capsys, monkeypatch):
    from hybrid.perf import op

    monkeypatch.setattr(op, "WARM_UP", 0.0)
    assert op.main(["rmsnorm", "--workload", "demo.decode", "--device", "cpu", "--seconds", "0.001"]) == 0
    said = capsys.readouterr().out
    assert "measured, the host's clock" in said and "timestamps" not in said and " 0.0 " not in said


def test_perplexity_reads_the_whole_text(tmp_path, capsys):
    from hybrid.perplexity import main

    text = tmp_path / "t.txt"
    text.write_text("the thing in there " * 40)
    folder = str(write_hf(tmp_path / "m", tiny()))
    found = []
    for more in ([], ["--cut"]):
        assert main([folder, str(text), "--device", "cpu", "--chunk", "50", *more, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    whole, cut = found
    assert whole["tokens_left_out"] == 0 and cut["predictions"] == 49 < whole["predictions"]
    assert cut["tokens_left_out"] + 50 == whole["predictions"] + 1 + 0  # every token but the first is predicted
    assert main([folder, str(text), "--device", "cpu", "--chunk", "50", "--progress"]) == 0
    assert "t.txt: 100%" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- inspect
@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("features", [(), ("f16_matrices",)])
def test_two_layers_of_each_kind_tell_what_all_take(monkeypatch, mixed, features):
    model = subject("gemma3-270m")
    weights = dict(model.weights)
    if mixed:  # as in Q4_K_M: some layers have another type in one place, some in two
        for layer in (0, 1, 4, 5, 9, 16):
            weights[f"blk.{layer}.ffn_down.weight"] = WeightInfo("q8_0", weights[f"blk.{layer}.ffn_down.weight"].shape)
            if layer % 2:
                weights[f"blk.{layer}.attn_v.weight"] = WeightInfo("q5_1", weights[f"blk.{layer}.attn_v.weight"].shape)
    options = planned_on(DryDevice(features=features.__contains__))
    few = footprints.footprint(model.hparams, weights, batch=2, context=700, **options)
    monkeypatch.setattr(footprints, "thinned", lambda target, each=2: (target, (1,) * target.hparams.n_layers))
    assert few == footprints.footprint(model.hparams, weights, batch=2, context=700, **options)


@pytest.mark.slow
def test_inspecting_a_large_model_plans_no_more_than_a_small_one(monkeypatch, capsys):
    """27B in under a second on an idle machine: its time is that of few layers, whatever their number."""
    steps = []
    old = planner._Planner._step
    monkeypatch.setattr(planner._Planner, "_step", lambda self, *a: steps.append(1) or old(self, *a))
    counts = {}
    for name in ("gemma3-1b", "gemma3-27b"):
        steps.clear()
        assert inspect.main([name]) == 0
        counts[name] = len(steps)
    assert (
        load_models()["gemma3-27b"].hparams().n_layers == 62
        and counts["gemma3-27b"] <= 1.2 * counts["gemma3-1b"] < 1200
    )
    assert "needs, for 1 x 4096 positions" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- find
@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A home with a hub's cache, Ollama's store and a folder of GGUF files; and the environment of its owner."""
    home = tmp_path / "home"
    snapshot = home / ".cache/huggingface/hub/models--google--gemma-3-tiny/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    write_hf(snapshot, tiny())
    other = home / ".cache/huggingface/hub/models--meta--llama/snapshots/def"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"model_type": "llama"}')
    (other / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    blob = home / ".ollama/models/blobs/sha256-0123"
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/gemma3/1b"
    for path in (blob, manifest):
        path.parent.mkdir(parents=True)
    blob.symlink_to(MODELS / "demo-gemma3-q8_0.gguf")
    layers = {"application/vnd.ollama.image.license": "sha256:99", OLLAMA_MODEL: "sha256:0123"}
    manifest.write_text(
        json.dumps({"layers": [{"mediaType": kind, "digest": digest} for kind, digest in layers.items()]})
    )
    (manifest.parent / "broken").write_text("{")
    (home / "models" / "deep").mkdir(parents=True)
    (home / "models" / "deep" / "demo.gguf").symlink_to(MODELS / "demo-gemma3-draft-q8_0.gguf")
    (home / "models" / "part-00002-of-00003.gguf").write_bytes(b"GGUF")
    (home / "models" / "damaged.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_models_of_this_machine_are_found_and_judged(machine, capsys):
    found = {f.name: f for f in find_models(problem)}
    ours = {"google/gemma-3-tiny": "Hugging Face", "gemma3:1b": "Ollama", "demo.gguf": "GGUF"}
    assert {n: f.kind for n, f in found.items() if f.problem is None and machine in f.path.parents} == ours
    assert (
        set(found) >= {"meta/llama", "damaged.gguf"} and found["meta/llama"].problem and found["damaged.gguf"].problem
    )
    assert not any("part-0000" in n for n in found)
    for name in ours:
        with open_checkpoint(found[name].path) as c:
            assert c.hparams.family == "gemma3"
    assert inspect.main(["--find"]) == 0
    said = capsys.readouterr().out
    assert f"\n    {found['gemma3:1b'].path}\n" in said and "meta/llama" in said and "cannot be loaded" in said
    assert inspect.main(["--find", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(found)
    assert inspect.main([]) == inspect.main(["--find", "gemma3-1b"]) == 2


def test_a_name_that_is_no_path_lists_known_models(machine, capsys):
    for name, path in (("gemma3:1b", "sha256-0123"), ("Gemma-3-Tiny", "snapshots/abc")):
        assert len(called(name)) == 1
        with pytest.raises(
            CheckpointError, match=f"no such file or directory; a model of that name on this machine is .*{path}"
        ):
            open_checkpoint(name)
    with open_checkpoint("google/gemma-3-tiny") as c:  # a name on Hugging Face, in its cache
        assert c.path.name == "abc" and c.name == "gemma-3-tiny"
    assert generate.main(["gemma9:1b", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for words in (
        "gemma9:1b: no such file",
        "a model is a .gguf file",
        "Ollama blob",
        "hybrid.inspect --find",
        "google/gemma-3-1b-it",
    ):
        assert words in said
