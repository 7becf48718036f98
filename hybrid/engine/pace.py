"""How many tokens to guess, and for which sequences: by what was accepted, and by what passes of so many rows take here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST = 7
"""Guesses of a pass for one sequence at most, unless asked for: with the token before them they fill the smallest batch of rows."""
PROBES = (8, 128)  # tokens between two tries where guesses do not pay: doubled after each try in vain
TRUST = 0.85  # rightness that such a try is made for
PROBE = 2  # guesses of a pass with more rows than any before, at least
SHARE, FIRST, SAVED = 0.01, 4.0, 16.0  # of a Budget: a share of the time; passes at the beginning, and at most
AHEAD = 4
"""Tokens chosen ahead of the host where no guess is at hand."""
_KEPT, _KEPT_OF_ALL = 0.9, 0.98  # of what was counted before, at each verification of one sequence, and of any
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
    """Mean seconds of a pass by its rows, prompts' excluded, and of drafting, for all sequences, by the most guesses of one. What
    was not measured lies between what was; beyond the most rows that were, it costs what those do: so it is tried once."""

    passes: dict[int, float] = field(default_factory=dict)
    drafts: dict[int, float] = field(default_factory=dict)
    faded: bool = False

    def took(self, rows: int, seconds: float) -> None:
        _note(self.passes, rows, seconds)

    def drafted(self, guesses: int, seconds: float) -> None:
        if self.faded:
            self.drafts, self.faded = {}, False
        _note(self.drafts, guesses, seconds)

    def fade(self) -> None:
        """Trust less in what was measured of drafting, so that it is measured anew some time."""
        self.drafts, self.faded = {n: seconds / 4 for n, seconds in self.drafts.items()}, True

    def of(self, rows: int) -> float:
        """0: nothing is known of so few."""
        return _between(self.passes, rows) if any(n <= rows for n in self.passes) else 0.0

    def drafting(self, guesses: int) -> float:
        """Of so many guesses; in proportion where only more were measured, by the last difference where only fewer were."""
        known = self.drafts
        if not known or not guesses:
            return 0.0
        least, most = min(known), max(known)
        if guesses <= least:
            return known[least] * guesses / least
        each = (known[most] - known[least]) / (most - least) if most > least else known[most] / most
        return _between(known, guesses) + max(0.0, each) * max(0, guesses - most)


def _note(table: dict[int, float], n: int, seconds: float) -> None:
    before = table.get(n, seconds)
    table[n] = seconds if seconds < before / 2 else _SLOWER * before + (1 - _SLOWER) * seconds


def _between(table: dict[int, float], n: int) -> float:
    """By the nearest that are known, of which one is not greater; as the greatest beyond it."""
    below, above = max(k for k in table if k <= n), min((k for k in table if k >= n), default=0)
    if above <= below:
        return table[below]
    return table[below] + (table[above] - table[below]) * (n - below) / (above - below)


class Budget:
    """Seconds that guesses may lose against passes without any: FIRST passes, SHARE of the time of all, and what guesses have saved
    lately. A pass is affordable where it would not lose more if all of its guesses were wrong: so texts with guesses take longer
    by no more than that, and by what a pass of so many rows took more than was known, once for each such number."""

    def __init__(self) -> None:
        self.seconds: float | None = None  # nothing is known of passes

    def passed(self, plain: float, seconds: float, worth: float | None = None) -> None:
        """A pass took so long, drafting included; without guesses its tokens would have taken `worth` (None: it had none). plain:
        of a pass without any."""
        before = FIRST * plain if self.seconds is None else self.seconds
        self.seconds = min(before + SHARE * seconds + (0.0 if worth is None else worth - seconds), SAVED * plain)

    def allows(self, loss: float) -> bool:
        return self.seconds is not None and loss <= self.seconds

    def until(self, loss: float, plain: float) -> int:
        """Passes without guesses after which it allows that."""
        return max(1, math.ceil((loss - (self.seconds or 0.0)) / (SHARE * plain) - 1e-6))


def expected(rate: float, guesses: int) -> float:
    """Tokens of a pass that verifies so many guesses, each right with this rate where those before it are."""
    return sum(rate**i for i in range(guesses + 1))


class Rightness:
    """How often a guess is right where those before it are. rate: what is supposed before anything was verified."""

    def __init__(self, rate: float = 0.75, kept: float = _KEPT_OF_ALL) -> None:
        self._right, self._tried, self._kept = 2 * rate, 2.0, kept

    @property
    def rate(self) -> float:
        return self._right / self._tried

    def verified(self, guessed: int, accepted: int) -> None:
        """So many of a pass's guesses were right."""
        self._right = self._kept * self._right + accepted
        self._tried = self._kept * self._tried + accepted + (accepted < guessed)


class Pace(Rightness):
    """Of one sequence. most: guesses of a pass at most; fixed: always as many. rate: of other sequences."""

    def __init__(self, most: int = MOST, fixed: bool = False, rate: float = 0.75) -> None:
        super().__init__(rate, _KEPT)
        self.most, self.fixed = most, fixed
        self._rest, self._wait, self._probed = 0, PROBES[0], False  # tokens until the next try; after one in vain, so many

    @property
    def due(self) -> bool:
        """Whether the next pass may have guesses for it."""
        return self.most > 0 and self._rest <= 0

    def pause(self, tokens: int) -> None:
        """No guesses for so many tokens."""
        self._rest = max(self._rest, tokens)

    def offer(self, guesses: int, tries: int) -> int:
        """Guesses for the next pass, where `share` gives so many. Where that is none, so many are tried now and then (`trial`)."""
        if guesses or self.fixed:
            return guesses
        return 0 if self._probed else min(tries, self.most)

    def settle(self, guesses: int, offered: int) -> None:
        """The next pass has as many guesses as `offer` said."""
        if guesses or self.fixed:
            self._wait, self._probed = PROBES[0], False
            return
        self._probed = offered > 0
        if not offered:
            self._rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])

    def chosen(self, tokens: int) -> None:
        """So many tokens were chosen without guesses."""
        self._rest = max(0, self._rest - tokens)


def share(paces: Sequence[Pace], rows: int, room: int, costs: Costs) -> list[int]:
    """How many guesses each sequence gets in a pass that has `rows` rows without any, and at most `room`: those that give the most
    tokens in a second, all sequences together; first those that are likelier to be right."""
    counts, tokens = [0] * len(paces), float(rows)
    room = min(room, max(rows + PROBE, 2 * max(costs.passes, default=room)))  # steps into what is not known are small
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


def trial(rows: int, room: int, costs: Costs) -> int:
    """How many guesses of one sequence would pay in passes of so many rows if most of them were right; 0: none would."""
    return share([Pace(rate=TRUST)], rows, room, costs)[0]


def _speed(tokens: float, rows: int, guesses: int, costs: Costs) -> float:
    seconds = costs.of(rows) + costs.drafting(guesses)
    return tokens / seconds if seconds else 0.0
