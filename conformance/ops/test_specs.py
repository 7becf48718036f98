"""The declarations: every spec is valid, every mistake in one gives one line with file, key and fix."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from inspect import signature
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.support.devices import spy_kernels
from conformance.support.paths import ROOT
from hybrid.core.dtypes import ACTIVATION_TYPES, DTYPES, QUANTISED_TYPES, WEIGHT_TYPES
from hybrid.harness.fixed import dtype_cases, edge_cases, one_each, variant_cases
from hybrid.harness.tuned import plan_for
from hybrid.kernels.npu.ops import OPS as ON_NPU
from hybrid.kernels.oracle import ORACLE, step
from hybrid.kernels.vulkan import modules
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.features import CAPABILITIES
from hybrid.kernels.vulkan.ops import BINDINGS
from hybrid.kernels.vulkan.spirv import inspect
from hybrid.spec import SPECS_DIR, OpSpec, SpecError, load_op, load_ops
from hybrid.spec import docs as generated
from hybrid.spec.__main__ import main
from hybrid.spec.axes import roles
from hybrid.spec.fields import EDGE_VALUES, Edge
from hybrid.spec.schedule import find_schedule
from hybrid.spec.workload import givens

GEMMA = {"270m": 640, "1b": 1152, "4b": 2560, "12b": 3840, "27b": 5376}
HIDDEN = {
    "embeddinggemma-2": 512,
    "gemma3n-e2b": 2048,
    "gemma3n-e4b": 2048,
    "gemma4-e2b": 1536,
    "gemma4-e4b": 2560,
    "gemma4-12b": 3840,
    "gemma4-31b": 5376,
    "gemma4-26b-a4b": 2816,
}
OPS = load_ops()
SPIRV = ROOT / "kernels" / "vulkan" / "spirv"


def test_backends_have_what_is_declared() -> None:
    for backend, made in (("oracle", ORACLE), ("vulkan", BINDINGS), ("npu", ON_NPU)):
        assert {n for n, op in OPS.items() if op.runs_on(backend)} == set(made), backend


def _of_gemma3() -> list[str]:
    """Operations of its schedule that have an axis of the model."""
    of_model = givens().numbers("demo", "").keys()
    used = {step.op for step in find_schedule("gemma3").steps}
    sizes = {n: [roles()[a.role].size for a in OPS[n].axes.values()] for n in used}
    return sorted(n for n in used if any(size is not None and size.names & of_model for size in sizes[n]))


@pytest.mark.parametrize("name", _of_gemma3())
def test_workloads_cover_every_gemma3_size(name: str) -> None:
    for model in (*(f"gemma3-{m}" for m in GEMMA), "demo"):
        assert any(w.id.startswith(f"{model}.") for w in OPS[name].workload), model


@pytest.mark.parametrize("name", OPS)
def test_workloads_have_their_models_hidden_size(name: str) -> None:
    hidden = {**{f"gemma3-{m}": n for m, n in GEMMA.items()}, **HIDDEN}
    for w in OPS[name].workload:
        for axis, n in w.bind.items():
            assert OPS[name].axes[axis].role != "hidden" or n == hidden.get(w.id.split(".")[0], 256), w.id


def test_workloads_of_an_operation_that_says_nothing_are_those_of_its_schedules() -> None:
    """By hand: types, passes, and that sizes without such layers have none."""
    found = {w.id: w for w in OPS["per_layer_embed"].workload}
    assert {i.split(".")[0] for i in found} == {
        *("gemma3n-e2b", "gemma3n-e4b", "gemma4-e2b", "gemma4-e4b", "demo-gemma3n", "demo-gemma4")
    }
    assert [w.id for w in OPS["per_layer_norm"].workload] == ["embeddinggemma-2.prefill"]  # it has no other pass
    one = found["gemma3n-e2b.decode"]
    assert one.bind == {"T": 1, "V": 262144, "E": 7680, "P": 256} and one.dtypes == {"w": "q8_0"}
    assert found["demo-gemma4.prefill"].bind == {"T": 128, "V": 4096, "E": 320, "P": 32}
    assert OPS["add_norm"].workload[1].dtypes == {"y": "q8_act"} and OPS["add_norm"].workload[1].tags == (
        "decode",
        "perf",
    )


@pytest.mark.parametrize("name", OPS)
def test_results_that_are_verified_separately_have_definitions(name: str) -> None:
    op = OPS[name]
    for result, t in op.tensors.items():
        if t.given or result in op.scratch:
            taken = signature(step(name, result)).parameters.keys() - {"real", "others"}
            assert set(t.given) <= taken <= {*op.inputs, *op.attributes, *t.given}, result


def test_a_backend_gives_a_reason_for_each_missing_operation() -> None:
    linear = OPS["linear"]
    assert linear.runs_on("cpu") and not linear.runs_on("npu")
    with pytest.raises(SpecError, match=r"linear\.toml: not_on\.npu: its cores have no float32 multiply"):
        linear.check({"T": 1, "K": 64, "N": 7}, {}, {"w": "q8_0"}, "npu")
    with pytest.raises(SpecError, match=r"no backend 'vulcan'; did you mean 'vulkan'\?"):
        linear.runs_on("vulcan")


@pytest.mark.parametrize("name", OPS)
def test_every_result_has_a_tolerance_for_every_dtype(name: str) -> None:
    op = OPS[name]
    for choice in op.dtype_choices():
        for tensor in (*op.outputs, *op.state, *op.scratch):
            assert op.tolerance_of(tensor, choice[tensor]).metric


def test_defaults_of_a_spec_are_those_of_its_kind() -> None:
    """By hand: tolerances of other types than f32, sizes of axes."""
    f32, q8 = (OPS["rmsnorm"].tolerance_of("y", d) for d in ("f32", "q8_act"))
    assert (f32.metric, q8.metric, q8.scale, str(q8.reduction), q8.c, q8.tie) == (
        "scaled_bound",
        "codes",
        "ref",
        "H",
        1,
        1e-4,
    )
    assert str(OPS["fused_ffn"].tolerance_of("h", "f16").reduction) == "H"  # not y's
    assert OPS["decode_attention"].tolerance_of("k_cache", "f16").c_out == 2  # as written
    assert OPS["decode_attention"].tolerance_of("k_cache", "q8_0").c_out == 1
    assert OPS["verify"].tolerance == {} and OPS["take_routes"].tolerance_of("wanted_slots", "i32").metric == "exact"
    axes = OPS["linear"].axes
    assert (axes["K"].min, axes["K"].multiple_of, axes["K"].max, axes["N"].max) == (16, 16, 131072, 1048576)


def test_every_edge_value_is_used_and_documented() -> None:
    used = {value for o in OPS.values() for c in o.edge.cases for _, value in Edge.settings(c)}
    assert set(EDGE_VALUES) <= used


def test_an_edge_case_of_several_settings_has_them_all() -> None:
    case = dict(edge_cases(OPS["begin_pass"], "cpu"))["R=40, S=8, C=6, inbox=following"]
    assert (case.bind["R"], case.bind["S"], case.bind["C"], case.kinds) == (40, 8, 6, {"inbox": "following"})
    text = "T=1, D=64, MB=20, BS=16, window=91, positions=full_cache"
    case = dict(edge_cases(OPS["decode_attention"], "cpu"))[text]
    assert (case.bind["D"], case.attrs["window"], case.style) == (64, 91, "full")


# ------------------------------------------------------------------------------------------- errors in a declaration
# A change of linear.toml (text, replacement), the key that must be named, and a piece of the fix.
MISTAKES = {
    "unknown key": ('shape = ["T", "N"]', 'shpae = ["T", "N"]', "outputs.y.shpae", "did you mean 'shape'?"),
    "unknown table": ("[numerics]", "[numeric]", "numeric", "did you mean 'numerics'?"),
    "missing key": ('flops = "2*T*N*K"\n', "", "cost.flops", "is missing"),
    "undeclared axis": ('shape = ["T", "N"]', 'shape = ["T", "M"]', "outputs.y.shape[1]", "unknown axis 'M'"),
    "nearest axis": ('shape = ["T", "N"]', 'shape = ["T", "NN"]', "outputs.y.shape[1]", "did you mean 'N'?"),
    "bad expression": ('shape = ["T", "N"]', 'shape = ["T", "N+"]', "outputs.y.shape[1]", "not a complete expression"),
    "call in a shape": ('shape = ["T", "N"]', 'shape = ["T", "exec(N)"]', "outputs.y.shape[1]", "unknown function"),
    "condition as a size": ('shape = ["T", "N"]', 'shape = ["T", "N>1"]', "outputs.y.shape[1]", "is a condition"),
    "unused axis": ("[inputs.x]", 'Z = { role = "ffn" }\n[inputs.x]', "axes.Z", "used by no tensor"),
    "unknown role": ('role = "inner"', 'role = "iner"', "axes.K.role", "did you mean 'inner'?"),
    "axis range": ("min = 16,", "min = 16, max = 8,", "axes.K.max", "below min"),
    "text for a number": ("min = 16,", 'min = "16",', "axes.K.min", "integer"),
    "unknown list of dtypes": (
        'dtype = "$weights"',
        'dtype = "$weigths"',
        "inputs.w.dtype[0]",
        "did you mean '$weights'?",
    ),
    "unknown dtype": ('dtype = "f32"', 'dtype = "f23"', "outputs.y.dtype[0]", "did you mean 'f32'?"),
    "dtype of nothing": ('dtype = "f32"', 'dtype = "same:v"', "outputs.y.dtype", "known: x, w"),
    "unknown backend": ("[backends.vulkan]", "[backends.gpu]", "backends.gpu", "is not one of"),
    "excepted unknown backend": ("[not_on]\nnpu", "[not_on]\ntpu", "not_on.tpu", "not one of"),
    "excepted without a reason": ("[not_on]\n", '[not_on]\ncpu = ""\n', "not_on.cpu", "at least 1 character"),
    "excepted with limits": ("[not_on]\nnpu", "[not_on]\nvulkan", "backends.vulkan", "not_on says"),
    "unknown feature": (
        "shaderIntegerDotProduct",
        "integerDotProduct",
        "backends.vulkan.requires_for.q8_act[0]",
        "did you mean",
    ),
    "unknown metric": (
        "[tolerance.f32]",
        '[tolerance.f32]\nmetric = "scaled"',
        "tolerance.f32.metric",
        "did you mean 'scaled_bound'?",
    ),
    "tolerance without scale": ('scale = "abs"\n', "", "tolerance.f32.scale", "is missing"),
    "tolerance missing": ("[tolerance.f32]", "[tolerance.f16]", "tolerance.f16", "no result has this dtype"),
    "cost name": ("2*T*N*K", "2*T*N*J", "cost.flops", "unknown axis or attribute 'J'"),
    "cost tensor": ("bytes(w)", "bytes(ww)", "cost.bytes", "did you mean 'w'?"),
    "rule tensor": ('when = { x = "q8_act" }', 'when = { z = "q8_act" }', "dtype_rules[0].when.z", "no tensor 'z'"),
    "rule dtype": ('when = { x = "q8_act" }', 'when = { x = "q8_0" }', "dtype_rules[0].when.x", "x is never q8_0"),
    "edge without a prime": ('"K=16"', '"K=prime"', "edge.cases[8]", "the role inner has no prime"),
    "variant name": ("{ T = 66, N", "{ T = 66, M", "backends.vulkan.variants[1].M", "no axis or attribute 'M'"),
    "variant numbers": (
        "{ T = 66, N = 65,",
        '{ "T,N" = [[66, 65], 3],',
        "backends.vulkan.variants[1].T,N",
        "3 is not of 2",
    ),
    "edge form": ('"T=1"', '"T"', "edge.cases[0]", "NAME=VALUE"),
    "edge target": ('"T=1"', '"Q=1"', "edge.cases[0]", "no axis, attribute or tensor 'Q'"),
    "edge value": ('"x=outlier"', '"x=outliers"', "edge.cases[13]", "did you mean 'outlier'?"),
    "edge of two": ('"T=1"', '"T=1, x=larg"', "edge.cases[0]", "did you mean 'large'?"),
    "edge without a second name": ('"T=1"', '"T=1, =2"', "edge.cases[0]", "NAME=VALUE"),
    "edge set twice": ('"T=1"', '"T=1, T=2"', "edge.cases[0]", "sets T twice"),
    "edge tile": (
        "tile = { T = 8, N = 256, K = 256 }",
        "tile = { T = 8, N = 256 }",
        "edge.cases[10]",
        "declares a tile of K",
    ),
    "workload axis": (
        ', N = "hidden" }',
        " }",
        "workloads[0].bind.N",
        "is missing: nothing here has the role features",
    ),
    "workload unknown axis": ("bind = { K", "bind = { M = 1, K", "workloads[0].bind.M", "no axis 'M'"),
    "workload name": (
        'N = "hidden"',
        'N = "hiden"',
        "workloads[0].bind.N",
        "unknown name 'hiden' in 'hiden'; did you mean 'hidden'?",
    ),
    "workload expression": ('N = "hidden"', 'N = "hidden +"', "workloads[0].bind.N", "not a complete expression"),
    "workload fraction": ('N = "hidden"', 'N = "hidden/3"', "workloads[0].bind.N", "hidden/3 = 213.3"),
    "workload condition": ('N = "hidden"', 'N = "hidden > 3"', "workloads[0].bind.N", "'hidden > 3' is a condition"),
    "workload variant's name": (
        "variants.attn_output = {}",
        'variants.attn_output = { bind = { N = "hiden" } }',
        "workloads[0].variants.attn_output.bind.N",
        "did you mean 'hidden'?",
    ),
    "workload division": ('N = "hidden"', 'N = "hidden//0"', "workloads[0].bind.N", "'hidden//0'"),
    "workload multiple": (
        "n_heads*head_dim",
        "n_heads*head_dim - 1",
        "workloads[0] (gemma3-270m.attn_output.decode)",
        "axes.K: K = 1023 is not a multiple of 16",
    ),
    "workload range": ("bind = { K", "bind = { T = 0, K", "workloads[0] (", "axes.T: T = 0 is outside 1..8192"),
    "workload dtype": (
        'x = "q8_act", w = "q4_0"',
        'x = "q8_act", w = "f16"',
        "workloads[0] (",
        "dtype_rules[0]: w must be q8_0 or q4_0",
    ),
    "workload attribute": (
        "variants.attn_output = {}",
        "attrs = { eps = 1.0 }\nvariants.attn_output = {}",
        "workloads[0] (",
        "attributes: no attribute 'eps'",
    ),
    "workload twice": ('variants."attn_output.q4_1"', "variants.attn_output", "workloads[2]", "decode' is used twice"),
    "workload model": ("gemma3-*", "gema3-*", "workloads[0].models[0]", "no model is called 'gema3-*'; did you mean"),
    "workload pass": (
        '"prefill"]',
        '"prefil"]',
        "workloads[0].passes",
        "no pass is called 'prefil'; did you mean 'prefill'?",
    ),
    "workload pass of a variant": (
        "variants.attn_output = {}",
        'variants.attn_output = { passes = ["once"] }',
        "workloads[0].variants.attn_output.passes",
        "no pass is called 'once'",
    ),
    "workload without a pass": (
        'passes = ["decode", "prefill"]\n',
        "",
        "workloads[0].bind.T",
        "nothing here has the role tokens",
    ),
    "workload variant": (
        "variants.attn_output",
        'variants."Attn output"',
        "workloads[0].variants.Attn output",
        "match pattern",
    ),
    "workloads without end": (
        '["decode", "prefill"]',
        f"{['decode'] * 200}",
        "workloads[0]",
        "more than 1000 workloads",
    ),
    "workload tag": (
        '["decode", "prefill"]',
        '["decode"]\ntags = ["fast"]',
        "workloads[0].tags[0]",
        "'fast' is not one of decode",
    ),
    "member of an op": ('name = "linear"', 'name = "linear"\nmembers = ["geglu"]', "op.members", "a region"),
    "input without domain": ('domain = { dist = "normal", scale = 1.0 }', "", "inputs.x.domain", "is missing"),
    "domain parameter": ('dist = "normal", scale = 1.0', 'dist = "normal"', "inputs.x.domain.scale", "is missing"),
    "domain of another kind": (
        "scale = 1.0 }",
        "scale = 1.0, low = 0 }",
        "inputs.x.domain.low",
        "has no meaning; remove it",
    ),
    "reserved name": ("[inputs.w]", "[inputs.min]", "inputs.min", "cannot be a name"),
    "name twice": ("[inputs.w]", "[inputs.T]", "inputs.T", "used in [axes] already"),
    "other version": ("schema = 1", "schema = 2", "schema", "2 must be 1"),
    "other name": ('name = "linear"', 'name = "lineal"', "op.name", "must be the file's name"),
    "not TOML": ("[op]", "[op", "", "not valid TOML"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_line_with_file_key_and_fix(mistake: str, tmp_path: Path) -> None:
    old, new, key, fix = MISTAKES[mistake]
    text = (SPECS_DIR / "ops" / "linear.toml").read_text()
    assert old in text, "the mistake no longer changes anything"
    path = tmp_path / "linear.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        _ = load_op(path).workload  # the last check of a declaration
    message = str(caught.value)
    assert message.startswith(f"{path}: {key}"), message
    assert fix in message and "\n" not in message, message


def test_an_unknown_constraint_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fused_qkv.toml"
    path.write_text((SPECS_DIR / "ops" / "fused_qkv.toml").read_text().replace("HQ % HK == 0", "HQ % HKV == 0"))
    with pytest.raises(SpecError, match=r"constraints\.exprs\[0\]: unknown axis .* 'HKV' .*did you mean 'HK'\?"):
        load_op(path)


def test_a_region_with_an_unknown_member_is_refused(tmp_path: Path) -> None:
    for name in ("fused_qkv", "rmsnorm"):
        (tmp_path / f"{name}.toml").write_text((SPECS_DIR / "ops" / f"{name}.toml").read_text())
    with pytest.raises(SpecError, match=r"op\.members\[0\]: no operation 'linear'"):
        load_op(tmp_path / "fused_qkv.toml")


def test_unknown_operations_and_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no operation 'linaer'; did you mean 'linear'\?"):
        load_op("linaer")
    with pytest.raises(SpecError, match="there is no such file"):
        load_op(tmp_path / "none.toml")
    with pytest.raises(SpecError, match="holds no operation specs"):
        load_ops(tmp_path)


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        OPS["linear"].op = OPS["geglu"].op


# ------------------------------------------------------------------------------------------------- using a declaration
def _binds(op: OpSpec) -> st.SearchStrategy[dict[str, int]]:
    """Axes inside their ranges, of sizes that a test could allocate."""

    def axis(name: str) -> st.SearchStrategy[int]:
        a = op.axes[name]
        first = -(-a.min // a.multiple_of)
        return st.integers(first, max(first, min(a.max // a.multiple_of, first + 20))).map(lambda n: n * a.multiple_of)

    return st.fixed_dictionaries({name: axis(name) for name in op.axes})


def _left_open(op: OpSpec, shapes: Mapping[str, tuple[int, ...]], bind: Mapping[str, int]) -> dict[str, int]:
    """Axes that the shapes do not determine, with their sizes: the error names them, one after another."""
    given_axes: dict[str, int] = {}
    while True:
        try:
            op.solve(shapes, given_axes)
        except SpecError as e:
            (axis,) = re.findall(r"open; bind (\w+) or", str(e))
            given_axes[axis] = bind[axis]
        else:
            return given_axes


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_shapes_determine_their_axes(name: str, data: st.DataObject) -> None:
    op = OPS[name]
    bind = data.draw(_binds(op))
    shapes = op.bind_shapes(bind)
    given_axes = _left_open(op, shapes, bind)
    assert op.solve(shapes, given_axes) == bind
    tensor = data.draw(st.sampled_from(sorted(shapes)))
    wrong = dict(shapes)
    wrong[tensor] = (shapes[tensor][0] + 1, *shapes[tensor][1:])
    try:
        other = op.solve(wrong, given_axes)
    except SpecError as e:
        assert tensor in str(e) or any(t in str(e) for t in shapes)
        assert "\n" not in str(e)
    else:  # an axis of that tensor only
        assert other != bind


def test_solving_names_both_places_that_disagree() -> None:
    with pytest.raises(SpecError, match=r"inputs\.w\.shape\[1\]: is 320 but K = 256 \(.* from inputs\.x\.shape\[1\]"):
        OPS["linear"].solve({"x": (4, 256), "w": (768, 320)})
    with pytest.raises(SpecError, match=r"\(HQ\+2\*HK\)\*D = 512 leaves D, HK, HQ open; bind D"):
        OPS["fused_qkv"].solve({"x": (4, 256), "w": (512, 256)})
    with pytest.raises(SpecError, match=r"outputs\.h\.shape\[1\]: is 8 but F = 32"):
        OPS["geglu"].solve({"gate_up": (1, 64), "h": (1, 8)})
    with pytest.raises(SpecError, match=r"2\*F = 63 has no whole solution for F"):
        OPS["geglu"].solve({"gate_up": (1, 63)})
    with pytest.raises(SpecError, match=r"inputs\.x\.shape: has 2 axes \(T, K\), got shape \(4,\)"):
        OPS["linear"].solve({"x": (4,)})
    assert OPS["fused_qkv"].solve({"w": (512, 256)}, {"HQ": 4, "D": 64}) == {"HQ": 4, "D": 64, "HK": 2, "H": 256}


def test_int8_activations_need_quantised_weights() -> None:
    pairs = {(c["x"], c["w"]) for c in OPS["linear"].dtype_choices()}
    assert pairs == {(x, w) for x in ACTIVATION_TYPES for w in WEIGHT_TYPES if x != "q8_act" or w in QUANTISED_TYPES}
    assert all(c["v_cache"] == c["k_cache"] for c in OPS["attention"].dtype_choices())
    with pytest.raises(SpecError, match="v_cache is f32 but must be f16, as k_cache is"):
        OPS["attention"].check_dtypes({"k_cache": "f16", "v_cache": "f32"})


def test_weights_of_a_backend_are_of_types_that_it_computes_with() -> None:
    linear = OPS["linear"]
    assert {c["w"] for c in linear.dtype_choices("vulkan")} == {*WEIGHT_TYPES} - {"q5_0", "q4_k", "q5_k"}
    assert {c["w"] for c in linear.dtype_choices("cpu")} == {*WEIGHT_TYPES} and linear.taken("cpu") == {}
    assert {c["w"] for c in OPS["dequantize"].dtype_choices("vulkan")} < {*WEIGHT_TYPES} - {"f32"}
    with pytest.raises(SpecError, match=r"backends\.vulkan\.dtypes\.w: q5_0 is not allowed; allowed: f32, f16"):
        linear.check_dtypes({"w": "q5_0"}, "vulkan")


def test_check_refuses_what_does_not_fit() -> None:
    linear, attention = OPS["linear"], OPS["attention"]
    linear.check({"T": 1, "K": 48, "N": 7}, {}, {"x": "f32", "w": "bf16"})
    with pytest.raises(SpecError, match="q8_0 needs rows of a multiple of 32 elements"):
        linear.check({"T": 1, "K": 48, "N": 7}, {}, {"w": "q8_0"})
    bind = {"T": 1, "HQ": 4, "HK": 3, "D": 64, "S": 1, "MB": 1, "B": 1, "BS": 32}
    with pytest.raises(SpecError, match=r"constraints\.exprs\[0\]: HQ % HK == 0 does not hold for HK = 3, HQ = 4"):
        attention.check(bind, {"scale": 0.125})
    with pytest.raises(SpecError, match=r"attributes\.scale: has no default and is not given"):
        attention.check({**bind, "HK": 2})
    with pytest.raises(SpecError, match=r"attributes\.window: -1 is below 0"):
        attention.check({**bind, "HK": 2}, {"scale": 0.125, "window": -1})
    with pytest.raises(SpecError, match=r"attributes\.window: 1\.5 is not of type int"):
        attention.check({**bind, "HK": 2}, {"scale": 0.125, "window": 1.5})
    sample = {"O": 1, "V": 8, "T": 1, "S": 1, "C": 4}
    with pytest.raises(SpecError, match=r"attributes\.valid: 9 is above 8"):
        OPS["sample"].check(sample, {"valid": 9})


def test_costs_are_those_worked_out_by_hand() -> None:
    bind = {"T": 1, "K": 4096, "N": 5376}
    assert OPS["linear"].flops(bind) == 2 * 4096 * 5376
    # q4_0: 18 bytes per 32; q8_act: 40 per 32
    w, x, y = 4096 * 5376 * 18 // 32, 4096 * 40 // 32, 5376 * 4
    assert OPS["linear"].nbytes(bind, {"x": "q8_act", "w": "q4_0"}) == w + x + y
    bind = {"T": 1, "HQ": 4, "HK": 2, "D": 64, "S": 1, "MB": 64, "B": 64, "BS": 32}
    whole, local = ({"scale": 0.125, "window": w} for w in (0, 128))
    assert OPS["attention"].flops(bind, whole) == 4 * 4 * 64 * 2048
    assert OPS["attention"].flops(bind, local) == 4 * 4 * 64 * 128
    assert OPS["attention"].nbytes(bind, {"k_cache": "f16", "o": "f32"}, local) == 2 * 256 * 4 + 128 * 128 * 4


def test_live_counts_bound_rows_or_outputs() -> None:
    """Output rows where there are any: their number differs from that of the pass's rows."""
    examples = {"linear": "T", "logits": "O", "verify": "O", "take_rows": "O", "dequantize": None, "begin_pass": None}
    assert {n: OPS[n].token_axis for n in examples} == examples


def test_matrices_are_weights_that_products_read_whole() -> None:
    examples = {
        "fused_ffn": ("w_gate_up", "w_down"),
        "logits": ("w",),
        "embed": (),
        "dequantize": (),
        "altup_predict": (),
    }
    assert {n: OPS[n].matrices for n in examples} == examples


def test_requirements_follow_the_dtypes() -> None:
    linear = OPS["linear"]
    plain = linear.requirements("vulkan", {"x": "f32", "w": "f32"})
    assert "shaderIntegerDotProduct" not in plain
    assert "shaderIntegerDotProduct" in linear.requirements("vulkan", {"x": "q8_act", "w": "q4_0"})
    assert set(plain) < set(linear.requirements("vulkan"))


def _selected(op: OpSpec, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Modules that its bindings select, on a device with small subgroups and no optional feature and on a GPU."""
    modules_of: set[str] = set()
    for device in (DryDevice(8), DryDevice(32, features=lambda feature: True, tuning="nvidia", cores=132)):
        chosen = spy_kernels(device, monkeypatch)
        found = [c for dtypes in one_each(op.dtype_choices("vulkan")) for c in dtype_cases(op, dtypes)]
        for case in found + [c for _, c in variant_cases(op, "vulkan")]:
            record(plan_for(op, case), device)
        modules_of |= chosen
    return modules_of


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.runs_on("vulkan")])
def test_declared_features_are_those_that_the_shaders_ask_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every capability of a SPIR-V module is declared for the dtypes in its name, and no other capability is declared."""
    backend, asked = OPS[name].backend("vulkan"), set()
    for module in _selected(OPS[name], monkeypatch):
        needs = {CAPABILITIES[c] for c in inspect(modules.read(SPIRV, module)).capabilities if c in CAPABILITIES}
        needs.discard("subgroup basic")  # every Vulkan device has it in compute kernels
        declared = {*backend.requires, *backend.uses}
        declared |= {f for d in module.split(".") if d in DTYPES for f in backend.requires_for.get(d, ())}
        assert needs <= declared, f"{module} needs {sorted(needs - declared)}: declare it in {OPS[name].file}"
        asked |= needs
    assert {*OPS[name].requirements("vulkan"), *backend.uses} == asked


def test_shape_of_one_tensor_needs_only_its_axes() -> None:
    assert OPS["attention"].shape("q", {"T": 3, "HQ": 4, "D": 64}) == (3, 256)
    with pytest.raises(SpecError, match="no value for HQ"):
        OPS["attention"].shape("q", {"T": 3, "D": 64})


# ---------------------------------------------------------------------------------------- commands and generated files
def test_the_support_matrix_names_the_dtypes_that_a_backend_lacks() -> None:
    page = generated.support(OPS)
    assert "on: `oracle`, `cpu`." in page and len(page.encode()) < 6000
    assert "| `linear` | not w q5_0/q4_k/q5_k | no |" in page
    assert (
        "- not on npu: `altup_unembed`, `fused_ffn`, `fused_qkv`, `linear`, `per_layer_input`: its cores have no"
        in page
    )


def test_the_reference_shows_every_operation_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    page = capsys.readouterr().out
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [*OPS, "Terms"]
    assert "| npu | - | - | - | known when built: K |" in page


def test_the_command_line_reports_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert f"{len(OPS)} operation specs are sound" in capsys.readouterr().out
    bad = tmp_path / "linear.toml"
    bad.write_text("schema = 1\n")
    assert main(["check", str(bad), "geglu"]) == 1
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 5 and "1 are wrong" in out
    assert all(line.startswith(f"error: {bad}: ") and "is missing" in line for line in err.splitlines())
    assert main(["show", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: specs/ops: no operation 'nothing'")
    assert main(["list", "--json"]) == 0
    assert [o["name"] for o in json.loads(capsys.readouterr().out)] == list(OPS)
    assert main(["show", "linear", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["workload"][0]["flops"] == 2 * 1024 * 640
    assert main(["show", "attention"]) == 0
    assert "Backends: oracle, cpu, vulkan, npu" in capsys.readouterr().out
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["additionalProperties"] is False
    with pytest.raises(SystemExit) as usage:
        main(["shwo"])
    assert usage.value.code == 2


def test_plain_data_modules_do_not_import_pydantic() -> None:
    code = "import hybrid.core.plan, hybrid.core.tensor, sys; print('pydantic' in sys.modules)"
    root = ROOT
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


def test_attention_scale_of_27b_is_not_that_of_its_head_dim() -> None:
    scales = {w.attrs["scale"] for w in OPS["attention"].workload if w.id.startswith("gemma3-27b")}
    assert len(scales) == 1 and math.isclose(float(scales.pop()), 168**-0.5, rel_tol=1e-12)
