"""Share of weights that sparse feed-forwards (Gemma 3n's first layers) need, measured on a text, and the modelled saving
of not reading the rest.

A row of up is needed where some token of a pass has a gate above its threshold, a column of down where some token's
activation is not zero as it is stored. A pass reads the union of what its tokens need. Two kinds of tokens are looked
at: of texts that have nothing to do with one another (a batch), and consecutive ones of a text (drafts that are
verified).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.hparams import HParams
from hybrid.perf.roofline.model import bandwidth, estimate
from hybrid.perf.roofline.work import Subject
from hybrid.spec.devicesheet import DeviceSheet

TOGETHER = (1, 2, 4, 8, 16, 32)
BLOCK = 32
"""Columns of down that share a scale."""
DRAWS = 200
Layers = Sequence[np.ndarray]
"""bool [tokens, F] of each sparse layer."""


@dataclass(frozen=True, slots=True)
class Union:
    """Shares, from 0 to 1, of what a pass of `tokens` tokens needs: mean over layers and passes."""

    tokens: int
    up: float
    down: float
    blocks: float
    """Of down's blocks of 32 columns, those with a column that is needed."""
    consecutive: float
    """`up` of consecutive tokens of a text."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Modelled seconds of a pass of `tokens` sequences, one token each, and what it would save of them."""

    tokens: int
    seconds: float
    """As expected where all of up and down is read."""
    up: float
    """Rows of up that are not read."""
    down: float
    """Columns of down that are not read: codes by columns, scales by blocks."""


def unions(above: Sequence[Layers], active: Sequence[Layers], seed: int = 0) -> list[Union]:
    """Of texts: which gates are above their threshold, and which activations are not zero. ValueError for a text
    shorter than the largest pass."""
    most, lengths = TOGETHER[-1], [len(text[0]) for text in above]
    if min(lengths, default=0) < most:
        raise ValueError(f"texts of {most} tokens or more are needed, the shortest has {min(lengths, default=0)}")
    rng, found = np.random.default_rng(seed), []
    for n in TOGETHER:
        drawn = []
        for _ in range(DRAWS):
            texts = [int(t) for t in rng.choice(len(above), n, replace=len(above) < n)]
            rows = [(t, int(rng.integers(lengths[t]))) for t in texts]
            first = int(rng.integers(lengths[texts[0]] - n + 1))
            after = [(texts[0], first + i) for i in range(n)]
            up, down = _needed(above, rows), _needed(active, rows)
            blocks = [np.any(d.reshape(-1, BLOCK), axis=-1) for d in down]
            drawn.append([_share(needed) for needed in (up, down, blocks, _needed(above, after))])
        found.append(Union(n, *(float(x) for x in np.mean(drawn, axis=0))))
    return found


def _needed(kind: Sequence[Layers], rows: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """[F] of each layer: what some (text, token) of `rows` needs."""
    return [np.any([kind[t][layer][i] for t, i in rows], axis=0) for layer in range(len(kind[0]))]


def _share(needed: Sequence[np.ndarray]) -> float:
    return sum(int(n.sum()) for n in needed) / sum(n.size for n in needed)


def saved(
    found: Sequence[Union], model: Subject, hp: HParams, dtype: str, context: int, sheet: DeviceSheet
) -> list[Saved]:
    """For the sizes of `hp` with matrices of `dtype`, at the bandwidth that was reached."""
    layers = [x for x in hp.layers if x.sparsity]
    codes, scales = _bytes(dtype)
    elements = sum(x.ffn * hp.hidden for x in layers)
    rate = bandwidth(sheet, "expected")
    result = []
    for u in found:
        as_declared = estimate(model.decode(u.tokens, context), sheet, "expected").seconds  # part of up only
        unread = (
            sum(x.ffn * hp.hidden * (1 - min(1.0, u.tokens * (1 - x.sparsity))) for x in layers)
            * (codes + scales)
            / rate
        )
        up = elements * (codes + scales) * (1 - u.up) / rate
        down = elements * (codes * (1 - u.down) + scales * (1 - u.blocks)) / rate
        result.append(Saved(u.tokens, as_declared + unread, up, down))
    return result


def _bytes(dtype: str) -> tuple[float, float]:
    """(codes, scales) of one element."""
    kind = DTYPES[dtype]
    codes = sum(p.dtype.itemsize * p.count for p in kind.parts if p.name in ("data", "codes", "high")) / kind.block
    return codes, kind.bits / 8 - codes
