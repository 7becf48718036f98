"""python -m perf.profile and perf.probe: sums that add up, the picture, overlaps, and one-line errors."""

from __future__ import annotations

import json

import pytest

from conformance.support.devices import BACKENDS
from conformance.support.profile import LONG
from hybrid.bench.probe import Probes
from hybrid.perf import probe, profile
from hybrid.perf.profile import StepRow, by_op
from hybrid.planning.cost import plan_cost

SMALL = ["--random", "gemma3-270m", "--layers", "2", "--vocab", "512", "-r", "2"]
KEYS = {
    "schema",
    "passed_over",
    "command",
    "device",
    "driver",
    "kernels",
    "precision",
    "model",
    "phase",
    "context",
    "batch",
    "repetitions",
    "probes",
    "passes",
    "ops",
    "steps",
}


@pytest.fixture(autouse=True)
def known_probes(monkeypatch):
    monkeypatch.setattr("hybrid.bench.probe.probe", lambda device: Probes(3000.0, "copy", 500.0, "matrix", {}))


PHASES = [("vulkan", "decode"), ("cpu", "prefill"), ("vulkan", "prefill")][: None if LONG else 2]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "phase"), PHASES)
def test_every_step_is_in_the_table_and_the_sums_add_up(devices, tmp_path, capsys, backend, phase):
    devices.get(backend)  # skips where there is no Vulkan
    assert (
        profile.main([*SMALL, "--device", backend, "--phase", phase, "--context", "11", "--chunk", "8", "--json"]) == 0
    )
    out = json.loads(capsys.readouterr().out)
    assert set(out) == KEYS and out["device"].startswith(backend)
    assert [p["rows"] for p in out["passes"]] == ([8, 3] if phase == "prefill" else [1])
    assert sum(r["calls"] for r in out["ops"]) == len(out["steps"])
    assert sum(r["us"] for r in out["ops"]) == pytest.approx(sum(p["device_us"] for p in out["passes"]))
    assert sum(r["share"] for r in out["ops"]) == pytest.approx(1)
    assert [r["us"] for r in out["ops"]] == sorted((r["us"] for r in out["ops"]), reverse=True)
    assert sum(r["calls"] for r in out["ops"] if "attention" in r["op"]) == 2 * len(out["passes"])
    assert all(p["host_us"] >= p["device_us"] * 0.5 for p in out["passes"])
    saved = tmp_path / "p.json"
    saved.write_text(json.dumps(out))
    pictures = [tmp_path / "p.png", tmp_path / "p.svg"]
    for picture in pictures:
        assert profile.main(["--read", str(saved), "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "attention" in shown and out["driver"] in shown and "measured" in shown
    assert pictures[0].read_bytes()[:4] == b"\x89PNG" and "<svg" in pictures[1].read_text()[:2000]


def test_bytes_and_operations_are_the_plans(devices):
    from hybrid.checkpoint.random import random_checkpoint
    from hybrid.engine.loading import EngineConfig
    from hybrid.engine.loop import Engine
    from hybrid.kernels.oracle.device import CpuDevice

    checkpoint = random_checkpoint("gemma3-270m", layers=1, vocab=512)
    engine = Engine(checkpoint, CpuDevice(), EngineConfig(ctx=32, n_tokens=512, chunk=8, profile=True))
    steps, passes = profile.measure(engine, "decode", 9, 1)
    whole = plan_cost(engine.runner.plan("decode", 1, 1), 11)
    assert (sum(s.nbytes for s in steps), sum(s.flops for s in steps)) == (whole.nbytes, whole.flops)
    assert steps[0].start == 0 and steps[1].start == pytest.approx(steps[0].us) and len(passes) == 1


def test_a_pass_of_several_sequences_is_profiled_whole(devices):
    from hybrid.checkpoint.random import random_checkpoint
    from hybrid.engine.loading import EngineConfig
    from hybrid.engine.loop import Engine
    from hybrid.kernels.oracle.device import CpuDevice

    checkpoint = random_checkpoint("gemma3-270m", layers=1, vocab=512)
    engine = Engine(checkpoint, CpuDevice(), EngineConfig(ctx=32, n_tokens=512, chunk=8, slots=3, profile=True))
    steps, (one,) = profile.measure(engine, "decode", 9, 1)
    whole = plan_cost(engine.runner.plan("decode", 3, 3), 11)
    assert (sum(s.nbytes for s in steps), sum(s.flops for s in steps)) == (whole.nbytes, whole.flops) and one[
        "rows"
    ] == 3
    _, passes = profile.measure(engine, "prefill", 9, 1)
    assert [p["rows"] for p in passes] == [8, 8, 8, 3]
    assert profile.subject({"phase": "decode", "context": 9, "batch": 3}) == "one token after 9, 3 sequences"


def test_operations_are_summed_the_longest_first():
    rows = by_op(
        [
            StepRow("a.0", "a", 0, 0.0, 1.0, 10, 1),
            StepRow("b", "b", 0, 1.0, 6.0, 0, 6),
            StepRow("a.1", "a", 1, 7.0, 3.0, 30, 1),
        ],
        copy_gb_s=0.02,
        matrix_tflops=2e-6,
    )
    assert [(r.op, r.calls, r.us, r.share, r.nbytes) for r in rows] == [("b", 1, 6.0, 0.6, 0), ("a", 2, 4.0, 0.4, 40)]
    assert [r.floor_us for r in rows] == pytest.approx([3.0, 2.0])  # 6 operations at 2 a microsecond; 40 bytes at 20
    assert rows[1].gb_per_second == pytest.approx(0.01) and rows[0].tflops == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ([], 2, "name a MODEL, or give --random NAME"),
        ([*SMALL, "--context", "32768"], 1, "--context 32768: the model was made for 32768 positions"),
        ([*SMALL, "--context", "0"], 2, "'0' is not a positive number"),
        ([*SMALL, "--phase", "both"], 2, "invalid choice: 'both'"),
        ([*SMALL, "--picture", "a.txt"], 1, "give a name that ends in .png or .svg"),
        ([*SMALL, "--picture", "none/a.png"], 1, "there is no folder none"),
        (["--read", "none.json"], 1, "none.json: No such file"),
    ],
)
def test_errors_are_one_line(capsys, options, code, says):
    try:
        found = profile.main([*options, "--device", "cpu"])
    except SystemExit as end:
        found = end.code
    err = capsys.readouterr().err
    assert found == code and says in err and err.startswith("error: ") and err.count("\n") == 1


def test_files_that_are_no_profile_are_refused(tmp_path, capsys):
    path = tmp_path / "other.json"
    for content in ("{}", "[]", "no JSON", ""):
        path.write_text(content)
        assert profile.main(["--read", str(path)]) == 1
        assert "other.json: not what perf.profile --json prints" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS if LONG else BACKENDS[:1])  # Vulkan's probe: test_bench
def test_the_probe_command_names_device_and_driver(devices, capsys, backend):
    devices.get(backend)
    assert probe.main(["--device", backend, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (
        out["device"].startswith(backend)
        and out["driver"]
        and out["copy_gb_s"] == max(out["variants"][n] for n in out["variants"] if "copy" in n)
    )
    assert probe.main(["--device", "none"]) == 1 and "none" in capsys.readouterr().err
