"""Logits before sampling, adjusted for a sequence, and log-probabilities."""

from __future__ import annotations

import numpy as np

from hybrid.quant.codec import Real

BIASES, MASKED = 4, -np.inf
WANTED = 6  # word of params: the number of most likely ids to report


def adjust_logits(
    *,
    logits: np.ndarray,
    out_rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    penalties: np.ndarray,
    history: np.ndarray,
    bias_ids: np.ndarray,
    bias: np.ndarray,
    mask_rows: np.ndarray,
    masks: np.ndarray,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """adjusted[O,V]: each row penalised by its sequence's tokens up to its own position, biased and masked; see
    specs/ops/adjust_logits.toml. NaN and +infinity stay, so that they are still reported."""
    vocab = logits.shape[1]
    adjusted = logits.astype(real)
    for z, source, mask_row in zip(adjusted, out_rows, mask_rows, strict=True):
        kept = np.isnan(z) | (z == np.inf)
        before = z[kept]
        slot, pos = slots[source], int(positions[source])
        repetition, presence, frequency = (real(x) for x in penalties[slot, :3].view(np.float32))
        first, count = int(penalties[slot, 3]), int(penalties[slot, BIASES])
        if (repetition, presence, frequency) != (1, 0, 0):
            tokens = history[slot, : pos + 1]
            known = (tokens >= 0) & (tokens < vocab)
            seen = np.unique(tokens[known])
            z[seen] = np.where(z[seen] > 0, z[seen] / repetition, z[seen] * repetition)
            generated, times = np.unique(tokens[first:][known[first:]], return_counts=True)
            z[generated] -= frequency * times.astype(real) + presence
        ids = bias_ids[slot, :count]
        known = (ids >= 0) & (ids < vocab)
        np.add.at(z, ids[known], bias[slot, :count][known].astype(real))
        if 0 <= mask_row < len(masks):
            allowed = np.unpackbits(masks[mask_row].astype("<u4").view(np.uint8), bitorder="little")[:vocab]
            z[allowed == 0] = MASKED
        z[kept] = before
    return (adjusted,)


def logprobs(
    *,
    logits: np.ndarray,
    out_rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    params: np.ndarray,
    history: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    valid: int,
    real: Real = np.float64,
) -> tuple[()]:
    """For each output row of logits[O,V] whose slot wants n > 0: ids and log-probabilities of the sampled token
    (element 0) and of the n most likely ids < valid, in top_ids and top_logprobs [slot, (position + 1) % 64]."""
    ring, most = top_ids.shape[1], top_ids.shape[2] - 1
    for row, source in zip(logits, out_rows, strict=True):
        slot, chosen_at = slots[source], int(positions[source]) + 1
        n = min(int(params[slot, WANTED]), most)
        if n == 0:
            continue
        ids, values = np.full(n + 1, -1, np.int32), np.full(n + 1, -np.inf, real)
        z = row[:valid].astype(real)
        greatest = z.max()
        if np.isfinite(greatest):
            p = z - greatest
            p -= np.log(np.exp(p).sum())
            best = most_likely(row[:valid], n)
            ids[1 : 1 + len(best)], values[1 : 1 + len(best)] = best, p[best]
            chosen = int(history[slot, chosen_at]) if chosen_at < history.shape[1] else -1
            if 0 <= chosen < valid:
                ids[0], values[0] = chosen, p[chosen]
        top_ids[slot, chosen_at % ring, : n + 1] = ids
        top_logprobs[slot, chosen_at % ring, : n + 1] = values
    return ()


def most_likely(row: np.ndarray, n: int) -> np.ndarray:
    """Ids of a row's n greatest logits above -infinity, descending, the lower id first at a tie."""
    least = np.partition(row, -n)[-n] if n < len(row) else -np.inf
    ids = np.flatnonzero((row >= least) & (row > -np.inf))
    return ids[np.argsort(-row[ids], kind="stable")][:n]
