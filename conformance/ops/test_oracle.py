"""The oracle against independent references, written another way: loops, complex numbers, integers, statistics."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.core.plan import NOT_FINITE
from hybrid.core.tensor import Tensor
from hybrid.kernels.oracle import ORACLE, call
from hybrid.kernels.oracle.ffn import gelu_tanh
from hybrid.kernels.oracle.linear import integer_dots
from hybrid.kernels.oracle.sampling import choose, gumbel, hash32
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


def test_integer_dots_at_their_largest() -> None:
    x = Tensor("q8_act", (1, 32), (np.full((1, 32), -127, np.int8), np.ones((1, 2), np.float32)))
    w = Tensor("q8_0", (1, 32), (np.full((1, 32), -128, np.int8), np.ones((1, 1), np.float16)))
    assert integer_dots(x, w).item() == 32 * 127 * 128


@pytest.mark.parametrize("x_type", ["f32", "f16", "q8_act"])
@pytest.mark.parametrize("w_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_linear_is_the_product_of_the_stored_numbers(w_type: str, x_type: str) -> None:
    x, w = quantise(normal(1, 3, 96), x_type), quantise(normal(2, 50, 96), w_type)
    numbers = dequantise(w, np.float32)
    if x_type == "f16":  # what matrix units multiply
        numbers = numbers.astype(np.float16)
    want = dequantise(x, np.float64) @ numbers.astype(np.float64).T
    assert np.allclose(call("linear", {"x": x, "w": w}, {}, {"y": "f32"})["y"].array, want, atol=1e-5)
    fast = call("linear", {"x": x, "w": w}, {}, {"y": "f32"}, real=np.float32)["y"].array
    assert np.allclose(fast, want, atol=3e-5)


def test_linear_in_row_blocks_has_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = quantise(normal(1, 2, 64), "q8_act"), quantise(normal(2, 37, 64), "q4_0")
    want = [ORACLE["linear"](x=x, w=w, real=r)[0] for r in (np.float32, np.float64)]
    monkeypatch.setattr("hybrid.kernels.oracle.linear._SCRATCH", 5 * 64)
    monkeypatch.setattr("hybrid.kernels.oracle.linear.row_blocks", lambda n, *_: ((a, min(a + 5, n)) for a in range(0, n, 5)))
    got = [ORACLE["linear"](x=x, w=w, real=r)[0] for r in (np.float32, np.float64)]
    assert np.allclose(got[0], want[0], atol=1e-5) and np.allclose(got[1], want[1], atol=1e-12)


def test_regions_are_their_members_in_turn() -> None:
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
        qkv=qkv, w_q_norm=wq, w_k_norm=wk, rope=rope, positions=positions, slots=slots, block_table=table,
        k_cache=k_cache, v_cache=v_cache, eps=1e-6,
    )  # fmt: skip

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
    k_cache[~seen] = v_cache[~seen] = np.nan  # what no row may see may hold anything
    (o,) = ORACLE["attention"](
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=table, slots=slots, positions=positions, scale=0.3,
        window=window,
    )  # fmt: skip
    assert np.allclose(o, want.reshape(len(rows), -1), atol=1e-12)


def test_attention_in_chunks_of_rows_has_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    k_cache, v_cache, table = caches(1, 1, 40, 8, 2, 16)
    given = {
        "q": normal(2, 33, 64), "k_cache": k_cache, "v_cache": v_cache, "block_table": table,
        "slots": np.zeros(33, np.int32), "positions": np.random.default_rng(3).permutation(40)[:33].astype(np.int32),
        "scale": 0.25, "window": 9,
    }  # fmt: skip
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


# --- sampling


def params(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> np.ndarray:
    words = np.zeros(8, np.uint32)
    words[[0, 2, 3]] = np.array([temperature, top_p, min_p], np.float32).view(np.uint32)
    words[1], words[4], words[5] = top_k, seed & 0xFFFFFFFF, seed >> 32
    return words


def scalar_hash(*words: int) -> int:
    """The hash in Python integers."""

    def mix(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    h = mix(words[0])
    for word in words[1:]:
        h = mix(h ^ word * 0x9E3779B9 % 2**32)
    return h


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1),
)
@CASES
def test_hash_equals_python_integers(seed: int, position: int, ids: list[int]) -> None:
    got = hash32(seed & 0xFFFFFFFF, seed >> 32, position, np.array(ids))
    assert got.tolist() == [scalar_hash(seed & 0xFFFFFFFF, seed >> 32, position, i) for i in ids]


def test_gumbel_noise_is_finite_and_has_its_moments() -> None:
    g = gumbel(1, 2, 3, np.arange(1 << 18))
    assert np.isfinite(g).all()
    assert abs(g.mean() - np.euler_gamma) < 0.01 and abs(g.std() - math.pi / math.sqrt(6)) < 0.01


def draws(logits: np.ndarray, count: int = 4000, **options: Any) -> Counter:
    words = params(seed=77, **options)
    return Counter(choose(logits, words, position, np.float64) for position in range(count))


LOGITS = np.log([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]).astype(np.float32)


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, 6),
        ({"temperature": 2.0}, 6),
        ({"temperature": 0.5}, 6),
        ({"top_k": 3}, 3),
        ({"top_k": 6}, 6),
        ({"top_k": 1}, 1),
        ({"top_p": 0.7}, 3),
        ({"top_p": 0.3}, 1),
        ({"min_p": 0.2}, 4),
        ({"min_p": 1.0}, 1),
        ({"top_k": 4, "top_p": 0.72}, 2),  # of what top-k kept: 0.4 + 0.25 >= 0.72 * 0.9
        ({"temperature": 2.0, "min_p": 0.55}, 3),  # after the temperature: sqrt(0.15 / 0.4) >= 0.55
    ],
)
def test_draws_follow_the_truncated_distribution(options: dict, kept: int) -> None:
    n = 4000
    found = draws(LOGITS, n, **options)
    p = np.exp(LOGITS[:kept] / options.get("temperature", 1.0))
    p /= p.sum()
    assert set(found) <= set(range(kept))
    chi2 = sum((found[i] - n * p[i]) ** 2 / (n * p[i]) for i in range(kept))
    assert chi2 < (kept - 1) + 5 * math.sqrt(2 * max(kept - 1, 1)), f"{found} is not {n * p}"


@pytest.mark.parametrize(
    "options, first",
    [
        ({"min_p": 0.4}, 0.4),  # as a share of the best one's mass
        ({"min_p": 0.4, "temperature": 0.8}, 0.4),
        ({"top_p": 0.4}, 1.5),  # 0.4 of the mass is the best one's: (1 - 0.4) / 0.4 is all the others'
        ({"top_p": 0.4, "temperature": 0.8}, 1.5),
    ],
)
def test_a_cut_is_exact_to_a_thousandth(options: dict, first: float) -> None:
    """Others that weigh a little more and a little less than the cut asks for: which of them are drawn tells where it is."""
    by_mass, scale = "top_p" in options, options.get("temperature", 1.0)
    for share, kept in ((1.0005, True), (0.9995, False)):
        others = first * share / (40 if by_mass else 1)
        logits = (scale * np.log([1.0, *[others] * 40])).astype(np.float32)
        found = set(draws(logits, 60, **options))
        assert (len(found) > 1) == kept, f"{found} of ids that weigh {share} of what the cut asks for"


def test_ties_at_the_border_of_top_k_and_top_p_are_kept() -> None:
    flat = np.zeros(8, np.float32)
    assert set(draws(flat, 400, top_k=2)) == set(range(8))
    assert set(draws(flat, 400, top_p=0.1)) == set(range(8))


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    greedy = params(temperature=0.0)
    assert choose(np.array([1, 5, 5, 2], np.float32), greedy, 0) == 1


@pytest.mark.parametrize("words", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1, "top_p": 0.5}])
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_nothing_is_chosen_from_logits_that_are_not_finite(words: dict[str, Any], real: Any) -> None:
    one = params(**words)
    for wrong in ([3, np.nan, 1], [-np.nan, 2, 1], [1, np.inf, 2], [np.nan, np.inf, -np.inf], [-np.inf] * 3):
        assert choose(np.array(wrong, np.float32), one, 0, real) == NOT_FINITE
    assert {choose(np.array([-np.inf, 0, -np.inf], np.float32), one, p, real) for p in range(50)} == {1}


def test_a_seed_repeats_and_another_differs() -> None:
    flat = np.zeros(1000, np.float32)
    runs = [[choose(flat, params(seed=s), p) for p in range(20)] for s in (1, 1, 2, 1 << 32 | 1)]
    assert runs[0] == runs[1] and runs[0] != runs[2] and runs[0] != runs[3]


def test_sample_and_begin_pass_keep_the_books_of_each_slot() -> None:
    logits = np.zeros((2, 10), np.float32)
    logits[0, 7], logits[1, 2], logits[:, 9] = 5, 5, 99  # id 9 is not valid
    state = {
        "next_token": np.full(3, -1, np.int32),
        "next_position": np.full(3, -1, np.int32),
        "history": np.full((3, 6), -1, np.int32),
    }
    rows = {"slots": np.array([2, 2, 0], np.int32), "positions": np.array([3, 4, 5], np.int32)}
    words = np.stack([params(temperature=0.0)] * 3)
    out = call("sample", {"logits": logits, "out_rows": np.array([1, 2], np.int32), "params": words, **rows, **state},
               {"valid": 9}, {})  # fmt: skip
    assert out == {}
    assert state["next_token"].tolist() == [2, -1, 7] and state["next_position"].tolist() == [6, -1, 5]
    assert np.argwhere(state["history"] >= 0).tolist() == [[2, 5]] and state["history"][2, 5] == 7  # position 6 is full
    tables = [np.zeros((3, 4), np.int32) for _ in range(2)]
    passed = {n: np.zeros(3, np.int32) for n in ("tokens", "positions", "slots", "out_rows", "mask_rows")}
    begun = {"turn": np.array([6], np.uint32), "live": np.array([1, 1, 0, 1, 9, 9, 9, 9], np.uint32), **state, **passed}
    begun |= {"global_table": tables[0], "local_table": tables[1]}
    message = [7, 3, 2, 1, 0, 0, 0, 0, -1, -1, 0, 4, 2, 1, 9, -2, 2, 0, -1, 2, 5, 1, 2, 3, 8]
    assert call("begin_pass", {"inbox": np.array([9, *message[1:]], np.int32), **begun}, {"sets": 1}, {}) == {}  # for pass 9
    assert begun["turn"].tolist() == [7] and begun["tokens"][:2].tolist() == [2, 0]
    assert begun["live"].tolist() == [1, 1, 7, 1] + [9] * 4
    begun["turn"][:] = 6
    call("begin_pass", {"inbox": np.array(message, np.int32), **begun}, {"sets": 1}, {})
    assert begun["tokens"].tolist() == [2, 4, 9] and begun["positions"].tolist() == [6, 2, 6]
    assert begun["slots"].tolist() == [0, 1, 2]
    assert begun["out_rows"].tolist() == [0, 2, 0] and begun["mask_rows"].tolist() == [-1, 5, 0]
    assert state["history"][1, 2] == 4 and np.argwhere(tables[1]).tolist() == [[2, 3]] and tables[1][2, 3] == 8
    assert begun["live"].tolist() == [3, 2, 7, 1, 9, 0, 0, 0]


def test_an_unknown_operation_and_wrong_results_are_named() -> None:
    with pytest.raises(KeyError, match="no oracle for operation 'rmsnrom'"):
        call("rmsnrom", {}, {}, {})
    with pytest.raises(TypeError, match="returned 1 arrays for the outputs"):
        call("geglu", {"gate_up": np.zeros((1, 4))}, {}, {"h": "f32", "extra": "f32"})
