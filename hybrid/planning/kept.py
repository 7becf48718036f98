"""LRU cache of plans. Statistics, footprints and a reloaded model's engine request the same plans repeatedly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from hybrid.core.plan import Plan

MOST_STEPS = 10_000
"""Steps of all cached plans; about 1 KB each."""


class KeptPlans:
    """LRU cache of plans by their inputs, up to `most` steps in total. Thread-safe."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most, self._steps, self._lock = most, 0, Lock()
        self._plans: OrderedDict[tuple[Any, ...], tuple[tuple[object, ...], Plan]] = OrderedDict()

    def get(self, values: tuple[Any, ...], objects: tuple[object, ...], make: Callable[[], Plan]) -> Plan:
        """The cached plan for equal `values` and identical `objects`, else make().

        The cache keeps `objects` alive with their plan, so that their ids stay unique.
        """
        key = (*values, *map(id, objects))
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key][1]
        made = make()
        with self._lock:
            if key not in self._plans and len(made.steps) <= self._most:
                self._plans[key] = objects, made
                self._steps += len(made.steps)
                while self._steps > self._most:
                    _, (_, oldest) = self._plans.popitem(last=False)
                    self._steps -= len(oldest.steps)
        return made


KEPT = KeptPlans()
