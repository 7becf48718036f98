"""The oracle against independent references: loops, complex numbers, integers, statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.core.dtypes import QUANTISED_TYPES
from hybrid.core.tensor import Tensor
from hybrid.harness import block_values
from hybrid.kernels.oracle import ORACLE, call
from hybrid.kernels.oracle.ffn import gelu_tanh
from hybrid.kernels.oracle.linear import integer_dots
from hybrid.quant.codec import dequantise, encode, quantise

CASES = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- norms, embedding, activation


def test_rmsnorm_gives_unit_mean_square_and_eps_stands_under_the_root() -> None:
    x = normal(1, 3, 64) * 100
    (y,) = ORACLE["rmsnorm"](x=x, w=np.ones(64, np.float32), eps=0.0)
    assert np.allclose((y**2).mean(axis=1), 1, rtol=1e-12)
    (y,) = ORACLE["rmsnorm"](x=np.zeros((1, 64), np.float32) + 3, w=np.full(64, 2, np.float32), eps=7.0)
    assert np.allclose(y, 2 * 3 / math.sqrt(9 + 7))


def test_add_rmsnorm_by_hand() -> None:
    a, r, p, n = normal(1, 64), normal(2, 64), normal(3, 64), normal(4, 64)
    total, y = ORACLE["add_rmsnorm"](a=a[None], residual=r[None], w_post=p, w_next=n, eps=1e-6)
    root = math.sqrt(math.fsum(float(v) ** 2 for v in a) / 64 + 1e-6)
    want = [float(r[i]) + float(a[i]) / root * float(p[i]) for i in range(64)]
    assert np.allclose(total[0], want, rtol=1e-13)
    root = math.sqrt(math.fsum(v**2 for v in want) / 64 + 1e-6)
    assert np.allclose(y[0], [v / root * float(n[i]) for i, v in enumerate(want)], rtol=1e-13)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_embed_reads_the_tokens_rows(dtype: str) -> None:
    w, tokens = quantise(normal(1, 9, 32), dtype), np.array([8, 0, 3, 3], np.int32)
    x = call("embed", {"tokens": Tensor.of(tokens), "w": w}, {"scale": 5.5}, {"x": "f32"})["x"].array
    assert np.array_equal(x, (dequantise(w, np.float64)[tokens] * 5.5).astype(np.float32))
    beyond = call("embed", {"tokens": Tensor.of(tokens + 9), "w": w}, {"scale": 5.5}, {"x": "f32"})["x"].array
    assert (beyond == x[0]).all(), "the last row, for ids that name no token"
    with pytest.raises(ValueError, match="row index outside"):
        call("embed", {"tokens": Tensor.of(tokens - 1), "w": w}, {"scale": 1.0}, {"x": "f32"})


def test_gelu_tanh_values() -> None:
    x = np.array([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0])  # torch.nn.functional.gelu(x, approximate="tanh") in float64
    want = [-0.0036373920817730, -0.1588080093917233, 0.0, 0.3457140098251439, 0.8411919906082768, 1.9545976940877750]
    assert np.allclose(gelu_tanh(x), want, rtol=1e-12)
    (h,) = ORACLE["geglu"](gate_up=np.array([[1.0, 2.0, 10.0, 100.0]]))
    assert np.allclose(h, [[0.8411919906082768 * 10, 1.954597694087775 * 100]])


# --- matrices


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@given(seed=seeds, t=st.integers(1, 5), n=st.integers(1, 40), blocks=st.integers(1, 5))
@CASES
def test_integer_dots_and_their_sum_equal_int64(dtype: str, seed: int, t: int, n: int, blocks: int) -> None:
    x, w = quantise(normal(seed, t, 32 * blocks), "q8_act"), quantise(normal(seed + 1, n, 32 * blocks), dtype)
    codes = w.parts[0].reshape(n, blocks, -1).astype(np.int64)
    if dtype == "q4_0":
        codes = np.concatenate([codes % 16, codes // 16], axis=-1)
    products = x.parts[0].reshape(t, 1, blocks, 32).astype(np.int64) * codes
    dots = integer_dots(x, w)
    assert dots.dtype == np.int32 and np.array_equal(dots, products.sum(-1))
    y = np.zeros((t, n))
    for i, j, b in np.ndindex(t, n, blocks):
        scale, scaled_sum = (float(v) for v in x.parts[1][i, 2 * b : 2 * b + 2])
        offset = 8 * scaled_sum if dtype == "q4_0" else 0.0
        y[i, j] += float(w.parts[1][j, b]) * (scale * int(dots[i, j, b]) - offset)
    assert np.allclose(ORACLE["linear"](x=x, w=w)[0], y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", QUANTISED_TYPES)
def test_integer_products_are_those_of_the_values(dtype: str) -> None:
    """Scales, zero points and minima of 16 or 32 elements, by exact sums: the same number in any order."""
    x, w = block_values.exact(3, "x", (3, 512), "q8_act"), block_values.quantised(4, "w", (5, 512), dtype, 0.05)
    want = dequantise(x, np.float64) @ dequantise(w, np.float64).T
    assert np.allclose(ORACLE["linear"](x=x, w=w)[0], want, rtol=0, atol=1e-10)


def test_integer_dots_at_their_largest() -> None:
    x = Tensor("q8_act", (1, 32), (np.full((1, 32), -127, np.int8), np.ones((1, 2), np.float32)))
    w = Tensor("q8_0", (1, 32), (np.full((1, 32), -128, np.int8), np.ones((1, 1), np.float16)))
    assert integer_dots(x, w).item() == 32 * 127 * 128


@pytest.mark.parametrize("x_type", ["f32", "f16", "q8_act"])
@pytest.mark.parametrize("w_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_linear_is_the_product_of_the_stored_numbers(w_type: str, x_type: str) -> None:
    x, w = quantise(normal(1, 3, 96), x_type), quantise(normal(2, 50, 96), w_type)
    numbers = dequantise(w, np.float32)
    if x_type == "f16":  # as matrix units multiply
        numbers = numbers.astype(np.float16)
    want = dequantise(x, np.float64) @ numbers.astype(np.float64).T
    assert np.allclose(call("linear", {"x": x, "w": w}, {}, {"y": "f32"})["y"].array, want, atol=1e-5)
    fast = call("linear", {"x": x, "w": w}, {}, {"y": "f32"}, real=np.float32)["y"].array
    assert np.allclose(fast, want, atol=3e-5)


def test_linear_in_row_blocks_has_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = quantise(normal(1, 2, 64), "q8_act"), quantise(normal(2, 37, 64), "q4_0")
    want = [ORACLE["linear"](x=x, w=w, real=r)[0] for r in (np.float32, np.float64)]
    monkeypatch.setattr("hybrid.kernels.oracle.linear._SCRATCH", 5 * 64)
    monkeypatch.setattr(
        "hybrid.kernels.oracle.linear.row_blocks", lambda n, *_: ((a, min(a + 5, n)) for a in range(0, n, 5))
    )
    got = [ORACLE["linear"](x=x, w=w, real=r)[0] for r in (np.float32, np.float64)]
    assert np.allclose(got[0], want[0], atol=1e-5) and np.allclose(got[1], want[1], atol=1e-12)


def test_regions_equal_their_members_in_sequence() -> None:
    x = quantise(normal(1, 3, 64), "q8_act")
    wg, wd = quantise(normal(2, 192, 64), "q4_0"), quantise(normal(3, 64, 96), "q8_0")
    (gate_up,) = ORACLE["linear"](x=x, w=wg)
    for h_type in ("f32", "f16", "q8_act"):
        h = encode(ORACLE["geglu"](gate_up=gate_up)[0], h_type)
        (want,) = ORACLE["linear"](x=h if h_type == "q8_act" else h.array, w=wd)
        (got,) = ORACLE["fused_ffn"](x=x, w_gate_up=wg, w_down=wd, h_dtype=h_type)
        assert np.array_equal(got, want)
        named = call("fused_ffn", {"x": x, "w_gate_up": wg, "w_down": wd}, {}, {"y": "f32", "h": h_type})
        assert list(named) == ["y"] and np.array_equal(named["y"].array, want.astype(np.float32))
    assert np.array_equal(ORACLE["fused_qkv"](x=x, w=wg)[0], ORACLE["linear"](x=x, w=wg)[0])


def test_logits_pick_rows_and_cap() -> None:
    x, w, rows = normal(1, 5, 32) * 9, normal(2, 11, 32), np.array([4, 0], np.int32)
    (plain,) = ORACLE["logits"](x=x, w=w, out_rows=rows, softcap=0.0)
    assert np.allclose(plain, x[rows].astype(float) @ w.T.astype(float))
    (capped,) = ORACLE["logits"](x=x, w=w, out_rows=rows, softcap=30.0)
    assert np.allclose(capped, 30 * np.tanh(plain / 30)) and np.abs(capped).max() < 30


def test_conversions() -> None:
    w = quantise(normal(1, 4, 64), "q4_0")
    y = call("dequantize", {"w": w}, {}, {"y": "f16"})["y"].array
    assert np.array_equal(y, dequantise(w).astype(np.float16))
    x = normal(2, 4, 64)
    got, want = call("quantize_act", {"x": x}, {}, {"y": "q8_act"})["y"], quantise(x, "q8_act")
    assert all(np.array_equal(a, b) for a, b in zip(got.parts, want.parts, strict=True))


# --- attention


def caches(seed: int, slots: int, context: int, block: int, kv_heads: int, d: int, dtype: type = np.float32):
    """Random caches, and a block table that scatters the sequences' blocks over them."""
    rng = np.random.default_rng(seed)
    per_slot = -(-context // block)
    table = rng.permutation(slots * per_slot + 2)[: slots * per_slot].reshape(slots, per_slot).astype(np.int32)
    shape = (slots * per_slot + 2, block, kv_heads, d)
    return rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(dtype), table


@pytest.mark.parametrize("context", [0, 1, 7])
def test_rope_is_a_rotation_of_complex_numbers_and_the_cache_is_addressed_by_blocks(context: int) -> None:
    hq, hk, d, c, block = 4, 2, 16, 12, 4
    k_cache, v_cache, table = caches(5, 3, c, block, hk, d)
    qkv = normal(6, 2, (hq + 2 * hk) * d)
    angle = np.outer(np.arange(c), 10000.0 ** (-2 * np.arange(d // 2) / d))
    rope = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    wq, wk = normal(7, d), normal(8, d)
    positions, slots = np.array([context, context + 4], np.int32), np.array([2, 0], np.int32)
    before = k_cache.copy(), v_cache.copy()
    (q,) = ORACLE["qk_norm_rope_append"](
        qkv=qkv,
        w_q_norm=wq,
        w_k_norm=wk,
        rope=rope,
        positions=positions,
        slots=slots,
        block_table=table,
        k_cache=k_cache,
        v_cache=v_cache,
        eps=1e-6,
    )

    def turned(head: np.ndarray, weight: np.ndarray, position: int) -> np.ndarray:
        x = head.astype(float) / math.sqrt((head.astype(float) ** 2).mean() + 1e-6) * weight
        z = (x[: d // 2] + 1j * x[d // 2 :]) * np.exp(1j * angle[position])
        return np.concatenate([z.real, z.imag])

    for row, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        heads = qkv[row].reshape(-1, d)
        at = table[slot, position // block], position % block
        for h in range(hq):
            assert np.allclose(q[row].reshape(-1, d)[h], turned(heads[h], wq, position), atol=1e-6)
        for h in range(hk):
            assert np.allclose(k_cache[at][h], turned(heads[hq + h], wk, position), atol=1e-6)
            assert np.array_equal(v_cache[at][h], heads[hq + hk + h])
        for cache, old in zip((k_cache, v_cache), before, strict=True):
            old[at] = cache[at]
    assert np.array_equal(k_cache, before[0]) and np.array_equal(v_cache, before[1]), "another row was written"


@given(
    seed=seeds,
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 18)), min_size=1, max_size=6, unique=True),
    window=st.sampled_from([0, 1, 2, 5, 19, 100]),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    dtype=st.sampled_from([np.float32, np.float16]),
)
@CASES
def test_attention_equals_three_loops(seed: int, rows: list, window: int, groups: tuple, dtype: type) -> None:
    (hq, hk), d, block = groups, 8, 4
    k_cache, v_cache, table = caches(seed, 3, 19, block, hk, d, dtype)
    q = normal(seed, len(rows), hq * d)
    slots, positions = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    want, seen = np.zeros((len(rows), hq, d)), np.zeros(k_cache.shape[:2], bool)
    for r, (slot, pos) in enumerate(rows):
        visible = [j for j in range(pos + 1) if window == 0 or pos - j < window]
        at = [(table[slot, j // block], j % block) for j in visible]
        for h in range(hq):
            query = q[r, h * d : (h + 1) * d].astype(float)
            weights = [math.exp(0.3 * float(query @ k_cache[a][h // (hq // hk)].astype(float))) for a in at]
            for weight, a in zip(weights, at, strict=True):
                want[r, h] += weight / math.fsum(weights) * v_cache[a][h // (hq // hk)].astype(float)
                seen[a] = True
    k_cache[~seen] = v_cache[~seen] = np.nan  # positions outside every row's view may hold anything
    (o,) = ORACLE["attention"](
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table,
        slots=slots,
        positions=positions,
        scale=0.3,
        window=window,
    )
    assert np.allclose(o, want.reshape(len(rows), -1), atol=1e-12)


def test_attention_in_chunks_of_rows_has_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    k_cache, v_cache, table = caches(1, 1, 40, 8, 2, 16)
    given = {
        "q": normal(2, 33, 64),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table,
        "slots": np.zeros(33, np.int32),
        "positions": np.random.default_rng(3).permutation(40)[:33].astype(np.int32),
        "scale": 0.25,
        "window": 9,
    }
    (want,) = ORACLE["attention"](**given)
    monkeypatch.setattr("hybrid.kernels.oracle.attention._SCORES", 1)
    (got,) = ORACLE["attention"](**given)
    assert np.allclose(got, want, atol=1e-12)


def test_attention_subtracts_the_maximum() -> None:
    k_cache, v_cache, table = caches(1, 1, 4, 4, 1, 8)
    q = 1e4 * normal(2, 1, 8)
    zero = np.zeros(1, np.int32)
    (o,) = ORACLE["attention"](
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=table, slots=zero, positions=zero + 3, scale=1.0, window=0
    )
    assert np.isfinite(o).all()


def test_an_unknown_operation_and_wrong_results_are_named() -> None:
    with pytest.raises(KeyError, match="no oracle for operation 'rmsnrom'"):
        call("rmsnrom", {}, {}, {})
    with pytest.raises(TypeError, match="returned 1 arrays for the outputs"):
        call("geglu", {"gate_up": np.zeros((1, 4))}, {}, {"h": "f32", "extra": "f32"})
