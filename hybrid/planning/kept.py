"""The plans that were made last. The same ones are asked for again and again: by the statistics of every generation, by
what a model takes beside what it needs, by the next engine of a model that was loaded before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from hybrid.core.plan import Plan

MOST_STEPS = 10_000
"""Of all plans that are kept, about a kilobyte each: twenty of a model with 60 layers."""


class KeptPlans:
    """Plans by what they were made of, the latest used ones up to `most` steps in all. Any thread may ask."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most, self._steps, self._lock = most, 0, Lock()
        self._plans: OrderedDict[tuple[Any, ...], tuple[tuple[object, ...], Plan]] = OrderedDict()

    def get(self, values: tuple[Any, ...], objects: tuple[object, ...], make: Callable[[], Plan]) -> Plan:
        """The plan that equal `values` and the very same `objects` have given before, or else make().

        Objects are held as long as the plan: their ids are no other's until then.
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
