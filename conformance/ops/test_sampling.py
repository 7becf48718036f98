"""Sampling parameters and constraints: the encoded words, refusals, and the adjusted distribution by a second
implementation."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from hybrid.engine.sampling import Allowed, Sampling, checked_mask, ids_of, mask_of, reported
from hybrid.harness import inputs
from hybrid.harness.sampling import Params, Penalties
from hybrid.kernels.oracle.distribution import adjust_logits, logprobs


def test_every_sampling_option_is_drawn() -> None:
    """The cases of sample and adjust_logits draw every option: a backend that ignores an option fails."""
    drawn = {"logit_bias"}  # test_figures_by_hand
    for seed in range(60):
        params, penalties = Params.of(inputs._params(seed, 0)), inputs._penalties(seed, 0)
        drawn |= {f.name for f in fields(Params) if getattr(params, f.name) != f.default}
        drawn |= {f"{f.name}_penalty" for f in fields(penalties) if getattr(penalties, f.name) != f.default}
    assert {f.name for f in fields(Sampling)} <= drawn


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
        {"temperature": 0},
        {"temperature": float(np.finfo(np.float32).max)},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"top_k": 0},
        {"top_k": np.int64(2**32 - 1)},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"min_p": np.float32(0.5)},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"presence_penalty": -2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, np.int64(7): 100.0}},
        {"logit_bias": dict.fromkeys(range(1024), 1)},
        {"logprobs": 0},
        {"logprobs": 20},
    ],
)
def test_values_at_the_border_are_accepted(given: dict) -> None:
    Sampling(**given).words()


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e39},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 1.001},
        {"top_p": float("nan")},
        {"top_p": None},
        {"min_p": -0.001},
        {"min_p": 1.001},
        {"min_p": "0"},
        {"top_k": -1},
        {"top_k": 2**32},
        {"top_k": 1.0},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 0.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 101},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": "1"},
        {"presence_penalty": 2.01},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.01},
        {"frequency_penalty": None},
        {"logit_bias": [1, 2]},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"7": 1}},
        {"logit_bias": {True: 1}},
        {"logit_bias": {7: 100.5}},
        {"logit_bias": {7: float("nan")}},
        {"logit_bias": {7: "much"}},
        {"logit_bias": dict.fromkeys(range(1025), 1)},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": 1.0},
    ],
)
def test_invalid_sampling_parameters_are_errors(given: dict) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(given))} must "):
        Sampling(**given)


def test_penalties_and_biases_as_the_operation_reads_them() -> None:
    made = Sampling(
        repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25, logit_bias={9: -100, 3: 2.5}, logprobs=5
    )
    assert (made.penalty_words(11)[0] == Penalties(1.5, -0.5, 0.25, 11, 2).words()).all() and made.words()[0, 6] == 5
    ids, biases = made.bias_rows()
    assert (ids.shape, ids.dtype, biases.dtype) == ((1, 1024), np.int32, np.float32)
    assert (ids[0, :2].tolist(), biases[0, :2].tolist()) == ([9, 3], [-100, 2.5])
    made.check(10)
    with pytest.raises(ValueError, match=r"^logit_bias: the model has no token 9; its ids are 0..8$"):
        made.check(9)


def test_only_what_is_asked_for_changes_the_plan() -> None:
    assert Sampling(temperature=2, logit_bias={}).options() == set() and not Sampling().counts
    assert Sampling(logit_bias={1: 1}).options() == {"adjust"} and not Sampling(logit_bias={1: 1}).counts
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert Sampling(**{name: 0.5}).counts and Sampling(**{name: 0.5}).options() == {"adjust"}
    assert Sampling(logprobs=1).options() == {"logprobs"} and Sampling(logprobs=1).options(masked=True) == {
        "adjust",
        "logprobs",
    }


def test_reported_log_probabilities_as_numbers() -> None:
    ids, values = np.full(21, -1, np.int32), np.full(21, -np.inf, np.float32)
    ids[:3], values[:3] = [7, 4, 7], [-1.5, -0.5, -1.5]
    assert reported(ids, values, 2) == ((7, -1.5), ((4, -0.5), (7, -1.5)))
    assert reported(ids, values, 5) == ((7, -1.5), ((4, -0.5), (7, -1.5)))  # of five, two have a probability
    assert reported(ids, values, 1) == ((7, -1.5), ((4, -0.5),))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_a_mask_holds_its_ids(vocab: int) -> None:
    ids = sorted({0, vocab // 3, vocab - 1})
    mask = mask_of(ids, vocab)
    assert (mask.dtype, mask.shape) == (np.uint32, (-(-vocab // 32),)) and ids_of(mask).tolist() == ids
    assert all(bool(mask[i // 32] >> np.uint32(i % 32) & np.uint32(1)) == (i in ids) for i in range(vocab))
    assert (checked_mask(mask, vocab, vocab) == mask).all()
    wide = checked_mask(mask, vocab + 64, vocab)  # rows of the output matrix beyond the tokenizer
    assert len(wide) == -(-(vocab + 64) // 32) and ids_of(wide).tolist() == ids
    with pytest.raises(IndexError, match=f"^there is no id {vocab}: ids are 0..{vocab - 1}$"):
        mask_of([0, vocab], vocab)


def test_an_empty_mask_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^the constraint allows no token here"):
        checked_mask(mask_of([], 40), 40, 40)
    with pytest.raises(ValueError, match=r"^the constraint allows no token here"):
        checked_mask(mask_of([37, 38], 40), 40, 37)  # only ids outside the tokenizer
    assert checked_mask(mask_of([36], 40), 40, 37) is not None
    with pytest.raises(ValueError, match=r"give at least one id"):
        Allowed([], 40)
    for wrong in (
        None,
        np.zeros(2, np.int64),
        np.zeros((1, 2), np.uint32),
        np.ones(1, np.uint32),
        np.ones(3, np.uint32),
    ):
        with pytest.raises(
            ValueError, match=r"^a constraint's mask must be uint32 \[2\], a bit for each of 40 ids, not"
        ):
            checked_mask(wrong, 40, 40)


def test_an_allowed_set_stays_as_it_is() -> None:
    one = Allowed([3, 5], 40)
    one.accept(3)
    assert ids_of(one.mask()).tolist() == ids_of(one.copy().mask()).tolist() == [3, 5]


def adjusted(
    row: list[float], said: list[int], prompt: int, s: Sampling, allowed: set[int] | None = None
) -> list[float]:
    """The formulas written out for one row, id by id."""
    made = []
    for token, z in enumerate(row):
        if token in said:
            z = z / s.repetition_penalty if z > 0 else z * s.repetition_penalty
        times = said[prompt:].count(token)
        z -= s.frequency_penalty * times + s.presence_penalty * (times > 0)
        z += (s.logit_bias or {}).get(token, 0)
        made.append(z if allowed is None or token in allowed else -math.inf)
    return made


@pytest.mark.parametrize(
    "s",
    [
        Sampling(),
        Sampling(repetition_penalty=1.5),
        Sampling(repetition_penalty=0.5),
        Sampling(presence_penalty=1.5),
        Sampling(frequency_penalty=-0.75),
        Sampling(logit_bias={2: 100, 5: -3}),
        Sampling(repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: -1}),
    ],
)
@pytest.mark.parametrize("allowed", [None, {1, 2, 6}])
def test_the_adjusted_row_is_that_of_the_formulas(s: Sampling, allowed: set[int] | None) -> None:
    row, said, prompt = [1.5, -0.5, 3.0, 0.0, 2.0, -4.0, 1.0], [2, 1, 1, 5, 2, 1], 3
    history = np.full((2, 9), 6, np.int32)  # later tokens are not read
    history[1, : len(said)] = said
    ids, bias = s.bias_rows()
    (got,) = adjust_logits(
        logits=np.array([row], np.float32),
        out_rows=np.array([0]),
        slots=np.array([1]),
        positions=np.array([len(said) - 1]),
        penalties=np.repeat(s.penalty_words(prompt), 2, axis=0),
        history=history,
        bias_ids=np.repeat(ids, 2, axis=0),
        bias=np.repeat(bias, 2, axis=0),
        mask_rows=np.array([-1 if allowed is None else 0]),
        masks=mask_of(allowed or (), len(row))[None],
    )
    np.testing.assert_allclose(got[0], adjusted(row, said, prompt, s, allowed), rtol=1e-12)


def test_log_probabilities_add_up_to_one() -> None:
    row = np.array([[0.5, -1.0, 2.0, -math.inf, 2.0, 7.0]], np.float32)
    top_ids, values = np.zeros((1, 64, 21), np.int32), np.zeros((1, 64, 21))
    logprobs(
        logits=row,
        out_rows=np.array([0]),
        slots=np.array([0]),
        positions=np.array([66]),
        history=np.full((1, 80), 1),
        params=Sampling(logprobs=5).words(),
        top_ids=top_ids,
        top_logprobs=values,
        valid=5,
    )
    assert top_ids[0, 3, :7].tolist() == [1, 2, 4, 0, 1, -1, 0]  # id 5 is padding, id 3 has no probability
    total = sum(math.exp(z) for z in row[0, :5])
    wanted = [math.log(math.exp(row[0, i]) / total) for i in (1, 2, 4, 0, 1)]
    np.testing.assert_allclose(values[0, 3, :5], wanted, rtol=1e-12)
    assert math.isclose(sum(math.exp(x) for x in values[0, 3, 1:5]), 1) and values[0, 3, 5] == -math.inf
