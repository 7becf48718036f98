"""The sampler's oracle against independent references: integers, moments, frequencies of draws."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.core.plan import NOT_FINITE
from hybrid.kernels.oracle import call
from hybrid.kernels.oracle.sampling import choose, gumbel, hash32

CASES = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


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
    n = 4000 if kept > 1 else 100
    found = draws(LOGITS, n, **options)
    p = np.exp(LOGITS[:kept] / options.get("temperature", 1.0))
    p /= p.sum()
    assert set(found) <= set(range(kept))
    chi2 = sum((found[i] - n * p[i]) ** 2 / (n * p[i]) for i in range(kept))
    assert chi2 < (kept - 1) + 5 * math.sqrt(2 * max(kept - 1, 1)), f"{found} is not {n * p}"


@pytest.mark.parametrize(
    "options, first",
    [
        ({"min_p": 0.4}, 0.4),  # as a share of the best id's mass
        ({"min_p": 0.4, "temperature": 0.8}, 0.4),
        ({"top_p": 0.4}, 1.5),  # 0.4 of the mass is the best one's: (1 - 0.4) / 0.4 is that of all others
        ({"top_p": 0.4, "temperature": 0.8}, 1.5),
    ],
)
def test_a_cut_is_exact_to_a_thousandth(options: dict, first: float) -> None:
    """Other ids weigh a little more and a little less than the cut: the drawn ids show where the cut is."""
    by_mass, scale = "top_p" in options, options.get("temperature", 1.0)
    for share, kept in ((1.0005, True), (0.9995, False)):
        others = first * share / (40 if by_mass else 1)
        logits = (scale * np.log([1.0, *[others] * 40])).astype(np.float32)
        found = set(draws(logits, 60, **options))
        assert (len(found) > 1) == kept, f"{found} of ids with {share} of the cut's mass"


def test_ties_at_the_border_of_top_k_and_top_p_are_kept() -> None:
    flat = np.zeros(8, np.float32)
    assert set(draws(flat, 400, top_k=2)) == set(range(8))
    assert set(draws(flat, 400, top_p=0.1)) == set(range(8))


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    greedy = params(temperature=0.0)
    assert choose(np.array([1, 5, 5, 2], np.float32), greedy, 0) == 1


@pytest.mark.parametrize(
    "words", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1, "top_p": 0.5}]
)
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_no_token_is_sampled_from_nonfinite_logits(words: dict[str, Any], real: Any) -> None:
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
    out = call(
        "sample",
        {"logits": logits, "out_rows": np.array([1, 2], np.int32), "params": words, **rows, **state},
        {"valid": 9},
        {},
    )
    assert out == {}
    assert state["next_token"].tolist() == [2, -1, 7] and state["next_position"].tolist() == [6, -1, 5]
    assert np.argwhere(state["history"] >= 0).tolist() == [[2, 5]] and state["history"][2, 5] == 7  # position 6 is full
    tables = [np.zeros((3, 4), np.int32) for _ in range(2)]
    passed = {n: np.zeros(3, np.int32) for n in ("tokens", "positions", "slots", "out_rows", "mask_rows")}
    begun = {"turn": np.array([6], np.uint32), "live": np.array([1, 1, 0, 1, 9, 9, 9, 9], np.uint32), **state, **passed}
    begun |= {
        "global_table": tables[0],
        "local_table": tables[1],
        "drafts": np.arange(-3, 15, dtype=np.int32).reshape(3, 6),
    }
    begun["known_until"] = np.array([3, 4, 1], np.int32)
    message = [7, 3, 2, 1, 0, 0, 0, 0, -1, -1, 0, 4, 2, 1, 9, -2, 2, 0, -1, 2, 5, 1, 2, 3, 8]
    assert (
        call("begin_pass", {"inbox": np.array([9, *message[1:]], np.int32), **begun}, {"sets": 1}, {}) == {}
    )  # for pass 9
    assert begun["turn"].tolist() == [7] and begun["tokens"][:2].tolist() == [2, 0]
    assert begun["live"].tolist() == [1, 1, 7, 1] + [9] * 4
    begun["turn"][:] = 6
    call("begin_pass", {"inbox": np.array(message, np.int32), **begun}, {"sets": 1}, {})
    assert begun["tokens"].tolist() == [2, 4, 9] and begun["positions"].tolist() == [6, 2, 6]
    assert begun["slots"].tolist() == [0, 1, 2]
    assert begun["out_rows"].tolist() == [0, 2, 0] and begun["mask_rows"].tolist() == [-1, 5, 0]
    assert state["history"][1, 2] == 4 and np.argwhere(tables[1]).tolist() == [[2, 3]] and tables[1][2, 3] == 8
    assert begun["live"].tolist() == [3, 2, 7, 1, 9, 0, 0, 0]
    drafted = [
        8,
        3,
        0,
        0,
        0,
        0,
        0,
        0,
        -3,
        4,
        0,
        -2,
        1,
        1,
        -9,
        3,
        2,
    ]  # slot 1's for position 4, slot 0's for 1 (none), unused
    call("begin_pass", {"inbox": np.array(drafted, np.int32), **begun}, {"sets": 1}, {})
    assert begun["tokens"].tolist() == [7, 0, 0] and state["history"][0, 4] == 7
    follows, before = -(2**30), state["history"].copy()  # slot 0 continues at 6 with token 2, after slot 1's rows
    rows = [follows - 1, follows, 2, follows - 1, -1, 0, follows - 3, follows, 0]
    begun["turn"][:] = 6
    state["next_position"][2] = 3
    call("begin_pass", {"inbox": np.array([7, 3, 0, 0, 0, 0, 0, 0, *rows], np.int32), **begun}, {"sets": 1}, {})
    assert begun["positions"].tolist() == [3, 6, 6] and begun["tokens"].tolist() == [6, 2, 2], (
        "no other slot's: its own"
    )
    assert np.argwhere(state["history"] != before).tolist() == [[2, 3]]
    rows = [follows - 2, follows, 2, follows, -1, 2]
    begun["turn"][:] = 6
    call("begin_pass", {"inbox": np.array([7, 2, 0, 0, 0, 0, 0, 0, *rows], np.int32), **begun}, {"sets": 1}, {})
    assert begun["positions"][:2].tolist() == [1, 3] and begun["tokens"][:2].tolist() == [10, 0], (
        "back to where it is known"
    )
