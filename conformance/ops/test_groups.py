"""Fused groups, steps that one dispatch computes. Each step is checked by its own operation's definition, on the memory
that the dispatch left. Everything unsupported is recorded step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.mutation.mutate import Mutant, load, mutated_function, mutated_spirv, tried
from conformance.support.chains import GATE_STEPS, STREAM_STEPS
from conformance.support.devices import (
    GUARD,
    INTERPRETED,
    Devices,
    need_compiler,
    open_another,
    open_backend,
    open_for_binding,
    spy_kernels,
)
from conformance.support.groups import SPECS, cases, judged, planned, run
from conformance.support.paths import MUTANTS
from conformance.support.profile import LONG
from hybrid.core.dtypes import DTYPES
from hybrid.core.plan import Step
from hybrid.core.tensor import Tensor
from hybrid.harness import poisoned
from hybrid.harness.cases import Case
from hybrid.harness.compare import Disagreement
from hybrid.harness.fixed import variant
from hybrid.harness.inputs import make
from hybrid.harness.interpreter.values import Fault
from hybrid.harness.sizes import base_bind
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.kernels.vulkan.ops import BINDINGS, GROUPS, _add_router, _altup_gate, _altup_next, _expert_route, _layer
from hybrid.kernels.vulkan.ops.rmsnorm import HELD
from hybrid.kernels.vulkan.steps import BEGUN_BY
from hybrid.kernels.vulkan.tuning import space
from hybrid.kernels.vulkan.types import QUANTISED

pytestmark = [pytest.mark.width, pytest.mark.slow]

SIZES = {"hidden": 96, "heads": 64, "ffn": 160, "hq": 2, "hk": 1, "d": 32}
OWN_BUFFERS = 53  # limited by layer.*.own
USES = [{"workgroups": n, "threads": t} for n in (1, "1 * cores") for t in (256, 768)]
FEWER = (
    USES if LONG else USES[::2]
)  # each number of threads is a pipeline, which takes a CPU driver four seconds to compile


def that_binds(devices: Devices, buffers: int) -> Any:
    """A device whose kernels have enough bindings: the driver's, or the interpreter's on it."""
    device = devices.get("vulkan", guard=GUARD)
    return device if device.storage_buffers >= buffers else devices.get(INTERPRETED, guard=GUARD)


def cancelled(device: Any, use: Mapping[str, Any], made: list[Case]) -> None:
    """The residual nearly cancels the addend: the sum of squares cannot use partial sums; it is recomputed."""
    judged(device, use, made)
    a = device.read("a").array.astype(np.float64)
    scaled = a / np.sqrt((a**2).mean() + made[1].attrs["eps"]) * device.read("w_post").array
    for left in (1e-1, 1e-3):
        noise = np.random.default_rng(1).standard_normal(a.shape) * left
        judged(device, use, made, given={"x": Tensor.of((-scaled * (1 + noise)).astype(np.float32))})


def test_a_residual_that_cancels_what_is_added(devices: Devices) -> None:
    device = devices.get("vulkan", guard=GUARD)
    for use in FEWER:
        cancelled(device, use, cases({**SIZES, "hidden": 1056}, "q8_0" if LONG else "q4_0", 1, "q8_act", 5, 1))


@pytest.mark.parametrize("w", ["q4_0", "q8_0"])
def test_workgroups_that_exchange_results(devices: Devices, w: str) -> None:
    """The shape of Gemma 3 4B on as many workgroups as there are multiprocessors, repeatedly. Where a driver does not
    report their number, a single workgroup would exchange no data: a smaller layer is interpreted with as many
    workgroups."""
    device, threads_of = devices.get("vulkan"), (768, 1024)
    shape = {"hidden": 2560, "heads": 2048, "ffn": 10240, "hq": 8, "hk": 4, "d": 256}
    if device.cores == 1:
        device, threads_of = devices.get(INTERPRETED, guard=GUARD), (256, 512)
        shape = {"hidden": 544, "heads": 160, "ffn": 672, "hq": 4, "hk": 2, "d": 32}
    for threads in threads_of:
        assert judged(device, {"workgroups": "1 * cores", "threads": threads}, cases(shape, w, 1, "q8_act", 3, 1)) == 1


@pytest.mark.parametrize("w", QUANTISED)
def test_a_layer_in_one_dispatch(devices: Devices, w: str) -> None:
    """Every type of weights, fixed sizes for every value of the tuning space (in the short profile of one type only),
    then drawn sizes (there one, of a type without fixed ones): each size is a pipeline."""
    device = devices.get("vulkan", guard=GUARD)
    uses, drawn = USES if LONG or w == "q4_0" else FEWER if w == "q8_0" else USES[:1], LONG or w == "q8_0"
    granule, bindings = DTYPES[w].block, 20 + 4 * len(DTYPES[w].parts)  # four weights
    dispatches = 1 if device.storage_buffers >= bindings else 6
    for i, use in enumerate(uses if LONG or not drawn else ()):
        sizes = {k: n if k in ("hq", "hk", "d") else -(-n // granule) * granule for k, n in SIZES.items()}
        assert judged(device, use, cases(sizes, w, 1, "q8_act", i, 1)) == dispatches

    blocks = st.integers(1, 12 if granule == 32 else 3).map(lambda n: n * granule)
    shapes = st.fixed_dictionaries(
        {
            "hidden": blocks,
            "heads": blocks,
            "ffn": blocks,
            "hq": st.sampled_from([2, 4]),
            "hk": st.sampled_from([1, 2]),
            "d": st.sampled_from([16, 32, 48]),
        }
    )

    @settings(max_examples=settings().max_examples if LONG else 1)
    @given(shapes, st.sampled_from(uses), st.integers(0, 999))
    def prove(sizes: dict[str, int], use: dict[str, int], seed: int) -> None:
        assert judged(device, use, cases(sizes, w, 1, "q8_act", seed, 1)) == dispatches

    if drawn:
        prove()


@pytest.mark.parametrize("w", ["q8_0", "q4_0"])
def test_a_layer_with_its_own_input_in_one_dispatch(devices: Devices, w: str) -> None:
    """Gates of fewer rows than workgroups, and of as many as threads; then Gemma 4 E2B's shape where workgroups
    exchange it."""
    device = devices.get("vulkan", guard=GUARD)
    exchanged = [use for use in USES if use["workgroups"] != 1]  # one workgroup's sums of this shape exceed its memory
    small, wide = {**SIZES, "own": 32}, {**SIZES, "hidden": 544, "own": 64, "heads": 160}
    shapes = [(device, small, USES), (device, wide, USES)]
    if device.cores > 1:
        shapes.append(
            (device, {"hidden": 1536, "heads": 2048, "ffn": 6144, "hq": 8, "hk": 1, "d": 256, "own": 256}, exchanged)
        )
    else:
        shapes.append((devices.get(INTERPRETED, guard=GUARD), wide, exchanged))
    for device, sizes, uses in shapes:
        for live in (1, 0):
            for use in uses:
                found = judged(device, use, cases(sizes, w, 1, "q8_act", 7, live))
                assert found == (1 if device.storage_buffers >= OWN_BUFFERS else 9)


@pytest.mark.parametrize(
    ("own", "projections", "value_norm", "rotary", "buffers"),
    [(64, 0, 1, 32, OWN_BUFFERS), (64, 2, 1, 32, OWN_BUFFERS), (0, 2, 0, 32, 41), (0, 2, 1, 16, 41)],
)
def test_a_layer_that_ends_with_the_next_attention(
    devices: Devices,
    own: int,
    projections: int,
    value_norm: int,
    rotary: int,
    buffers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries only, or queries, keys and values; values normed, heads that rotate in part. One head, because a CPU
    driver runs only one workgroup at once, which then has its KV split. Then a layer without the attention in the same
    pipeline."""
    device, spec = that_binds(devices, buffers), SPECS["decode_attention"]
    bind = {**base_bind(spec), "T": 1, "HQ": 1, "HK": 1, "D": 32, "S": 2, "B": 16, "MB": 4, "BS": 16, "C": 64}
    bind |= {"KV": projections, "R": rotary}
    last = variant(spec, bind, spec.dtypes({"o": "q8_act", "k_cache": "f16", "v_cache": "f16"}), 5, frozenset(bind))
    last = replace(last, attrs={**last.attrs, "value_norm": value_norm}, rows=1, outs=1)
    sizes = {**SIZES, "hq": 1 + projections, "hk": 0, **({"own": own} if own else {"hq": 1, "hk": 1})}
    caches = {n: make(spec, last)[n] for n in ("k_cache", "v_cache")}
    use = {"workgroups": 1, "threads": 256, "attention": 1}
    chosen = spy_pipelines(device, monkeypatch)
    layer = cases(sizes, "q4_0", 1, "q8_act", 7, 1)
    assert judged(device, use, [*layer, last], given=caches, others=[layer]) == 2
    assert len(chosen) == 1


def spy_pipelines(device: Any, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """A set that collects the pipelines of layers that the device selects from now on."""
    chosen: set[tuple[Any, ...]] = set()
    choose = device.kernel

    def kernel(name: str, **constants: int) -> Any:
        if name.startswith("layer."):
            chosen.add((name, *sorted(constants.items())))
        return choose(name, **constants)

    monkeypatch.setattr(device, "kernel", kernel)
    return chosen


def two_kinds(w: str, **more: int) -> list[list[Case]]:
    """Layers of two kinds that differ in attention and projections, as local and global ones of a model do."""
    sizes = {**SIZES, **more}
    return [
        cases({**sizes, **s}, w, 1, "q8_act", 3, 1) for s in ({}, {"heads": 160}, {"hq": 6}, {"heads": 160, "hq": 6})
    ]


@pytest.mark.parametrize("own", [0, 64])
def test_layers_of_two_kinds_in_one_pipeline(devices: Devices, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = that_binds(devices, OWN_BUFFERS if own else 0)
    chosen = spy_pipelines(device, monkeypatch)
    first, *others = two_kinds("q4_0", **({"own": own} if own else {}))
    assert judged(device, USES[0], first, others=others) == 4
    assert len(chosen) == 1


def test_a_last_layer_in_one_dispatch(devices: Devices) -> None:
    """The last layer projects no queries: without per-layer input, then with it."""
    device = devices.get("vulkan", guard=GUARD)
    for use in USES[:1] + USES[3:] if LONG else FEWER:
        for live in (1, 0):
            assert judged(device, use, cases(SIZES, "q4_0", 1, "q8_act", 3, live)[:-1]) == 1
            found = judged(device, use, cases({**SIZES, "own": 64}, "q8_0", 1, "q8_act", 3, live)[:-1])
            assert found == (1 if device.storage_buffers >= OWN_BUFFERS else 8)


def stream_cases(hidden: int, rows: int, act: str, live: int) -> list[Case]:
    bind = {"T": rows, "H": hidden, "A": 4}
    return [
        Case(
            op,
            bind,
            dict(SPECS[op].dtypes({"y": act} if "y" in args else {})),
            SPECS[op].attrs(bind, {}),
            live,
            live,
            seed=i,
            style="full",
        )
        for i, (op, args) in enumerate(STREAM_STEPS)
    ]


@pytest.mark.parametrize("act", ["q8_act", "f16"])
def test_streams_that_end_a_layer_and_begin_the_next(devices: Devices, act: str) -> None:
    """Rows of one unit a thread, of two, and of more than the registers hold."""
    device = devices.get("vulkan", guard=GUARD)
    for hidden, rows, live in ((96, 1, 1), (1056, 3, 3), (2080, 1, 0), (12320, 2, 2)):
        grids = int(rows > 1)  # of live rows
        assert run(device, stream_cases(hidden, rows, act, live)) == 1 + grids
    assert run(device, stream_cases(96, 1, "q8_act", 1), swaps={"1.streams": "other"}) == 2


def gate_cases(
    hidden: int, width: int, w: str = "q4_0", rows: int = 1, act: str = "q8_act", live: int = 1
) -> list[Case]:
    streams = {"T": rows, "H": hidden, "A": 4}
    own = {"T": rows, "H": hidden, "P": width, "E": 3 * width}
    made = zip(GATE_STEPS, (streams, own), ({"y": act}, {"x": act, "w_gate": w, "w_proj": w, "h": act}), strict=True)
    return [
        Case(
            op,
            bind,
            dict(SPECS[op].dtypes(types)),
            {**SPECS[op].attrs(bind, {}), **({"layer": 1} if i else {})},
            live,
            live,
            seed=i,
            style="full",
        )
        for i, ((op, _), bind, types) in enumerate(made)
    ]


@pytest.mark.parametrize("w", ["q4_0", "q8_0"])
def test_a_correction_with_the_gate_of_the_own_input(devices: Devices, w: str) -> None:
    """One block of the gate and several; rows with less than one vector for each lane, and as wide as a workgroup
    supports."""
    device = devices.get("vulkan", guard=GUARD)
    for hidden, width, live in ((32, 32, 1), (1056, 96, 1), (2048, 256, 1), (2048, 64, 0)):
        assert run(device, gate_cases(hidden, width, w, live=live)) == 2
    if w == "q4_0":
        unfused = gate_cases(96, 32, "q4_1"), gate_cases(96, 32, rows=2, live=2), gate_cases(96, 32, act="f32")
        assert all(run(device, made) >= 3 for made in unfused)
    assert run(device, gate_cases(2080, 32, w)) == 3
    assert run(device, gate_cases(96, 32, w), swaps={"1.x": "other"}) == 3


def test_own_inputs_of_other_types_are_recorded_step_by_step(devices: Devices) -> None:
    device = devices.get("vulkan", guard=GUARD)
    assert judged(device, USES[0], cases({**SIZES, "own": 32}, "q4_1", 1, "q8_act", 7, 1)) == 10
    assert (
        judged(device, USES[0], cases({**SIZES, "own": 288}, "q4_0", 1, "q8_act", 7, 1)) == 9
    )  # its gate is one dispatch


EDGES = (
    {"hidden": 1056},  # a second sweep of few
    {"hidden": 32, "heads": 32, "ffn": 32, "hq": 1, "hk": 1, "d": 16},  # fewer rows than workgroups
    {"heads": 8224},  # more vectors of a row than 256 threads
    {"hidden": 2048},  # two sweeps of 256 threads, both full
    {"ffn": 2080},
)


@pytest.mark.parametrize(
    "sizes",
    EDGES if LONG else (EDGES[0], EDGES[1 + int(kernels_digest(), 16) % 4]),
    ids=lambda s: ".".join(f"{k}{n}" for k, n in s.items()),
)
def test_sizes_at_the_edges(devices: Devices, sizes: dict[str, int]) -> None:
    device = devices.get("vulkan", guard=GUARD)
    for use in USES[:1] + USES[2:3]:
        assert judged(device, use, cases({**SIZES, **sizes}, "q4_0", 1, "q8_act", 3, 1)) == 1


def test_the_time_of_a_group_is_counted_once(devices: Devices) -> None:
    device, made = devices.get("vulkan", guard=GUARD), cases(SIZES, "q4_0", 1, "q8_act", 3, 1)
    for use, within in ((USES[0], [None, *["0.linear"] * 4]), ({"workgroups": 0}, [None] * 5)):
        with device.tuning.forced("layer", use):
            plan, values = planned(made, device.name)
            device.reset()
            for name, decl in plan.tensors.items():
                device.store(decl, values.get(name, poisoned(decl, 0)))
            program = device.compile(plan, profile=True)
        device.wait(program.submit())
        assert [t.within for t in program.times()] == within
        assert program.times()[0].duration > 0


def test_no_live_row_is_written(devices: Devices) -> None:
    assert judged(devices.get("vulkan", guard=GUARD), USES[0], cases(SIZES, "q4_0", 1, "q8_act", 3, 0)) == 1


@pytest.mark.parametrize(("ffn", "found"), [((6144, 12288), 96), ((10240,), 80), ((21504,), 112), ((416,), 13)])
def test_workgroups_of_a_layer_share_its_blocks_evenly(ffn: tuple[int, ...], found: int) -> None:
    plan = [Step("fused_ffn", "ffn", {"F": f}, {}) for f in ffn]
    assert _layer.whole_shares(plan, 132) == found


def candidates() -> list[dict[str, int]]:
    """All; in the short profile those of one number of threads that no other test covers, which changes with the
    kernel."""
    of = space().named("layer").candidates
    others = [t for t in of["threads"] if t not in (256, 768)]
    threads = of["threads"] if LONG else [others[int(kernels_digest(), 16) % len(others)]]
    return [{"workgroups": n, "threads": t} for n in of["workgroups"] for t in threads]


@pytest.mark.parametrize("use", candidates(), ids=str)
def test_every_candidate_computes_what_the_oracle_does(devices: Devices, use: dict[str, int]) -> None:
    judged(devices.get("vulkan", guard=GUARD), use, cases({**SIZES, "hidden": 544}, "q8_0", 1, "q8_act", 5, 1))


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("several rows", {"rows": 2, "live": 2}),
        ("activations that are not int8", {"act": "f32"}),
        ("unquantised weights", {"act": "f32", "w": "f16"}),
        ("a row wider than the workgroup holds", {"sizes": {"hidden": 2080}}),
    ],
)
def test_unsupported_groups_are_recorded_step_by_step(devices: Devices, why: str, change: dict[str, Any]) -> None:
    how = {"w": "q4_0", "rows": 1, "act": "q8_act", "seed": 3, "live": 1, **change}
    made = cases({**SIZES, **how.pop("sizes", {})}, **how)
    assert judged(devices.get("vulkan", guard=GUARD), USES[0], made) > 5, why


def test_independent_steps_are_not_fused(devices: Devices) -> None:
    device, made = devices.get("vulkan", guard=GUARD), cases(SIZES, "q4_0", 1, "q8_act", 3, 1)
    assert judged(device, USES[0], made, swaps={"3.residual": "x"}) > 5
    assert judged(device, USES[0], made, order=(1, 0, 2, 3, 4), swaps={"1.a": "b"}) > 5
    assert judged(device, {"workgroups": 0}, made) > 5


def test_an_operation_with_another_binding_is_not_fused() -> None:
    """A test's or an ablation's replacement binding is what runs: on the device, or in one program."""
    made = cases(SIZES, "q4_0", 1, "q8_act", 3, 1)
    other = {**BINDINGS, "linear": lambda *a: BINDINGS["linear"](*a)}
    with open_backend("vulkan", guard=GUARD, bindings=other) as device:
        assert judged(device, USES[0], made) > 5
    with open_backend("vulkan", guard=GUARD) as device:
        assert judged(device, USES[0], made) == 1
        with device.tuning.forced("layer", USES[0]):
            assert device.compile(planned(made, device.name)[0], bindings=other).dispatches > 5


def route_cases(experts: int, chosen: int, rows: int, hidden: int = 96, act: str = "q8_act") -> list[Case]:
    choice = {"T": rows, "X": experts, "K": chosen}
    steps = (
        ("top_experts", choice, {"k": chosen, "scale": 0.25}, {}),
        ("group_experts", choice, {"e": experts}, {}),
        ("expert_rows", {"T": rows, "K": chosen, "H": hidden}, {}, {"y": act}),
    )
    return [
        Case(op, bind, dict(SPECS[op].dtypes(types)), SPECS[op].attrs(bind, attrs), rows, rows, seed)
        for seed, (op, bind, attrs, types) in enumerate(steps)
    ]


@pytest.mark.parametrize(("experts", "chosen", "rows"), [(128, 8, 1), (6, 2, 5), (33, 33, 3), (1, 1, 2), (64, 4, 32)])
def test_rows_choose_and_group_their_experts_in_one_dispatch(
    devices: Devices, experts: int, chosen: int, rows: int
) -> None:
    """Beside the dispatch that makes the grid of several rows. Equal logits, and some that are no numbers."""
    device, dispatches = devices.get("vulkan", guard=GUARD), 1 if rows == 1 else 2
    for hidden, act in ((96, "q8_act"), (1056, "f16")):
        made = route_cases(experts, chosen, rows, hidden, act)
        assert run(device, made) == dispatches
        made[0] = replace(made[0], kinds={"logits": "all_equal"})
        assert run(device, made) == dispatches
        logits = make(SPECS["top_experts"], replace(made[0], kinds={}))["logits"]
        logits.array[0, chosen:] = np.nan
        assert run(device, made, {"logits": logits}) == dispatches


def test_what_is_recorded_step_by_step_of_a_route(devices: Devices) -> None:
    """Rows whose logits or choices do not fit, float32 rows, and choices that the next step does not read."""
    device = devices.get("vulkan", guard=GUARD)
    for made in (route_cases(128, 8, 17), route_cases(16, 16, 17), route_cases(6, 2, 1, act="f32")):
        assert run(device, made) >= 3
    made = route_cases(6, 2, 2)
    assert run(device, made, swaps={"1.experts": "others"}) >= 3


def add_router_cases(hidden: int, experts: int, rows: int, act: str = "q8_act", live: bool = True) -> list[Case]:
    steps = (
        ("add_rmsnorm", {"T": rows, "H": hidden}, {"scale": 0.75}, {"y": act}),
        ("router", {"T": rows, "H": hidden, "X": experts}, {}, {}),
    )
    return [
        Case(op, bind, dict(SPECS[op].dtypes(types)), SPECS[op].attrs(bind, attrs), rows * live, rows * live, seed)
        for seed, (op, bind, attrs, types) in enumerate(steps)
    ]


@pytest.mark.parametrize(("hidden", "experts", "rows"), [(1056, 128, 1), (96, 5, 4), (2816, 3, 2)])
def test_a_row_is_added_normed_and_routed_in_one_dispatch(
    devices: Devices, hidden: int, experts: int, rows: int
) -> None:
    """Beside the dispatch that makes the grid of several rows. Rows that are not live are not written."""
    device, dispatches = devices.get("vulkan", guard=GUARD), 1 if rows == 1 else 2
    for act in ("q8_act", "f16", "f32"):
        assert run(device, add_router_cases(hidden, experts, rows, act)) == dispatches
    assert run(device, add_router_cases(hidden, experts, rows, live=False)) == dispatches


def test_what_is_recorded_step_by_step_before_a_router(devices: Devices) -> None:
    """Many rows, rows that do not fit into registers, and a router that reads another tensor."""
    device = devices.get("vulkan", guard=GUARD)
    wide = 4 * (HELD * device.max_threads + 8)
    for made in (add_router_cases(96, 6, 5), add_router_cases(wide, 2, 1)):
        assert run(device, made) >= 2
    assert run(device, add_router_cases(96, 6, 1), swaps={"1.x": "others"}) >= 2


GROUP_MUTANTS = list(load(MUTANTS / "groups"))
TRIED = tried(GROUP_MUTANTS)
ROWS_OF = {
    "altup_next": _altup_next,
    "altup_gate": _altup_gate,
    "expert_route": _expert_route,
    "add_router": _add_router,
}


@pytest.mark.parametrize("mutant", TRIED, ids=lambda s: f"{s.kind}-{s.name}")
def test_caught(devices: Devices, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutated kernel or binding of a fused group makes a step fail."""
    if mutant.kind == "shader":
        need_compiler()
    own, rows = mutant.op == "layer_own", ROWS_OF.get(mutant.op)
    sound = that_binds(devices, OWN_BUFFERS if own else 0)
    sizes = {**SIZES, "own": 64} if own else SIZES
    made = cases(sizes, "q4_0", 1, "q8_act", 3, 1)
    if rows:
        made = {
            _altup_next: lambda: stream_cases(1056, 1, "q8_act", 1),
            _altup_gate: lambda: gate_cases(1056, 96),
            _expert_route: lambda: route_cases(64, 4, 1),
            _add_router: lambda: add_router_cases(1056, 6, 1),
        }[rows]()
    chosen = spy_kernels(sound, monkeypatch)
    kinds = mutant.op == "layer_kinds"
    how: dict[str, Any] = {"others": two_kinds("q4_0")[1:]} if kinds else {}
    assert judged(sound, USES[0], made, **how) == (2 if rows is _altup_gate else 4 if kinds else 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options: dict[str, Any] = {"spirv": mutated_spirv(mutant, chosen, tmp_path)} if mutant.kind == "shader" else {}
    if mutant.kind == "binding":
        wrong = mutated_function(mutant, "record")
        for ops in (rows.OPS,) if rows else (_layer.OPS, _layer.QUERIES_WITH_OWN):
            others = [(o, wrong if o == ops else group) for o, group in BEGUN_BY[ops[0]]]
            monkeypatch.setitem(BEGUN_BY, ops[0], others)
    opened = open_for_binding if mutant.kind == "binding" else open_another
    with opened(sound, guard=GUARD, **options) as device, pytest.raises((Disagreement, AssertionError, Fault)):
        (run if rows else judged if kinds else cancelled)(device, *(() if rows else (USES[0],)), made, **how)


def test_every_group_has_a_shader_and_a_binding_mutant() -> None:
    kinds, recorders = [s.kind for s in GROUP_MUTANTS], len(set(GROUPS.values()))
    assert kinds.count("shader") >= recorders and kinds.count("binding") >= recorders
