"""Memoisation of results that depend only on a declaration."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TypeVar, cast

from hybrid.spec.load import Model

ANSWERS = 4096
T = TypeVar("T")


class Asked(Model):
    """A declaration with a cache of derived results, which planning needs for every layer and row bucket."""

    def once(self, question: tuple[Hashable, ...], answer: Callable[[], T]) -> T:
        """The cached result for `question`, else answer(). Callers must not modify it. Exceptions are not cached."""
        found = self._answers.get(question)
        if found is None:
            if len(self._answers) >= ANSWERS:
                self._answers.clear()
            found = self._answers[question] = answer()
        return cast(T, found)

    @cached_property
    def _answers(self) -> dict[tuple[Hashable, ...], object]:
        return {}
