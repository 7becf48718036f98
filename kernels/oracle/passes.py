"""The rows of a pass."""

from __future__ import annotations

import numpy as np

from hybrid.core.plan import CONTROL, ENTRY_WORDS, MESSAGE_HEADER, OUT_WORDS, ROW_WORDS
from hybrid.quant.codec import Real

FOLLOWS = -(1 << 30)  # hybrid.engine.runner


def begin_pass(
    *,
    inbox: np.ndarray,
    next_token: np.ndarray,
    next_position: np.ndarray,
    drafts: np.ndarray,
    known_until: np.ndarray,
    turn: np.ndarray,
    live: np.ndarray,
    tokens: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    out_rows: np.ndarray,
    mask_rows: np.ndarray,
    global_table: np.ndarray,
    local_table: np.ndarray,
    history: np.ndarray,
    sets: int,
    real: Real = np.float64,
) -> tuple[()]:
    """tokens, positions, slots [R], out_rows, mask_rows [Q], live [8], entries of the tables [S,MB] and tokens of
    history [S,C] for pass turn[0] + 1: from the message of inbox [sets * N] with that number, else continued from the
    previous pass."""
    turn[0] += 1
    messages = inbox.reshape(sets, -1)
    (found,) = np.nonzero(messages[:, 0].view(np.uint32) == turn[0])
    if len(found):
        live[5:8] = 0
        body = messages[found[-1], MESSAGE_HEADER:]
        rows, outs, entries = (int(n) for n in messages[found[-1], 1:4])
        ends = np.cumsum([ROW_WORDS * rows, OUT_WORDS * outs, ENTRY_WORDS * entries])
        given, wanted, entered = (
            part.reshape(-1, n)
            for part, n in zip(np.split(body[: ends[-1]], ends[:-1]), (ROW_WORDS, OUT_WORDS, ENTRY_WORDS), strict=True)
        )
        out_rows[:outs], mask_rows[:outs] = wanted.T
        for table, slot, index, block in entered:
            held = {0: global_table, 1: local_table}.get(int(table))
            if held is not None and 0 <= slot < held.shape[0] and 0 <= index < held.shape[1]:
                held[slot, index] = block
    else:
        rows, outs = int(live[CONTROL["rows"]]), int(live[CONTROL["outs"]])
        given = np.stack([np.full(rows, -1), np.full(rows, -1), slots[:rows]], axis=1)
    token, position, slot = given.T
    there = (slot >= 0) & (slot < len(next_token))
    known = np.where(there, slot, 0)
    follows = token <= FOLLOWS
    other = np.where(follows, FOLLOWS, -2) - token  # slot of draft tokens, where the token is a draft
    theirs = (token < -1) & (other < len(known_until))
    until = np.where(theirs, known_until[np.where(theirs, other, 0)], -1)
    behind = np.where(follows & theirs, np.minimum(next_position[known], until), next_position[known])
    onward = np.where(position <= FOLLOWS, behind, next_position[known] - 1 - position)
    at = np.where(position >= 0, position, np.where(there, onward, 0))
    slots[:rows], positions[:rows] = slot, at
    drafted = theirs & (at < drafts.shape[1])
    draft = np.maximum(drafts[np.where(drafted, other, 0), np.where(drafted, at, 0)], 0)
    draft = np.where(follows & (at > until), -1, np.where(drafted, draft, 0))
    token = np.where(token < -1, draft, token)
    tokens[:rows] = np.where(token >= 0, token, np.where(there, next_token[known], 0))
    noted = (token >= 0) & there & (at < history.shape[1])
    history[slot[noted], at[noted]] = token[noted]
    live[[CONTROL["rows"], CONTROL["outs"], CONTROL["context"]]] = rows, outs, int(at.max()) + 1 if rows else 0
    return ()
