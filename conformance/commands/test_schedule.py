"""Schedule files and device sheets: an error is one line with file, key and fix; the commands print real plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.support.synthetic import tiny, write_hf
from hybrid import schedule as command
from hybrid.core.errors import SpecError
from hybrid.spec.__main__ import main as spec
from hybrid.spec.devicesheet import load_sheets, sheet_for
from hybrid.spec.load import load_toml
from hybrid.spec.op import load_ops
from hybrid.spec.placement import FORMS, Form, Placement, placed
from hybrid.spec.schedule import SCHEDULES, extended, find_schedule, load_schedule, named_schedule
from hybrid.spec.step import Phase


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('op = "embed"', 'opp = "embed"', r"before\[1\]\.opp: unknown key.*did you mean 'op'"),
        ('extent = "outs"', 'extent = "out"', r"extent: 'out': use one of rows, outs, wanted"),
        ('act = { x = "auto:w" }', 'act = { x = "int8" }', "x = 'int8': use one of f32, f16, q8_act or auto:"),
        ("[axes]", '[devices]\ncpu = ["gpu"]\n[axes]', "a chain of cpu, vulkan"),
        (
            'unquantised = { act = "f32", kv = "f32" }',
            'unquantised = { act = "q8_act", kv = "f32" }',
            "cannot be q8_act",
        ),
        (
            "[precision.exact]",
            'beside_quantised = { act = "q8_act", kv = "f32" }\n[precision.exact]',
            "beside_quantised.act can",
        ),
        ("[precision.exact]", "[precision.exactly]", "precision.exactly"),
        ('H = "hidden"', 'H = "__import__"', "axes.H: unknown name '__import__'"),
        ('dtype = "i32", shape = ["T"]', 'dtype = "i33", shape = ["T"]', "unknown dtype 'i33'"),
        ('name = "embed"', 'name = "begin_pass"', "two steps are named 'begin_pass'"),
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
    assert [s["op"] for s in report["steps"][:3]] == ["begin_pass", "embed", "rmsnorm"]
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
    with pytest.raises(ValueError, match=r"gemma9: neither a file nor a shipped schedule; .*gemma3-hybrid"):
        named_schedule("gemma9")


# ------------------------------------------------------------------------------------- schedules that extend another
HEAD = 'schema = 1\nextends = "gemma3"\n\n[schedule]\nname = "mine"\nsummary = "s"\n'
NPU = '[[placement]]\nsteps = ["*.ffn"]\ndevice = "npu"\n'


def written(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


EXTENSION_MISTAKES = {
    "unknown base": (
        HEAD.replace('"gemma3"', '"gema3"'),
        "extends: no shipped schedule is called 'gema3'; did you mean 'gemma3'?",
    ),
    "no such file": (HEAD.replace('"gemma3"', '"other.toml"'), "extends: there is no file 'other.toml' from here"),
    "itself": (HEAD.replace('"gemma3"', '"mine.toml"'), "extends: goes in a circle"),
    "no text": (HEAD.replace('"gemma3"', "3"), "extends: input should be a valid string, not 3"),
    "same head": (HEAD + 'family = "gemma3"\n', "schedule.family: specs/schedules/gemma3.toml sets it too"),
    "same table": (
        HEAD + '[choice]\n"head.weight" = ["output.weight"]\n',
        "choice.head.weight: specs/schedules/gemma3.toml sets it too",
    ),
    "same steps": (HEAD + '[[layer]]\nname = "n"\nop = "linear"\n', "layer: specs/schedules/gemma3.toml sets it too"),
    "unknown key": (HEAD + NPU.replace("device", "devise"), "placement[0].devise: unknown key; did you mean 'device'?"),
    "no step": (
        HEAD + NPU.replace("*.ffn", "*.attentoin"),
        "placement[0].steps[0]: '*.attentoin' fits no step; did you mean",
    ),
    "no step of the phase": (
        HEAD + NPU.replace("*.ffn", "*.qk_norm_rope") + 'phase = "decode"\n',
        "placement[0].steps[0]: '*.qk_norm_rope' fits no step of decode; ",
    ),
    "nothing said": (
        HEAD + NPU.replace('device = "npu"\n', 'phase = "decode"\n'),
        "placement[0].steps: nothing is said of them",
    ),
    "like and phase": (
        HEAD + NPU + 'like = "prefill"\nphase = "decode"\n',
        "placement[0].phase: has no meaning beside like",
    ),
    "form and act": (
        HEAD + NPU + 'form = "linear_rows"\nact = { x = "f32" }\n',
        "placement[0].act: the steps of a form have",
    ),
    "form and another's act": (
        HEAD + NPU + 'form = "linear_rows"\n[[placement]]\nsteps = ["*.ffn"]\nact = { x = "f32" }\n',
        "placement[0].form: another placement gives blk.{l}.ffn an act",
    ),
    "placements without end": (HEAD + 65 * NPU, "placement: has 65 entries; at most 64"),
    "wrong act": (HEAD + NPU + 'act = { x = "int8" }\n', "placement[0].act: x = 'int8': use one of f32"),
    "unknown form": (HEAD + NPU + 'form = "rows"\n', "placement[0].form: no form is called 'rows'; "),
    "no such operation in the form": (
        HEAD + NPU.replace("*.ffn", "*.attn_add") + 'form = "linear_rows"\n',
        "placement[0].form: linear_rows has nothing in place of add_rmsnorm (blk.{l}.attn_add); it has linear",
    ),
    "placed twice": (
        HEAD + NPU + NPU.replace("*.ffn", "blk.*"),
        "placement[1].device: placement[0] sets it for blk.{l}.ffn",
    ),
    "same value": (HEAD + '[values]\nkind = { any = "x" }\n', "values.kind: specs/schedules/gemma3.toml sets it too"),
    "placement of a whole file": ("", "placement: unknown key"),
}


@pytest.mark.parametrize("mistake", EXTENSION_MISTAKES)
def test_a_wrong_extension_is_one_line_with_file_key_and_fix(mistake: str, tmp_path: Path) -> None:
    text, words = EXTENSION_MISTAKES[mistake]
    path = written(tmp_path, text or (SCHEDULES / "gemma3.toml").read_text() + NPU)
    with pytest.raises(SpecError) as caught:
        load_schedule(path)
    assert str(caught.value).startswith(f"{path}: {words}") and "\n" not in str(caught.value), caught.value


def test_a_circle_of_files_is_shown(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "b")):
        written(tmp_path, HEAD.replace('"gemma3"', f'"{other}.toml"'), name)
    with pytest.raises(
        SpecError, match=r"c\.toml: extends: goes in a circle \(\S+b\.toml -> \S+c\.toml -> \S+b\.toml\); one of them"
    ):
        load_schedule(tmp_path / "a.toml")


def test_an_extension_adds_what_is_not_set_and_can_itself_be_extended(tmp_path: Path) -> None:
    added = '[devices]\nboth = ["vulkan:0", "cpu"]\n[fallback]\nnpu = "main"\n'
    written(tmp_path, HEAD + added + NPU, "one")
    two = written(
        tmp_path, HEAD.replace('"gemma3"', '"one.toml"') + "pipeline = 2\n" + NPU.replace("ffn", "attn_qkv"), "two"
    )
    made, base = load_schedule(two), find_schedule("gemma3")
    assert (
        made.chain("both") == ("vulkan:0", "cpu") and made.fallback == {"npu": "main"} and made.schedule.pipeline == 2
    )
    assert (made.schedule.family, made.schedule.source) == (base.schedule.family, base.schedule.source)
    assert made.elsewhere == {"npu": ["blk.{l}.attn_qkv", "blk.{l}.ffn"]} and not base.elsewhere
    assert extended(two) == ["one", "gemma3"] and extended(SCHEDULES / "gemma3.toml") == []
    with pytest.raises(SpecError, match=r"two\.toml: fallback\.npu: \S+one\.toml sets it too"):
        load_schedule(written(tmp_path, two.read_text() + '[fallback]\nnpu = "main"\n', "two"))


@pytest.mark.parametrize("name", ["gemma3-hybrid"])
def test_another_family_is_placed_by_the_same_lines(name: str, tmp_path: Path) -> None:
    """A family with its own tensors and one more step: the shipped placements extend it unchanged."""
    family = (SCHEDULES / "gemma3.toml").read_text().replace('"gemma3"', '"other"').replace("y.{l}", "normed.{l}")
    written(
        tmp_path,
        family + '[[layer]]\nname = "blk.{l}.more"\nop = "rmsnorm"\nargs = { x = "x.{l+1}", y = "more.{l}" }\n',
        "other",
    )
    path = written(
        tmp_path, (SCHEDULES / f"{name}.toml").read_text().replace('extends = "gemma3"', 'extends = "other.toml"')
    )
    made, shipped = load_schedule(path), named_schedule(name)
    assert made.schedule.family == "other" and made.elsewhere == shipped.elsewhere
    assert [(s.name, s.op, s.phase) for s in made.layer[:-1]] == [(s.name, s.op, s.phase) for s in shipped.layer]
    assert made.layer[-1].name == "blk.{l}.more" and "normed.{l}" in {a for s in made.layer for a in s.args.values()}


PHASES: tuple[Phase, ...] = ("prefill", "decode")
NAMES = sorted({s.name for s in find_schedule("gemma3").layer})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from([None, *PHASES]), st.sampled_from(["npu", "tpu"])),
        max_size=4,
        unique_by=lambda entry: entry[0],
    )
)
def test_in_each_phase_a_placement_changes_the_devices_of_its_steps_and_nothing_else(
    entries: list[tuple[str, Phase | None, str]],
) -> None:
    base = find_schedule("gemma3")
    runs = {name: {p for s in base.layer if s.name == name for p in s.phases} for name in NAMES}
    entries = [(n, p, d) for n, p, d in entries if p is None or p in runs[n]]
    groups = {"before": base.before, "layer": base.layer, "after": base.after}
    found = placed(groups, [Placement(steps=(n,), phase=p, device=d) for n, p, d in entries])
    assert (found["before"], found["after"]) == (base.before, base.after)
    for phase in PHASES:
        device = {n: d for n, p, d in entries if p in (None, phase)}
        wanted = [
            s.model_copy(update={"phase": phase, "device": device.get(s.name, "main")})
            for s in base.layer
            if phase in s.phases
        ]
        assert [s.model_copy(update={"phase": phase}) for s in found["layer"] if phase in s.phases] == wanted


def test_a_step_of_both_phases_stays_one_where_both_are_placed_alike() -> None:
    groups = {"layer": [s for s in find_schedule("gemma3").layer if s.op == "fused_ffn"]}
    both = [Placement(steps=("*",), phase=phase, device="npu") for phase in PHASES]
    assert [(s.phase, s.device) for s in placed(groups, both)["layer"]] == [(None, "npu")]
    assert [(s.phase, s.device) for s in placed(groups, both[:1])["layer"]] == [("prefill", "npu"), ("decode", "main")]


def test_like_a_phase_means_its_steps_in_both() -> None:
    groups = {"layer": find_schedule("gemma3").layer}
    for phase, gone in (("prefill", {"decode_attention"}), ("decode", {"attention", "qk_norm_rope_append"})):
        found = placed(groups, [Placement(steps=("*",), like=phase)])["layer"]
        assert {s.phase for s in found} == {None} and {s.op for s in groups["layer"]} - {s.op for s in found} == gone


def test_a_form_takes_the_place_of_steps_where_they_run() -> None:
    (ffn,) = (s for s in find_schedule("gemma3").layer if s.op == "fused_ffn")
    one = ffn.model_copy(update={"when": "l == 2", "phase": "prefill", "extent": "outs"})
    made = placed({"layer": [one]}, [Placement(steps=("*",), device="npu", form="linear_rows")])["layer"]
    assert [(s.op, s.device) for s in made] == [("linear_rows", "npu"), ("geglu", "main"), ("linear_rows", "npu")]
    assert {(s.when, s.phase, s.extent) for s in made} == {("l == 2", "prefill", "outs")} and not any(
        s.act for s in made
    )
    assert made[0].args == {"x": "z.{l}", "w": "blk.{l}.ffn_gate_up.weight", "y": "gate_up.{l}"}
    outside = placed({"after": [one]}, [Placement(steps=("*",), device="npu", form="linear_rows")])["after"]
    assert outside[1].args == {"gate_up": "gate_up", "h": "h.{l}"}


@pytest.mark.parametrize("path", sorted(FORMS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_forms_name_tensors_that_there_are(path: Path) -> None:
    """Every argument is one of the new operation's, every source one of the old one's or made by an earlier step."""
    form, ops = load_toml(path, Form), load_ops()
    assert form.form.name == path.stem
    for op, steps in form.instead.items():
        own: set[str] = set()
        for step in steps:
            new = ops[step.op]
            assert {*step.args, *step.own} == set(new.tensors) and set(step.args.values()) <= set(ops[op].tensors)
            assert {name for key, name in step.own.items() if key in new.inputs} <= own
            own |= {name for key, name in step.own.items() if key not in new.inputs}
        results = {name for step in steps for key, name in step.args.items() if key not in ops[step.op].inputs}
        assert set(ops[op].outputs) <= results


def test_the_commands_say_what_is_extended_and_what_runs_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_hf(tmp_path, tiny()))
    assert command.main(["show", "gemma3-hybrid", model, "--phase", "prefill"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "gemma3-hybrid extends gemma3" and second.startswith("on npu: blk.{l}.ffn_down (prefill); ")
    assert command.main(["check", "gemma3-hybrid", model, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["extends"], said["elsewhere"]) == (["gemma3"], {"npu": ["blk.{l}.ffn_down (prefill)"]})
    assert command.main(["show", "gemma3", model]) == 0
    assert capsys.readouterr().out.startswith("gemma3.decode.r1.o1: ")
    path = written(tmp_path, HEAD.replace('"gemma3"', '"gemma9"'))
    assert spec(["check", "gemma3-hybrid", str(SCHEDULES / "gemma3-hybrid.toml"), str(path)]) == 1
    out, err = capsys.readouterr()
    assert (
        "1 schedules are sound: gemma3-hybrid (extends gemma3); 2 are wrong" in out
        and f"error: {path}: extends: " in err
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('parts = ["passes", "choosing"]', 'parts = ["passes", "chosing"]'),
            "parts[1]: no part is called 'chosing'; did you mean 'choosing'?",
        ),
        (('parts = ["passes", "choosing"]', "parts = 7"), "parts[0]: no part is called 7"),
        (
            ("[tensors]", '[tensors]\nhistory = { kind = "io", dtype = "i32", shape = ["S"] }'),
            "tensors.history: specs/parts/choosing.toml sets it too; remove one of the two",
        ),
        (("[tensors]", "[[tensors]]"), "tensors: "),
    ],
)
def test_parts_are_found_and_set_nothing_twice(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = (SCHEDULES / "gemma3.toml").read_text()
    assert change[0] in text
    (path := tmp_path / "mine.toml").write_text(text.replace(*change, 1))
    with pytest.raises(SpecError, match=re.escape(message)):
        load_schedule(path)


def test_a_part_stands_around_a_schedules_own_steps() -> None:
    made = find_schedule("gemma3")
    assert [s.name for s in made.after] == [
        "logits",
        "adjust_logits",
        "sample",
        "verify",
        "logprobs",
    ] and "history" in made.tensors
