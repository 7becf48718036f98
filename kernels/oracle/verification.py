"""Verification of draft tokens against sampled tokens."""

from __future__ import annotations

import numpy as np

from hybrid.core.plan import FAULTED
from hybrid.quant.codec import Real


def verify(
    *,
    out_rows: np.ndarray,
    tokens: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    history: np.ndarray,
    next_token: np.ndarray,
    next_position: np.ndarray,
    accepted: np.ndarray,
    real: Real = np.float64,
) -> tuple[()]:
    """For each run of output rows (one slot, consecutive positions): the rows after the first hold draft tokens, and
    history[S,C] has the token sampled after each row. accepted[slot]: drafts equal to the sampled token before them, up
    to the first mismatch. next_token, next_position: the token sampled after the last accepted row, and its position,
    if the run has drafts."""

    def choice(row: int) -> int | None:
        p = int(positions[row]) + 1
        return int(history[slots[row], p]) if p < history.shape[1] else None

    runs: list[list[int]] = []
    for row in out_rows.tolist():
        last = runs[-1][-1] if runs else None
        if last is not None and slots[last] == slots[row] and positions[last] + 1 == positions[row]:
            runs[-1].append(row)
        else:
            runs.append([row])
    for run in runs:
        slot, at = slots[run[0]], 0
        while at + 1 < len(run) and choice(run[at]) == tokens[run[at + 1]]:
            at += 1
        accepted[slot] = at
        if len(run) == 1:
            continue
        chosen = choice(run[at])
        aborted = choice(run[0]) == FAULTED
        next_token[slot] = chosen if chosen is not None and chosen >= 0 else tokens[run[at]]
        next_position[slot] = positions[run[at]] + (not aborted)
    return ()
