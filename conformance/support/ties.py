"""Greedy text of two computations that round differently is the same text up to a near tie.

Sums in another order, on another device, in another number of rows, by another processor's BLAS, move logits a little.
Where no two logits may have changed places, the choice must be the same; after the first step at which they may have,
two sound texts can go on differently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import hybrid

CLEAR = "class Base:\n    def __init__(self, name, value):\n        self."
"""A prompt whose first ten choices are clear of a near tie with int8 activations too: leads of 0.58 and more."""
EXACT_NEAR = 1e-3
"""Of logits by float32 activations: a near tie. They differ by 2e-4 between devices and by less between processors."""
INT8_RMS = 0.07
"""Root mean square of how far logits by int8 activations are apart on two sound devices or processors. They amplify
rounding: one code that falls the other way moves many of the next layer's, so two differ by as much as int8 differs
from float32, 0.05 in the demonstration model's logits (0.003 % of the codes suffice)."""
INT8_NEAR = 0.4
"""A near tie by int8 activations: the difference of two logits moves by 0.07 rms, six times that is as good as
never."""


def lead(logits: np.ndarray) -> np.ndarray:
    """[rows]: how far the best logit of each row is ahead of the second."""
    best = np.sort(logits, axis=-1)[:, -2:]
    return best[:, 1] - best[:, 0]


def clear(ours: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """bool [rows]: where the best logit of `wanted` leads by six times what the rounding of that row, as its other
    logits show it, makes of a difference."""
    rms = np.sqrt(np.square(ours - wanted).mean(axis=-1))
    return lead(wanted) > 6 * np.sqrt(2) * rms


def generated(model: hybrid.Model, ids: Sequence[int], count: int) -> list[int]:
    """Greedy ids, through the public interface."""
    for _ in model.generate(list(ids), max_tokens=count, ignore_eos=True):
        pass
    assert model.stats is not None
    return list(model.stats.ids)


def leads(model: hybrid.Model, ids: Sequence[int], then: Sequence[int]) -> np.ndarray:
    """[len(then)]: `lead` of each choice of `then` after the prompt `ids`, as the model computes it."""
    return lead(model.logits([*ids, *then])[len(ids) - 1 : -1])


def agree(ours: Sequence[int], wanted: Sequence[int], leads: np.ndarray, near: float, at_least: int = 4) -> None:
    """Assert that two greedy texts are the same up to the first step whose choice in `wanted` was a near tie.

    leads: [len(wanted)], by `leads`. at_least: steps that have to be compared, or the test proves nothing."""
    assert len(ours) == len(wanted) == len(leads), "texts of one length"
    stop = int(np.argmax([*(leads < near), True]))  # the end, where there is no near tie
    assert stop >= min(at_least, len(wanted)), (
        f"a near tie at step {stop}: choose a prompt whose choices are clear ({leads})"
    )
    assert list(ours[:stop]) == list(wanted[:stop]), f"leads of {near} and more: {leads[:stop]}"
