"""Races between the dispatches of a program: two touch the same word of memory, one of them writes it, and no barrier
lies between them. Drivers run such a program, most often with the right result.

The interpreter logs the words that each dispatch touches; the recorded barriers are compared with that log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid.kernels.vulkan.memory import Buffer, Slice
from hybrid.kernels.vulkan.recorder import Recording, hazards

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


def sweep(recording: Recording, logs: Sequence[Log]) -> Counter[tuple[str, str]]:
    """What a recording loses without each of its declared reads, writes and barriers: counts by (what is dropped,
    verdict). Verdicts: `refused` when it is recorded; `race` in a run of `logs`; `same`: the same barriers; else the
    kernels between which nothing was noticed."""
    dispatches, found = recording.dispatches, Counter[tuple[str, str]]()
    barriers = [b is not None for b in recording.barriers]
    grids = next((d.writes[0] for d in dispatches if d.kernel.name == "grid"), Slice(Buffer(0, "none"), 0, 0))

    def verdict(fewer: list[bool], kernel: str) -> str:
        if fewer == barriers:
            return "same"
        return "race" if any(log.races(fewer) for log in logs) else kernel

    def without(i: int, **changed: Any) -> str:
        some = [*dispatches[:i], replace(dispatches[i], **changed), *dispatches[i + 1 :]]
        return verdict([b is not None for b in hazards(some, grids)], dispatches[i].kernel.name)

    for i, d in enumerate(dispatches):
        if barriers[i]:
            fewer = [b and k != i for k, b in enumerate(barriers)]
            found["barrier", verdict(fewer, f"{dispatches[i - 1].kernel.name}, {d.kernel.name}")] += 1
        for k in range(len(d.reads)):
            found["read", without(i, reads=(*d.reads[:k], *d.reads[k + 1 :]))] += 1
        stored = {d.slices[k] for k in (d.kernel.writes_now or frozenset)()}
        for k, piece in enumerate(d.writes):
            dropped = without(i, writes=(*d.writes[:k], *d.writes[k + 1 :]))
            found["write", "refused" if piece in stored else dropped] += 1
    return found
