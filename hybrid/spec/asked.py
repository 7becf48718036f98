"""Answers that follow from a declaration alone, kept with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TypeVar, cast

from hybrid.spec.load import Model

ANSWERS = 4096
T = TypeVar("T")


class Asked(Model):
    """A declaration as it was read, which plans ask the same questions for every layer and number of rows."""

    def once(self, question: tuple[Hashable, ...], answer: Callable[[], T]) -> T:
        """answer(), or what it was when the same was asked before, which nobody may change. What it raises is not
        kept."""
        found = self._answers.get(question)
        if found is None:
            if len(self._answers) >= ANSWERS:
                self._answers.clear()
            found = self._answers[question] = answer()
        return cast(T, found)

    @cached_property
    def _answers(self) -> dict[tuple[Hashable, ...], object]:
        return {}
