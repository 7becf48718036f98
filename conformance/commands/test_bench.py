"""python -m hybrid.bench: its output, counts, comparisons and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.support.devices import BACKENDS, need_cxx, own_memory
from conformance.support.models import MODELS
from conformance.support.paths import ATTENTION
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid import perplexity
from hybrid.bench import __main__ as bench
from hybrid.bench.ceiling import ceiling, impossible
from hybrid.bench.measure import Bench, Row
from hybrid.bench.probe import Probes, probe
from hybrid.bench.report import text
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.npu.xrt import NpuUnavailable, open_host
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.perf import profile
from hybrid.planning.cost import Cost, plan_cost
from hybrid.spec.devicesheet import DeviceSheet, find_sheet
from hybrid.spec.load import validate

pytestmark = pytest.mark.slow

SMALL = ["--random", "gemma3-270m", "--layers", "1", "--vocab", "512", "-r", "2", "-n", "4", "-p", "5,9"]
PROBES = Probes(3000.0, "copy", 500.0, "matrix", {})
ROW = Row("decode", 10, 0, 1, 10, (0.1, 0.2, 0.4), 10**12, 10**12, {"dispatches": 1.0, "barriers": 1.0})
KEYS = {
    "schema",
    "command",
    "device",
    "driver",
    "kernels",
    "model",
    "schedule",
    "precision",
    "weights_bytes",
    "context",
    "chunk",
    "deterministic",
    "load_seconds",
    "passed_over",
    "probes",
    "ceiling",
    "results",
    "errors",
}
RESULT = {
    "test",
    "phase",
    "n",
    "depth",
    "batch",
    "tokens",
    "seconds",
    "tokens_per_second",
    "mean",
    "spread",
    "gb_per_second",
    "share_of_copy",
    "tflops",
    "share_of_matrix",
    "host_us_per_token",
    "per_pass",
}


@pytest.fixture(autouse=True)
def known_probes(monkeypatch):
    """A probe takes a second: one test measures, the others get fixed values."""
    monkeypatch.setattr("hybrid.bench.probe.probe", lambda device: PROBES)
    monkeypatch.setattr("hybrid.spec.devicesheet.sheet_for", lambda name: None)


def sheet(**peak: float) -> DeviceSheet:
    figures = {k: {"value": v, "provenance": "published", "source": "made up"} for k, v in peak.items()}
    head = {"name": "tiny", "kind": "cpu", "match": "."}
    return validate("tiny.toml", {"schema": 1, "device": head, "peak": figures}, DeviceSheet)


NPU_SCHEDULES = ("gemma3-hybrid", str(ATTENTION))


# Every command with either NPU, and each schedule with one; in the long profile all combinations.
OPENED = [
    (command, schedule, npu)
    for i, command in enumerate(("bench", "profile", "perplexity"))
    for j, schedule in enumerate(NPU_SCHEDULES)
    for npu in ("sim", "npu")
    if LONG or j == i % 2
]


@pytest.mark.parametrize(("command", "schedule", "npu"), OPENED)
def test_commands_open_what_a_schedule_asks_for(capsys, tmp_path, command, schedule, npu):
    """Steps of an NPU run on its simulator if requested; where there is no NPU the reason is printed."""
    if npu == "sim":
        need_cxx()
    if npu == "npu" and xrt_is_there():
        pytest.skip("this machine has an NPU, so nothing is passed over")
    (tmp_path / "t.txt").write_text("ab" * 4)
    model = str(write_hf(tmp_path / "m", dtype="f32"))
    given = [model, "--schedule", schedule, "--npu", npu, "--device", "cpu", "--weights", "q8_0"]
    code = {
        "bench": lambda: bench.main([*given, "-p", "4", "-n", "2", "-r", "1"]),
        "profile": lambda: profile.main([*given[:-2], "--context", "4", "-r", "1"]),
        "perplexity": lambda: perplexity.main([*given, str(tmp_path / "t.txt"), "--chunk", "4"]),
    }[command]()
    out = capsys.readouterr().out
    assert code == 0 and ("cpu + sim-npu1" in out) == (npu == "sim") and ("passed over: npu: " in out) == (npu == "npu")
    assert ("no speeds of an NPU" in out) == (npu == "sim" and command != "perplexity")


def xrt_is_there() -> bool:
    try:
        open_host("npu", Path()).close()
    except NpuUnavailable:
        return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_json_has_every_test_and_what_the_device_counted(devices, capsys, backend):
    devices.get(backend)  # skips where there is no Vulkan
    options = ["--device", backend, "--ctx-depth", "0,20", "--batch-size", "2", "--json"]
    assert bench.main([*SMALL, *options]) == 0
    out = json.loads(capsys.readouterr().out)
    assert set(out) == KEYS and out["device"].startswith(backend) and out["driver"] and not out["errors"]
    assert out["weights_bytes"] > 0 and out["command"].startswith("python -m hybrid.bench --random gemma3-270m")
    names = [f"{t} @ {d} x 2" for d in (0, 20) for t in ("prefill 5", "prefill 9")]
    names += [f"decode 4 @ {d} x 2" for d in (0, 20)]
    assert [r["test"] for r in out["results"]] == names
    for r in out["results"]:
        assert set(r) == RESULT and len(r["seconds"]) == 2 and r["tokens"] == 2 * r["n"]
        assert r["tokens_per_second"] == pytest.approx(sum(r["tokens"] / s for s in r["seconds"]) / 2)
        assert r["share_of_copy"] == pytest.approx(r["gb_per_second"] / 3000)
        assert r["per_pass"]["allocations"] == r["per_pass"]["recordings"] == 0
        if r["phase"] == "decode":
            assert r["per_pass"]["submits"] == 1 and (r["host_us_per_token"] is None) == (backend == "cpu")


@pytest.mark.parametrize("backend", BACKENDS if LONG else BACKENDS[:1])
def test_the_table_names_device_driver_model_and_ceilings(devices, capsys, backend):
    devices.get(backend)
    assert bench.main([*SMALL, "--device", backend, "--batch-size", "2"]) == 0  # the kernels tested above
    out = capsys.readouterr().out
    for part in (
        backend,
        "measured",
        "gemma3-270m (random)",
        "copy 3000.0 GB/s",
        "prefill 5 @ 0",
        "decode 4 @ 0",
        "copy probe",
    ):
        assert part in out, out


@pytest.mark.parametrize(
    ("options", "context"),
    [
        (["-p", "9", "-n", "4", "--ctx-depth", "0,20"], 30),
        (["-p", "3", "-n", "7", "--ctx-depth", "0,12"], 20),  # a token is sampled after the last
        (["-p", "5", "-n", "40"], 43),  # decoding begins with two tokens
        (["-p", "5,9", "-n", "0"], 10),
    ],
)
def test_the_context_holds_the_longest_test(capsys, monkeypatch, options, context):
    monkeypatch.setattr(bench, "_rows", lambda args, engine, meter: [ROW])
    assert bench.main([*SMALL[:6], "-r", "1", "--device", "cpu", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == context


def test_a_file_is_measured_too(tmp_path, capsys):
    folder = write_hf(tmp_path / "m", tiny())
    assert (
        bench.main([str(folder), "--device", "cpu", "-p", "3", "-n", "0", "-r", "1", "--json", "--deterministic"]) == 0
    )
    out = json.loads(capsys.readouterr().out)
    assert [r["test"] for r in out["results"]] == ["prefill 3 @ 0"] and out["deterministic"]


def test_a_figure_above_the_nameplate_is_an_error_that_names_it(monkeypatch, capsys):
    monkeypatch.setattr("hybrid.spec.devicesheet.sheet_for", lambda name: sheet(bandwidth_gb_s=1e-6, f32_tflops=1e6))
    assert bench.main([*SMALL, "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    said = "error: the measurement is wrong: copy probe: 3000 GB/s is above the 1e-06 of tiny; prefill 5 @ 0: "
    assert err.splitlines()[-1].startswith(said)
    assert len(json.loads(out)["errors"]) == 4  # the probe and three tests


def test_a_sequence_that_ends_too_early_is_an_error(monkeypatch, capsys):
    requests = Bench.requests

    def cut(*args):
        made = requests(*args)
        made[0].cancel()
        return made

    monkeypatch.setattr(Bench, "requests", cut)
    assert bench.main([*SMALL, "--device", "cpu"]) == 1
    assert "error: a sequence got 0 tokens, 1 were asked for" in capsys.readouterr().err


def test_bytes_and_operations_are_the_plans(devices):
    from hybrid.checkpoint.random import random_checkpoint

    engine = Engine(
        random_checkpoint("gemma3-270m", layers=1, vocab=512), CpuDevice(), EngineConfig(ctx=64, n_tokens=512, chunk=8)
    )
    made = Bench(engine, 1)
    row, one = made.decode(6, 20), plan_cost(engine.runner.plan("decode", 1, 1), 23)
    assert (row.flops, row.nbytes) == (6 * one.flops, 6 * one.nbytes)
    row, whole = made.prefill(12, 0), Cost()
    for rows, outs, context in ((8, 0, 5), (4, 1, 11)):  # the second in a plan of 8 rows, of which 4 are live
        whole += plan_cost(engine.runner.plan("prefill", 8, outs), context, {"tokens": rows, "slots": 1})
    assert (row.flops, row.nbytes) == (whole.flops, whole.nbytes)
    assert row.counted["submits"] == 1


def test_shares_are_of_the_probe_once_it_is_good_enough_else_of_the_sheet():
    h200 = find_sheet("h200")
    good, poor = Probes(4300.0, "c", 600.0, "m", {}), Probes(3200.0, "c", None, "none", {})
    assert (ceiling(good, h200).gb_s, ceiling(good, h200).tflops) == (4300.0, 600.0)
    assert "the copy probe of this run" in ceiling(good, h200).of_bytes
    assert (
        ceiling(poor, h200).gb_s == 4800
        and "the copy probe reached only 3200 of 4300 GB/s" in ceiling(poor, h200).of_bytes
    )
    assert ceiling(poor, h200).tflops == 989 and "no matrix probe" in ceiling(poor, h200).of_flops
    assert ceiling(poor, None).gb_s == 3200 and ceiling(poor, None).tflops is None
    assert ceiling(poor, None).share_of_flops(ROW) is None


def test_impossible_figures_of_either_kind_are_found():
    assert ROW.tokens_per_second == 50 and ROW.gb_per_second == 5000 and ROW.tflops == 5
    assert impossible([ROW], PROBES, None) == [] == impossible([ROW], PROBES, sheet())
    assert impossible([ROW], PROBES, find_sheet("h200")) == [
        "decode 10 @ 0: 5000 GB/s is above the 4800 of NVIDIA H200"
    ]
    found = impossible([ROW], PROBES, sheet(f16_tflops=2, int8_tops=4))
    assert found == ["copy probe: 500 TFLOPS is above the 4 of tiny", "decode 10 @ 0: 5 TFLOPS is above the 4 of tiny"]


@pytest.mark.parametrize("backend", BACKENDS if LONG else BACKENDS[:1])
def test_a_test_may_end_where_the_context_ends(devices, capsys, tmp_path, backend):
    """The token after a prompt, and the last sampled token; in the long profile, at the demonstration model's 2048
    positions."""
    devices.get(backend)
    file, context = (MODELS / "demo-gemma3-q8_0.gguf", 2048) if LONG else (write_hf(tmp_path / "m", tiny()), 256)
    model = [str(file), "--device", backend, "-r", "1", "--json"]
    for phase, n in (("prefill", 3), ("decode", 3)):
        test = [["-p", "0", "-n"], ["-n", "0", "-p"]][phase == "prefill"]
        ends, beyond = ([*test, str(k), "--ctx-depth", str(context - 4)] for k in (n, n + 1))
        assert bench.main([*model, *ends]) == 0
        assert json.loads(capsys.readouterr().out)["context"] == context
        assert bench.main([*model, *beyond]) == 1
        assert f"need {context + 1} positions: the model was made for {context}" in capsys.readouterr().err


@pytest.mark.parametrize("backend", BACKENDS)
def test_probes_measure_and_give_their_memory_back(devices, backend):
    device = devices.get(backend)
    before = dict(device.memory())
    found = probe(device)
    assert found.copy_gb_s == max(found.variants[n] for n in found.variants if "copy" in n) > 0
    after = dict(device.memory())
    if own_memory(device):  # its first transfer allocates staging memory, which stays
        before.pop("staging"), after.pop("staging")
    assert after == before
    device.reset()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ([], 2, "name a MODEL, or give --random NAME: one of the two"),
        (["a.gguf", "--random", "gemma3-1b"], 2, "name a MODEL, or give --random NAME: one of the two"),
        (["a.gguf", "--head", "q8_0"], 2, "--head belongs to --random"),
        (["a.gguf", "--type", "q8_0"], 2, "--type belongs to --random"),
        (["none.gguf"], 1, "none.gguf: no such file or directory"),
        (["--random", "gemma3-1"], 1, "did you mean 'gemma3-1b'?"),
        ([*SMALL, "-p", "x"], 2, "'x' is no list of counts such as 512,2048"),
        ([*SMALL, "-r", "0"], 2, "'0' is not a positive number"),
        ([*SMALL, "-p", "0", "-n", "0"], 2, "nothing to measure"),
        ([*SMALL, "--ctx-depth", "32768"], 1, "the model was made for 32768"),
        ([*SMALL, "--device", "gpu9"], 1, "gpu9"),
    ],
)
def test_errors_are_one_line(capsys, options, code, says):
    try:
        found = bench.main([*options, "--device", "cpu"] if "--device" not in options else options)
    except SystemExit as end:
        found = end.code
    err = capsys.readouterr().err
    assert found == code and says in err and err.startswith("error: ") and err.count("\n") == 1


def test_the_text_shows_what_is_not_known_as_a_dash():
    from hybrid.bench.report import as_dict

    about = {
        "device": "d",
        "driver": "v",
        "model": "m",
        "weights_bytes": 1,
        "load_seconds": 1.0,
        "passed_over": [],
        "precision": {"weights": ["q4_0"], "activations": ["f32"], "kv": ["f16"]},
    }
    bare = Probes(1.0, "c", None, "none", {})
    lines = text(as_dict(about, [ROW], bare, ceiling(bare, None), [])).splitlines()
    assert "no matrix units" in lines[2] and lines[-1].split().count("-") == 2
