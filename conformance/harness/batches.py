"""Ragged batches: the sequence slot and position of each row, and the shuffled block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid.harness.values import integers, permutation

STYLES = ("ragged", "mixed", "empty", "full", "edge")


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one pass. slots, positions: i32[rows]; lengths: i64[S], positions held by each slot after the pass."""

    slots: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray


def batch(seed: int, rows: int, slots: int, context: int, style: str, edge: int = 0, spread: bool = False) -> Batch:
    """`rows` rows over at most `slots` sequences of at most `context` positions, no position twice in a slot.

    `spread`: use as many sequences as possible (a decode batch: one row each if they suffice). Styles: `ragged` starts
    anywhere; `mixed` too, with the rows of all sequences interleaved; `empty` starts every sequence at 0 (nothing
    cached); `full` ends every sequence at the last position; `edge` straddles position `edge` (a block's end, the
    sliding window's).
    """
    if rows > slots * context:
        raise ValueError(f"{rows} rows do not fit {slots} slots of {context} positions")
    runs = _runs(seed, rows, slots, context, spread)
    order = permutation(seed, "batch.slots", slots)
    row_slots: list[int] = []
    row_positions: list[int] = []
    lengths = np.zeros(slots, np.int64)
    for i, run in enumerate(runs):
        room, slot = context - run, int(order[i])
        start = int(integers(seed, f"batch.start.{i}", (1,), 0, room)[0])
        start = {"empty": 0, "full": room, "edge": min(room, max(0, edge - 1 + i % 3 - run // 2))}.get(style, start)
        row_slots += [slot] * run
        row_positions += range(start, start + run)
        lengths[slot] = start + run
    mix = permutation(seed, "batch.mix", rows) if style == "mixed" else np.arange(rows)
    return Batch(np.array(row_slots, np.int32)[mix], np.array(row_positions, np.int32)[mix], lengths)


def block_table(seed: int, slots: int, per_slot: int, blocks: int, ring: bool) -> np.ndarray:
    """i32[slots, per_slot]: distinct blocks of the cache in shuffled order. `ring`: each sequence reuses the first half
    of its blocks, as sliding layers do."""
    own = max(1, -(-per_slot // 2)) if ring else per_slot
    if slots * own > blocks:
        raise ValueError(f"{slots} x {own} distinct blocks wanted, the cache has {blocks}")
    table = permutation(seed, "block_table", blocks)[: slots * own].reshape(slots, own).astype(np.int32)
    return np.ascontiguousarray(table[:, np.arange(per_slot) % own])


def _runs(seed: int, rows: int, slots: int, context: int, spread: bool) -> list[int]:
    """Lengths >= 1 of the sequences' runs: at most `slots` runs of at most `context` rows, which sum to `rows`."""
    fewest, most = -(-rows // context), min(slots, rows)
    count = most if spread else int(integers(seed, "batch.count", (1,), fewest, most)[0])
    runs, left = [], rows
    for i in range(count):
        after = count - i - 1
        low, high = max(1, left - after * context), min(context, left - after)
        if spread:
            low = high = -(-left // (after + 1))
        runs.append(int(integers(seed, f"batch.run.{i}", (1,), low, high)[0]))
        left -= runs[-1]
    return runs
