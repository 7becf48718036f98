"""How many of the sequences that decode a pass runs, where the device's kernels go by numbers of rows.

A pass of one sequence more than a tile holds may take so much longer that all of them together get fewer tokens a second: on an
H100 32 sequences of a 27B model decode 2700 and 33 of them 2460. Then fewer run in each pass, as many as the next smaller number of
rows that plans are made for, and all take turns; each gets more tokens a second than if all ran in every pass.
What passes take is measured as they are run, both ways in turn, for it changes with the length of the sequences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hybrid.engine.sequence import Stream

GAIN = 0.02  # of tokens a second, at least, that taking turns is for
SOON, OFTEN, RARELY = 16, 256, 4096
"""Passes until the other way is tried: the first time, and, with twice as many after each try that changed nothing, at most."""
TRY = 5  # passes of such a try, and readings that are kept, so that it leaves none of those before it
ENOUGH = 3  # readings that a time is believed from


@dataclass(slots=True)
class _Pair:
    """Two neighbouring numbers of rows that plans are made for."""

    left: int = SOON
    """Passes until the next try."""
    period: int = OFTEN // 2
    trying: int = 0
    turns: bool = False
    """Whether sequences took turns when the last try began."""


class Turns:
    """For the thread that makes passes. sizes: rows that decode passes have plans for, ascending; of a device on which those in
    between cost nearly as much as the next larger one."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._readings = {size: deque[float](maxlen=TRY) for size in sizes}
        self._pairs = [_Pair() for _ in sizes]
        self._next = 0

    def took(self, rows: int, seconds: float) -> None:
        """A pass that decoded one token of each of `rows` sequences took so long."""
        self._readings[self.sizes[bisect_left(self.sizes, rows)]].append(seconds)

    def most(self, n: int) -> int:
        """Rows of the next pass, of n sequences that decode; n, or the next smaller of `sizes`."""
        i = bisect_left(self.sizes, n)
        if i == 0 or i == len(self.sizes) or self.sizes[i] == n:
            return n
        pair, turns, fewer = self._pairs[i], self._pays(n, i), self.sizes[i - 1]
        pair.left -= 1
        if pair.left <= 0:
            pair.period = OFTEN if turns != pair.turns else min(2 * pair.period, RARELY)
            pair.left, pair.trying, pair.turns = pair.period, TRY, turns
        if pair.trying:
            pair.trying -= 1
            turns = not pair.turns
        return fewer if turns else n

    def resting(self, running: Sequence[Stream]) -> frozenset[Stream]:
        """Of running sequences, none within its prompt, those that the next pass leaves out: in turn, of the lowest priority; never
        the first in order."""
        most = self.most(len(running))
        if most == len(running):
            return frozenset()
        able = [s for s in running if s.decodes]
        rest, last = len(able) - most, able[-1].priority if able else 0
        some = [s for s in able[1:] if s.priority == last]
        if not 0 < rest <= len(some) or not all(s.ahead for s in able):
            return frozenset()
        first, self._next = self._next % len(some), self._next + rest
        return frozenset(some[(first + i) % len(some)] for i in range(rest))

    def _pays(self, n: int, i: int) -> bool:
        whole, part = self._readings[self.sizes[i]], self._readings[self.sizes[i - 1]]
        known = min(len(whole), len(part)) >= ENOUGH
        return known and self.sizes[i - 1] * median(whole) > (1 + GAIN) * n * median(part)
