"""Static analysis for gfx1103: assembly is parsed correctly, rules catch violations, exceptions apply."""

from __future__ import annotations

import json

import pytest

from hybrid.kernels.vulkan.dry import record
from hybrid.perf import isa
from hybrid.perf.isa.assembly import hot_loop, mix, parse
from hybrid.perf.isa.radv import Collector, shown, spared
from hybrid.perf.mesa import version_of
from hybrid.perf.roofline.work import Planned, subject
from hybrid.planning.passes import capabilities_of

TEXT = """BB0:
\ts_load_b128 s[12:15], s[2:3], null                          ; f4080301
BB1:
\tbuffer_load_b128 v[0:3], v4, s[0:3], 0 offen                ; e05c1000
BB2:
\ts_waitcnt vmcnt(0)                                          ; bf8903f7
\tv_dot4_i32_iu8 v5, v0, v6, v5                               ; cc164005
\tv_dot4_i32_iu8 v5, v1, v7, v5                               ; cc164005
\tv_exp_f32_e32 v8, v8                                        ; 7e104b08
\ts_cbranch_scc1 BB2                                          ; bfa2fff0
\ts_branch BB1                                                ; bfa0fff0
BB3:
\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]   ; cc400000
\ts_endpgm                                                    ; bfb00000
"""
GOOD = {"spilled_vgprs": 0, "spilled_sgprs": 0, "scratch": 0, "waves": 16, "load_128": 4, "dot4": 32}


def test_assembly_is_read():
    names, labels, branches = parse(TEXT)
    assert labels["BB2"] == 2 and branches == [(6, "BB2"), (7, "BB1")]
    found = mix(names)
    assert (found["dot4"], found["wmma"], found["load_128"], found["wait"], found["branch"]) == (2, 1, 1, 1, 2)
    assert found["valu"] == 4


def test_the_hot_loop_is_where_most_is_multiplied():
    looped = TEXT.replace("v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]", "v_mov_b32 v0, v1")
    loop = hot_loop(looped)
    assert loop is not None and loop.macs == 2 * 4 * 32 and loop.cycles == 1 + 1 + 4
    unrolled = hot_loop(TEXT)  # the straight-line code after the loops multiplies more
    assert unrolled is not None and unrolled.macs == 16**3 and unrolled.cycles == 32
    assert hot_loop(looped.replace("v_dot4_i32_iu8", "v_mov_b32")) is None


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("linear.gemv.q4_0.q8_act", {"spilled_vgprs": 4}, "no spills"),
        ("sample.1024", {"scratch": 64}, "no scratch"),
        ("embed.f16", {"waves": 3}, "occupancy"),
        ("linear.gemv.q4_0.q8_act", {"load_128": 0}, "16-byte loads"),
        ("ffn_up.gemv.q4_0.q8_act", {"dot4": 0}, "packed dot products"),
    ],
)
def test_rules_catch(name, change, rule):
    rules = isa.load_rules()
    assert not isa.check({name: GOOD}, "99.0.0", rules).broken
    broken = isa.check({name: {**GOOD, **change}}, "99.0.0", rules).broken
    assert len(broken) == 1 and rule in broken[0]


def test_exceptions_excuse_only_their_kernels_and_go_stale():
    rule = isa.Rule(name="no spills", kernels=("*",), statistic="spilled_vgprs", most=0)
    excuse = isa.Exemption(rule="no spills", kernels="a.*", why="a reason that is given")
    rules = isa.Rules.model_validate({"schema": 1, "rule": (rule,), "exception": (excuse,)})
    found = isa.check({"a.1": {"spilled_vgprs": 1}, "b.1": {"spilled_vgprs": 1}}, "22.3.6", rules)
    assert len(found.excused) == len(found.broken) == 1 and found.broken[0].startswith("b.1") and not found.stale
    assert isa.check({"a.1": {"spilled_vgprs": 0}}, "22.3.6", rules).stale == ("no spills: a.*",)


def test_driver_versions():
    assert version_of("radv Mesa 25.0.7-2+deb13u1") == "25.0.7"
    with pytest.raises(ValueError, match="no version"):
        version_of("llvmpipe")


def test_the_table_has_what_prefill_on_matrix_units_runs():
    features = {"f16_matrices": True, "cooperative_matrix": True}
    device = Collector(features, 2**32 - 1)
    for dtype in ("q4_0", "q8_0", "q6_k"):
        model = subject("gemma3-27b", dtype, capabilities=capabilities_of(features.__getitem__))
        hp = model.hparams.only((0, 5))
        small = Planned(model.name, hp, model.weights, dtype, capabilities=model.capabilities)
        for rows in (32, 2048):
            record(small.plan("prefill", rows, 1, 4096, 1), device)
    table = isa.committed("25.0.7")
    used = {shown(key) for key in device.used}
    assert used <= set(table), sorted(used - set(table))
    products = {name.split()[0] for name in used if ".gemm." in name}
    assert {f"ffn_up.gemm.{t}.f16.{tile}" for t in ("q4_0", "q8_0", "q6_k") for tile in ("32x64", "64x64")} <= products
    own = {name: table[name] for name in used if ".gemm." in name}
    assert not isa.check(own, "25.0.7", isa.load_rules()).broken
    assert all(statistics["scratch"] == 0 for statistics in own.values())
    assert "flash_attention.128.64 OUTPUT=1" in used


def test_only_what_was_compiled_before_is_spared(tmp_path):
    """Of kernels with SPIR-V in the same driver's table, about one in `share` is compiled again; every other one always
    is."""
    names = [f"linear.{n}" for n in range(240)]
    (tmp_path / "25.0.7.json").write_text(json.dumps({name: {"spirv": "1"} for name in names}))
    driver = "radv Mesa 25.0.7-2+deb13u1"
    left_out = spared(12, tmp_path, driver)
    assert 10 <= sum(not left_out(name, "1") for name in names) <= 40
    assert not any(left_out(name, "2") for name in names) and not left_out("new", "1")
    for all_of in (
        spared(1, tmp_path, driver),
        spared(12, tmp_path, "radv Mesa 26.0.0"),
        spared(12, tmp_path / "none", driver),
    ):
        assert not any(all_of(name, "1") for name in names)
