"""How many tokens to guess, and for which sequences: by what was accepted, and by what passes of so many rows take here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST = 7
"""Guesses of a pass for one sequence at most, unless asked for: with the token before them they fill the smallest batch of rows."""
PROBES = (16, 512)  # tokens between two tries where guesses do not pay: doubled after each try in vain
PROBE = 2  # guesses of such a try
AHEAD = 4
"""Tokens chosen ahead of the host where no guess is at hand."""
_KEPT = 0.9  # of what was counted before, at each verification
_SLOWER = 0.8  # weight of earlier passes in a mean time


@dataclass(slots=True)
class Counts:
    """Of one request, or of all."""

    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    """Passes with guesses; of several sequences in one pass, each counts."""
    passes: int = 0
    """Passes that chose tokens, with guesses and without."""
    tokens: int = 0

    def chose(self, tokens: int, guesses: int = 0) -> None:
        """A pass has chosen so many tokens, the first of them guessed rightly but for the last."""
        self.passes, self.tokens = self.passes + 1, self.tokens + tokens
        if guesses:
            self.verified, self.drafted, self.accepted = self.verified + 1, self.drafted + guesses, self.accepted + tokens - 1

    def line(self, name: str) -> str:
        """For people."""
        share = f" ({100 * self.accepted / self.drafted:.0f} %)" if self.drafted else ""
        rate = f"; {self.tokens / self.passes:.2f} tokens per pass" if self.passes else ""
        return f"guesses ({name}): drafted {self.drafted}, accepted {self.accepted}{share}{rate}"


@dataclass(slots=True)
class Costs:
    """Mean seconds of a pass by its rows, prompts' excluded, and of drafting one more guess for all sequences. What was not
    measured lies between what was; beyond the most rows that were, it costs what those do: so it is tried once."""

    passes: dict[int, float] = field(default_factory=dict)
    guess: float = 0.0

    def took(self, rows: int, seconds: float) -> None:
        before = self.passes.get(rows, seconds)
        self.passes[rows] = seconds if seconds < before / 2 else _SLOWER * before + (1 - _SLOWER) * seconds

    def guessed(self, count: int, seconds: float) -> None:
        each = seconds / max(count, 1)
        self.guess = each if not self.guess else _SLOWER * self.guess + (1 - _SLOWER) * each

    def of(self, rows: int) -> float:
        """0: nothing is known of so few."""
        passes = self.passes
        if rows in passes:
            return passes[rows]
        below = max((n for n in passes if n < rows), default=0)
        above = min((n for n in passes if n > rows), default=0)
        if not below or not above:
            return passes[below] if below else 0.0
        return passes[below] + (passes[above] - passes[below]) * (rows - below) / (above - below)


def expected(rate: float, guesses: int) -> float:
    """Tokens of a pass that verifies so many guesses, each right with this rate where those before it are."""
    return sum(rate**i for i in range(guesses + 1))


class Pace:
    """Of one sequence. most: guesses of a pass at most; fixed: always as many."""

    def __init__(self, most: int = MOST, fixed: bool = False) -> None:
        self.most, self.fixed = most, fixed
        self._right, self._tried = 1.5, 2.0  # as if 3 of 4 had been right
        self._rest, self._wait, self._probed = 0, PROBES[0], False  # tokens until the next try; after one in vain, so many

    @property
    def rate(self) -> float:
        """Of a guess to be right where those before it are."""
        return self._right / self._tried

    @property
    def due(self) -> bool:
        """Whether the next pass may have guesses for it."""
        return self.most > 0 and self._rest <= 0

    def pause(self, tokens: int) -> None:
        """No guesses for so many tokens."""
        self._rest = max(self._rest, tokens)

    def offer(self, guesses: int, hope: bool) -> int:
        """Guesses for the next pass, where `share` gives so many. Where that is none, a few are tried once in a while, if right
        ones would pay (hope)."""
        if guesses or self.fixed:
            return guesses
        return min(PROBE, self.most) if hope and not self._probed else 0

    def settle(self, guesses: int, offered: int) -> None:
        """The next pass has as many guesses as `offer` said."""
        if guesses or self.fixed:
            self._wait, self._probed = PROBES[0], False
            return
        self._probed = offered > 0
        if not offered:
            self._rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])

    def verified(self, guessed: int, accepted: int) -> None:
        """So many of a pass's guesses were right."""
        self._right = _KEPT * self._right + accepted
        self._tried = _KEPT * self._tried + accepted + (accepted < guessed)

    def chosen(self, tokens: int) -> None:
        """So many tokens were chosen without guesses."""
        self._rest = max(0, self._rest - tokens)


def share(paces: Sequence[Pace], rows: int, room: int, costs: Costs) -> list[int]:
    """How many guesses each sequence gets in a pass that has `rows` rows without any, and at most `room`: those that give the most
    tokens in a second, all sequences together; first those that are likelier to be right."""
    counts, tokens = [0] * len(paces), float(rows)
    for i, pace in enumerate(paces):
        if pace.fixed:
            counts[i] = min(pace.most, max(0, room - rows))
            tokens, rows = tokens + expected(pace.rate, counts[i]) - 1, rows + counts[i]
    best, speed = list(counts), _speed(tokens, rows, max(counts, default=0), costs)
    free = [(i, pace) for i, pace in enumerate(paces) if not pace.fixed]
    gains = sorted((-(pace.rate**j), i, j) for i, pace in free for j in range(1, pace.most + 1))
    for loss, i, j in gains[: max(0, room - rows)]:
        counts[i], tokens, rows = j, tokens - loss, rows + 1
        now = _speed(tokens, rows, max(counts), costs)
        if now > speed:
            best, speed = list(counts), now
    return best


def hopeful(rows: int, room: int, costs: Costs) -> bool:
    """Whether right guesses of one sequence would make passes of so many rows pay."""
    more = rows + PROBE
    return more <= room and _speed(more, more, PROBE, costs) > _speed(rows, rows, 0, costs)


def _speed(tokens: float, rows: int, guesses: int, costs: Costs) -> float:
    seconds = costs.of(rows) + guesses * costs.guess
    return tokens / seconds if seconds else 0.0
