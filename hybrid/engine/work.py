"""What scheduled passes have taken: seconds in which the device ran them, and what their plans declare for them.

    phase     of a pass: `decode` has rows of sequences that decode alone, `prefill` of prompts alone, `mixed` both
    seconds   from its submission, or from the end of the pass before, until the host saw that it had ended: the host's
    clock,
              so a pass that ends while the host is busy seems longer by that, and the one behind it shorter
    bytes, operations
              by the declared costs of the plan that ran, for the rows, sequences and mean context that the pass had

A pass costs the host a few additions; costs are computed when somebody asks. They are multilinear in rows, sequences
and context, up to windows and the last block, as long as contexts are within two neighbouring powers of two: so sums of
products are kept for each plan and power of two, and a plan's declared cost is evaluated at the corners.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hybrid.core.plan import Plan
from hybrid.engine.sequence import Pass
from hybrid.planning.cost import plan_cost

PassPhase = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class Total:
    """Of one phase."""

    passes: int = 0
    rows: int = 0
    seconds: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0


@dataclass(slots=True)
class _Sums:
    """Passes of one plan, phase and range of contexts: `moments` are sums of products of (1, rows) x (1, sequences) x
    (1, context)."""

    plan: Plan
    onward: bool
    low: int
    moments: np.ndarray = field(default_factory=lambda: np.zeros((2, 2, 2)))
    passes: int = 0
    rows: int = 0
    seconds: float = 0.0


class Work:
    """For the thread that owns the device, but `totals`, which any may call. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sums: dict[tuple[PassPhase, int, int], _Sums] = {}
        self._open: list[tuple[Pass, _Sums, float]] = []  # submitted, not known to have ended
        self._last = 0.0  # when the last pass ended
        self._corners: dict[tuple[int, int], np.ndarray] = {}
        self._lock = threading.Lock()  # of the corners

    def begin(self, p: Pass, onward: bool, plan: Plan) -> None:
        """A pass is about to be submitted. onward: by a plan of the phase decode, a row of each sequence."""
        context = _context(p)
        bits = context.bit_length()
        key = (phase_of(p), id(plan), bits)
        sums = self._sums.get(key)
        if sums is None:  # it keeps the plan, so that its id stays its own
            sums = self._sums[key] = _Sums(plan, onward, 1 << (bits - 1))
        self._open.append((p, sums, self._clock()))
        t, s = p.rows, len(p.runs)
        sums.moments += ((1, context), (s, s * context)), ((t, t * context), (t * s, t * s * context))

    def end(self, p: Pass) -> None:
        """The host has seen that a pass has ended, and so have those before it."""
        now = self._clock()
        ended = 1 + next((i for i, (known, _, _) in enumerate(self._open) if known is p), -1)
        done, self._open = self._open[:ended], self._open[ended:]
        if not done:
            return
        seconds, rows = now - max(self._last, done[0][2]), sum(known.rows for known, _, _ in done)
        for known, sums, _ in done:
            sums.passes += 1
            sums.rows += known.rows
            sums.seconds += seconds * known.rows / rows
        self._last = now

    def lost(self) -> None:
        """Passes that had not ended never will."""
        self._open.clear()

    def totals(self) -> Mapping[PassPhase, Total]:
        """Of passes since the beginning; bytes and operations of some that have not ended are in it."""
        found: dict[PassPhase, Total] = {}
        for (phase, _, _), sums in list(self._sums.items()):
            nbytes, flops = np.tensordot(self._at_corners(sums), _weights(sums), 3).tolist()
            t = found.get(phase, Total())
            found[phase] = Total(
                t.passes + sums.passes, t.rows + sums.rows, t.seconds + sums.seconds, t.nbytes + nbytes, t.flops + flops
            )
        return found

    def _at_corners(self, sums: _Sums) -> np.ndarray:
        """[2, rows, sequences, context]: bytes and operations of the plan at the corners; decode plans have a sequence
        for each row, so theirs are a square."""
        with self._lock:
            found = self._corners.get(key := (id(sums.plan), sums.low))
            if found is None:
                found = np.zeros((2, 2, 2, 2))
                for i, j, k in itertools.product(range(2), repeat=3):
                    (t, s), c = _corner(sums, i, j), sums.low << k
                    if sums.onward and i != j:
                        continue
                    cost = plan_cost(sums.plan, c, {"tokens": t, "slots": s, **({"outs": t} if sums.onward else {})})
                    found[:, i, j, k] = cost.nbytes, cost.flops
                self._corners[key] = found
            return found


def phase_of(p: Pass) -> PassPhase:
    """By its runs: one that wants as many tokens as it has rows decodes, any other is of a prompt."""
    prompts = sum(run.ids is not None and len(run.ids) > run.wants for run in p.runs)
    return "decode" if not prompts else "prefill" if prompts == len(p.runs) else "mixed"


def _context(p: Pass) -> int:
    """Mean positions that a row looks at, at least 1."""
    seen = rows = 0
    for _, _, start, ids, _ in p.runs:
        n = 1 if ids is None else len(ids)
        seen += n * start + n * (n + 1) // 2
        rows += n
    return max(1, seen // rows)


def _sizes(sums: _Sums) -> tuple[int, int]:
    """Rows and sequences at the far corner."""
    return (2, 2) if sums.onward else (64, 16)


def _corner(sums: _Sums, i: int, j: int) -> tuple[int, int]:
    """Rows never fewer than sequences: costs have a bend there."""
    rows, sequences = _sizes(sums)
    return ((rows if i else 1) if sums.onward else rows << i), (sequences if j else 1)


def _weights(sums: _Sums) -> np.ndarray:
    """[rows, sequences, context]: how much of each corner's cost the passes make together."""
    m, c = sums.moments, sums.low
    m = np.stack((2 * m[..., 0] - m[..., 1] / c, m[..., 1] / c - m[..., 0]), -1)  # contexts c and 2 c
    if sums.onward:  # linear in rows, which are the sequences
        n, t = m[0, 0], m[1, 0]
        return np.array([[2 * n - t, 0 * n], [0 * n, t - n]])
    rows, sequences = _sizes(sums)
    at = np.stack((2 * m[0] - m[1] / rows, m[1] / rows - m[0]))  # rows and 2 rows
    return np.stack((at[:, 0] - (at[:, 1] - at[:, 0]) / (sequences - 1), (at[:, 1] - at[:, 0]) / (sequences - 1)), 1)
