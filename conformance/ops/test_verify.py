"""verify: acceptance of draft rows, by hand and against a plain model of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybrid.core.plan import FAULTED, NOT_FINITE
from hybrid.kernels.oracle import ORACLE

CTX = 12
LEFT = {"next_token": 77, "next_position": 5, "accepted": 9}  # of an earlier sequence of the slot


def run(rows: list[tuple[int, int, int]], choices: dict[tuple[int, int], int], slots: int = 3) -> dict[str, list[int]]:
    """rows: (slot, position, token), all of them output rows; choices: (slot, position of the row) -> the token sampled
    there."""
    columns = np.array(rows, np.int32).reshape(-1, 3)
    history = np.zeros((slots, CTX), np.int32)
    for (slot, position), token in choices.items():
        history[slot, position + 1] = token
    state: dict[str, Any] = {name: np.full(slots, value, np.int32) for name, value in LEFT.items()}
    ORACLE["verify"](
        out_rows=np.arange(len(rows), dtype=np.int32),
        slots=columns[:, 0],
        positions=columns[:, 1],
        tokens=columns[:, 2],
        history=history,
        **state,
    )
    return {name: array.tolist() for name, array in state.items()}


def test_a_run_continues_after_its_last_accepted_draft() -> None:
    rows = [(1, 4, 10), (1, 5, 11), (1, 6, 12), (1, 7, 13)]
    for wrong, accepted in ((5, 0), (6, 1), (7, 2), (None, 3)):
        choices = {(1, p): (99 if p + 1 == wrong else t + 1) for _, p, t in rows}
        found = run(rows, choices)
        token = choices[1, 4 + accepted]
        assert (found["accepted"][1], found["next_token"][1], found["next_position"][1]) == (
            accepted,
            token,
            5 + accepted,
        )
        assert all(found[name][other] == value for name, value in LEFT.items() for other in (0, 2)), "of no other slot"


def test_runs_of_several_sequences_and_rows_without_drafts() -> None:
    rows = [(2, 0, 1), (0, 3, 5), (0, 4, 6), (1, 5, 8), (1, 6, 9)]
    found = run(rows, {(2, 0): 2, (0, 3): 6, (0, 4): 7, (1, 5): 4, (1, 6): 4})
    assert found == {"accepted": [1, 0, 0], "next_token": [7, 4, LEFT["next_token"]], "next_position": [5, 6, 5]}


@pytest.mark.parametrize(("choice", "position"), [(NOT_FINITE, 6), (FAULTED, 5)])
def test_a_slot_without_a_sampled_token_keeps_a_valid_one(choice: int, position: int) -> None:
    found = run([(0, 5, 3), (0, 6, 4)], {(0, 5): choice, (0, 6): 8})
    assert (found["accepted"][0], found["next_token"][0], found["next_position"][0]) == (0, 3, position)


def test_the_token_after_the_context_is_unknown() -> None:
    found = run([(0, CTX - 2, 3), (0, CTX - 1, 4)], {(0, CTX - 2): 4})
    assert (found["accepted"][0], found["next_token"][0], found["next_position"][0]) == (1, 4, CTX)
