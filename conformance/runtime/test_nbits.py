"""onnxruntime's products are the definition's: every type, mixed rows, activations that it would round again, threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.support.paths import DEMO
from hybrid.checkpoint import CheckpointError
from hybrid.core.dtypes import QUANTISED_TYPES
from hybrid.core.tensor import Rows, Tensor
from hybrid.harness import block_values
from hybrid.kernels.host import nbits
from hybrid.kernels.host.nbits import Product, exact_for
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.kernels.oracle.linear import linear
from hybrid.quant.codec import dequantise, quantise

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
X = quantise(np.random.default_rng(1).standard_normal((19, 512)), "q8_act")


def drawn(dtype: str, n: int = 40, seed: int = 0) -> Tensor:
    return block_values.quantised(seed, dtype, (n, 512), dtype, 0.05)


def error(y: np.ndarray, x: Tensor, w: Tensor | Rows) -> float:
    """The largest error in units of |x| |w|."""
    a, b = dequantise(x, np.float64), dequantise(w, np.float64)
    return float(np.max(np.abs(y - a @ b.T) / (np.abs(a) @ np.abs(b).T)))


@pytest.mark.parametrize("dtype", QUANTISED_TYPES)
def test_a_product_of_any_type_is_the_definitions(dtype: str) -> None:
    w = drawn(dtype)
    assert exact_for(X) and error(Product(w)(X), X, w) < 5e-7


def test_rows_of_several_types_and_pieces_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nbits, "_AT_ONCE", 7 * 512)
    w = Rows(tuple(drawn(t, n, n) for t, n in (("q5_0", 9), ("q8_0", 10), ("q4_k", 11), ("q6_k", 12))))
    one, three = Product(w), Product(w, lambda: 3)
    assert one.shape == (42, 512) and error(one(X), X, w) < 5e-7
    assert np.array_equal(one(X), three(X))
    assert np.allclose(one(X)[3:4], one(X.rows(3, 4)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spoil", ["no code of 127", "tiny", "infinite"])
def test_activations_that_would_be_rounded_again_are_computed_in_float32(spoil: str) -> None:
    codes, scales = (p.copy() for p in X.parts)
    if spoil == "no code of 127":
        codes[4, :32] = 5
        scales.reshape(19, 16, 2)[4, 0, 1] = 160 * scales.reshape(19, 16, 2)[4, 0, 0]
    else:
        scales.reshape(19, 16, 2)[4, 0] = 1e-38 if spoil == "tiny" else np.inf
    x, w = Tensor("q8_act", X.shape, (codes, scales)), drawn("q4_0")
    assert not exact_for(x)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(*(linear(x=x, w=m, real=np.float32)[0] for m in (Product(w), w)))


def test_a_processor_with_wrong_products_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nbits.unusable() is None and CpuDevice().failures == ()
    monkeypatch.setattr(Product, "__call__", lambda self, x: linear(x=x, w=self.source, real=np.float32)[0] + 1)
    why = nbits.unusable.__wrapped__()
    assert why is not None and why.endswith("wrong products of q4_0 on this processor")
    monkeypatch.setattr(nbits, "unusable", lambda: why)
    assert CpuDevice().failures == (f"{why}; so float32",) and "onnxruntime" not in CpuDevice().threads


def test_a_matrix_that_cannot_be_read_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are made by other threads, while more matrices are stored."""

    def damaged(w: Tensor, form: nbits._Form) -> None:
        raise CheckpointError("no such codes")

    assert nbits.unusable() is None
    monkeypatch.setattr(nbits, "_coded", damaged)
    with pytest.raises(CheckpointError, match="no such codes"):
        hybrid.load(DEMO, "cpu")


def test_a_model_holds_codes_instead_of_its_file() -> None:
    with hybrid.load(DEMO, "cpu") as model:
        memory, text = model.engine.device.memory(), "".join(model.generate("def f(", max_tokens=6))
    size = Path(DEMO).stat().st_size
    assert memory["dequantised"] == memory["left_in_files"] == 0 and memory["weights"] < size / 4
    assert size < memory["codes"] < 1.3 * size
    with hybrid.load(DEMO, "cpu", precision="exact") as model:
        memory = model.engine.device.memory()
        assert memory["codes"] == 0 and memory["dequantised"] > 3 * size
        assert "".join(model.generate("def f(", max_tokens=6)) == text
