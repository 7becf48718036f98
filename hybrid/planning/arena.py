"""Offsets of activations in their shared arena: each lives from the step that writes it to the last that reads it, and two
whose lifetimes overlap never share bytes. Greedy best fit, largest first (the order matters more than the fit)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.core.plan import ALIGN


@dataclass(frozen=True, slots=True)
class Life:
    """A tensor's bytes and the first and last step (inclusive) during which it must stay intact."""

    name: str
    nbytes: int
    first: int
    last: int


def place(lives: Sequence[Life]) -> tuple[dict[str, int], int]:
    """Byte offsets by name, multiples of ALIGN, and the arena's size in bytes."""
    placed: list[tuple[int, int, Life]] = []  # (offset, size, life)
    offsets: dict[str, int] = {}
    for life in sorted(lives, key=lambda v: (-v.nbytes, v.first, v.name)):
        size = max(ALIGN, -(-life.nbytes // ALIGN) * ALIGN)
        busy = sorted((o, o + s) for o, s, other in placed if life.first <= other.last and other.first <= life.last)
        offset = _best_gap(busy, size)
        placed.append((offset, size, life))
        offsets[life.name] = offset
    return offsets, max((o + s for o, s, _ in placed), default=0)


def _best_gap(busy: list[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap between busy ranges (sorted by start) that holds `size`, else their end."""
    best, best_room, end = None, 0, 0
    for start, stop in busy:
        room = start - end
        if room >= size and (best is None or room < best_room):
            best, best_room = end, room
        end = max(end, stop)
    return end if best is None else best
