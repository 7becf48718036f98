"""Schedule files and device sheets: what is wrong is one line with file, key and fix; the commands print real plans."""

from __future__ import annotations

import json
import re

import pytest

from conformance.support.synthetic import tiny, write_hf
from hybrid import schedule as command
from hybrid.core.errors import SpecError
from hybrid.spec.devicesheet import load_sheets, sheet_for
from hybrid.spec.schedule import SCHEDULES, find_schedule, load_schedule, named_schedule


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('op = "embed"', 'opp = "embed"', r"before\[1\]\.opp: unknown key.*did you mean 'op'"),
        ('extent = "outs"', 'extent = "out"', r"extent: 'out' is not one of rows, outs"),
        ('act = { x = "auto:w" }', 'act = { x = "int8" }', "x = 'int8': use one of f32, f16, q8_act or auto:"),
        ('cpu = ["cpu"]', 'cpu = ["gpu"]', "a chain of cpu, vulkan"),
        ('auto = ["vulkan:gpu", "cpu"]\n', "", 'needs the chain "auto"'),
        ('unquantised = { act = "f32", kv = "f32" }', 'unquantised = { act = "q8_act", kv = "f32" }', "cannot be q8_act"),
        ("[precision.exact]", "[precision.exactly]", "precision.exactly"),
        ('H = "hidden"', 'H = "__import__"', "axes.H: unknown name '__import__'"),
        ('dtype = "i32", shape = ["T"]', 'dtype = "i33", shape = ["T"]', "unknown dtype 'i33'"),
        ('name = "embed"', 'name = "decode_rows"', "two steps are named 'decode_rows'"),
        ("schema = 1", "schema = 1 =", "not valid TOML"),
    ],
)
def test_a_wrong_schedule_is_one_line(tmp_path, capsys, old, new, message):
    text = (SCHEDULES / "gemma3.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    model = write_hf(tmp_path / "m", tiny())
    code = command.main(["check", str(path), str(model)])
    error = capsys.readouterr().err
    assert code == 1 and error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error), error


def test_chains():
    schedule = find_schedule("gemma3")
    assert schedule.chain("auto") == ("vulkan:gpu", "cpu")
    assert schedule.chain("vulkan:3") == ("vulkan:3",)
    with pytest.raises(ValueError, match=r"unknown device 'tpu': use auto, vulkan, cpu or vulkan:NUMBER"):
        schedule.chain("tpu")
    with pytest.raises(ValueError, match="no schedule for the architecture 'llama'"):
        find_schedule("llama")
    with pytest.raises(SpecError, match="there is no such file"):
        load_schedule("nowhere.toml")


def test_show_prints_the_plan(tmp_path, capsys):
    model = write_hf(tmp_path, tiny())
    assert command.main(["show", "gemma3", str(model), "--weights", "q4_0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [s["op"] for s in report["steps"][:3]] == ["decode_rows", "embed", "rmsnorm"]
    assert report["dispatches"] == len(report["steps"]) == 3 + 3 * 6 + 2
    assert report["dispatches_per_layer"] == {"0": 6, "1": 6, "2": 6}
    assert report["memory"]["weights"] > 0 and report["nbytes"] == sum(s["nbytes"] for s in report["steps"])
    assert command.main(["show", "gemma3", str(model), "--device", "vulkan", "--rows", "4"]) == 0
    text = capsys.readouterr().out
    assert "blk.2.ffn" in text and "per layer" in text and "memory: weights" in text


def test_check_takes_the_shipped_schedule_by_name(tmp_path, capsys):
    assert command.main(["check", "gemma3", str(write_hf(tmp_path, tiny()))]) == 0
    assert "every edge agrees" in capsys.readouterr().out


def test_usage_errors_exit_with_2(capsys):
    with pytest.raises(SystemExit) as e:
        command.main(["paint", "gemma3", "x"])
    assert e.value.code == 2 and capsys.readouterr().err.startswith("error: ")
    assert command.main(["check", "gemma3", "/no/such/model"]) == 1
    assert "no such file or directory" in capsys.readouterr().err


def test_device_sheets():
    assert {"h200", "radeon-780m", "lavapipe"} <= set(load_sheets())
    assert sheet_for("vulkan:0 (NVIDIA H200)").peak.bandwidth_gb_s.value == 4800
    assert sheet_for("vulkan:0 (llvmpipe (LLVM 15.0.6, 256 bits))").device.kind == "cpu"
    assert sheet_for("cpu") is None


def test_a_schedule_is_named_or_a_file_and_else_the_known_ones_are_listed():
    assert named_schedule("gemma3") == named_schedule(SCHEDULES / "gemma3.toml")
    with pytest.raises(ValueError, match=r"gemma4: neither a file nor a shipped schedule; .*gemma3-hybrid"):
        named_schedule("gemma4")
