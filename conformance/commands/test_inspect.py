"""Memory of a model: planned bytes against what devices allocate, and the sheets of published models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hybrid
from conformance.support.devices import Devices, planned_on
from conformance.support.paths import DEMO
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.families import tensors
from hybrid.checkpoint.random import random_checkpoint
from hybrid.convert import Wanted, convert
from hybrid.core.errors import SpecError
from hybrid.core.units import parse_bytes, shortest, show_bytes
from hybrid.devices.opening import Opened
from hybrid.engine.loading import EngineConfig, stored_types
from hybrid.engine.loop import Engine
from hybrid.inspect import main
from hybrid.inspect import text as shown
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.kernels.vulkan.dry import DryDevice, scratch_bytes
from hybrid.planning.expand import WeightInfo
from hybrid.planning.footprint import footprint
from hybrid.planning.planner import PrecisionName
from hybrid.spec.model import find_model, load_models


@pytest.mark.parametrize(("batch", "context"), [(1, 40), (3, 256), (32, 200)])
def test_a_footprint_is_what_an_engine_holds(tmp_path: Path, batch: int, context: int) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf", tiny(head_dim=32, layer_is_global=(False, True, False)))) as c:
        planned = footprint(c.hparams, stored_types(c, "q8_0"), batch=batch, context=context)
        device = CpuDevice()
        engine = Engine(c, device, EngineConfig(weights="q8_0", ctx=context, slots=batch))
        decls = [engine.device._decls[name] for name in engine.runner._stored]  # with the padding that devices add
        held = {k: sum(d.nbytes for d in decls if d.kind == k) for k in ("weight", "state", "io")}
        assert planned.weights + planned.tables == held["weight"] and planned.io == held["io"]
        assert planned.kv_global + planned.kv_local + planned.state == held["state"]
        assert planned.scratch == device.memory()["activations"]
        assert planned.total == sum(held.values()) + device.memory()["activations"]
        kv = engine.runner.plan("decode", 1, 1).tensors
        own = [kv[f"kv.{layer}.{part}"].nbytes for layer in range(3) for part in "kv"]
        assert (planned.kv_local, planned.kv_global) == (sum(own[:2] + own[4:]), sum(own[2:4]))


class Units(CpuDevice):
    """Stores and plans as a device with matrix units would; runs nothing."""

    name = "vulkan:0 (dry)"

    def has(self, feature: str) -> bool:
        return feature == "f16_matrices"


@pytest.mark.parametrize(("context", "kv_rows"), [(40, 40), (2560, 2048)])
def test_a_footprint_is_what_an_engine_holds_where_matrix_units_multiply(
    tmp_path: Path, context: int, kv_rows: int
) -> None:
    hp = tiny(head_dim=32, layer_is_global=(False, True, False), context_length=4096)
    dry = DryDevice(features=Units().has)
    with open_checkpoint(write_hf(tmp_path / "hf", hp)) as c:
        planned = footprint(c.hparams, stored_types(c, "q8_0", "vulkan"), context=context, **planned_on(dry))
        device = Units()
        engine = Engine(c, device, EngineConfig(weights="q8_0", ctx=context))
        assert engine.cache.chunk == kv_rows and engine.sizes.rows[-1] == kv_rows
        held = sum(engine.device._decls[name].nbytes for name in engine.runner._stored)
        made = [engine.runner.plan("prefill", kv_rows, 1), engine.runner.plan("decode", 1, 1)]
        assert made[0].tensors["h.0"].dtype == "f16"
        assert planned.total - planned.beside == held + device.memory()["activations"]
        assert planned.beside >= max(scratch_bytes(p, dry) for p in made) > 0


@pytest.mark.slow
def test_kernel_scratch_is_counted_and_allocated_once(devices: Devices) -> None:
    """Programs of every bucket, the smallest first: 32 rows are split and take more than 128."""
    device = devices.get("vulkan")
    device.reset()  # another test's last case
    checkpoint = random_checkpoint("gemma3-270m", "q4_0", None, 2, 2048)
    engine = Engine(checkpoint, device, EngineConfig(ctx=256, n_tokens=2048))
    try:
        for rows in engine.sizes.rows:
            engine.runner.warm_up(rows)
        planned = footprint(
            checkpoint.hparams, engine.target.weights, context=256, **planned_on(DryDevice.like(device.report))
        )
        assert planned.beside == device.memory()["scratch"] > 0
    finally:
        device.reset()


def test_a_weight_that_is_unpacked_is_counted() -> None:
    hp = find_model("gemma3-4b").hparams().only((0, 5))
    infos = {n: WeightInfo("q6_k" if len(s) > 1 else "f32", s) for n, s in tensors(hp).items()}
    found = {}
    for table in ("default", "nvidia"):
        options = planned_on(DryDevice(features=Units().has, tuning=table))
        found[table] = footprint(hp, infos, context=2048, **options).beside
    most = max(
        a * b for n, (a, *rest) in tensors(hp).items() for b in rest if "embd" not in n
    )  # gate and up are one matrix
    assert found["nvidia"] >= 2 * 2 * most > found["default"] > 0


def test_sheets_hold_the_published_sizes() -> None:
    gemma3 = [f"gemma3-{s}" for s in ("270m", "1b", "4b", "12b", "27b")]
    assert [name for name in load_models() if name in gemma3] == gemma3
    others = ["gemma3n-e2b", "gemma4-e2b", "gemma3n-e4b", "gemma4-e4b", "gemma4-12b", "gemma4-26b-a4b", "gemma4-31b"]
    drafters = [f"gemma4-{size}-assistant" for size in ("e2b", "e4b", "26b-a4b", "12b", "31b")]
    embedders = ["embeddinggemma-2", "embeddinggemma-300m"]
    assert [name for name in load_models() if name not in (*gemma3, *drafters)] == [*embedders, *others]
    assert [name for name in load_models() if name in drafters] == drafters
    for sheet in load_models().values():
        hp = sheet.hparams()
        counts = []
        for shape in tensors(hp).values():
            counts.append(shape[0] * (shape[1] if len(shape) > 1 else 1))
        assert sum(counts) == sheet.model.parameters
    big = find_model("gemma3-27b").hparams()
    assert big.attention_scale == 168**-0.5 and big.layers[0].head_dim == 128 and sum(big.layer_is_global) == 10
    with pytest.raises(SpecError, match="did you mean 'gemma3-12b'"):
        find_model("gemma3-12B")


@pytest.mark.slow
def test_a_file_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf")) as source:
        convert(source, tmp_path / "m.gguf", Wanted("q4_0", {"embed": "q8_0"}))
    assert main([str(tmp_path / "m.gguf"), "--json", "--memory", "1MiB", "--batch", "2", "--context", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hparams"]["hidden"] == 64 and report["tokenizer"]["ends"] == {"1": "<eos>", "5": "<end_of_turn>"}
    assert report["types"].keys() == {"q8_0", "f32", "q4_0"} and len(report["tensors"]) == 41
    assert report["tensors"][0] == {"name": "token_embd.weight", "type": "q8_0", "shape": [320, 64], "bytes": 320 * 68}
    first = report["fits"][0]
    assert first["bytes"] == 1 << 20 and first["spare"] == first["bytes"] - report["needs"]["vulkan"]["total"]
    assert report["fits"][-1]["device"] == "cpu"
    assert main([str(tmp_path / "m.gguf"), "--type", "f32"]) == 0
    text = capsys.readouterr().out
    assert "1 global" in text and "2 local " in text and "3 x f32    [96, 64]" in text and "to spare" in text
    assert main([str(tmp_path / "m.gguf"), "--tensors"]) == 0
    assert "blk.2.ffn_up.weight" in capsys.readouterr().out


def test_an_unreadable_tokenizer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write_hf(tmp_path / "hf") / "tokenizer.model").unlink()
    assert main([str(tmp_path / "hf")]) == 0
    assert "tokenizer: " in (out := capsys.readouterr().out) and "missing" in out and "to spare" in out


def test_a_name_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gemma3-270m", "--type", "q4_0", "--type-embed", "f16", "--context", "8192", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # What Google's QAT file of this size reads for a token: 392.2 MB.
    assert sum(report["types"].values()) == pytest.approx(392.2e6, rel=1e-3)
    local, whole = report["needs"]["vulkan"]["kv_local"], report["needs"]["vulkan"]["kv_global"]
    assert whole == 3 * 8192 * 1024  # 3 layers, 1024 bytes for each position in f16
    assert local == 15 * 1024 * 32 * 33  # 15 rings that hold a window of 512 and a chunk of 512
    for args, words in (
        (["gemma3-9b"], "no model is called"),
        (["gemma3-1b", "--context", "40000"], "outside 1..32768"),
        (["none.gguf"], "no such file"),
    ):
        assert main(args) == 1 and words in capsys.readouterr().err


def test_experts_that_do_not_fit_are_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["gemma4-26b-a4b", "--type", "q4_0", "--json", "--memory"]
    assert main([*command, "8GiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    row, needs = report["fits"][0], report["needs"]["vulkan"]
    assert row["spare"] == 0 < row["spill"] == needs["total"] - (8 << 30) < needs["spill"] and "schedule" not in row
    assert f"fits, with {show_bytes(row['spill'])} of experts in host memory" in shown(report, False)
    experts = sum(t["bytes"] for t in report["tensors"] if t["name"].endswith("_exps.weight"))
    assert needs["spill"] == experts and "total" in needs and needs["total"] < 14 << 30
    assert main([*command, "1GiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    row = report["fits"][0]
    assert row["spill"] == experts and row["spare"] == (1 << 30) - needs["total"] + experts < 0
    assert f"{show_bytes(-row['spare'])} short, with {show_bytes(experts)} of experts" in shown(report, False)


def test_a_schedule_with_weights_on_the_host_is_named_where_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gemma4-e2b", "--type", "q4_0", "--memory", "2GiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    row = report["fits"][0]
    assert row["schedule"] == "gemma4-host-table" and row["spare"] >= 0 > (2 << 30) - report["needs"]["vulkan"]["total"]
    assert f"to spare with schedule {row['schedule']}" in shown(report, False)


def test_sizes_as_people_write_them() -> None:
    assert [parse_bytes(t) for t in ("16GiB", "1.5 MB", "2g", "4096", "1KiB")] == [
        1 << 34,
        1_500_000,
        2 * 10**9,
        4096,
        1024,
    ]
    for text in ("", "x", "-1", "0", "1XB", "1 i"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(text)
    assert [show_bytes(n) for n in (5, 2048, 20 << 20, 3 << 29)] == ["5 B", "2.00 KiB", "20.0 MiB", "1.50 GiB"]
    assert shortest(9.999999974752427e-07) == 1e-06 and shortest(0.1) == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "exact"])
def test_what_cpu_needs_is_what_it_holds(capsys: pytest.CaptureFixture[str], precision: str) -> None:
    assert main([str(DEMO), "--precision", precision, "--context", "512", "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]["cpu"]
    with hybrid.load(DEMO, "cpu", precision=precision, ctx=512) as model:  # type: ignore[arg-type]
        held = model.engine.device.memory()
    assert needs["weights"] + needs["tables"] == pytest.approx(
        held["weights"] + held["dequantised"] + held["codes"], rel=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "precision"), [(64, "auto"), (24, "auto"), (16, "auto"), (16, "exact")])
def test_what_cpu_makes_of_experts_is_what_its_memory_allows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, memory: int, precision: PrecisionName
) -> None:
    """float32 up to half of the memory, then their own type, then their file."""
    monkeypatch.setattr("hybrid.kernels.host.memory.usable_bytes", lambda: memory << 20)
    path = DEMO.parent / "demo-gemma4-moe-q8_0.gguf"
    assert main([str(path), "--precision", precision, "--context", "512", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    needs, device = report["needs"]["cpu"], CpuDevice(memory=memory << 20)
    with hybrid.load(path, Opened(device, device), ctx=512, slots=1, precision=precision):
        held = device.memory()
    made = held["weights"] + held["dequantised"] + held["codes"]
    assert needs["weights"] + needs["tables"] == pytest.approx(made, rel=0.02)
    assert needs["file"] == pytest.approx(held["left_in_files"], rel=0.03) and (needs["file"] > 0) == (memory < 24)
    assert (needs["own"] > 0) == (memory < 64) == ("are dequantised at every use" in shown(report, False))
    assert (needs["file"] > 0) == ("are read from the file at every use" in shown(report, False))
