"""Details of declarations, their commands, messages and units: each was broken once without another test noticing."""

from __future__ import annotations

import builtins
import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hybrid.spec
from conformance.support.paths import ROOT, SPECS
from hybrid.checkpoint import open_checkpoint
from hybrid.cli import describe
from hybrid.core import errors
from hybrid.core.dtypes import native_types
from hybrid.core.errors import SpecError
from hybrid.core.places import DEMO
from hybrid.core.units import parse_bytes, shortest, show_bytes
from hybrid.spec import OpSpec, load_op, op, workload
from hybrid.spec.__main__ import main as spec
from hybrid.spec.devicesheet import DeviceSheet
from hybrid.spec.load import load_toml, validate
from hybrid.spec.npusheet import Count, Rate
from hybrid.spec.schedule import StepSpec, find_schedule, scheduled
from hybrid.spec.workload import Source


@pytest.mark.parametrize("arguments", [["list"], ["show", "sample"], ["schema"], ["check"], ["list", "--json"]])
def test_commands_about_specs_end_well(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert spec(arguments) == 0 and capsys.readouterr().out


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr(builtins, "print", closed)
    assert spec(["list"]) == 0


def test_the_check_of_specs_names_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert spec(["check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    files = (*SPECS.glob("ops/*.toml"), *SPECS.glob("schedules/*.toml"))
    assert set(found) == {f"specs/{p.parent.name}/{p.name}" for p in files}
    assert all(problems == [] for problems in found.values())


def test_names_of_the_specs_package_are_those_of_its_modules() -> None:
    for name in hybrid.spec.__all__:
        home = errors if name == "SpecError" else op
        assert getattr(hybrid.spec, name) is getattr(home, name)
    with pytest.raises(AttributeError, match="has no attribute 'load_opp'"):
        hybrid.spec.load_opp  # noqa: B018


def test_a_sheet_is_for_devices_by_a_regular_expression() -> None:
    head = {"name": "d", "kind": "cpu", "match": "cpu|c(?=pu)"}
    assert validate("s.toml", {"schema": 1, "device": head, "peak": {}}, DeviceSheet).device.match == head["match"]
    with pytest.raises(SpecError, match=r"'\(' is not a regular expression"):
        validate("s.toml", {"schema": 1, "device": {**head, "match": "("}, "peak": {}}, DeviceSheet)


@pytest.mark.parametrize("kind", [Count, Rate])
def test_figures_of_an_npu_are_positive_and_have_a_source(kind: type[Count] | type[Rate]) -> None:
    assert kind(value=1, source="s").value == 1
    for wrong in ({"value": 0, "source": "s"}, {"value": 1, "source": ""}, {"value": 1}):
        with pytest.raises(ValueError, match=r"value|source"):
            kind.model_validate(wrong)


def _declared(tmp_path: Path, op: str, old: str, new: str) -> OpSpec:
    text = (SPECS / "ops" / f"{op}.toml").read_text()
    assert old in text
    folder = tmp_path / str(len(list(tmp_path.iterdir())))  # a file is read once
    folder.mkdir()
    (folder / f"{op}.toml").write_text(text.replace(old, new, 1))
    return load_op(folder / f"{op}.toml")


def test_a_default_is_of_its_attributes_type(tmp_path: Path) -> None:
    window = '{ type = "int", min = 0, default = 0,'
    assert (
        _declared(tmp_path, "attention", window, window.replace("default = 0", "default = 3"))
        .attributes["window"]
        .default
        == 3
    )
    with pytest.raises(SpecError, match=r"window.default: 0.5 is not of type int"):
        _declared(tmp_path, "attention", window, window.replace("default = 0", "default = 0.5"))
    without = _declared(tmp_path, "attention", window, window.replace(" default = 0,", ""))
    assert without.attributes["window"].default is None


@pytest.mark.parametrize(("given", "words"), [('["y"]', "no earlier result 'y'"), ('["x"]', "no earlier result 'x'")])
def test_a_result_is_given_what_is_made_before_it(tmp_path: Path, given: str, words: str) -> None:
    with pytest.raises(SpecError, match=rf"outputs.y.given\[0\]: {words}"):
        _declared(tmp_path, "fused_ffn", 'given = ["h"]', f"given = {given}")


def test_steps_meet_where_phase_and_layers_do() -> None:
    (first, *_) = find_schedule("gemma3").layer

    def step(phase: str | None, when: str) -> StepSpec:
        return first.model_copy(update={"phase": phase, "when": when})

    for a, b, same in (
        ((None, "any"), ("decode", "any"), True),
        (("decode", "any"), (None, "any"), True),
        ((None, "any"), (None, "any"), True),
        (("prefill", "any"), ("decode", "any"), False),
        (("decode", "local"), ("decode", "any"), True),
        (("decode", "local"), (None, "global"), False),
        ((None, "local"), (None, "local"), True),
    ):
        assert step(*a).meets(step(*b)) == step(*b).meets(step(*a)) == same


# ---------------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n b"), "a b"),
        (RuntimeError(""), "internal: RuntimeError: "),
        (KeyError("x"), "internal: KeyError: 'x'"),
        (FileNotFoundError(2, "No such file", "f"), "f: No such file"),
        (OSError(28, "No space left"), "No space left"),
        (OSError("odd"), "odd"),
        (MemoryError(), "not enough memory; use a smaller ctx"),
        (MemoryError("9 GiB"), "not enough memory: 9 GiB; use a smaller ctx"),
    ],
)
def test_an_error_is_one_line(error: Exception, line: str) -> None:
    said = describe(error)
    assert said.startswith(line) and "\n" not in said and ("HYBRID_DEBUG=1" in said) == line.startswith("internal")


# ------------------------------------------------------------------------------------------------------------- units
def test_sizes_are_read_and_written_as_people_do() -> None:
    read = {
        "4096": 4096,
        "2k": 2000,
        "500MB": 5 * 10**8,
        "2G": 2 * 10**9,
        "1T": 10**12,
        "1KiB": 1024,
        "3mib": 3 << 20,
        "1.5GiB": 3 << 29,
        "1TiB": 1 << 40,
        " 7 b ": 7,
    }
    assert {text: parse_bytes(text) for text in read} == read
    for wrong in ("", "x", "-1", "0", "0.4", "1ib", "1 2", "1PB", "i"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(wrong)
    shown = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.00 KiB",
        10 << 10: "10.0 KiB",
        1 << 20: "1.00 MiB",
        -(3 << 30): "-3.00 GiB",
        (1 << 20) - 1: "1024.0 KiB",
        1 << 40: "1024.0 GiB",
    }
    assert {size: show_bytes(size) for size in shown} == shown
    assert shortest(float(np.float32(1e-6))) == 1e-6 and shortest(0.1) == 0.1 and shortest(0.5) == 0.5


# --------------------------------------------------------------------------------------------------------- workloads
@pytest.mark.parametrize("name", load_toml(SPECS / "workloads.toml", Source).demos)
def test_the_demonstration_models_sizes_are_those_of_their_files(name: str) -> None:
    file = DEMO if name == "demo" else DEMO.with_name(f"{name}-q8_0.gguf")
    with open_checkpoint(file) as checkpoint:
        stored = checkpoint.hparams
    written = workload.givens().models[name]
    assert math.isclose(stored.eps, written.eps, rel_tol=1e-7)  # the file's is a float32
    layers = tuple(replace(layer, scalar=1.0) for layer in stored.layers)  # a tensor of the file
    assert replace(stored, eps=written.eps, layers=layers) == written


def test_workloads_have_the_sizes_of_models_and_passes() -> None:
    """By hand, one of each kind: role, expression, variant, pass of a variant, no pass, attribute, tag."""
    found = {
        (o, w.id): w
        for o in ("decode_attention", "logits", "dequantize", "embed", "linear")
        for w in load_op(o).workload
    }
    one = found["decode_attention", "gemma3-27b.global.decode512"]
    assert one.bind == {
        "T": 1,
        "HQ": 32,
        "HK": 16,
        "D": 128,
        "S": 1,
        "MB": 16,
        "B": 16,
        "BS": 32,
        "C": 512,
        "KV": 2,
        "R": 128,
    }
    assert one.attrs == {"eps": 1e-6, "scale": 168**-0.5, "window": 0} and one.tags == ("decode", "perf")
    assert found["decode_attention", "gemma3-4b.local.decode"].attrs["window"] == 1024
    batch = found["decode_attention", "gemma3-4b.global.batch32"]
    assert (batch.bind["T"], batch.bind["S"], batch.bind["B"], batch.tags) == (
        32,
        32,
        32 * 256,
        ("decode", "batch", "perf"),
    )
    forced = found["logits", "demo.teacher_forced"]
    assert forced.bind == {"R": 128, "O": 128, "H": 256, "V": 4096} and forced.tags == ("prefill", "demo")
    assert found["logits", "gemma3-1b.prefill"].bind == {"R": 512, "O": 1, "H": 1152, "V": 262144}
    assert found["dequantize", "gemma3-12b.attn_output"].bind == {"N": 3840, "K": 4096}
    assert found["embed", "demo.prefill"].bind["T"] == 128 and found["embed", "demo.prefill"].attrs == {"scale": 16.0}
    assert found["linear", "gemma3-27b.attn_output.q6_k.decode"].dtypes == {"x": "q8_act", "w": "q6_k"}
    assert [w.id for w in load_op("begin_pass").workload] == ["demo.decode", "demo.batch32"]


def test_a_variant_goes_before_its_table_and_texts_stay_texts(tmp_path: Path) -> None:
    mine = 'variants.mine = { attrs = { window = "window//2" }, dtypes = { k_cache = "f32" }, passes = ["decode"] }\n'
    text = (SPECS / "ops" / "attention_i8.toml").read_text()
    text = text.replace(
        "[attributes]\n", '[attributes]\nkind = { type = "str", values = ["hidden", "b"], default = "b" }\n'
    )
    head, _, _ = text.partition("[[workloads]]")
    path = tmp_path / "attention_i8.toml"
    common = (
        'passes = ["prefill"]\nattrs = { scale = 0.5, window = 3, kind = "hidden" }\ndtypes = { k_cache = "f16" }\n'
    )
    path.write_text(head + '[[workloads]]\nmodels = ["demo"]\n' + mine + common)
    (made,) = load_op(path).workload
    assert (made.id, made.bind["T"], made.dtypes) == ("demo.mine.decode", 1, {"k_cache": "f32"})
    assert made.attrs == {"scale": 0.5, "window": 64, "kind": "hidden"} and isinstance(made.attrs["window"], int)


def test_an_operation_without_workloads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "geglu.toml"
    path.write_text((SPECS / "ops" / "geglu.toml").read_text().partition("[[workloads]]")[0])
    with pytest.raises(
        SpecError, match=r"geglu\.toml: workloads\[0\]\.models: is missing: no model's schedule has geglu"
    ):
        _ = load_op(path).workload


def test_a_wrong_size_of_a_pass_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (SPECS / "workloads.toml").read_text()
    for old, new, words in (
        (
            "slots*table",
            "slots*tables",
            "passes.decode: blocks: unknown name 'tables' in 'slots*tables'; did you mean 'table'?",
        ),
        (
            "context = 512",
            "contxt = 512",
            "passes.decode512.sizes.contxt: unknown size 'contxt'; did you mean 'context'?",
        ),
        ("hidden = 256", "hidden = 0", "demos.demo.hidden: input should be greater than 0"),
    ):
        path = tmp_path / "workloads.toml"
        path.write_text(text.replace(old, new, 1))
        monkeypatch.setattr(workload, "FILE", path)
        workload.givens.cache_clear()
        with pytest.raises(SpecError, match=re.escape(words)) as error:
            _ = _declared(tmp_path, "geglu", "schema = 1", "schema = 1 ").workload
        assert "workloads.toml: " in str(error.value) and "\n" not in str(error.value)
    monkeypatch.undo()
    workload.givens.cache_clear()


def test_commands_start_without_workloads() -> None:
    code = "import sys; from hybrid.generate import parser; parser(); print('hybrid.spec.workload' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


def test_a_size_is_planned_without_readers_of_files() -> None:
    code = (
        "import sys; from hybrid import inspect; inspect.main(['gemma3-27b']); import hybrid.checkpoint as c; "
        "unused = ('hybrid.checkpoint.open', 'hybrid.convert.shards', 'hybrid.engine.runner', 'hybrid.spec.devicesheet'); "
        "print('loaded', [m for m in unused if m in sys.modules], c.open_checkpoint.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["loaded [] open_checkpoint"], run.stderr


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_matrices_of_models_have_every_type_that_a_device_computes_with(backend: str) -> None:
    held, asked = set(native_types(backend)), 0
    for declared in map(load_op, sorted(scheduled())):
        for name, t in declared.inputs.items():
            if t.role == "weight" and len(t.shape) == 2 and t.dtype != ("f32",):
                taken = {choice[name] for choice in declared.dtype_choices(backend)}
                assert held <= taken, f"{declared.name}.{name}: {sorted(held - taken)}"
                asked += 1
    assert asked > 8
