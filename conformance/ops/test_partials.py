"""Split-K products whose partials the next row kernel adds. Each step is checked by its own operation's definition, on
the memory left by both. Where a device has no matrix units, the only split products, partials are made another way."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.mutation.mutate import Mutant, load, mutated_function, mutated_spirv, tried
from conformance.ops.test_groups import SIZES
from conformance.support.devices import (
    GUARD,
    Devices,
    MatrixDevices,
    need_compiler,
    open_another,
    share_of,
    spy_kernels,
)
from conformance.support.groups import SPECS, cases, planned, proved
from conformance.support.paths import MUTANTS
from conformance.support.profile import LONG
from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.harness.cases import Case
from hybrid.harness.compare import Disagreement
from hybrid.harness.fixed import variant
from hybrid.harness.inputs import make
from hybrid.harness.interpreter.values import Fault
from hybrid.harness.sizes import base_bind
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.ops import GROUPS, _linear, _partials, linear
from hybrid.kernels.vulkan.ops._rows import Parts
from hybrid.kernels.vulkan.steps import BEGUN_BY

pytestmark = pytest.mark.slow

SHORT = {**SIZES, "hidden": 128, "heads": 96}
PARTS, GRIDS = 5, 1  # dispatches: grids of live rows
AT = PARTS // 2  # the part that holds the product; the other parts are zeros


def pair(
    ops: tuple[str, str], sizes: Mapping[str, int], rows: int, act: str, live: int, w: str = "q4_0", y: str = "f16"
) -> list[Case]:
    """The cases of two consecutive steps of a layer."""
    product = next(c for c in cases(sizes, w, rows, act, 3, live) if c.op == ops[0])
    if ops[1] == "decode_attention":
        return [product, attention(product.bind, live)]
    return [product, reader(ops[1], sizes["hidden"], rows, live, y)]


def attention(product: Mapping[str, int], live: int) -> Case:
    """A product of queries, keys and values, or of queries only, by its sizes."""
    spec, rows = SPECS["decode_attention"], product["T"]
    if "HQ" in product:
        heads = {"KV": 2, **{axis: product[axis] for axis in ("HQ", "HK", "D")}}
    else:
        heads = {"KV": 0, "HQ": product["N"] // 32, "HK": 1, "D": 32}
    bind = {**base_bind(spec), "T": rows, "S": rows, "MB": 4, "B": 4 * rows, **heads, "R": heads["D"]}
    made = variant(spec, bind, spec.dtypes({"o": "f16", "k_cache": "f16", "v_cache": "f16"}), 5, frozenset(bind))
    return replace(made, rows=live, outs=live)


def reader(op: str, hidden: int, rows: int, live: int, y: str = "f16") -> Case:
    spec, bind = SPECS[op], {"T": rows, "H": hidden}
    if "A" in spec.axes:
        bind["A"] = 4
    return Case(op, bind, dict(spec.dtypes({"y": y})), spec.attrs(bind, {}), live, live, seed=4, style="full")


def zeros_beside(rec: Any, step: Step, t: Mapping[str, Any], partials: int = 0) -> None:
    """linear whose first partial is the whole product; the others are products with the plan's zero tensor."""
    if not partials:
        return linear_record(rec, step, t)
    rows = step.bind["T"]
    y = t["y"].parts[0]
    each = y.size // partials
    for i in range(partials):
        w = t["w"] if i == AT else rec.device.tensor("nothing")
        _linear.linear(rec, t["x"], w, replace(y, offset=y.offset + i * each, size=each), rows=rows, extent=step.extent)
    return None


linear_record = linear.record


@contextmanager
def parts_by_other_means() -> Iterator[None]:
    """Every product keeps its partials, by dispatches that any device has."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (_linear, _partials):
            patch.setattr(module, "kept_partials", lambda *a, **k: PARTS)
        patch.setattr(linear, "record", zeros_beside)
        patch.setitem(_partials.PRODUCTS, "linear", ("x", "w", "y", zeros_beside))
        yield


def given_more(plan: Plan, more: Mapping[str, Tensor]) -> Plan:
    """The same with these additional tensors."""
    decls = {n: TensorDecl(n, t.dtype, t.shape, "weight") for n, t in more.items()}
    return replace(plan, tensors={**plan.tensors, **decls})


def judge(
    device: Any, rows: int = 3, live: int = 3, hidden: int = 128, y: str = "f16", swaps: Mapping[str, str] = {}
) -> int:
    """Dispatches of linear and add_rmsnorm as one group."""
    made = pair(("linear", "add_rmsnorm"), {**SHORT, "hidden": hidden}, rows, "f32", live, "f32", y)
    more = {"nothing": Tensor.of(np.zeros((hidden, SHORT["heads"]), np.float32))}
    plan, values = planned(made, device.name, swaps=swaps)
    return proved(device, made, given_more(plan, more), {**values, **more})


@pytest.mark.width
@pytest.mark.parametrize("op", [op for op in _partials.READERS if op != "decode_attention"])
def test_parts_are_added_up_and_their_sum_is_kept(devices: Devices, op: str) -> None:
    """Against the operation's definition of the sum, and the sum bit by bit: partials are added in order."""
    device = devices.get("vulkan", guard=GUARD)
    for hidden, rows, live, count in ((2560, 2, 2, 8), (96, 1, 0, 2), (1056, 3, 3, 5), (5376, 2, 2, 3))[
        : None if LONG else 2
    ]:
        judge_reader(device, op, hidden, rows, live, count)


def judge_reader(device: Any, op: str, hidden: int, rows: int, live: int, count: int) -> None:
    made = [reader(op, hidden, rows, live)]
    parts = np.random.default_rng(count).standard_normal((count, rows, hidden)).astype(np.float32)

    def record(rec: Any, step: Step, t: Mapping[str, Any]) -> None:
        _partials.READERS[op][1](rec, step, t, parts=Parts(rec.device.tensor("parts").parts[0], count))

    more = {"parts": Tensor.of(parts.reshape(count * rows, hidden))}
    plan, values = planned(made, device.name)
    total = reduce(np.add, parts)
    a = plan.steps[0].args["a"]
    first = {name: value for name, value in values.items() if name != a}
    proved(device, made, given_more(plan, more), {**first, **more}, bindings={**device.bindings, op: record})
    np.testing.assert_array_equal(device.read(a).array[:live], total[:live])


@pytest.mark.parametrize("of", ["fused_qkv", "linear"])
def test_parts_of_queries_keys_and_values_are_added_up(devices: Devices, of: str) -> None:
    device = devices.get("vulkan", guard=GUARD)
    for d, live, count in ((32, 3, 5), (32, 0, 2), (512, 3, 8))[: None if LONG else 2]:
        judge_attention(device, of, d, live, count)


def judge_attention(device: Any, of: str, d: int, live: int, count: int) -> None:
    """As judge_reader, of three rows."""
    bind = {"T": 3, "HQ": 4, "HK": 2, "D": d} if of == "fused_qkv" else {"T": 3, "N": 128}
    case = attention(bind, live)
    spec, rows = SPECS[case.op], bind["T"]
    values = make(spec, case)
    caches = {name: values[name] for name in spec.state}
    parts = np.random.default_rng(count).standard_normal((count, *values["qkv"].shape)).astype(np.float32)

    def record(rec: Any, step: Step, t: Mapping[str, Any]) -> None:
        _partials.READERS[case.op][1](rec, step, t, parts=Parts(rec.device.tensor("parts").parts[0], count))

    more = {"parts": Tensor.of(parts.reshape(count * rows, -1))}
    plan, drawn = planned([case], device.name)
    first = {name: value for name, value in {**drawn, **caches}.items() if name != "qkv"}
    proved(
        device, [case], given_more(plan, more), {**first, **more}, caches, bindings={**device.bindings, case.op: record}
    )
    np.testing.assert_array_equal(device.read("qkv").array[:live], reduce(np.add, parts)[:live])


def test_a_product_keeps_its_partials_and_added_up_by_its_reader(devices: Devices) -> None:
    device = devices.get("vulkan", guard=GUARD)
    with parts_by_other_means():
        assert judge(device, rows=5, live=5) == GRIDS + PARTS + 1
        assert judge(device, live=0) == GRIDS + PARTS + 1


def test_independent_steps_are_recorded_separately(devices: Devices) -> None:
    device = devices.get("vulkan", guard=GUARD)
    with parts_by_other_means():
        assert judge(device, swaps={"1.a": "b"}) == GRIDS + 2
        assert judge(device, y="f32") == GRIDS + 2
        longest = 4 * 3 * device.max_threads
        assert judge(device, hidden=longest + 32) == GRIDS + 2


@pytest.mark.parametrize("ops", _partials.OPS, ids="-".join)
def test_a_table_says_whether_partials_are_kept(ops: tuple[str, str]) -> None:
    """The product writes the number of partials that its consumer reads, as both are configured; else it writes its
    result."""
    units = ("f16_matrices", "matrix_lanes")
    dry = DryDevice(features=units.__contains__, tuning="nvidia", cores=132, shared_bytes=49152)
    inner = {"hidden": 2048} if ops[0] == "fused_qkv" else {"hidden": 512, "heads": 2048, "ffn": 2048}
    plan, _ = planned(pair(ops, {**SIZES, **inner, "hq": 8, "hk": 4, "d": 32}, 32, "f16", 32), "dry")
    for most, found in ((8, 8), (3, 3), (0, None)):
        with dry.tuning.forced("linear.partials", {"most": most}):
            *_, product, read = [d for d in record(plan, dry).dispatches if d.kernel.name != "grid"]
        whole, splits = struct.unpack("<2I", product.push[-8:])
        assert product.writes[0] in read.reads[1:3] and whole == 0
        assert splits - (1 << 31) == found if found else splits < 1 << 31
        assert product.grid[1] == 8 * (splits & ~(1 << 31))
        assert product.writes[0].size == 4 * 32 * 512 * (found or 1)
        if ops[1] != "decode_attention":  # the number is a constant of the pipeline
            assert struct.unpack("<I", read.push[-4:]) == (found or 1,)


ROWS = {"32x64": 27, "64x64": 61, "8x256": 7, "16x256": 11, "24x256": 19, "32x256": 27, "40x256": 35, "48x256": 43}


def on_matrix_units(device: Any, ops: tuple[str, str], tile: str, live: int) -> None:
    """Sizes whose K is not a whole number of stages, with some empty splits."""
    sizes = {**SIZES, "hidden": 320, "heads": 1088, "ffn": 1344}
    made = pair(ops, sizes, ROWS[tile], "f16", live)
    with (
        device.tuning.forced("linear.gemm", {"tile": tile, "groups": "8 * cores"}),
        device.tuning.forced("linear.partials", {"most": 8}),
    ):
        plan, values = planned(made, device.name)
        last = made[-1]
        caches = {n: make(SPECS[last.op], last)[n] for n in SPECS[last.op].state}
        proved(device, made, plan, {**values, **caches}, caches)


@pytest.mark.parametrize("tile", ROWS)
def test_products_on_matrix_units_are_kept(matrices: MatrixDevices, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = matrices(guard=GUARD)
    counts: list[int] = []

    def watched(*a: Any, **k: Any) -> int:
        counts.append(_linear.kept_partials(*a, **k))
        return counts[-1]

    monkeypatch.setattr(_partials, "kept_partials", watched)
    ways = [(ops, live) for ops in _partials.OPS for live in (ROWS[tile], 0)]
    for ops, live in share_of(device, ways, len(ways)):
        on_matrix_units(device, ops, tile, live)
    assert min(counts) > 1


MUTATED = list(load(MUTANTS / "partials"))


@pytest.mark.parametrize("mutant", tried(MUTATED), ids=lambda m: f"{m.kind}-{m.name}")
def test_caught(
    devices: Devices, matrices: MatrixDevices, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = matrices(guard=GUARD) if mutant.needs else devices.get("vulkan", guard=GUARD)

    def tell(device: Any) -> None:
        if mutant.needs:
            on_matrix_units(device, _partials.OPS[0], "32x64", 27)
        elif mutant.file == "decode_attention.slang":
            for live in (3, 0):
                judge_attention(device, "fused_qkv", 32, live, 5)
        elif mutant.kind == "shader":
            for live in (1, 0):
                judge_reader(device, "add_rmsnorm", 1056, 1, live, 8)
        else:
            judge(device)

    chosen = spy_kernels(sound, monkeypatch)
    with parts_by_other_means() if mutant.kind == "binding" else nullcontext():
        tell(sound)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        options: dict[str, Any] = {}
        if mutant.kind == "shader":
            need_compiler()
            options["spirv"] = mutated_spirv(mutant, chosen, tmp_path)
        else:
            wrong = mutated_function(mutant, "record")
            of = [(ops, wrong if group is GROUPS[_partials.OPS[0]] else group) for ops, group in BEGUN_BY["linear"]]
            monkeypatch.setitem(BEGUN_BY, "linear", of)
        with (
            open_another(sound, guard=GUARD, **options) as device,
            pytest.raises((Disagreement, AssertionError, Fault)),
        ):
            tell(device)
