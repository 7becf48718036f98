"""Arena allocation of activations. A tensor's lifetime is from the step that writes it to its last reader; tensors with
overlapping lifetimes get disjoint bytes. Greedy best fit, largest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.core.plan import ALIGN


@dataclass(frozen=True, slots=True)
class Life:
    """A tensor's size and lifetime: bytes, first and last step (inclusive)."""

    name: str
    nbytes: int
    first: int
    last: int


def place(lives: Sequence[Life]) -> tuple[dict[str, int], int]:
    """Byte offsets by name, multiples of ALIGN, and the arena's size in bytes."""
    placed: dict[int, list[tuple[int, int]]] = {}  # step -> allocated ranges, as (begin, end)
    offsets: dict[str, int] = {}
    total = 0
    for life in sorted(lives, key=lambda v: (-v.nbytes, v.first, v.name)):
        size = max(ALIGN, -(-life.nbytes // ALIGN) * ALIGN)
        during = [placed.setdefault(step, []) for step in range(life.first, life.last + 1)]
        offset = _best_gap(sorted({taken for step in during for taken in step}), size)
        for step in during:
            step.append((offset, offset + size))
        offsets[life.name] = offset
        total = max(total, offset + size)
    return offsets, total


def _best_gap(busy: list[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap between busy ranges (sorted by start) that holds `size`, else their end."""
    best, best_gap, end = None, 0, 0
    for start, stop in busy:
        gap = start - end
        if gap >= size and (best is None or gap < best_gap):
            best, best_gap = end, gap
        end = max(end, stop)
    return end if best is None else best
