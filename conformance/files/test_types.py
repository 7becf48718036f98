"""Types of files that a device does not compute with, and matrices with rows of several types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.files import type_table
from conformance.files.kquants import K_TYPES, encode, mixture, write_gguf
from conformance.support import models
from conformance.support.devices import BACKENDS, open_backend
from conformance.support.models import documents
from conformance.support.paths import DEMO
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core.dtypes import DTYPES, QUANTISED_TYPES, WEIGHT_TYPES
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Rows, Tensor
from hybrid.engine.loading import EngineConfig, stored_types
from hybrid.engine.loop import Engine
from hybrid.harness import block_values
from hybrid.harness.compare import UNIT
from hybrid.perplexity import _log_softmax
from hybrid.quant.codec import dequantise, rows, take
from hybrid.quant.native import MOST, NATIVE, computed, native
from hybrid.quant.reencode import Reencoded, reencode, summary

IDS = list(range(3, 40))


@pytest.mark.parametrize("dtype", QUANTISED_TYPES)
def test_two_decoders_agree(dtype: str) -> None:
    """The oracle's, which is ggml's bit for bit, and the conformance suite's own."""
    t = block_values.quantised(5, "t", (3, 512), dtype, 0.05)
    q, scale, minimum = block_values.unpack(t)
    assert np.array_equal((q * scale + minimum).reshape(t.shape), dequantise(t, np.float64))
    exact = dequantise(block_values.exact(6, "t", (2, 512), dtype))
    assert np.array_equal(exact, np.rint(exact)) and abs(exact).max() <= 128
    assert np.isfinite(dequantise(block_values.largest(t, 1), np.float64)).all()


@pytest.mark.parametrize("source", NATIVE)
def test_reencoding_keeps_codes_and_rounds_scales_once(source: str) -> None:
    t = block_values.quantised(7, "t", (37, 512), source, 0.05)
    made, rounding = reencode(t)
    assert made.dtype == NATIVE[source] and made.shape == t.shape
    assert made.nbytes <= MOST * t.nbytes
    codes, scale, minimum = block_values.unpack(t)
    got, new, new_minimum = block_values.unpack(made)
    if source == "q5_0":
        assert rounding == 0 and np.array_equal(dequantise(made), dequantise(t))
        return
    assert np.array_equal(got, codes)
    for a, b in ((scale, new), (minimum, new_minimum)):
        assert np.array_equal(b, a.astype(np.float16))
    assert 0 < rounding < 2 * UNIT["f16"]


def test_a_scale_that_float16_cannot_hold_is_refused() -> None:
    t = block_values.quantised(7, "t", (1, 256), "q4_k", 0.05)
    t.parts[2][0, 0] = 60000
    with pytest.raises(ValueError, match=r"overflows float16.*--device cpu"):
        reencode(t)


def test_every_type_has_a_place_on_every_backend() -> None:
    assert computed("cpu") == WEIGHT_TYPES
    assert {t: native(t, "vulkan") for t in WEIGHT_TYPES if native(t, "vulkan") != t} == NATIVE
    report = summary(
        [("q4_k", "q4_1", (4, 256), 1e-4), ("q4_k", "q4_1", (2, 256), 4e-4), ("q5_0", "q5_1", (1, 32), 0.0)]
    )
    assert report[0] == Reencoded("q4_k", "q4_1", 2, 6 * 144, 6 * 160, 4e-4)
    assert report[0].line() == "q4_k as q4_1 (2 tensors, +11.1 % bytes, max relative scale rounding 0.0004)"
    assert report[1].line() == "q5_0 as q5_1 (1 tensors, +9.1 % bytes, exact)"


def test_rows_of_several_types_are_one_matrix() -> None:
    parts = tuple(
        block_values.quantised(i, "t", (n, 256), t, 0.05) for i, (n, t) in enumerate(((5, "q4_1"), (9, "q6_k")))
    )
    whole = Rows(parts)
    values = np.concatenate([dequantise(p) for p in parts])
    assert whole.shape == (14, 256) and whole.dtype == "q6_k" and whole.nbytes == sum(p.nbytes for p in parts)
    assert np.array_equal(dequantise(whole), values)
    assert np.array_equal(dequantise(rows(whole, 3, 8)), values[3:8])
    with pytest.raises(TypeError, match="several storage types"):
        take(whole, np.array([0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_takes_rows_of_several_types_in_pieces(backend: str) -> None:
    decl = TensorDecl("w", "q6_k", (14, 256), "weight", row_types=(("q4_1", 5), ("q6_k", 9)))
    a, b = (block_values.quantised(i, "w", (n, 256), t, 0.05) for i, (t, n) in enumerate(decl.row_types))
    with open_backend(backend) as device:
        device.store(decl, parts=[lambda: a.rows(0, 2), lambda: a.rows(2, 5), lambda: b])
        with pytest.raises(ValueError, match=r"several storage types|are q4_1, not q6_k"):
            device.read("w")
    with open_backend(backend) as device, pytest.raises(ValueError, match="q4_1"):
        device.store(decl, parts=[lambda: b])


def small(folder: Path, types: str) -> Checkpoint:
    """A random model with whole blocks of 256, as a GGUF file."""
    hp = tiny(hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64, n_layers=3)
    source = open_checkpoint(write_hf(folder / "hf", hp, dtype="f32"))
    return open_checkpoint(write_gguf(source, folder / f"{types}.gguf", types))


@pytest.mark.slow
@pytest.mark.parametrize("types", ["q4_k_m", "q5_k", "q5_0", "q3_k", *(["q2_k", "iq4_xs", "iq4_nl"] if LONG else [])])
def test_models_of_file_types_agree_between_devices(tmp_path: Path, types: str) -> None:
    checkpoint = small(tmp_path, types)
    with open_backend("vulkan") as device, open_backend("cpu", memory_budget=0) as cpu:
        # Float32 arithmetic on the re-encoded type: in the short profile for one type.
        for precision, bound in (("exact", 2e-3), ("auto", 0.1))[0 if LONG or types == "q4_k_m" else 1 :]:
            ours, theirs = (
                Engine(checkpoint, d, EngineConfig(chunk=16, ctx=64, precision=precision)) for d in (device, cpu)
            )
            a, b = ours.logits(IDS), theirs.logits(IDS)
            assert np.abs(a - b).max() < bound * np.abs(b).max()
            source = types.removesuffix("_m")
            assert not theirs.runner.reencoded and {r.source for r in ours.runner.reencoded} == {source} & {*NATIVE}
            device.reset()
            cpu.reset()


def test_a_mixed_file_is_held_as_it_is_where_that_is_possible(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "q4_k_m")
    types = stored_types(checkpoint, None, "vulkan")
    for name in checkpoint.names:
        wanted = mixture(name, "q4_k_m", 3)
        assert types[name].dtype == ("f32" if len(types[name].shape) == 1 else NATIVE.get(wanted, wanted))
    assert types["token_embd.weight"].dtype == types["blk.2.attn_v.weight"].dtype == "q6_k"
    assert stored_types(checkpoint, None, "cpu")["blk.0.attn_q.weight"].dtype == "q4_k"
    with pytest.raises(ValueError, match="unknown weight type 'q3_x'"):
        stored_types(checkpoint, "q3_x", "vulkan")
    for dtype in (*K_TYPES, "q5_0"):
        with pytest.raises(ValueError, match=f"weights cannot be made '{dtype}' for vulkan: use one of .*q5_1"):
            stored_types(checkpoint, dtype, "vulkan")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In the short profile three of its layers, whose matrices are of both types."""
    with open_checkpoint(models.demo("f32")) as source:
        yield write_gguf(
            source if LONG else models.cut(source, models.BOTH),
            tmp_path_factory.mktemp("demo") / "q4_k_m.gguf",
            "q4_k_m",
        )


@pytest.mark.slow
def test_reencoding_moves_the_demonstration_model_by_next_to_nothing(demo: Path) -> None:
    """KL of Vulkan's distributions from the exact decoding; precision `exact` isolates the rounding of scales."""
    open_backend("vulkan").close()
    with hybrid.load(demo, "cpu", precision="exact") as exact:
        ids = next(iter(documents(exact)))[: 128 if LONG else 48]
        p = _log_softmax(exact.logits(ids))
    for precision, bound in (("exact", 2e-5), ("auto", 2e-3)):
        with hybrid.load(demo, "vulkan", precision=precision) as ours:
            q = _log_softmax(ours.logits(ids))
            assert 0 < (np.exp(p) * (p - q)).sum(-1).mean() < bound
            if precision == "auto":
                list(ours.generate("def ", max_tokens=1))
                assert ours.stats is not None and ours.stats.precision["weights"] == ("q4_1", "q6_k")
                (line,) = ours.stats.reencoded
                assert line.startswith("q4_k as q4_1 (") and f"re-encoded: {line}" in ours.stats.details()


@pytest.mark.parametrize("dtype", K_TYPES)
def test_the_reference_encoders_are_near(dtype: str) -> None:
    x = np.random.default_rng(3).standard_normal((4, 512)).astype(np.float32)
    error = dequantise(encode(x, dtype)) - x
    assert np.sqrt(np.square(error).mean()) < {"q4_k": 0.09, "q5_k": 0.05, "q6_k": 0.025}[dtype]
    assert not dequantise(encode(np.zeros((1, 256), np.float32), dtype)).any()
    assert isinstance(encode(x, dtype), Tensor) and DTYPES[dtype].block == 256


def test_decode_passes_are_compared_position_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have several lengths; each decode pass reads one token of every chunk."""
    monkeypatch.setattr(type_table, "CHUNK", 16)
    (found,) = type_table.distances(DEMO, 260, [("cpu", "exact", "decode")])
    assert found.same == found.nats.n == 260 and found.divergence.mean < 1e-9
