"""The planner: every edge is checked, live activations never overlap, precision matches the profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.synthetic import tiny, tiny_gemma3n, tiny_gemma4
from hybrid.checkpoint.families import is_exact, tensors
from hybrid.core.errors import SpecError
from hybrid.core.plan import ALIGN, FEW_ROWS, Plan
from hybrid.kernels.vulkan.dry import count
from hybrid.planning.arena import Life, place
from hybrid.planning.cache import CacheShape
from hybrid.planning.cost import step_cost
from hybrid.planning.expand import WeightInfo
from hybrid.planning.planner import Target, plan
from hybrid.planning.segments import segments
from hybrid.spec.op import load_ops
from hybrid.spec.schedule import find_schedule

GEMMA3 = find_schedule("gemma3")


def target(dtype: str = "q8_0", ctx: int = 200, slots: int = 3, **options) -> Target:
    hp = options.pop("hparams", tiny())
    infos = {n: WeightInfo("f32" if is_exact(n, s) else dtype, tuple(s)) for n, s in tensors(hp).items()}
    infos |= options.pop("weights", {})
    return Target(
        options.pop("schedule", GEMMA3), hp, infos, CacheShape(ctx, hp.window, 64, slots), hp.vocab, **options
    )


def change(group: str, name: str, **fields):
    """The schedule with one step changed."""
    steps = tuple(s.model_copy(update=fields) if s.name == name else s for s in getattr(GEMMA3, group))
    return GEMMA3.model_copy(update={group: steps})


lives = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 12), st.integers(0, 6)), max_size=30)


@given(lives)
def test_live_activations_never_share_bytes(drawn):
    items = [Life(f"t{i}", n, a, a + d) for i, (n, a, d) in enumerate(drawn)]
    offsets, size = place(items)
    for i, a in enumerate(items):
        assert offsets[a.name] % ALIGN == 0 and offsets[a.name] + a.nbytes <= size
        for b in items[:i]:
            together = a.first <= b.last and b.first <= a.last
            disjoint = offsets[a.name] + a.nbytes <= offsets[b.name] or offsets[b.name] + b.nbytes <= offsets[a.name]
            assert disjoint or not together
    assert size <= sum(-(-v.nbytes // ALIGN) * ALIGN for v in items)


def spans(made: Plan) -> dict[str, tuple[int, int]]:
    """First and last step of each activation, recomputed from the steps."""
    found: dict[str, tuple[int, int]] = {}
    for i, step in enumerate(made.steps):
        for name in step.args.values():
            if made.tensors[name].kind == "activation":
                found[name] = (found.get(name, (i, i))[0], i)
    return found


def assert_disjoint(made: Plan, after: int = 0) -> None:
    """Assert that activations that live at the same time share no bytes; with `after`, that many steps longer."""
    live = spans(made)
    for a, (first, last) in live.items():
        for b, (start, stop) in live.items():
            if a < b and first <= stop + after and start <= last + after:
                x, y = made.tensors[a], made.tensors[b]
                assert x.offset + x.nbytes <= y.offset or y.offset + y.nbytes <= x.offset, (a, b)


@pytest.mark.parametrize(("phase", "rows", "outs"), [("prefill", 64, 3), ("prefill", 8, 0), ("decode", 3, 3)])
def test_a_plan_is_whole(phase, rows, outs):
    made, ops = plan(target(), rows, outs, phase), load_ops()
    written: set[str] = set()
    for step in made.steps:
        op = ops[step.op]
        assert set(step.args) == set(op.tensors)
        shapes = op.bind_shapes(step.bind)
        for key, name in step.args.items():
            decl = made.tensors[name]
            assert decl.shape == shapes[key]
            if key in op.inputs and decl.kind == "activation":
                assert name in written
            if (key in op.outputs or key in op.scratch) and decl.kind == "activation":
                assert name not in written
                written.add(name)
    assert_disjoint(
        made, after=phase == "decode"
    )  # in a fused group one workgroup may still read what another has passed
    assert [s.op for s in made.steps][-1] == ("sample" if outs else "add_rmsnorm")
    assert made.steps[0].op == "begin_pass"
    assert [s.device for s in segments(made)] == ["cpu"]


def test_smaller_buckets_fit_in_the_layout_of_the_largest():
    for hp in (tiny(), tiny(hidden=96, ffn=160), tiny(hidden=256, ffn=160, n_heads=8, head_dim=64, vocab=32)):
        t = target(hparams=hp)
        layout = plan(t, 64, 3, "prefill")
        for rows in (1, 2, 7, 8, 31, 32, 63):
            for options in ({}, {"sample": False}, {"capture": True}):
                made = plan(t, rows, min(rows, 3), "prefill", layout=layout, **options)
                assert made.arena_bytes == layout.arena_bytes
                assert_disjoint(made)
            assert_disjoint(plan(t, rows, 0, "prefill", layout=layout))
    with pytest.raises(ValueError, match="has too few bytes for"):
        plan(t, 64, 3, "prefill", layout=plan(t, 8, 3, "prefill"))


@pytest.mark.parametrize(
    ("dtype", "options", "act", "kv"),
    [
        ("q4_0", {}, "q8_act", "f16"),
        ("bf16", {}, "f32", "f32"),
        ("q4_0", {"precision": "exact"}, "f32", "f32"),
        ("f16", {"precision": "fast"}, "f16", "f16"),
        ("q8_0", {"precision": "fast"}, "q8_act", "f16"),
        ("q8_0", {"kv": "f32"}, "q8_act", "f32"),
    ],
)
def test_precision_follows_profile_and_weights(dtype, options, act, kv):
    made = plan(target(dtype, **options), 8, 1, "prefill")
    assert {made.tensors[f"kv.{layer}.k"].dtype for layer in range(3)} == {kv}
    inputs = {
        made.tensors[s.args[k]].dtype
        for s in made.steps
        for k in ("x", "h")
        if k in load_ops()[s.op].tensors and s.op in ("fused_qkv", "linear", "fused_ffn", "logits")
    }
    assert inputs == {act}
    assert {made.tensors[f"x.{i}"].dtype for i in range(4)} == {"f32"}  # the residual stream


def test_each_matrix_has_the_precision_of_its_own_type():
    mixed = {f"blk.{i}.ffn_down.weight": WeightInfo("f16", (64, 96)) for i in range(3)}
    mixed["token_embd.weight"] = WeightInfo("f16", (320, 64))
    made = plan(target("q4_0", weights=mixed), 8, 1, "prefill")
    assert made.tensors["z.1"].dtype == "q8_act" and made.tensors["h.1"].dtype == "f32"
    assert made.tensors["y.2"].dtype == "q8_act" and made.tensors["y.3"].dtype == "f32"


def test_a_capability_changes_the_precision_of_prefill_and_of_batches():
    """Activations of more than a few rows are f16 where matrix units multiply them; those of few rows, and the cache,
    keep their types. The device defines "few"."""
    units = target("q4_0", capabilities=frozenset({"f16_matrices"}), slots=8)
    for phase, rows, act in (
        ("prefill", FEW_ROWS, "q8_act"),
        ("prefill", FEW_ROWS + 1, "f16"),
        ("decode", 1, "q8_act"),
        ("decode", FEW_ROWS, "q8_act"),
        ("decode", FEW_ROWS + 1, "f16"),
        ("decode", 8, "f16"),
    ):
        made, without = plan(units, rows, 1, phase), plan(target("q4_0", slots=8), rows, 1, phase)
        assert {made.tensors[n].dtype for n in ("y.1", "z.1", "h.1", "o.1")} == {act}
        assert {without.tensors[n].dtype for n in ("y.1", "z.1", "h.1", "o.1")} == {"q8_act"}
        assert made.tensors["kv.1.k"].dtype == without.tensors["kv.1.k"].dtype
    assert plan(target("f16", capabilities=frozenset({"f16_matrices"})), 3, 1, "prefill").tensors["y.1"].dtype == "f32"
    for rows, act in ((2, "q8_act"), (3, "f16")):
        assert plan(replace(units, few_rows=2), rows, 1, "decode").tensors["y.1"].dtype == act


def test_a_joined_matrix_keeps_the_types_of_its_sources():
    v = WeightInfo("q8_0", (32, 64))
    made = plan(target("q4_1", weights={"blk.1.attn_v.weight": v}, device="vulkan"), 8, 1, "prefill")
    qkv = made.tensors["blk.1.attn_qkv.weight"]
    assert qkv.dtype == "q8_0" and qkv.row_types == (("q4_1", 96), ("q8_0", 32)) and qkv.dtypes == ("q4_1", "q8_0")
    assert qkv.data_bytes == 96 * 40 + 32 * 68
    assert made.tensors["blk.0.attn_qkv.weight"].row_types == ()
    step = {s.name: s for s in made.steps}
    mixed, plain = (step_cost(made, step[f"blk.{i}.attn_qkv"]).nbytes for i in (1, 0))
    assert mixed - plain == 32 * (68 - 40)
    counts = count(made).dispatches
    assert counts["blk.1.attn_qkv"] == counts["blk.0.attn_qkv"] + 1
    with pytest.raises(SpecError, match="q4_k is not allowed"):
        plan(
            target(
                "q4_1",
                weights={"blk.1.attn_v.weight": WeightInfo("q4_k", (32, 256))},
                hparams=tiny(hidden=256),
                device="vulkan",
            ),
            8,
            1,
            "prefill",
        )


def test_local_and_global_layers_differ_where_they_should():
    made = plan(target(), 8, 1, "prefill")
    windows = {s.layer: s.attrs["window"] for s in made.steps if s.op == "attention"}
    assert windows == {0: 8, 1: 0, 2: 8}
    assert made.tensors["kv.0.k"].shape[0] < made.tensors["kv.1.k"].shape[0]
    tables = {s.layer: s.args["block_table"] for s in made.steps if s.op == "attention"}
    assert tables == {0: "block_table.local", 1: "block_table.global", 2: "block_table.local"}


def test_capture_and_teacher_forcing_leave_results_to_the_host():
    made = plan(target(), 8, 0, "prefill", capture=True)
    assert [made.tensors[f"hidden.{i}"].kind for i in range(4)] == ["io"] * 4
    assert made.tensors["hidden.3"].shape == (8, 64)
    scored = plan(target(), 8, 8, "prefill", sample=False)
    assert scored.tensors["logits"].kind == "io" and scored.tensors["logits"].shape == (8, 320)
    assert plan(target(), 8, 1, "prefill").tensors["logits"].kind == "activation"


def test_an_untied_output_matrix_is_used():
    made = plan(target(hparams=tiny(tied=False)), 8, 1, "prefill")
    assert made.steps[-2].args["w"] == "output.weight"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"blk.1.attn_output.weight": WeightInfo("q8_0", (32, 64))}}, r"step blk\.1\.attn_add: .*32.*64"),
        ({"weights": {"blk.1.attn_norm.weight": WeightInfo("f16", (64,))}}, r"step blk\.0\.ffn_add: .*w_next.*f16"),
        (
            {"hparams": tiny(), "weights": {"token_embd.weight": WeightInfo("q8_0", (320, 96))}},
            r"step embed: .*(96|64)",
        ),
        (
            {"weights": {"blk.0.attn_q.weight": WeightInfo("q4_0", (64, 96))}},
            "joins matrices with rows of different lengths",
        ),
        ({"schedule": change("layer", "blk.{l}.ffn", op="fused_fnn")}, "unknown operation 'fused_fnn'; did you mean"),
        (
            {"schedule": change("layer", "blk.{l}.ffn", act={"x": "f16", "y": "f32"})},
            r"act\.y: fused_ffn has no such name",
        ),
        (
            {
                "schedule": change(
                    "layer", "blk.{l}.attn_output", args={"x": "o.{l}", "w": "nothing.weight", "y": "a.{l}"}
                )
            },
            r"step blk\.0\.attn_output: .*nothing\.weight",
        ),
        ({"schedule": change("layer", "blk.{l}.attention", args={"q": "q.{m}"})}, r"unknown \{m\}"),
        ({"schedule": change("after", "logits", act={"x": "q8_act"}), "dtype": "f16"}, "step logits: .*q8_act"),
    ],
)
def test_a_misfit_is_one_line_that_names_the_step(options, message):
    with pytest.raises(SpecError, match=message) as caught:
        plan(target(**options), 8, 1, "prefill")
    assert ("\n" not in str(caught.value) and "schedule gemma3" in str(caught.value)) or "joins" in str(caught.value)


def test_a_step_on_another_device_makes_segments():
    schedule = change("layer", "blk.{l}.ffn", device="cpu")
    made = plan(replace(target(schedule=schedule), device="vulkan"), 8, 1, "prefill")
    assert [s.device for s in segments(made)] == ["vulkan", "cpu"] * 3 + ["vulkan"]


def test_dispatches_can_be_counted_without_a_device():
    made = plan(target(), 1, 1, "decode")
    counts = count(made)
    assert all(counts.dispatches[s.name] >= 1 for s in made.steps)
    assert sum(counts.barriers.values()) <= sum(counts.dispatches.values())


def test_a_plan_has_the_steps_of_its_options_only():
    made = {
        options: plan(target(), 4, 2, "decode", options=options)
        for options in ((), ("adjust",), ("logprobs",), ("logprobs", "adjust"))
    }
    plain = made[()]
    assert [s.name for s in plain.steps[-2:]] == ["logits", "sample"] and plain.steps[-1].args["logits"] == "logits"
    assert not {"penalties", "masks", "top_ids", "logits.adjusted"} & plain.tensors.keys()
    for options, one in made.items():
        added = [s for s in one.steps if s.op in ("adjust_logits", "logprobs")]
        assert sorted(s.op.removesuffix("_logits") for s in added) == sorted(options)
        assert [s for s in one.steps if s not in added][:-1] == list(plain.steps)[:-1]  # except for inputs of sample
        of = {s.op: s.args["logits"] for s in one.steps if "logits" in s.args and s.op != "logits"}
        assert of["sample"] == ("logits.adjusted" if "adjust" in options else "logits")
        assert all(of[op] == "logits" for op in of if op != "sample")  # log-probabilities are of the model's own logits
    assert made["logprobs", "adjust"].tensors["masks"].shape == (3 + 16, -(-target().hparams.vocab // 32))
    assert made["adjust",].name.endswith(".adjust") and made["adjust",].arena_bytes > plain.arena_bytes


def test_plans_of_every_option_fit_the_layout_of_all():
    layout = plan(target(), 8, 8, "decode", options=("adjust", "logprobs"))
    for options in ((), ("adjust",), ("logprobs",)):
        assert plan(target(), 2, 2, "decode", layout=layout, options=options).arena_bytes == layout.arena_bytes


def test_options_need_a_sampling_plan():
    with pytest.raises(ValueError, match=r"options \['adjust'\] belong to sampling passes"):
        plan(target(), 4, 4, "prefill", sample=False, options=("adjust",))


@pytest.mark.parametrize("alias", [{"adjusted": "nothing"}, {"nothing": "logits"}])
def test_an_alias_names_a_result_and_an_input(alias: dict[str, str]):
    with pytest.raises(SpecError, match="step adjust_logits: alias: adjust_logits has no result"):
        plan(target(schedule=change("after", "adjust_logits", alias=alias)), 4, 2, "decode")


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
@pytest.mark.parametrize(
    ("rows", "units", "dtype", "matrix", "act"),
    [
        (32, True, "q4_0", "bf16", "f16"),
        (32, False, "q4_0", "bf16", "f32"),
        (1, True, "q4_0", "bf16", "f32"),
        (32, True, "bf16", "bf16", "f32"),
        (32, True, "q4_0", "q4_0", "f16"),
        (1, True, "q4_0", "q4_0", "q8_act"),
    ],
)
def test_a_matrix_beside_quantised_ones_takes_matrix_units(
    family: str, rows: int, units: bool, dtype: str, matrix: str, act: str
) -> None:
    """In batches; and rows are converted where no tensor of the required type exists."""
    hp = {"gemma3n": tiny_gemma3n, "gemma4": tiny_gemma4}[family]()
    shape = (hp.n_layers * hp.per_layer_dim, hp.hidden)
    can = frozenset({"f16_matrices"} if units else ())
    made = plan(
        target(
            dtype,
            96,
            32,
            hparams=hp,
            schedule=find_schedule(family),
            capabilities=can,
            weights={"per_layer_model_proj.weight": WeightInfo(matrix, shape)},
        ),
        rows,
        rows,
        "decode",
    )
    steps = {s.name: s for s in made.steps}
    given = steps["per_layer_proj"].args["x"]
    assert made.tensors[given].dtype == act
    converted = steps.get("per_layer_rows")
    assert (converted is None) == (act == "f32")
    assert converted is None or (converted.args["y"], made.tensors[converted.args["x"]].dtype) == (given, "f32")


def test_inputs_of_an_omitted_step_outlive_its_result() -> None:
    """A plan of few rows, without such a step, uses the layout of a plan of many. Here the conversion is the last
    reader of its input, and the feed-forward comes before the result is read."""
    hp, schedule = tiny_gemma4(hidden=256), find_schedule("gemma4")
    moved = {
        s.name: s.model_copy(update={"when": "l == 0"})
        for s in (*schedule.before, *schedule.layer)
        if s.name.startswith("per_layer")
    }
    before = {"blk.{l}.ffn": ["per_layer_rows"], "blk.{l}.own_input": ["per_layer_proj", "per_layer_embed"]}
    layer = [t for s in schedule.layer if s.name not in moved for t in (*(moved[n] for n in before.get(s.name, ())), s)]
    later = schedule.model_copy(
        update={"before": tuple(s for s in schedule.before if s.name not in moved), "layer": tuple(layer)}
    )
    matrix = WeightInfo("bf16", (hp.n_layers * hp.per_layer_dim, hp.hidden))
    many = target(
        "q4_0",
        96,
        32,
        hparams=hp,
        schedule=later,
        capabilities=frozenset({"f16_matrices"}),
        weights={"per_layer_model_proj.weight": matrix},
    )
    layout = plan(many, 32, 32, "decode")
    few = plan(many, 1, 1, "decode", layout=layout)
    assert "ple.rows" in layout.tensors and "ple.rows" not in few.tensors and few.arena_bytes == layout.arena_bytes
    assert_disjoint(few)
