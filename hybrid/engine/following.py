"""A sequence that is guessed for."""

from __future__ import annotations

from hybrid.engine.drafts import Drafter
from hybrid.engine.pace import Counts, Pace
from hybrid.engine.sequence import Stream


class Following:
    """By whom, and how many guesses of its next pass."""

    def __init__(self, stream: Stream, pace: Pace, drafter: Drafter, constrained: bool) -> None:
        self.stream, self.pace, self.drafter, self.constrained = stream, pace, drafter, constrained
        self.counts = Counts()
        self.asked = 0
        """Guesses that the next pass may have for it."""
        self.ready = 0
        """Guesses of its next pass that were made while those before them were verified."""
        self.since = len(stream.ids)
        """Tokens up to which it is known what would have been guessed."""

    def run_ahead(self, may: bool) -> None:
        """Whether its next row may run before its last token is known."""
        may = may and not self.constrained
        if self.stream.ahead != may:
            self.stream.ahead, self.stream.steady = may, False
