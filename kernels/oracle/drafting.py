"""A drafter that reads its target's cache: its input, the hidden state that it starts from, and its head of clusters."""

from __future__ import annotations

import numpy as np

from hybrid.kernels.oracle.linear import linear
from hybrid.quant.codec import Real, Value, take


def draft_input(
    *,
    x: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    next_position: np.ndarray,
    hidden: np.ndarray,
    guessed: np.ndarray,
    real: Real = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """y[T,2*W]: x[T,W] beside the slot's row of hidden[S,W], or for a guess (a position above next_position[S] of the
    slot) of guessed[S,W]; at i32 [T]: the position before next_position of the slot."""
    after = next_position[slots]
    state = np.where((positions > after)[:, None], guessed[slots], hidden[slots])
    return np.concatenate([x, state], axis=-1).astype(real, copy=False), np.maximum(after - 1, 0).astype(np.int32)


def keep_last(
    *,
    x: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    next_position: np.ndarray,
    kept: np.ndarray,
    real: Real = np.float64,
) -> tuple[()]:
    """kept[slot] = x[t] f32 [W] for rows t at the position before next_position of their slot."""
    last = positions + 1 == next_position[slots]
    kept[slots[last]] = x[last]
    return ()


def top_clusters(*, scores: np.ndarray, k: int, real: Real = np.float64) -> tuple[np.ndarray]:
    """clusters i32 [T,K]: the largest of scores [T,C], in descending order, the first of equal ones."""
    return (np.argsort(-scores, axis=-1, kind="stable")[:, :k].astype(np.int32),)


def cluster_logits(
    *,
    x: np.ndarray,
    w: Value,
    members: np.ndarray,
    clusters: np.ndarray,
    out_rows: np.ndarray,
    m: int,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """picked[O,K*M] = x[row] @ w[tokens].T, row = out_rows[O], for the tokens of clusters[row]: m each of members[V]."""
    picked = np.empty((len(out_rows), clusters.shape[1] * m), real)
    for o, row in enumerate(out_rows):
        tokens = members.reshape(-1, m)[clusters[row]].reshape(-1)
        picked[o] = linear(x=x[row : row + 1], w=take(w, tokens), real=real)[0][0]
    return (picked,)


def spread_logits(
    *,
    picked: np.ndarray,
    members: np.ndarray,
    clusters: np.ndarray,
    out_rows: np.ndarray,
    m: int,
    real: Real = np.float64,
) -> tuple[np.ndarray]:
    """logits[O,V]: picked[O,K*M] at the tokens of clusters[out_rows[O]], m each of members[V]; elsewhere the least of
    them less 1."""
    picked = picked.astype(real, copy=False)
    logits = np.repeat(picked.min(-1, keepdims=True) - real(1), members.size, axis=1)
    tokens = members.reshape(-1, m)[clusters[out_rows]].reshape(len(out_rows), -1)
    np.put_along_axis(logits, tokens, picked, axis=-1)
    return (logits,)
