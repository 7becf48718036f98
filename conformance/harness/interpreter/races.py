"""Races between the dispatches of a program: two touch the same word of memory, one of them writes it, and no barrier
lies between them. Drivers run such a program, most often with the right result.

The interpreter logs the words that each dispatch touches; the recorded barriers are compared with that log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WORD = 4
Place = tuple[int, int, int]
"""A bound slice: identity of its memory, first byte, bytes."""


class Touched:
    """The words that one dispatch reads and writes."""

    def __init__(self, name: str, bound: Sequence[Place]) -> None:
        self.name, self.bound = name, bound
        self._marks = [[np.zeros(-(-size // WORD), bool) for _, _, size in bound] for _ in range(2)]
        self._extra: list[Place] = []

    def touched(self, binding: int, offset: Any, size: int, mask: Any, writes: bool) -> None:
        """Log an access of `size` bytes by each active lane at its offset in a binding."""
        at = np.asarray(offset)
        if mask is not None and at.ndim:
            at = at[mask]
        marks = self._marks[writes][binding]
        for word in range(-(-size // WORD)):
            marks[at // WORD + word] = True

    def reads_grid(self, place: Place) -> None:
        """Log the size of an indirect dispatch."""
        self._extra.append(place)

    def words(self, writes: bool) -> dict[int, np.ndarray]:
        """Word numbers by memory, sorted."""
        found: dict[int, list[np.ndarray]] = {}
        for (memory, offset, _), marks in zip(self.bound, self._marks[writes], strict=True):
            if marks.any():
                found.setdefault(memory, []).append(np.flatnonzero(marks) + offset // WORD)
        for memory, offset, size in () if writes else self._extra:
            found.setdefault(memory, []).append(np.arange(offset // WORD, (offset + size) // WORD))
        return {memory: np.unique(np.concatenate(parts)) for memory, parts in found.items()}


@dataclass(frozen=True, slots=True)
class Race:
    """Dispatches by number, and how many words they share."""

    first: int
    second: int
    what: str
    words: int


class Log:
    """The words of all dispatches of a run."""

    def __init__(self, touched: Sequence[Touched]) -> None:
        self.names = [t.name for t in touched]
        self._reads, self._writes = ([t.words(writes) for t in touched] for writes in (False, True))

    def races(self, barriers: Sequence[bool]) -> list[Race]:
        """All races, with a barrier before each dispatch for which `barriers` has True."""
        found, first = list[Race](), 0
        for second in range(len(self.names)):
            if barriers[second]:
                first = second
            for earlier in range(first, second):
                for what, before, after in (
                    ("is read after it is written", self._writes[earlier], self._reads[second]),
                    ("is written after it is read", self._reads[earlier], self._writes[second]),
                    ("is written twice", self._writes[earlier], self._writes[second]),
                ):
                    shared = sum(
                        len(np.intersect1d(before[m], after[m], assume_unique=True))
                        for m in before.keys() & after.keys()
                    )
                    if shared:
                        found.append(Race(earlier, second, what, shared))
        return found

    def describe(self, race: Race) -> str:
        return (
            f"dispatch {race.second} ({self.names[race.second]}) has no barrier after dispatch {race.first} "
            f"({self.names[race.first]}): memory of {race.words} words {race.what}"
        )
