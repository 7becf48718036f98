"""Products on matrix units whose tiles do not fill a device: split-K, and each partial is added once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from conformance.support.devices import GUARD, MatrixDevices, share_of, spy_kernels
from hybrid.core.dtypes import DTYPES
from hybrid.harness import POISON, prepare, run_case
from hybrid.harness.cases import Case
from hybrid.harness.fixed import variant
from hybrid.harness.inputs import make
from hybrid.harness.sizes import base_bind
from hybrid.harness.tuned import plan_for
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.ops._gemm import (
    DEFAULTS,
    ENDS,
    MOST_SPLITS,
    N8,
    REGISTER_TILES,
    SPLIT_SUBGROUPS,
    SUMS,
    TILES,
    TYPES,
    split_k,
    split_threads,
)
from hybrid.kernels.vulkan.tuning import space
from hybrid.spec import load_op


@pytest.mark.parametrize(
    ("shape", "groups", "found"),
    [
        ((11, 64, 84), 132, (60, 3)),  # five full waves, and 44 tiles in three partials each
        ((11, 42, 336), 132, (36, 2)),
        ((1, 42, 336), 264, (0, 6)),
        ((1, 336, 84), 264, (264, 3)),
        ((11, 336, 84), 132, (336, 1)),  # 28 full waves
        ((1, 336, 84), 0, (336, 1)),
        ((1, 5, 2), 264, (0, 2)),  # no more partials than stages
        ((1, 1, 999), 264, (0, MOST_SPLITS)),
        ((7, 3, 9), 24, (3, 1)),  # 21 tiles of 24: too many to be split
    ],
)
def test_the_tiles_that_do_not_fill_a_device_are_cut(shape, groups, found):
    assert split_k(*shape, groups, 10**6) == found


@pytest.mark.parametrize(
    ("shape", "found"), [((1, 28, 336), (0, 4)), ((1, 28, 64), (0, 4)), ((2, 28, 336), (0, 7)), ((1, 43, 84), (0, 3))]
)
def test_fewer_parts_where_their_sums_take_longer(shape, found):
    """Tiles of 128 x 192 of 27B's matrices: down of 128 and 256 rows, output, q, k and v."""
    assert split_k(*shape, 132, 10**6, ENDS["128x192"], SUMS["128x192"]) == found


def test_split_tiles_take_fewer_stages_and_none_is_lost():
    for down, columns, groups in itertools.product(range(1, 13), range(1, 90), (24, 132, 264)):
        whole, parts = split_k(down, columns, 50, groups, 10**6)
        rest = (columns - whole) * down
        assert 0 <= whole <= columns and 1 <= parts <= MOST_SPLITS
        assert (parts > 1) == (rest > 0)
        if rest:
            assert whole * down <= down * columns // groups * groups
            assert -(-rest * parts // groups) * -(-50 // parts) < -(-rest // groups) * 50


SIZES = (11, 133, 261)  # rows: only split tiles; and, of the smaller ones, split and whole tiles together
BIND = {"linear": {"N": 331, "K": 224}, "fused_ffn": {"H": 160, "F": 352}}
PAIRS = {
    "linear": {"N": 331, "K": 320},
    "fused_ffn": {"H": 320, "F": 448},
}  # whole pairs of blocks, for register_weights.slang


def case_for(op: str, rows: int, dtype: str, shapes: dict[str, dict[str, int]] = BIND) -> Case:
    spec, bind = load_op(op), {**shapes[op], "T": rows}
    types = (
        {"x": "f16", "w": dtype} if op == "linear" else {"x": "f16", "h": "f16", "w_gate_up": dtype, "w_down": dtype}
    )
    return variant(spec, {**base_bind(spec), **bind}, spec.dtypes(types), 0, frozenset(bind))


FAMILIES = {"linear": "linear.gemm", "fused_ffn": "ffn_up.gemm"}
TILED = {
    op: [tile for tile in TILES if tile in space().named(family).candidates["tile"]] for op, family in FAMILIES.items()
}


@pytest.mark.parametrize(("op", "tile"), [(op, tile) for op in BIND for tile in TILED[op]])
@pytest.mark.parametrize("rows", SIZES)
def test_whole_and_cut_tiles_of_one_product_agree_with_the_oracle(
    matrices: MatrixDevices, op: str, rows: int, tile: str
) -> None:
    device, family = matrices(guard=GUARD), FAMILIES[op]
    ways = [(*way, live) for way in (("q4_0", 24), ("f16", 24), ("q8_0", "8 * cores")) for live in (rows, rows // 2)]
    for dtype, groups, live in share_of(device, ways, 6):
        with device.tuning.forced(family, {"tile": tile, "groups": groups}):
            case = case_for(op, rows, dtype, BIND if tile in DEFAULTS else PAIRS)
            run_case(load_op(op), device, replace(case, rows=live))


def test_counters_are_left_as_they_were_found(matrices: MatrixDevices) -> None:
    """The same recording, run repeatedly, gives the same bits."""
    device, spec = matrices(), load_op("linear")
    case = case_for("linear", SIZES[0], "q4_0")
    with device.tuning.forced("linear.gemm", {"tile": "32x64", "groups": "2 * cores"}):
        program = prepare(spec, device, case, make(spec, case), POISON[0])
    assert program.recording.counter_bytes
    device.wait(program.submit())
    first = device.read("y").array.view(np.uint32).copy()  # dead rows hold a NaN
    for _ in range(3):
        device.wait(program.submit())
        assert (device.read("y").array.view(np.uint32) == first).all()


@pytest.mark.parametrize("dtype", [t for t in TYPES if DTYPES[t].quantised])
def test_few_rows_meet_weights_that_were_rounded_once(matrices: MatrixDevices, dtype: str) -> None:
    """With one element in a row of x, the decoding of each weight is visible: its f16 is the definition's."""
    device, spec = matrices(guard=GUARD), load_op("linear")
    for tile in (t for t in TILED["linear"] if t not in DEFAULTS):
        rows = 43 if tile in SPLIT_SUBGROUPS else max(7, TILES[tile][0] - 5)
        bind = {"T": rows, "N": 331, "K": 512}
        case = variant(spec, {**base_bind(spec), **bind}, spec.dtypes({"x": "f16", "w": dtype}), rows, frozenset(bind))
        with device.tuning.forced("linear.gemm", {"tile": tile}):
            run_case(spec, device, replace(case, kinds={"x": "one_hot"}))


@pytest.mark.parametrize("width", [64, 96, 256])
def test_both_products_of_a_layers_own_input_by_subgroups_that_share_k(matrices: MatrixDevices, width: int) -> None:
    """Its second K is not a whole number of block pairs with 96 columns: that product uses another tile."""
    device, spec = matrices(guard=GUARD), load_op("per_layer_input")
    types = spec.dtypes({"x": "f16", "h": "f16", "w_gate": "q4_0", "w_proj": "q4_0"})
    with device.tuning.forced("linear.gemm", {"tile": SPLIT_SUBGROUPS[0]}):
        for rows, live in ((5, 5), (37, 21), (64, 64)):
            bind = {"T": rows, "H": 4672 if width == 256 else 320, "P": width, "E": 3 * width}
            case = variant(spec, {**base_bind(spec), **bind}, types, rows, frozenset(bind))
            run_case(spec, device, replace(case, rows=live, attrs={**case.attrs, "layer": 2}))


@pytest.mark.parametrize("tile", SPLIT_SUBGROUPS)
def test_subgroups_share_the_columns_of_a_small_product_evenly(tile: str) -> None:
    """In the minimum number of passes whose sums fit in shared memory."""
    rows, columns = TILES[tile]
    for shared in (16384, 32768, 49152):
        device = DryDevice(shared_bytes=shared)
        for k in range(64, 22000, 64):
            stages, subgroups = -(-k // 128), split_threads(device, tile, k) // 32
            most = max(n for n in range(1, 17) if n * rows * (4 * columns + 16) <= shared)
            passes = -(-stages // subgroups)
            assert subgroups <= most and passes == -(-stages // most) and stages > passes * (subgroups - 1)


@pytest.mark.parametrize("tile", [N8[1], SPLIT_SUBGROUPS[0]])
@pytest.mark.parametrize(
    ("known", "k", "dtype", "to_registers"),
    [(True, 320, "q4_0", True), (False, 320, "q4_0", False), (True, 224, "q4_0", False), (True, 320, "q8_0", False)],
)
def test_weights_go_straight_to_registers_where_lanes_hold_what_the_kernel_counts_on(
    monkeypatch, tile, known, k, dtype, to_registers
):
    features = {"f16_matrices": True, "matrix_lanes": known}
    dry = DryDevice(features=lambda name: features.get(name, False), tuning="nvidia")
    chosen = spy_kernels(dry, monkeypatch)
    case = case_for("linear", 7, dtype, {"linear": {"N": 331, "K": k}})
    with dry.tuning.forced("linear.gemm", {"tile": tile}):
        record(plan_for(load_op("linear"), case), dry)
    assert (f"linear.gemm.{dtype}.f16.{tile}" in chosen) == to_registers and len(chosen) == 1
    assert ("linear", dtype) in REGISTER_TILES or not to_registers
