"""Split a plan into runs of steps on one device."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.core.plan import Plan, Step


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive steps on one device: one submit."""

    device: str
    steps: tuple[Step, ...]


def segments(plan: Plan) -> tuple[Segment, ...]:
    """The plan's segments, in order."""
    found: list[list[Step]] = []
    for step in plan.steps:
        if not found or found[-1][0].device != step.device:
            found.append([])
        found[-1].append(step)
    return tuple(Segment(steps[0].device, tuple(steps)) for steps in found)
