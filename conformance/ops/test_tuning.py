"""Tuning tables: strict files, the class of a device, the first matching entry, and every candidate proved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.support.devices import is_interpreted
from conformance.support.profile import LONG
from hybrid.core.errors import SpecError
from hybrid.core.plan import FEW_ROWS
from hybrid.harness import run_case
from hybrid.harness.fixed import dtype_cases
from hybrid.harness.tuned import asking, plan_for, uses
from hybrid.kernels.vulkan import tuning
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.kernels.vulkan.ops._gemm import lowest_tile
from hybrid.kernels.vulkan.tuning import UNCOUNTED, Space, Table, Tuning, device_class, holds, space, tables
from hybrid.spec import load_op
from hybrid.spec.load import parse_toml, validate

GOOD = """
schema = 1
[match]
vendor = "acme"
[[family]]
name = "sample"
when = { vocab = ">=512" }
use = { threads = 1024 }
[[family]]
name = "sample"
use = { threads = 256 }
"""
WRONG = {
    "schema = 1": ("schema = 2", "schema: 2 must be 1"),
    'vendor = "acme"': ('vender = "acme"', "match.vender: unknown key; did you mean 'vendor'?"),
    'name = "sample"\nwhen': ('name = "simple"\nwhen', "family[0].name: no family 'simple'; did you mean 'sample'?"),
    'vocab = ">=512"': (
        "vocabulary = 5",
        "family[0].when.vocabulary: sample is not chosen by it; did you mean 'vocab'?",
    ),
    "threads = 1024": ("threads = 512", "family[0].use.threads: 512 is no candidate of sample: 256, 1024"),
    "{ threads = 256 }": (
        "{ thread = 256 }",
        "family[1].use.thread: sample has no such number; did you mean 'threads'?",
    ),
}


def table(text: str) -> Table:
    return validate("acme.toml", parse_toml("acme.toml", text), Table)


@pytest.mark.parametrize("part", WRONG)
def test_an_error_names_file_and_field(part):
    changed, says = WRONG[part]
    with pytest.raises(SpecError) as error:
        table(GOOD.replace(part, changed, 1))
    assert str(error.value).startswith(f"acme.toml: {says}")


def test_a_family_declared_twice_or_with_equal_candidates_is_refused():
    family = 'name = "a"\nsummary = "s"\nop = "sample"\nfacts = ["n"]\ncandidates = { x = [1, 2] }\n'
    for text, says in (
        (f"[[family]]\n{family}[[family]]\n{family}", "family: a is declared twice"),
        (f"[[family]]\n{family}".replace("[1, 2]", "[1, 1]"), "candidates.x: must list different values"),
    ):
        with pytest.raises(SpecError, match=r"space\.toml") as error:
            validate("space.toml", parse_toml("space.toml", f"schema = 1\n{text}"), Space)
        assert says in str(error.value)


@pytest.mark.parametrize(
    ("condition", "yes", "no"),
    [
        ("q4_0", ["q4_0"], ["q8_0", 4]),
        (4, [4], [5, "4", True]),
        (True, [True], [False, 1]),
        ((1, ">=8"), [1, 8, 9], [2, 7]),
        (("q4_0", "q8_0"), ["q8_0"], ["f16"]),
        ("<4096", [4095], [4096]),
        (">4", [5], [4]),
        ("<= 4", [4], [5]),
        ("2..8", [2, 8], [1, 9]),
    ],
)
def test_conditions(condition, yes, no):
    assert [holds(condition, v) for v in [*yes, *no]] == [True] * len(yes) + [False] * len(no)


def test_the_first_entry_that_holds_is_merged_over_the_default(monkeypatch):
    monkeypatch.setattr(tuning, "tables", lambda: {"default": tables()["default"], "acme": table(GOOD)})
    made = Tuning("acme")
    assert made.choose("sample", {"threads": 256}, vocab=512) == {"threads": 1024}
    assert made.choose("sample", {"threads": 1024}, vocab=511) == {"threads": 256}
    assert Tuning().choose("sample", {"threads": 1024}, vocab=511) == {"threads": 1024}
    with made.watched() as asked, made.forced("sample", {"threads": 256}):
        assert made.choose("sample", {"threads": 256}, vocab=512) == {"threads": 256}
    assert [(a.family, dict(a.facts), dict(a.use)) for a in asked] == [("sample", {"vocab": 512}, {"threads": 256})]
    assert made.choose("sample", {"threads": 256}, vocab=512) == {"threads": 1024}


def test_a_question_that_the_space_does_not_declare_is_refused():
    made = Tuning()
    for family, default, facts, says in (
        ("simple", {"threads": 256}, {"vocab": 1}, "family: there is no 'simple'; did you mean 'sample'?"),
        ("sample", {"threads": 256}, {"rows": 1}, "sample: facts: vocab, but its binding gives rows"),
        ("sample", {"width": 256}, {"vocab": 1}, "sample: candidates: threads, but its binding's default has width"),
        ("sample", {"threads": 64}, {"vocab": 1}, "candidates.threads: the binding's default 64 is no candidate"),
    ):
        with pytest.raises(SpecError, match=r"kernels/vulkan/tuning/space\.toml: ") as error:
            made.choose(family, default, **facts)
        assert says in str(error.value)


@pytest.mark.parametrize(("cores", "groups"), [(132, 1056), (60, 480), (1, 8 * UNCOUNTED)])
def test_a_number_of_workgroups_follows_the_cores_that_a_device_states(cores, groups):
    made = Tuning("nvidia", cores)
    assert made.choose("linear.tile", {"least": 0}, w="bf16", x="f32", rows=8, n=64, k=64) == {"least": groups}


@pytest.mark.parametrize(
    ("family", "w", "columns", "tiles"),
    [
        ("linear", "q4_0", 256, {1: "8", 9: "16", 24: "24", 48: "48", 64: "32", 96: "48"}),
        ("linear", "q6_k", 256, {17: "32", 40: "40", 48: "32", 96: "32"}),
        ("ffn_up", "q4_0", 384, {8: "24", 33: "64", 64: "64"}),
        ("linear", "q8_0", 256, {5: ""}),
    ],
)
def test_a_tile_by_rows_is_the_lowest_that_holds_them(family, w, columns, tiles):
    """In equal parts where no tile does."""
    for rows, height in tiles.items():
        assert lowest_tile(family, w, rows, columns) == (f"{height}x{columns}" if height else "")


def test_a_device_gets_the_class_that_says_most_about_it():
    traits = {"vendor": "nvidia", "driver": "nvidia", "subgroup": 32, "cooperative_matrix": True}
    assert device_class(traits) == "nvidia"
    assert device_class({**traits, "driver": "nvk"}) == "default"
    assert device_class({**traits, "vendor": "mesa", "driver": "llvmpipe", "subgroup": 8}) == "lavapipe"
    assert device_class({**traits, "vendor": "amd", "driver": "radv"}) == "radv"
    assert device_class({**traits, "vendor": "0x1234", "driver": "99"}) == "default"


def test_an_opened_device_has_the_table_of_its_class(devices):
    device = devices.get("vulkan")
    assert device.tuning.name == device_class(tuning.traits(device.report, device.subgroup_size))
    assert device.report.vendor and device.report.driver_id


@pytest.mark.parametrize("family", [f.name for f in space().family if not f.fused])
def test_every_candidate_computes_what_the_oracle_does(devices, matrices, family):
    """Every value of every parameter at least once, and every entry of every table, on the family's cases: on two of
    them (in the short profile, where each is compiled, on one, alternating), on matrix units on all, interpreted on
    one. A CPU driver, which compiles each for seconds, runs half of them in the short profile, of decode attention's a
    twelfth; the share changes with the kernels."""
    declared = space().named(family)
    device = matrices() if declared.needs == "f16_matrices" else devices.get("vulkan")
    if declared.needs and not device.has(declared.needs):
        pytest.skip(f"{device.name} lacks {declared.needs}: nothing asks for {family} there")
    spec = load_op(declared.op)
    found = asking(declared, spec, device)
    assert found, f"no fixed case of {declared.op} asks for {family}"
    tried = list(enumerate(uses(declared)))
    if not LONG and not declared.needs and device.info.kind == "cpu":
        share = 2 if len(tried) < 20 else 12
        tried = tried[int(kernels_digest(), 16) % share :: share]
    if not LONG and is_interpreted(device):
        share = min(12, len(tried))
        tried = tried[int(kernels_digest(), 16) % share :: share]
    assert tried
    for i, use in tried:
        two = found[:2] if LONG else found[i % 2 :][:1]
        every = found[i % len(found) :][:1] if is_interpreted(device) else found
        with device.tuning.forced(family, use):
            for case in every if declared.needs else two or found[:1]:
                run_case(spec, device, case)


@pytest.mark.parametrize(
    ("op", "axes", "types", "tiles"),
    [
        ("linear", {"N": 8192, "K": 5376}, {"x": "f16", "w": "q4_0", "y": "f32"}, ["8x256"]),
        ("linear", {"N": 512, "K": 5376}, {"x": "f16", "w": "q4_0", "y": "f32"}, ["8x16"]),
        (
            "fused_ffn",
            {"H": 5376, "F": 256},
            {"x": "f16", "h": "f16", "w_gate_up": "q4_0", "w_down": "q4_0", "y": "f32"},
            ["8x256", "8x256"],
        ),
    ],
)
def test_three_rows_of_a_large_model_are_a_batch_on_nvidia(op, axes, types, tiles):
    """Passes of large models take f16 from three rows on there, and these products use matrix units."""
    assert [Tuning("nvidia").few_rows(hidden, 0) for hidden in (2560, 5376)] == [FEW_ROWS, 2]
    assert Tuning(tuning.DEFAULT).few_rows(5376, 0) == FEW_ROWS
    spec = load_op(op)
    for rows in (2, 3, 4):
        case = replace(next(iter(dtype_cases(spec, types))), bind={"T": rows, **axes}, rows=rows)
        dry = DryDevice(features=lambda feature: feature in ("f16_matrices", "matrix_lanes"), tuning="nvidia")
        chosen = [d.kernel.name for d in record(plan_for(spec, case), dry).dispatches]
        if rows == 2:
            assert all(".gemv." in name for name in chosen)
        else:
            assert [name.rpartition(".")[2] for name in chosen] == tiles, rows


def products(case, device):
    """The kinds of kernels of a feed-forward's products."""
    names = [d.kernel.name for d in record(plan_for(load_op(case.op), case), device).dispatches]
    return {f".{name.split('.')[1]}." for name in names if name.startswith(("linear.", "ffn_up."))}


def test_few_rows_of_a_mixture_stay_in_int8_on_nvidia():
    """Up to eight rows go through gemv's kernels by fours; more take f16."""
    assert [Tuning("nvidia").few_rows(2816, experts) for experts in (0, 128)] == [FEW_ROWS, 8]
    spec = load_op("fused_ffn")
    types = {"x": "q8_act", "h": "q8_act", "w_gate_up": "q4_0", "w_down": "q4_0", "y": "f32"}
    for rows, kind in ((8, ".gemv."), (9, ".tile.")):
        case = replace(next(iter(dtype_cases(spec, types))), bind={"T": rows, "H": 2816, "F": 2112}, rows=rows)
        dry = DryDevice(tuning="nvidia")
        assert products(case, dry) == {kind}, rows


@pytest.mark.parametrize(("x", "w"), [("q8_act", "q4_0"), ("f32", "bf16")])
def test_a_feed_forward_goes_through_more_rows_by_fours(devices, x, w):
    device, spec = devices.get("vulkan"), load_op("fused_ffn")
    types = {"x": x, "h": x, "w_gate_up": w, "w_down": w, "y": "f32"}
    case = replace(next(iter(dtype_cases(spec, types))), bind={"T": 11, "H": 96, "F": 160}, rows=9)
    with device.tuning.forced("linear.tile", {"least": "8 * cores"}):
        assert products(case, device) == {".gemv."}
        run_case(spec, device, case)


@pytest.mark.parametrize(
    ("rows", "w", "tile"), [(11, "q4_0", ".32x64"), (27, "q6_k", ".32x64"), (40, "q6_k", ".32x64")]
)
def test_other_fragment_layouts_use_shared_memory_tiles(rows, w, tile):
    dry = DryDevice(features=lambda feature: feature == "f16_matrices", tuning="nvidia")
    types = {"x": "f16", "w": w, "y": "f32"}
    case = replace(next(iter(dtype_cases(load_op("linear"), types))), bind={"T": rows, "N": 331, "K": 512}, rows=rows)
    assert any(d.kernel.name.endswith(tile) for d in record(plan_for(load_op("linear"), case), dry).dispatches)
