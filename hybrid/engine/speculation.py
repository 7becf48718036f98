"""How many tokens to guess, and whether at all: by what was accepted and by what passes of so many rows take here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid.engine import streams, verification
from hybrid.engine.config import MOST_GUESSES
from hybrid.engine.draft_model import DraftModel
from hybrid.engine.drafts import Drafter
from hybrid.engine.interface import PassRunner
from hybrid.engine.sampling import Sampling

MOST = 7
"""Guesses of a pass at most, unless asked for: with the token before them they fill the smallest bucket of rows."""
PROBES = (16, 512)  # tokens between two tries where guesses do not pay: doubled after each try in vain
_KEPT = 0.9  # of what was counted before, at each verification
_SLOWER = 0.8  # weight of earlier passes in a mean time
AHEAD = 4  # tokens chosen one pass ahead of the host where no guess is at hand


@dataclass(slots=True)
class Counts:
    """Of one request, or of all."""

    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    """Passes with guesses."""
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

    def add(self, other: Counts) -> None:
        for name in ("drafted", "accepted", "verified", "passes", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Costs:
    """Mean seconds of a pass by its rows of one sequence, and of a guess. What was not measured costs what fewer rows do: so it is
    tried once."""

    passes: dict[int, float] = field(default_factory=dict)
    guess: float = 0.0

    def took(self, rows: int, seconds: float) -> None:
        before = self.passes.get(rows, seconds)
        self.passes[rows] = seconds if seconds < before / 2 else _SLOWER * before + (1 - _SLOWER) * seconds

    def guessed(self, count: int, seconds: float) -> None:
        each = seconds / max(count, 1)
        self.guess = each if not self.guess else _SLOWER * self.guess + (1 - _SLOWER) * each

    def of(self, rows: int) -> float:
        known = [n for n in self.passes if n <= rows]
        return self.passes[max(known)] if known else 0.0


def expected(rate: float, guesses: int) -> float:
    """Tokens of a pass that verifies so many guesses, each right with this rate where those before it are."""
    return sum(rate**i for i in range(guesses + 1))


class Pace:
    """Of one sequence: how many guesses the next pass gets. most: guesses at most; fixed: always as many."""

    def __init__(self, costs: Costs, most: int = MOST, fixed: bool = False) -> None:
        self.costs, self.most, self.fixed = costs, most, fixed
        self._right, self._tried = 1.5, 2.0  # as if 3 of 4 had been right
        self._rest, self._wait = 0, PROBES[0]  # tokens until the next try; after one in vain, so many

    @property
    def rate(self) -> float:
        return self._right / self._tried

    def guesses(self) -> int:
        """For the next pass; 0: none for `plain` tokens. Where none pay, a few are tried once in a while."""
        if self.fixed:
            return self.most
        if not self.costs.of(1):  # what a pass without guesses takes must be known
            self._rest = max(self._rest, AHEAD)
        return 0 if self._rest > 0 else self._best() or min(2, self.most)

    def plain(self) -> int:
        """Tokens to choose without guesses before asking again."""
        return max(1, self._rest)

    def _best(self) -> int:
        """The count that gives the most tokens in a second; 0 where that is none."""
        costs = self.costs
        speed = {k: expected(self.rate, k) / (costs.of(k + 1) + k * costs.guess) for k in range(1, self.most + 1)}
        best = max(speed, key=speed.__getitem__)
        return best if speed[best] > 1 / costs.of(1) else 0

    def verified(self, guessed: int, accepted: int) -> None:
        """So many of a pass's guesses were right."""
        self._right = _KEPT * self._right + accepted
        self._tried = _KEPT * self._tried + accepted + (accepted < guessed)
        if not self.fixed and not self._best():
            self._rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])
        else:
            self._wait = PROBES[0]

    def chosen(self, tokens: int) -> None:
        """So many tokens were chosen without guesses."""
        self._rest = max(0, self._rest - tokens)


def most_guesses(draft: object, speculate: object) -> int:
    """Of a pass, by what a user asks for (hybrid.load): 0 where tokens are not to be guessed. ValueError."""
    if speculate is None:
        speculate = 0 if draft is None else "auto"
    if speculate == "auto":
        return MOST
    if isinstance(speculate, bool) or not isinstance(speculate, int) or not 0 <= speculate <= MOST_GUESSES:
        raise ValueError(f"speculate must be auto, or a number of tokens to guess, 0 to {MOST_GUESSES}, not {speculate!r}")
    return speculate


def check_speculation(engine: PassRunner) -> None:
    """ValueError where an engine cannot verify guesses."""
    if engine.device.pipeline_depth > 1:
        raise ValueError("a schedule whose passes overlap on two devices verifies no guesses: load without draft and speculate")
    if engine.sizes.wanted < 2:
        raise ValueError("deterministic on cpu runs one row a pass, so it verifies no guesses: load without draft and speculate")


class Speculation:
    """Guesses for the sequences of one engine. k: guesses of a pass (None: by their worth). failed: told once why guessing ended,
    where a drafter failed; sequences go on without."""

    def __init__(self, drafter: Drafter, k: int | None = None, failed: Callable[[str], object] = lambda why: None) -> None:
        self.drafter: Drafter | None = drafter
        self.name, self.k, self.costs, self.counts, self._failed = drafter.name, k, Costs(), Counts(), failed

    def stream(self, engine: PassRunner, slot: int, ids: Sequence[int], most: int, sampling: Sampling,
               before: Sequence[int] = (), counts: Counts | None = None) -> Iterator[int]:  # fmt: skip
        """As Engine.stream, by passes of several rows where guesses are at hand. before: tokens that the slot holds. counts: to
        count this sequence's passes in."""
        known, counts, costs = [*before, *ids], Counts() if counts is None else counts, self.costs
        room = engine.sizes.wanted - 1
        pace = Pace(costs, min(room, MOST if self.k is None else self.k), fixed=self.k is not None)
        limit = min(len(known) + most, engine.cache.ctx)
        if len(known) >= limit:
            engine.wait(engine.submit_prefill({slot: ids}))
            return
        try:
            known.append(engine.token(slot, len(known), engine.submit_prefill({slot: ids})))
            counts.chose(1)
            self._begin(sampling)
            yield known[-1]
            while (left := limit - len(known)) > 0:
                guesses = self._propose(known, min(pace.guesses(), left - 1))
                if guesses:
                    began = time.perf_counter()
                    found = verification.read(engine, slot, guesses, verification.submit(engine, slot, guesses))
                    costs.took(len(guesses) + 1, time.perf_counter() - began)
                    pace.verified(len(guesses), len(found) - 1)
                    counts.chose(len(found), len(guesses))
                    for token in found:
                        known.append(token)
                        yield token
                    continue
                burst = left if self.drafter is None else min(left, max(AHEAD, pace.plain()))
                at, spent, began = len(known), 0.0, time.perf_counter()
                for ticket, _ in streams.submit_ahead(engine, (slot,), burst, 1):
                    known.append(engine.token(slot, len(known), ticket))
                    spent += time.perf_counter() - began
                    counts.chose(1)
                    yield known[-1]
                    began = time.perf_counter()
                costs.took(1, spent / (len(known) - at))
                pace.chosen(burst)
        finally:
            self.counts.add(counts)

    def close(self) -> None:
        drafter, self.drafter = self.drafter, None
        if drafter is not None:
            drafter.close()

    def _begin(self, sampling: Sampling) -> None:
        if isinstance(self.drafter, DraftModel):
            self._guarded(lambda drafter: drafter.begin(sampling))

    def _propose(self, known: Sequence[int], most: int) -> list[int]:
        if most < 1:
            return []
        began = time.perf_counter()
        found = list(self._guarded(lambda drafter: drafter.propose(known, most)) or ())
        if found:
            self.costs.guessed(len(found), time.perf_counter() - began)
        return found

    def _guarded(self, work: Callable[[Any], Any]) -> Any:
        """What a drafter returns; None, and no more guesses of it, where it fails: a text does not depend on guesses."""
        if self.drafter is None:
            return None
        try:
            return work(self.drafter)
        except Exception as error:  # whatever another model's device or files raise
            drafter, self.drafter = self.drafter, None
            self._failed(f"{drafter.name}: {type(error).__name__}: {error}; no more tokens are guessed")
            return None
