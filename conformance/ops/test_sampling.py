"""Sampling parameters: the words that devices read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.engine.sampling import Sampling
from hybrid.harness.sampling import Params


def test_words_are_what_the_operation_reads() -> None:
    made = Sampling(0.75, 40, 0.9, 0.05, 0x123456789ABCDEF0).words()
    assert made.shape == (1, 8) and made.dtype == np.uint32
    assert (made[0] == Params(0.75, 40, 0.9, 0.05, 0x123456789ABCDEF0).words()).all()
    assert made[0].tolist()[1] == 40 and made[0].tolist()[4:] == [0x9ABCDEF0, 0x12345678, 0, 0]
    assert (Sampling().words()[0] == Params().words()).all()
    assert Sampling(seed=2**64 - 1, top_k=2**32 - 1).words()[0, [1, 4, 5]].tolist() == [2**32 - 1] * 3


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0}, {"temperature": float(np.finfo(np.float32).max)}, {"top_p": 1}, {"top_p": 1e-9}, {"min_p": 0},
        {"min_p": 1}, {"top_k": 0}, {"top_k": np.int64(2**32 - 1)}, {"seed": 0}, {"seed": 2**64 - 1}, {"min_p": np.float32(0.5)},
    ],
)  # fmt: skip
def test_what_lies_at_the_border_is_taken(given: dict) -> None:
    Sampling(**given).words()


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 1e39},
        {"temperature": "1"}, {"top_p": 0}, {"top_p": 1.001}, {"top_p": float("nan")}, {"top_p": None}, {"min_p": -0.001},
        {"min_p": 1.001}, {"min_p": "0"}, {"top_k": -1}, {"top_k": 2**32}, {"top_k": 1.0}, {"seed": -1}, {"seed": 2**64},
        {"seed": 0.5},
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_by_is_said(given: dict) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(given))} must be"):
        Sampling(**given)
