"""Counters of an interpreted dispatch: instructions per subgroup by kind, wavefronts of shared memory and sectors of
buffers, beside the minimum for the same words.

The model is NVIDIA's: shared memory has 32 banks of 4 bytes, and a wavefront accesses one word of each (of 8 bytes a
lane 16 lanes at a time, of 16 bytes eight); global memory is accessed in sectors of 32 bytes. Accesses are the
module's, with whole vectors: a compiler may merge or drop some.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybrid.harness.interpreter.matrices import LANES
from hybrid.harness.interpreter.module import TYPE_BOOL, TYPE_INT, TYPE_MATRIX, TYPE_VECTOR, Type

BANKS, WORD, SECTOR = 32, 4, 32
MOVES = {1, 65, 66, 79, 80, 81, 82, 83, 124, 245, 4460}
"""Opcodes that only rename a value: not counted."""
INSIDE = {61, 62}  # loads and stores: counted by what they access
KINDS = {4459: "matrix products", 224: "barriers", 225: "barriers", 4457: "matrix loads", 4458: "matrix stores"}


@dataclass(slots=True)
class Accesses:
    """Accesses of one kind and width. taken, least: wavefronts or sectors."""

    requests: int = 0
    taken: int = 0
    least: int = 0


@dataclass
class Watch:
    """Counts by kernel name."""

    instructions: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    shared: dict[str, dict[tuple[str, int], Accesses]] = field(default_factory=lambda: defaultdict(dict))
    buffers: dict[str, dict[tuple[str, int], Accesses]] = field(default_factory=lambda: defaultdict(dict))
    subgroups: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def executed(self, kernel: str, op: int, t: Type | None, mask: Any, lanes: int) -> None:
        """Count an instruction for each subgroup with an active lane."""
        if op not in MOVES and op not in INSIDE:
            active = lanes // LANES if mask is None else int(mask.reshape(-1, LANES).any(-1).sum())
            self.instructions[kernel][_kind(op, t)] += active * _times(t)

    def touched(self, kernel: str, shared: bool, offset: Any, size: int, mask: Any, writes: bool, lanes: int) -> None:
        """Count a load or store of `size` bytes by each lane at its offset."""
        places = np.broadcast_to(offset, lanes) if np.ndim(offset) < 2 else None
        if places is None:  # a matrix, whose fragments are not contiguous
            return
        active = np.ones(lanes, bool) if mask is None else mask
        table = self.shared if shared else self.buffers
        found = table[kernel].setdefault(("writes" if writes else "reads", size), Accesses())
        rows, on = places.reshape(-1, LANES).astype(np.int64), active.reshape(-1, LANES)
        rows, on = rows[on.any(-1)], on[on.any(-1)]
        found.requests += len(rows)
        rows = np.where(
            on, rows, np.take_along_axis(rows, on.argmax(-1)[:, None], -1)
        )  # inactive lanes copy an active lane's offset
        if shared:
            taken, least = wavefronts(rows, size)
        else:
            taken, least = sectors(rows, size)
        found.taken += taken
        found.least += least


def _words(rows: np.ndarray, size: int) -> np.ndarray:
    """Sorted indices of the accessed words, int64 [..., lanes * words]."""
    words = rows[..., None] // WORD + np.arange(-(-size // WORD))
    return np.sort(words.reshape(*rows.shape[:-1], -1), axis=-1)


def _first(words: np.ndarray) -> np.ndarray:
    """Mask of first occurrences in sorted numbers."""
    return np.concatenate([np.ones((*words.shape[:-1], 1), bool), words[..., 1:] != words[..., :-1]], -1)


def wavefronts(rows: np.ndarray, size: int) -> tuple[int, int]:
    """Wavefronts of requests, byte offsets int64 [requests, 32], and the minimum for as many words."""
    together = LANES if size <= WORD else LANES // 2 if size <= 2 * WORD else LANES // 4
    words = _words(rows.reshape(-1, together), size)
    first = _first(words)
    counts = np.zeros((len(words), BANKS), np.int64)
    row = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    np.add.at(counts, (row[first], words[first] % BANKS), 1)
    return int(counts.max(-1).sum()), int((-(-first.sum(-1) // BANKS)).sum())


def sectors(rows: np.ndarray, size: int) -> tuple[int, int]:
    words = _words(rows, size)
    distinct = _first(words).sum(-1)
    taken = _first(words * WORD // SECTOR).sum()
    return int(taken), int((-(-distinct * WORD // SECTOR)).sum())


def _kind(op: int, t: Type | None) -> str:
    if op in KINDS:
        return KINDS[op]
    if t is None:
        return "stores, flow"
    if 333 <= op <= 366:
        return "subgroup"
    if 227 <= op <= 242:
        return "atomic"
    scalar = t.of if t.kind in (TYPE_VECTOR, TYPE_MATRIX) else t
    if scalar.kind in (TYPE_INT, TYPE_BOOL):
        return "integers"
    return "halves" if scalar.dtype == np.float16 else "floats"


def _times(t: Type | None) -> int:
    """Instructions per result: two halves count as one."""
    if t is None or t.kind != TYPE_VECTOR:
        return 1
    return -(-t.n // 2) if t.dtype == np.float16 else t.n
