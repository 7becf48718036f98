"""How many tokens to guess, and for which sequences: by what was accepted, and by what passes of so many rows take
here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid.planning.passes import GUESSED_ROWS

MOST = 7
"""Guesses of a pass for one sequence at most, unless asked for: with the token before them they fill the smallest batch
of rows."""
PROBES = (8, 128)  # tokens between two tries where guesses do not pay: doubled after each try in vain
WATCHES = 16, 64  # most tokens between two looks at what would have been guessed: where that costs nothing; by a model
TRUST = 0.85  # rightness that such a try is made for
# two rows cost so much of the way from one to three until that is known: it is measured where it would pay then
HOPE = 0.5
PROBE = 2  # guesses of a pass with more rows than any before, at least
SHARE, FIRST, SAVED = 0.01, 4.0, 16.0  # of a Budget: a share of the time; passes at the beginning, and at most
CREDIT = 8.0  # passes that it may be overdrawn by, where guesses have lately been so often right that they surely pay
LOOKS = 2
"""Sequences that are looked at before a pass, by a draft model that has to run what is new of each."""
AHEAD = 4
"""Tokens chosen ahead of the host where no guess is at hand."""
_KEPT, _KEPT_OF_ALL = 0.9, 0.98  # of what was counted before, at each verification of one sequence, and of any
_PRIOR, _APART = (
    8.0,
    1.5,
)  # guesses that what is known of all counts for in one; in standard deviations, where it does not
_READINGS, DOUBTS = 8, 2  # of a time that are kept; that are not believed at first


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
    ready: int = 0
    """Of `drafted`, made while those before them were verified, on another device."""
    dropped: int = 0
    """Made so in vain."""

    def chose(self, tokens: int, guesses: int = 0) -> None:
        """A pass has chosen so many tokens, the first of them guessed rightly but for the last."""
        self.passes, self.tokens = self.passes + 1, self.tokens + tokens
        if guesses:
            self.verified, self.drafted, self.accepted = (
                self.verified + 1,
                self.drafted + guesses,
                self.accepted + tokens - 1,
            )

    def line(self, name: str) -> str:
        """For people."""
        share = f" ({100 * self.accepted / self.drafted:.0f} %)" if self.drafted else ""
        rate = f"; {self.tokens / self.passes:.2f} tokens per pass" if self.passes else ""
        return f"guesses ({name}): drafted {self.drafted}, accepted {self.accepted}{share}{rate}{self._beforehand()}"

    def _beforehand(self) -> str:
        if not (self.ready or self.dropped):
            return ""
        share = 100 * self.ready / self.drafted if self.drafted else 0.0
        return f"; {self.ready} ({share:.0f} %) drafted while others were verified, and {self.dropped} so in vain"


@dataclass(slots=True)
class Costs:
    """Seconds of a pass by its rows, prompts' excluded, and of drafting, for all sequences, by the most guesses of one:
    the mean of the last readings without the slowest, for a device or its host may be busy elsewhere. What was not
    measured lies between what was; beyond the most rows that were, it costs what those do: so it is tried once. But
    where a batch fills a device, from GUESSED_ROWS on, it costs in proportion: a try of 32 sequences would take too
    long for what it may find."""

    passes: dict[int, float] = field(default_factory=dict)
    drafts: dict[int, float] = field(default_factory=dict)
    apart: bool = False
    """Whether the draft may go on while a pass verifies its guesses."""
    slower: float = 1.0
    """A pass beside which it does takes so many times as long."""
    faded: bool = False
    _read: dict[tuple[str, int], deque[float]] = field(default_factory=dict)
    _doubted: dict[tuple[str, int], int] = field(default_factory=dict)

    def took(self, rows: int, seconds: float, plain: float = math.inf) -> None:
        """A pass of so many rows. plain: of one without guesses; that each row takes longer than it is not believed at
        once."""
        if self._believed("pass", rows, seconds, plain):
            self.passes[rows] = self._note("pass", rows, seconds)
            self.slower = 1 + _KEPT_OF_ALL * (self.slower - 1)  # trusted less until it is measured anew

    def took_beside(self, rows: int, seconds: float) -> None:
        """A pass of so many rows beside which the draft went on."""
        if alone := self.passes.get(rows):
            self.slower = max(1.0, self._note("beside", 0, seconds / alone))

    def drafted(self, guesses: int, seconds: float, plain: float = math.inf) -> None:
        """As for a pass, of so many guesses."""
        if not self._believed("draft", guesses, seconds, plain):
            return
        if self.faded:
            self.drafts, self.faded = {}, False
            self._read = {key: found for key, found in self._read.items() if key[0] == "pass"}
        self.drafts[guesses] = self._note("draft", guesses, seconds)

    def round(self, rows: int, guesses: int, ready: float) -> float:
        """Of a pass of so many rows and of drafting the most guesses of a sequence, the cheaper way. ready: the
        probability that what the draft goes on with is right."""
        alone = self.of(rows) + self.drafting(guesses)
        return min(alone, self.beside(rows, guesses, ready)) if self.apart and guesses else alone

    def beside(self, rows: int, guesses: int, ready: float) -> float:
        """The same where the draft goes on while the pass runs: for one guess more, the first being of the pass's own
        token. Where that was in vain, the draft's pass that runs is waited for, and then as many guesses are drafted as
        ever."""
        took, ahead = self.slower * self.of(rows), self.drafting(guesses + 1)
        vain = min(max(took, ahead), took + self.drafting(1)) + self.drafting(guesses)
        return ready * max(took, ahead) + (1 - ready) * vain

    def goes_on(self, rows: int, guesses: int, ready: float) -> bool:
        """Whether the draft is to go on beside a pass: what that takes without must be known."""
        return (
            self.apart
            and rows in self.passes
            and self.beside(rows, guesses, ready) <= self.of(rows) + self.drafting(guesses)
        )

    def _believed(self, what: str, n: int, seconds: float, plain: float) -> bool:
        doubted = self._doubted.get((what, n), 0)
        self._doubted[what, n] = doubted + (doubt := seconds > n * plain)
        return not doubt or doubted >= DOUBTS

    def _note(self, what: str, n: int, seconds: float) -> float:
        readings = self._read.setdefault((what, n), deque(maxlen=_READINGS))
        readings.append(seconds)
        kept = sorted(readings)[: max(1, len(readings) - 1 - len(readings) // 4)]
        return sum(kept) / len(kept)

    def fade(self, rows: int) -> None:
        """Trust less in what was measured of drafting, and once or twice of passes with more rows than these, so that
        it is measured anew some time."""
        self.drafts, self.faded = {n: seconds / 4 for n, seconds in self.drafts.items()}, bool(self.drafts)
        plain = self.of(rows)
        for n, seconds in self.passes.items():
            if n > rows and len(self._read.get(("pass", n), ())) < 3:
                self.passes[n] = max(plain, seconds / 2)

    def of(self, rows: int) -> float:
        """0: nothing is known of so few."""
        if not any(n <= rows for n in self.passes):
            return 0.0
        return _between(self.passes, rows, HOPE) * max(1.0, rows / max(GUESSED_ROWS, *self.passes))

    def drafting(self, guesses: int) -> float:
        """Of so many guesses; in proportion where only more were measured, by the last difference where only fewer
        were."""
        known = self.drafts
        if not known or not guesses:
            return 0.0
        least, most = min(known), max(known)
        if guesses <= least:
            return known[least] * guesses / least
        each = (known[most] - known[least]) / (most - least) if most > least else known[most] / most
        return _between(known, guesses) + max(0.0, each) * max(0, guesses - most)


def _between(table: dict[int, float], n: int, near: float = 1.0) -> float:
    """By the nearest that are known, of which one is not greater; as the greatest beyond it. near: of the way from one
    to the other, where one alone lies between."""
    below, above = max(k for k in table if k <= n), min((k for k in table if k >= n), default=0)
    if above <= below:
        return table[below]
    part = (n - below) / (above - below)
    return table[below] + (near * part if above - below == 2 else part) * (table[above] - table[below])


class Budget:
    """Seconds that guesses may lose against passes without any: FIRST passes, SHARE of the time of all, and what
    guesses have saved lately. A pass is affordable where it would not lose more if all of its guesses were wrong: so
    texts with guesses take longer by no more than that, by what a pass of so many rows took more than was known, once
    for each such number, and by CREDIT passes where guesses were right and are no longer."""

    def __init__(self) -> None:
        self.seconds: float | None = None  # nothing is known of passes

    def passed(self, plain: float, seconds: float, worth: float | None = None) -> None:
        """A pass took so long, drafting included; without guesses its tokens would have taken `worth` (None: it had
        none). plain: of a pass without any."""
        before = FIRST * plain if self.seconds is None else self.seconds
        self.seconds = min(before + SHARE * seconds + (0.0 if worth is None else worth - seconds), SAVED * plain)

    def spent(self, seconds: float) -> None:
        """So long was taken for nothing but to know more."""
        if self.seconds is not None:
            self.seconds -= seconds

    def allows(self, loss: float, credit: float = 0.0) -> bool:
        return self.seconds is not None and loss <= self.seconds + credit

    def until(self, loss: float, plain: float) -> int:
        """Passes without guesses after which it allows that."""
        return max(1, math.ceil((loss - (self.seconds or 0.0)) / (SHARE * plain) - 1e-6))


def likely(rates: Sequence[tuple[float, int]]) -> float:
    """The probability that all of so many guesses with these rates are right, and so are those after them."""
    return math.prod(min(1.0, rate) ** (guesses + 1) for rate, guesses in rates if guesses)


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

    @property
    def surely(self) -> float:
        """The rate, less what it may be wrong by for as few guesses as it is known from (one standard deviation)."""
        return max(0.0, self.rate - math.sqrt(self.rate * (1 - min(self.rate, 1.0)) / self._tried))

    def verified(self, guessed: int, accepted: int) -> None:
        """So many of a pass's guesses were right."""
        self._right = self._kept * self._right + accepted
        self._tried = self._kept * self._tried + accepted + (accepted < guessed)

    def watched(self, right: int, guessed: int) -> None:
        """So many of `guessed` tokens would have been guessed rightly, each after those before it."""
        self._right, self._tried = self._kept * self._right + right, self._kept * self._tried + guessed


class Pace(Rightness):
    """Of one sequence. most: guesses of a pass at most; fixed: always as many. rate: of other sequences. watches: most
    tokens between two looks at what would have been guessed while there are no guesses; 0: nobody can say, so a few are
    tried instead. among: how often guesses are right in all sequences, this one included, which is remembered
    longer."""

    def __init__(
        self,
        most: int = MOST,
        fixed: bool = False,
        rate: float = 0.75,
        watches: int = 0,
        among: Rightness | None = None,
    ) -> None:
        super().__init__(rate, _KEPT)
        self._among = among
        self.most, self.fixed, self.watches = most, fixed, watches
        self._rest, self._wait, self._probed = (
            0,
            PROBES[0],
            False,
        )  # tokens until the next try; after one in vain, so many
        self.looks = False
        """Whether it has none because they did not pay, and what would have been guessed is to be known when it is
        due."""

    @property
    def rate(self) -> float:
        """Its own, known from few guesses, drawn towards that of all where the two may well be the same."""
        own = self._right / self._tried
        if self._among is None or abs(own - self._among.rate) > _APART * math.sqrt(
            max(own * (1 - own), 0.02) / self._tried
        ):
            return own
        return (self._right + _PRIOR * self._among.rate) / (self._tried + _PRIOR)

    @property
    def due(self) -> bool:
        """Whether the next pass may have guesses for it."""
        return self.most > 0 and self._rest <= 0

    @property
    def soon(self) -> bool:
        """Whether a look may be taken now: it will be due in a few tokens."""
        return self.looks and 0 < self._rest <= AHEAD

    def pause(self, tokens: int) -> None:
        """No guesses for so many tokens."""
        self._rest = max(self._rest, tokens)

    def offer(self, guesses: int, tries: int) -> int:
        """Guesses for the next pass, where `share` gives so many. Where that is none, so many are tried now and then
        (`trial`)."""
        if guesses or self.fixed:
            return guesses
        return 0 if self._probed or self.watches else min(tries, self.most)

    def settle(self, guesses: int, offered: int) -> None:
        """The next pass has as many guesses as `offer` said."""
        if guesses or self.fixed:
            self._wait, self._probed, self.looks = PROBES[0], False, False
            return
        self._probed = offered > 0
        if not offered:
            self.wait()

    def wait(self) -> None:
        """None until it is due again: for longer each time."""
        self._rest, self._wait = self._wait, min(2 * self._wait, self.watches or PROBES[1])
        self.looks = self.watches > 0

    def chosen(self, tokens: int) -> None:
        """So many tokens were chosen without guesses."""
        self._rest = max(0, self._rest - tokens)


def share(paces: Sequence[Pace], rows: int, room: int, costs: Costs) -> list[int]:
    """How many guesses each sequence gets in a pass that has `rows` rows without any, and at most `room`: those that
    give the most tokens in a second, all sequences together; first those that are likelier to be right."""
    counts, tokens = [0] * len(paces), float(rows)
    room = min(room, max(rows + PROBE, 2 * max(costs.passes, default=room)))  # steps into what is not known are small
    for i, pace in enumerate(paces):
        if pace.fixed:
            counts[i] = min(pace.most, max(0, room - rows))
            tokens, rows = tokens + expected(pace.rate, counts[i]) - 1, rows + counts[i]
    ready = likely([(pace.rate, k) for pace, k in zip(paces, counts, strict=True)])
    best, speed = list(counts), _speed(tokens, rows, max(counts, default=0), ready, costs)
    free = [(i, pace) for i, pace in enumerate(paces) if not pace.fixed]
    gains = sorted((-(pace.rate**j), i, j) for i, pace in free for j in range(1, pace.most + 1))
    for loss, i, j in gains[: max(0, room - rows)]:
        counts[i], tokens, rows = j, tokens - loss, rows + 1
        ready *= min(1.0, paces[i].rate) ** (1 if j > 1 else 2)
        now = _speed(tokens, rows, max(counts), ready, costs)
        if now > speed:
            best, speed = list(counts), now
    return best


def trial(rows: int, room: int, costs: Costs) -> int:
    """How many guesses of one sequence would pay in passes of so many rows if most of them were right; 0: none
    would."""
    return share([Pace(rate=TRUST)], rows, room, costs)[0]


def _speed(tokens: float, rows: int, guesses: int, ready: float, costs: Costs) -> float:
    seconds = costs.round(rows, guesses, ready)
    return tokens / seconds if seconds else 0.0
