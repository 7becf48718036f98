"""Differences between layers in plans: axes, conditions, roles of tensors, shared caches, wanted rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.support.synthetic import tiny, tiny_gemma3n, tiny_gemma4
from hybrid.checkpoint.families import is_exact, tensors
from hybrid.core.errors import SpecError
from hybrid.core.hparams import HParams
from hybrid.core.plan import Plan
from hybrid.planning.cache import CacheShape
from hybrid.planning.cost import memory
from hybrid.planning.expand import WeightInfo
from hybrid.planning.footprint import thinned
from hybrid.planning.passes import pass_sizes
from hybrid.planning.planner import Target, plan
from hybrid.planning.rope import rope_of, rope_table
from hybrid.spec.schedule import Schedule, find_schedule

FAMILIES = {"gemma3n": tiny_gemma3n(), "gemma4": tiny_gemma4()}


def target(hp: HParams, schedule: Schedule | None = None, ctx: int = 128, slots: int = 2) -> Target:
    weights = {n: WeightInfo("f32" if is_exact(n, s) else "bf16", s) for n, s in tensors(hp).items()}
    return Target(schedule or find_schedule(hp.family), hp, weights, CacheShape.of(hp, ctx, slots, 64), hp.vocab)


def extents(made: Plan, layer: int) -> set[str]:
    return {s.extent for s in made.steps if s.layer == layer}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_passes_shared_layers_with_the_wanted_rows_alone(family: str) -> None:
    hp = FAMILIES[family]
    first, made = hp.n_kv_layers, plan(target(hp), 32, 2, "prefill")
    assert [extents(made, layer) for layer in range(first)] == [{"rows"}] * first
    for layer in range(first, hp.n_layers):
        assert extents(made, layer) == {"outs"}
        for step in made.steps:
            if step.layer == layer and step.op in ("attention", "fused_ffn"):
                assert step.bind["T"] == 2
                assert all(made.tensors[step.args[k]].shape == (2,) for k in ("positions", "slots") if k in step.args)
    picks = [s.name for s in made.steps if s.op.startswith("take_")]
    assert picks and not any(s.op.startswith("take_") for s in plan(target(hp), 2, 2, "decode").steps)
    without_outs = plan(target(hp), 32, 0, "prefill")
    assert {s.layer for s in without_outs.steps if s.layer is not None} == set(range(first))
    hidden = plan(target(hp), 32, 0, "prefill", capture=True)
    assert not any(s.op.startswith("take_") for s in hidden.steps) and extents(hidden, hp.n_layers - 1) == {"rows"}
    width = hp.n_streams * hp.hidden
    assert [hidden.tensors[f"hidden.{i}"].shape for i in range(hp.n_layers + 1)] == [(32, width)] * (hp.n_layers + 1)


def test_results_of_wanted_rows_are_not_recomputed_in_decode() -> None:
    """Gemma 4's first shared layer norms a prompt's wanted rows; in decode the previous layer's norm covers the row."""
    hp = FAMILIES["gemma4"]
    border = f"blk.{hp.n_kv_layers}.attn_norm"
    made = {phase: {s.name: s.args for s in plan(target(hp), 2, 2, phase).steps} for phase in ("prefill", "decode")}
    assert border in made["prefill"] and border not in made["decode"]
    before, after = f"blk.{hp.n_kv_layers - 1}.own_add", f"blk.{hp.n_kv_layers}.attn_qkv"
    assert made["decode"][after]["x"] == made["decode"][before]["y"]
    assert made["prefill"][after]["x"] == made["prefill"][border]["y"] != made["prefill"][before]["y"]


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_layers_own_no_cache(family: str) -> None:
    hp = FAMILIES[family]
    made = plan(target(hp), 32, 2, "prefill")
    caches = {d.layer: d for d in made.tensors.values() if d.role == "kv"}
    assert set(caches) == set(range(hp.n_kv_layers))
    for layer, decl in caches.items():
        assert decl.layer is not None and decl.shape[-2:] == (hp.layers[layer].n_kv_heads, hp.layers[layer].head_dim)
    readers = {s.layer: s.args["k_cache"] for s in made.steps if s.op == "attention"}
    assert readers[3] == readers[1] and readers[4] == readers[2] and len(set(readers.values())) == 3
    assert memory(made)["kv"] == sum(d.nbytes for d in made.tensors.values() if d.role == "kv")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_fits_in_the_largest(family: str) -> None:
    hp = FAMILIES[family]
    sizes, t = pass_sizes(hp, 128, 2, 64), target(hp)
    largest = plan(t, sizes.rows[-1], 1, "prefill")
    hidden = plan(t, sizes.hidden, 0, "prefill", capture=True, layout=largest)
    plans = [plan(t, rows, 1, "prefill", layout=largest) for rows in sizes.rows]
    plans += [plan(t, rows, rows, "prefill", sample=False, layout=largest) for rows in sizes.rows]
    small = [plan(t, rows, 0, "prefill", capture=True, layout=largest) for rows in sizes.rows if rows <= sizes.hidden]
    assert {p.arena_bytes for p in plans} == {largest.arena_bytes} and {p.arena_bytes for p in small} == {
        hidden.arena_bytes
    }
    for made in (*plans, *small):
        placed = [d for d in made.tensors.values() if d.kind == "activation"]
        assert all(d.offset + d.nbytes <= made.arena_bytes for d in placed)


def test_layers_of_one_plan_have_their_own_axes() -> None:
    hp = tiny_gemma4()
    made = plan(target(hp), 2, 2, "decode")
    binds = {s.layer: s.bind for s in made.steps if s.op == "decode_attention"}
    assert [(binds[i]["D"], binds[i]["HK"]) for i in range(5)] == [(16, 2), (16, 2), (32, 1), (16, 2), (32, 1)]
    ffn = {s.layer: s.bind["F"] for s in made.steps if s.op == "fused_ffn"}
    assert [ffn[i] for i in range(5)] == [64, 64, 64, 128, 128]
    tables = {n: d.shape for n, d in made.tensors.items() if d.role == "rope"}
    assert sorted(tables.values()) == [(128, 8), (128, 16)]


def test_a_table_rotates_a_share_of_the_pairs() -> None:
    layer = replace(tiny_gemma4().layers[2], head_dim=48, rotated=0.25)  # 6 of 24 pairs: 8 in the table
    table = rope_of(layer, 20)
    whole = rope_table(20, 48, 1e6, 1.0)
    assert (
        table.shape == (20, 16) and (table[:, :6] == whole[:, :6]).all() and (table[:, 8:14] == whole[:, 24:30]).all()
    )
    assert (table[:, 6:8] == 1).all() and (table[:, 14:] == 0).all()


def test_a_table_is_of_layers_that_rotate_alike() -> None:
    hp = tiny(n_layers=3)
    wrong = replace(hp, layers=(hp.layers[0], hp.layers[1], replace(hp.layers[2], rope_theta=2e4)))
    with pytest.raises(
        SpecError, match=r"tensors.rope.\{kind\}: layers 0 and 2 rotate differently, but both have rope.local"
    ):
        plan(target(wrong), 1, 1, "decode")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thinned_model_keeps_the_layers_that_others_read(family: str) -> None:
    hp = FAMILIES[family]
    small, times = thinned(target(hp))
    assert sum(times) == hp.n_layers and len(times) == small.hparams.n_layers
    assert small.hparams.n_kv_layers == hp.n_kv_layers
    plan(small, 4, 1, "prefill")


def changed(**tables: Any) -> Schedule:
    return find_schedule("gemma3").model_copy(update=tables)


def test_schedules_that_say_what_no_layer_has_are_one_line() -> None:
    base = find_schedule("gemma3")
    first, rest = base.layer[0], base.layer[1:]
    values: dict[str, dict[str, str]] = {k: dict(v) for k, v in base.values.items()}
    for change, words in (
        ({"values": {**values, "kind": {"layer.windw > 0": "local", "any": "global"}}}, "unknown name 'layer.windw'"),
        (
            {"values": {**values, "kind": {"layer.window > 9999": "local"}}},
            "values.kind: no condition holds for layer 0; add any",
        ),
        (
            {"axes": {**base.axes, "D": type(base.axes["D"])("layer.head_dims")}},
            "axes.D: unknown name 'layer.head_dims'",
        ),
        (
            {"before": (base.before[0].model_copy(update={"when": "layer.window > 0"}), *base.before[1:])},
            "'layer.window' in 'layer.window > 0' has a value only in [[layer]] steps",
        ),
        ({"layer": (first.model_copy(update={"name": "{layer.rope_theta}"}), *rest)}, "unknown {layer.rope_theta}"),
        ({"layer": (first, first.model_copy(update={"when": "l == 0"}), *rest)}, "two steps of this name"),
        (
            {"layer": (first.model_copy(update={"extent": "{kind}"}), *rest)},
            "is 'local'; use one of rows, outs, wanted",
        ),
        ({"layer": (first.model_copy(update={"alias": {"z": "x"}}), *rest)}, "alias: fused_qkv has no result z"),
        ({"layer": (first.model_copy(update={"same": {"z": "x.0"}}), *rest)}, "same: fused_qkv has no result z"),
    ):
        with pytest.raises(SpecError) as error:
            plan(target(tiny(), changed(**change)), 1, 1, "decode")
        assert words in str(error.value) and "\n" not in str(error.value)
