"""How many of the sequences that decode a pass runs, where the device's kernels go by numbers of rows.

A pass of one sequence more than a tile holds may take so much longer that all of them together get fewer tokens a
second: on an H100 32 sequences of a 27B model decode 2700 and 33 of them 2460. Then fewer run in each pass, as many as
the next smaller number of rows that plans are made for, and all take turns; each gets more tokens a second than if all
ran in every pass. What passes take is measured as they are run, both ways in turn, for it changes with the length of
the sequences.
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
"""Passes until the other way is tried: the first time, and, with twice as many after each try that changed nothing, at
most."""
TRY = 5  # passes of such a try, and readings that are kept, so that it leaves none of those before it
ENOUGH = 3  # readings that a time is believed from
# of the time of a pass: where it has changed by more since the last try, the other way's is not believed for long
MOVED = 0.1


@dataclass(slots=True)
class _Pair:
    """Two neighbouring numbers of rows that plans are made for."""

    left: int = SOON
    """Passes until the next try."""
    period: int = OFTEN // 2
    trying: int = 0
    turns: bool = False
    """Whether sequences took turns when the last try began."""
    way: bool | None = None
    """Whether they do now, and seconds of a pass when they began to, or at the last try."""
    took: float = 0.0


class Turns:
    """For the thread that makes passes. sizes: rows that decode passes have plans for, ascending. full: those of which
    no row is left over on the device; passes of others cost nearly what the next larger of these do."""

    def __init__(self, sizes: Sequence[int], full: Sequence[int]) -> None:
        self.sizes, self._full = tuple(sizes), frozenset(full)
        self._readings = {size: deque[float](maxlen=TRY) for size in sizes}
        self._pairs = [_Pair() for _ in sizes]
        self._next = 0

    def took(self, rows: int, seconds: float) -> None:
        """A pass that decoded one token of each of `rows` sequences took so long."""
        self._readings[self.sizes[bisect_left(self.sizes, rows)]].append(seconds)

    def fewer(self, n: int) -> int:
        """Rows of a pass in which some of n sequences rest; 0: none may."""
        i = bisect_left(self.sizes, n)
        return 0 if n in self._full or not 0 < i < len(self.sizes) else self.sizes[i - 1]

    def pays(self, n: int) -> bool:
        """Whether in the next pass, of n sequences that decode, some rest. Asked once for each pass: it counts them."""
        i = bisect_left(self.sizes, n)
        pair, whole, part = self._pairs[i], self._readings[self.sizes[i]], self._readings[self.sizes[i - 1]]
        known = min(len(whole), len(part)) >= ENOUGH
        turns = known and self.sizes[i - 1] * median(whole) > (1 + GAIN) * n * median(part)
        used = part if turns else whole
        now, pair.left = median(used) if used else 0.0, pair.left - 1
        if pair.way is not turns:
            pair.way, pair.took = turns, now
        elif abs(now - pair.took) > MOVED * pair.took > 0:
            pair.left, pair.period, pair.took = min(pair.left, SOON), OFTEN // 2, now
        if pair.left <= 0:
            pair.period = OFTEN if turns != pair.turns else min(2 * pair.period, RARELY)
            pair.left, pair.trying, pair.turns, pair.took = pair.period, TRY, turns, now
        if pair.trying:
            pair.trying -= 1
            return not pair.turns
        return turns

    def resting(self, running: Sequence[Stream]) -> frozenset[Stream]:
        """Of running sequences, none within its prompt, those that the next pass leaves out: in turn, of the lowest
        priority, at most every second of them; never the first in order."""
        none = frozenset[Stream]()
        if not (most := self.fewer(len(running))):
            return none
        able = [s for s in running if s.decodes]
        rest = len(able) - most
        some = [s for s in able[1:] if s.priority == able[-1].priority]
        if not 0 < 2 * rest <= len(some) or not all(s.ahead for s in able) or not self.pays(len(running)):
            return none
        first, self._next = self._next % len(some), self._next + rest
        return frozenset(some[(first + i) % len(some)] for i in range(rest))
