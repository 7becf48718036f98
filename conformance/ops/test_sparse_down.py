"""Sparse feed-forwards that read columns of down: the column-major copy, every type and number of rows, and a whole
model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.support.devices import without_vulkan
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny_gemma3n, write_hf
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.devices.opening import Opened
from hybrid.harness import POISON, execute, run_case
from hybrid.harness.fixed import dtype_cases
from hybrid.harness.inputs import make
from hybrid.harness.tuned import plan_for
from hybrid.kernels.vulkan.columns import SUFFIX
from hybrid.kernels.vulkan.device import VulkanDevice, VulkanUnavailable
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.ops import BINDINGS
from hybrid.kernels.vulkan.ops._sparse import sparse_down
from hybrid.kernels.vulkan.types import SCALED
from hybrid.planning.expand import WeightInfo
from hybrid.planning.footprint import laid_out_again
from hybrid.quant.codec import encode
from hybrid.spec.model import find_model
from hybrid.spec.op import load_op

pytestmark = pytest.mark.width

FFN = load_op("fused_ffn")


def case(w: str, rows: int, h: str = "q8_act", sparsity: float = 0.9):
    """More blocks of columns than a workgroup's slices take at once, and rows of down that do not fill the last
    workgroup."""
    types = {"x": h, "h": h, "w_gate_up": w, "w_down": w, "y": "f32"}
    made = next(iter(dtype_cases(FFN, types)))
    return replace(made, bind={"T": rows, "H": 96, "F": 1056}, rows=rows, attrs={"sparsity": sparsity})


@pytest.fixture(scope="module")
def radv():
    """Vulkan with the table of Mesa's driver for AMD, which selects columns."""
    try:
        with VulkanDevice("vulkan", tuning="radv") as device:
            yield device
    except VulkanUnavailable as error:
        without_vulkan(error)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("w", SCALED)
def test_columns_make_what_the_oracle_does(radv, w, rows):
    run_case(FFN, radv, case(w, rows))


@pytest.mark.parametrize("w", SCALED)
def test_a_damaged_row_is_not_skipped_with_its_codes(radv, w):
    """Of three rows the first and the last hold a NaN, which reaches h as scales, whatever their codes are."""
    run_case(FFN, radv, replace(case(w, 3), kinds={"x": "nan"}))


@pytest.mark.parametrize("w", SCALED)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_block_without_codes_counts_where_its_scale_is_damaged(w, scale):
    """A driver may encode a block with a NaN to any codes. Tests the kernel alone, as a binding of `linear`."""

    def alone(rec, step, t):
        sparse_down(
            rec, t["x"], rec.device.by_columns(t["w"]), t["y"].parts[0], rows=step.bind["T"], extent=step.extent
        )

    try:
        device = VulkanDevice("vulkan", tuning="radv", bindings={**BINDINGS, "linear": alone})
    except VulkanUnavailable as error:
        without_vulkan(error)
    linear = load_op("linear")
    made = replace(
        next(iter(dtype_cases(linear, {"x": "q8_act", "w": w, "y": "f32"}))), bind={"T": 4, "N": 96, "K": 1056}, rows=4
    )
    with device:
        sound = make(linear, made)
        codes, pairs = (p.copy() for p in sound["x"].parts)
        codes[:, 64:96] = 0  # block 2 of 33, in every row
        pairs.reshape(4, -1, 2)[:, 2] = 0.0
        pairs.reshape(4, -1, 2)[2, 2] = scale, scale * 0
        y = execute(linear, device, made, {**sound, "x": Tensor("q8_act", (4, 1056), (codes, pairs))}, POISON[0])[
            "y"
        ].array
    assert np.isnan(y[2]).all() and np.isfinite(np.delete(y, 2, axis=0)).all()


@pytest.mark.parametrize(
    ("w", "rows", "h", "sparsity", "takes"),
    [
        ("q4_0", 4, "q8_act", 0.9, True),
        ("q8_0", 1, "q8_act", 0.5, True),
        ("q4_0", 5, "q8_act", 0.9, False),
        ("q4_0", 1, "q8_act", 0.0, False),
        ("q4_1", 1, "q8_act", 0.9, False),
        ("q4_0", 1, "f32", 0.9, False),
    ],
)
def test_which_steps_read_columns(w, rows, h, sparsity, takes):
    """Few rows of int8 activations, of a sparse layer, in types with such a kernel, where the table selects it."""
    for tuning, expected in (("radv", takes), ("default", False), ("nvidia", False)):
        names = [
            d.kernel.name
            for d in record(plan_for(FFN, case(w, rows, h, sparsity)), DryDevice(tuning=tuning)).dispatches
        ]
        assert (f"sparse_down.{w}" in names) == expected, names


@pytest.mark.parametrize("f", [64, 512])
@pytest.mark.parametrize("w", SCALED)
def test_the_second_layout_by_hand(radv, w, f):
    """Codes [F, N], scales [F / 32, N], for tiled rows too; rewritten with the weight, dropped with it."""
    rng, n = np.random.default_rng(5), 96
    radv.reset()
    for again in (False, True):
        value = encode(rng.standard_normal((n, f)).astype(np.float32), w)
        if again:
            radv.write("w", value)
        else:
            radv.store(TensorDecl("w", w, (n, f), "weight"), value)
        codes, scales = value.parts
        if w == "q4_0":
            blocks = codes.reshape(n, f // 32, 16)
            codes = np.concatenate([blocks & 15, blocks >> 4], axis=-1).reshape(n, f)
        tensor = radv.by_columns(radv.tensor("w"))
        radv.wait()
        made, of_blocks = (np.empty(p.size, np.uint8) for p in tensor.parts)  # read() returns the weight's rows
        for piece, out in zip(tensor.parts, (made, of_blocks), strict=True):
            radv.transfer.download(piece, out)
        made = np.stack([made & 15, made >> 4], axis=-1).reshape(f, n) if w == "q4_0" else made.reshape(f, n)
        np.testing.assert_array_equal(made, codes.view(np.uint8).T)
        np.testing.assert_array_equal(of_blocks.view(np.uint16).reshape(f // 32, n), scales.view(np.uint16).T)
    assert radv.by_columns(radv.tensor("w")) is tensor
    radv.drop("w")
    with pytest.raises(KeyError, match="w" + SUFFIX):
        radv.tensor("w" + SUFFIX)


def test_second_layouts_of_a_published_size_are_planned_as_weights():
    """Ten layers of 8192 by 2048, 4.5 bits."""
    hp, dry = find_model("gemma3n-e2b").hparams(), DryDevice(tuning="radv")
    weights = {f"blk.{i}.ffn_down.weight": WeightInfo("q4_0", (2048, 8192)) for i in range(hp.n_layers)}
    assert laid_out_again(hp, weights, dry.second_layout) == 10 * 2048 * 8192 * 18 // 32
    assert laid_out_again(hp, weights, DryDevice().second_layout) == 0


@pytest.mark.skipif(not LONG, reason="a model's kernels to compile; the long profile does")
@pytest.mark.usefixtures("radv")
def test_a_model_that_reads_columns_gives_the_same_tokens_in_planned_memory(tmp_path: Path):
    """Two of a small model's layers are sparse. The column-major copies are made once for all plans, and are planned as
    weights. The tokens equal those of dense products, up to rounding."""
    hp = tiny_gemma3n()
    folder, found = write_hf(tmp_path, hp, dtype="f32"), {}
    for most in (4, 0):
        device = VulkanDevice("vulkan", tuning="radv")
        with (
            device.tuning.forced("sparse_down", {"most": most}),
            hybrid.load(folder, Opened(device, device), ctx=64, weights="q4_0") as model,
        ):
            result = model.submit(list(range(4, 20)), max_tokens=6, ignore_eos=True, logprobs=1).result(60)
            made = sorted(n for n in device._tensors if n.endswith(SUFFIX))
            again = laid_out_again(hp, model.engine.target.weights, device.second_layout)
            found[most] = [c.logprob for c in result.logprobs or ()], device.memory()["weights"], again
        assert made == [f"blk.{i}.ffn_down.weight{SUFFIX}" for i in (0, 1) if most]
    assert len(found[4][0]) == 6 and [found[most][2] for most in (4, 0)] == [64 * (96 + 64) * 18 // 32, 0]
    np.testing.assert_allclose(found[4][0], found[0][0], atol=0.02)
    assert found[4][2] <= found[4][1] - found[0][1] <= found[4][2] + 4096  # tensors are padded
