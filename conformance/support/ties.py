"""Compare greedy text of two computations that round differently: equal up to a near tie.

Sums in another order, on another device, in another number of rows, by another processor's BLAS, move logits a little.
Where no two logits may have swapped order, the token must be the same. After the first possible swap, two correct texts
can differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import hybrid

CLEAR = "class Base:\n    def __init__(self, name, value):\n        self."
"""A prompt whose first ten tokens are no near ties with int8 activations either: margins of 0.58 and more."""
EXACT_NEAR = 1e-3
"""Near tie of logits with float32 activations. They differ by 2e-4 between devices and by less between processors."""
INT8_RMS = 0.07
"""Root mean square difference of logits with int8 activations between two sound devices or processors. They amplify
rounding: one changed code moves many of the next layer's. So two differ by as much as int8 differs from float32, 0.05
in the demonstration model's logits (0.003 % of the codes suffice)."""
INT8_NEAR = 0.4
"""Near tie with int8 activations: the difference of two logits varies by 0.07 rms; six times that hardly ever occurs.
"""


def lead(logits: np.ndarray) -> np.ndarray:
    """[rows]: margin between the best and the second logit of each row."""
    best = np.sort(logits, axis=-1)[:, -2:]
    return best[:, 1] - best[:, 0]


def clear(ours: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """bool [rows]: where the best logit of `wanted` leads by six times the row's rounding difference, estimated from
    its other logits."""
    rms = np.sqrt(np.square(ours - wanted).mean(axis=-1))
    return lead(wanted) > 6 * np.sqrt(2) * rms


def generated(model: hybrid.Model, ids: Sequence[int], count: int) -> list[int]:
    """Greedy ids, through the public interface."""
    for _ in model.generate(list(ids), max_tokens=count, ignore_eos=True):
        pass
    assert model.stats is not None
    return list(model.stats.ids)


def leads(model: hybrid.Model, ids: Sequence[int], then: Sequence[int]) -> np.ndarray:
    """[len(then)]: `lead` of each token of `then` after the prompt `ids`, as the model computes it."""
    return lead(model.logits([*ids, *then])[len(ids) - 1 : -1])


def agree(ours: Sequence[int], wanted: Sequence[int], leads: np.ndarray, near: float, at_least: int = 4) -> None:
    """Assert that two greedy texts are equal up to the first step whose token in `wanted` was a near tie.

    leads: [len(wanted)], by `leads`. at_least: steps that must be compared, or the test proves nothing.
    """
    assert len(ours) == len(wanted) == len(leads), "texts of one length"
    stop = int(np.argmax([*(leads < near), True]))  # the end, where no step is a near tie
    assert stop >= min(at_least, len(wanted)), (
        f"a near tie at step {stop}: choose a prompt whose choices are clear ({leads})"
    )
    assert list(ours[:stop]) == list(wanted[:stop]), f"leads of {near} and more: {leads[:stop]}"
