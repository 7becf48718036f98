"""Guesses for the sequences that a scheduler runs: before each pass, which of them get how many, and from whom.

A sequence with guesses is not run ahead of the host: its last token must be known before more are guessed, and all such
sequences share one pass. So there are two ways of going on, and `prepare` changes between them: passes ahead of the
host without guesses, and, where guesses are due, one pass at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from hybrid.engine.choosing import Choosing
from hybrid.engine.config import check_guesses
from hybrid.engine.draft_model import DraftModel
from hybrid.engine.drafts import Drafter, Watcher
from hybrid.engine.following import Following
from hybrid.engine.interface import PassRunner
from hybrid.engine.pace import (
    AHEAD,
    CREDIT,
    LOOKS,
    MOST,
    PROBES,
    Budget,
    Costs,
    Counts,
    Pace,
    Rightness,
    likely,
    share,
    trial,
)
from hybrid.engine.sampling import Sampling
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.sequence import Pass, Stream


def most_guesses(draft: object, speculate: object) -> int:
    """Of a pass, by what a user asks for (hybrid.load): 0 where tokens are not to be guessed. ValueError."""
    if speculate is None:
        speculate = 0 if draft is None else "auto"
    return MOST if speculate == "auto" else check_guesses(speculate)


def check_drafting(engine: PassRunner) -> None:
    """ValueError where an engine cannot verify guesses."""
    if engine.device.pipeline_depth > 1:
        raise ValueError(
            "a schedule whose passes overlap on two devices verifies no guesses: load without draft and speculate"
        )
    if engine.sizes.wanted < 2:
        raise ValueError(
            "deterministic on cpu runs one row a pass, so it verifies no guesses: load without draft and speculate"
        )


class Drafting:
    """drafter: who guesses. room: most rows of a pass whose tokens are chosen. k: guesses of a pass (None: by their
    worth). wish: of a sequence, how its tokens are chosen, how many guesses its request asks for (None: as k), and
    whether it is under a constraint. refused: told of a sequence whose constraint fails. failed: told once why guessing
    ended, where a drafter failed. clock: seconds."""

    def __init__(
        self,
        drafter: Drafter,
        room: int,
        k: int | None,
        choosing: Choosing | None,
        wish: Callable[[Stream], tuple[Sampling, int | None, bool]],
        refused: Callable[[Stream, Exception], object],
        failed: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter: Drafter | None = drafter
        self.name, self.room, self.k, self.counts = drafter.name, room, k, Counts()
        self.forget()
        self._choosing, self._wish, self._refused, self._failed, self._clock = choosing, wish, refused, failed, clock
        self._of: dict[Any, Following] = {}

    def forget(self) -> None:
        """What passes and guesses cost, and how often they were right."""
        self.costs, self.budget, self.rightness = Costs(), Budget(), Rightness()
        self._plain = math.inf  # a pass without guesses of as many sequences as are drafted for
        self._took = 0.0  # drafting for the next pass, but for what it takes once
        self._drafting: tuple[float, int] | None = (
            None  # that the device does: since when, the most guesses if they count
        )
        self._beside = 0  # the pass while which the draft goes on
        self._watching = 0  # the pass that a draft model's own, for a look at what it would have guessed, runs before
        self._given: tuple[int, dict[Any, int]] = (
            0,
            {},
        )  # the last pass that verifies guesses, how many of which sequence
        self._behind = 0  # the pass behind which the next guesses are made
        self._seen = 0.0  # when the last pass had been read

    def prepare(self, scheduler: Scheduler) -> bool:
        """Give the scheduler drafts for its next pass. False: it is to make none before those in flight have been
        read."""
        if self.drafter is None:
            return True
        self.costs.apart = isinstance(self.drafter, DraftModel) and self.drafter.apart
        self._beside = self._beside if scheduler.in_flight else 0
        if scheduler.in_flight == 1 and self._given[0] == scheduler.number:
            self._draft_behind(scheduler)
        streams = [s for s in scheduler._running if s.decodes]
        following = [self._follow(stream) for stream in streams]
        due = [f for f in following if f.pace.due]
        soon = [f for f in following if f.pace.soon]
        if soon and not trial(len(streams), self.room, self.costs):
            soon = []
        self._look(scheduler, soon, [f for f in due if f.pace.looks])
        if self.drafter is None:  # it failed
            return True
        shares = self._share(due, len(streams)) if due else []
        asked = [f for f in due if f.asked > 0]
        if asked and scheduler.in_flight:
            for f in asked:
                f.run_ahead(False)
            return False
        self._keep_behind(scheduler, asked)
        for f, k in zip(due, shares, strict=True):
            if f.pace.due:  # else it waits for what a pass takes
                f.pace.settle(k, f.asked)
        if not (asked or scheduler.in_flight) and isinstance(self.drafter, DraftModel):
            self.drafter.beside.stop()  # nobody is going to take what it goes on with
        if not asked or not self._draft(scheduler, asked):
            self._let_go(following)
        return True

    def committed(self, done: Pass, news: Sequence[tuple[Stream, int]], seconds: float, between: float = 0.0) -> None:
        """A pass has chosen so many tokens of each sequence, and took so long, alone or behind the one before (0: it
        has taken what others will not); so long after the end of that it began."""
        self._seen = self._clock()
        wants = {run.seq.id: run.wants for run in done.runs}
        if seconds and all(run.wants == (len(run.ids) if run.ids else 1) for run in done.runs):  # no rows of prompts
            if done.number == self._beside:
                self.costs.took_beside(done.rows, seconds)
            elif done.number != self._watching:
                plain = self.costs.of(len(done.runs)) if done.rows > len(done.runs) else 0.0
                self.costs.took(done.rows, seconds, plain or math.inf)
            self._account(done, news, seconds, between)
        for stream, n in news:
            guesses = wants[stream.id] - 1
            for counts in (self.counts, *((found.counts,) if (found := self._of.get(stream.id)) else ())):
                counts.chose(n, guesses)
                counts.ready += 0 if found is None else min(found.ready, guesses)
            if guesses:
                self.rightness.verified(guesses, n - 1)
            if found is not None and guesses:
                found.pace.verified(guesses, n - 1)
                found.since = len(stream.ids)
            elif found is not None:
                found.pace.chosen(n)

    def _account(self, done: Pass, news: Sequence[tuple[Stream, int]], seconds: float, between: float) -> None:
        """What guesses have saved or lost. Between two passes more may lie than drafting, such as a reader that waits,
        and a pass of several rows that takes longer than as many of one has waited for something else; so has a
        guess."""
        sequences = len(done.runs)
        if not (plain := self.costs.of(sequences)):
            return
        if done.rows == sequences:
            looked = done.number == self._watching
            self.budget.passed(plain, min(seconds, 4 * plain), plain if looked else None)
        elif not any(
            f.pace.fixed for run in done.runs if run.wants > 1 and (f := self._of.get(run.seq.id)) is not None
        ):
            most = max(run.wants for run in done.runs) - 1
            took = min(seconds, done.rows * plain) + min(between, self._took + plain, most * plain)
            self.budget.passed(plain, took, plain * sum(n for _, n in news) / sequences)

    def end(self, stream: Stream) -> Counts:
        """A sequence has ended: forget it; returns what was guessed for it."""
        found = self._of.pop(stream.id, None)
        if isinstance(self.drafter, DraftModel):
            dropped = self.drafter.beside.dropped
            try:
                self.budget.spent(
                    self.costs.drafting(self.drafter.expects(stream.id, stream.ids)) / max(1, len(self._of) + 1)
                )
                self.drafter.end(stream.id)
            except Exception as error:  # its device may be gone
                self._end_drafting(error)
            vain = dropped.pop(stream.id, 0)
            for counts in (self.counts, *((found.counts,) if found is not None else ())):
                counts.dropped += vain
        return Counts() if found is None else found.counts

    def close(self) -> None:
        drafter, self.drafter = self.drafter, None
        self._of.clear()
        if drafter is not None:
            drafter.close()

    # --- who gets how many -------------------------------------------------------------------------------------------

    def _follow(self, stream: Stream) -> Following:
        found = self._of.get(stream.id)
        if found is None:
            assert self.drafter is not None
            _, wanted, constrained = self._wish(stream)
            k = self.k if wanted is None else wanted
            watches = self.drafter.watches if isinstance(self.drafter, DraftModel | Watcher) else 0
            pace = Pace(MOST if k is None else k, k is not None, self.rightness.rate, watches, self.rightness)
            found = self._of[stream.id] = Following(stream, pace, self.drafter.fork(), constrained)
        return found

    def _share(self, due: list[Following], rows: int) -> list[int]:
        """How many guesses each gets by its worth, in a pass of so many rows without; sets `asked`, which may be a few
        to try."""
        shares = share([f.pace for f in due], rows, self.room, self.costs)
        free = not all(f.pace.fixed for f in due)
        tries = trial(rows, self.room, self.costs) if free else 0
        if free and not tries and self.costs.of(rows):
            self.costs.fade(rows)  # a device may have been busy when drafting was measured
        for f, k in zip(due, shares, strict=True):
            if not self.costs.of(rows) and not f.pace.fixed:  # what a pass without guesses takes must be known
                f.asked = 0
                f.pace.pause(1)
            else:
                f.asked = min(f.pace.offer(k, tries), f.stream.last - len(f.stream.ids) - f.stream.flying - 1)
        self._afford([f for f in due if not f.pace.fixed], rows)
        return shares

    def _afford(self, trying: list[Following], rows: int) -> None:
        """Ask for none for a while, where the budget has not what they lose if all of them are wrong."""
        self._plain = self.costs.of(rows) or math.inf
        loss = self._loss(trying, [f.asked for f in trying], rows)
        if not any(f.asked for f in trying) or self.budget.allows(loss, self._credit(trying, rows)):
            return
        tokens = min(self.budget.until(loss, self.costs.of(rows)), PROBES[1])
        for f in trying:
            f.asked = 0
            if f.pace.watches:
                f.pace.wait()
            else:
                f.pace.pause(max(tokens, AHEAD))

    def _loss(self, trying: list[Following], asked: Sequence[int], rows: int) -> float:
        """Seconds that a pass of so many rows without guesses takes more with them, if all of them are wrong."""
        most = max(asked, default=0)
        ready = likely([(f.pace.rate, k) for f, k in zip(trying, asked, strict=True)])
        way = self.costs.beside if self.costs.goes_on(rows + sum(asked), most, ready) else self.costs.round
        return way(rows + sum(asked), most, 0.0) - self.costs.of(rows)

    def _credit(self, trying: list[Following], rows: int) -> float:
        """What the budget may be overdrawn by: something where guesses have been so often right that they surely
        pay."""
        sure = any(share([Pace(f.pace.most, rate=f.pace.surely) for f in trying], rows, self.room, self.costs))
        return CREDIT * self.costs.of(rows) if sure else 0.0

    def _look(self, scheduler: Scheduler, soon: list[Following], due: list[Following]) -> None:
        """What would have been guessed of the tokens that came without guesses, for those that are due; a draft model
        runs them a little before that, in passes that nobody waits for."""
        model = self.drafter if isinstance(self.drafter, DraftModel) else None
        try:
            for f in due:
                if model is not None:
                    found = model.agreed(f.stream.id)
                else:
                    assert isinstance(f.drafter, Watcher)
                    found, f.since = f.drafter.agreed(f.stream.ids, f.since), len(f.stream.ids)
                if found[1]:
                    f.pace.watched(*found)
                    self.rightness.watched(*found)
            if model is not None and soon and self.budget.allows(0.0):
                fresh = islice((f for f in soon if not model.watching(f.stream.id) and self._follows(model, f)), LOOKS)
                began = self._clock()
                if any([model.watch(f.stream.id, f.stream.ids) for f in fresh]):
                    self._watching = scheduler.number + 1
                    self.budget.spent(self._clock() - began)
        except Exception as error:  # as where it guesses
            self._end_drafting(error)

    # --- who guesses -------------------------------------------------------------------------------------------------

    def _draft(self, scheduler: Scheduler, asked: list[Following]) -> bool:
        """Whether there were any guesses."""
        began, self._behind = self._seen if self._behind == scheduler.number else self._clock(), 0
        try:
            found, steady = self._propose(asked)
        except Exception as error:  # whatever another model's device or files raise: a text does not depend on guesses
            self._end_drafting(error)
            return False
        most = max(map(len, found), default=0)
        self._drafting = None if self._reads(asked) else (began, most if steady else 0)
        if self._drafting is None:
            self._note(began, most if steady else 0)
        given: dict[Any, tuple[Following, tuple[int, ...]]] = {}
        for f, guesses in zip(asked, found, strict=True):
            if guesses := self._allowed(f, guesses[: f.asked]):
                f.run_ahead(False)
                scheduler.draft(f.stream, guesses)
                given[f.stream.id] = f, guesses
            else:
                f.pace.pause(AHEAD)
        self._given = scheduler.number + 1, {key: len(guesses) for key, (_, guesses) in given.items()}
        if given:
            self._go_on(scheduler.number + 1, sum(s.decodes for s in scheduler._running), given)
        return bool(given)

    def _go_on(self, number: int, rows: int, given: Mapping[Any, tuple[Following, tuple[int, ...]]]) -> None:
        """Let a draft model guess on while pass `number` verifies what was given, if that pays: as if all of it were
        right, and the token after it as the draft would have it. rows: of the pass without guesses."""
        model = self.drafter
        if not isinstance(model, DraftModel) or not model.apart:
            return
        counts = [len(guesses) for _, guesses in given.values()]
        ready = likely([(f.pace.rate, len(guesses)) for f, guesses in given.values()])
        if not self.costs.goes_on(rows + sum(counts), max(counts), ready):
            return
        wanted = {}
        for key, (f, guesses) in given.items():
            ids = [*f.stream.ids, *guesses]
            most = min(len(guesses), f.stream.last - len(ids) - 2)  # the last token has no use for guesses
            if most > 0:
                wanted[key] = ids, 1 + most
        if wanted:
            try:
                model.go_on(wanted)
                self._beside = number
            except Exception as error:  # as where it guesses
                self._end_drafting(error)

    def _draft_behind(self, scheduler: Scheduler) -> None:
        """Let a draft model on the same queue guess behind the pass in flight, which verifies its last guesses, what
        follows them: so the device goes on while the host reads. Of sequences that will not have ended by their length,
        as far as it pays."""
        model, (number, given) = self.drafter, self._given
        self._given = 0, {}  # once
        if not isinstance(model, DraftModel) or not model.follows_on:
            return
        found = [
            f
            for key, guesses in given.items()
            if (f := self._of.get(key)) is not None
            and not f.constrained
            and f.stream.slot is not None
            and f.stream.last - len(f.stream.ids) - guesses > 2
        ]
        shares, free = (
            share([f.pace for f in found], len(found), self.room, self.costs),
            [f for f in found if not f.pace.fixed],
        )
        loss = self._loss(free, [given[f.stream.id] for f in free], len(free))  # of the pass in flight, and of the next
        if free and not self.budget.allows(2 * loss, self._credit(free, len(free))):
            return
        try:
            if model.behind(
                {f.stream.id: (f.stream.slot or 0, given[f.stream.id]) for f in found}, max(shares, default=0)
            ):
                self._behind = number
        except Exception as error:  # as where it guesses
            self._end_drafting(error)

    def _keep_behind(self, scheduler: Scheduler, asked: list[Following]) -> None:
        """Ask for no fewer guesses than were made behind the last pass, if it has been read and any are asked for; else
        the device has made them for nothing."""
        model = self.drafter
        if not self._behind or scheduler.in_flight or not isinstance(model, DraftModel):
            return
        if asked and self._behind == scheduler.number:
            for f in asked:
                there = min(model.expects(f.stream.id, f.stream.ids), f.stream.last - len(f.stream.ids) - 1)
                f.asked = max(f.asked, 0 if f.pace.fixed else there)
        else:
            self._behind = 0
            self.budget.spent(self.costs.drafting(model.drop()))
            self._watching = scheduler.number + 1  # it waits for them

    def _note(self, began: float, most: int) -> None:
        """Drafting of most guesses (0: not to be compared) began then, and is over."""
        took = self._clock() - began
        self._took = 0.0 if isinstance(self.drafter, DraftModel) and self.drafter.compiled else took
        if most and self._took:
            self.costs.drafted(most, took, self._plain)

    def finish(self, done: Pass) -> float:
        """Before a pass is waited for: wait for the drafting on the same queue that it follows, if any; when that was
        over."""
        begun, self._drafting = self._drafting, None
        if begun is None or done.outs == len(done.wanting) or not isinstance(self.drafter, DraftModel):
            return 0.0
        try:
            self.drafter.finish()
        except Exception as error:  # as where it is submitted
            self._end_drafting(error)
            return 0.0
        self._note(*begun)
        return self._clock()

    def _propose(self, asked: list[Following]) -> tuple[list[Sequence[int]], bool]:
        """Guesses for each, or words by which the device finds them, and whether they took no longer than they will
        again."""
        if not isinstance(self.drafter, DraftModel):
            return [list(f.drafter.propose(f.stream.ids, f.asked)) for f in asked], True
        model = self.drafter
        for f in asked:
            self._follows(model, f)
        wanted = {f.stream.id: (f.stream.ids, f.asked) for f in asked}
        found = model.propose_all(wanted) if self._reads(asked) else model.ahead(wanted)
        for f in asked:
            f.ready = model.ready.get(f.stream.id, 0)
        return [found.get(f.stream.id, []) for f in asked], model.steady

    def _follows(self, model: DraftModel, f: Following) -> bool:
        """Whether a draft model has a slot for it."""
        return model.follows(f.stream.id) or model.begin(self._wish(f.stream)[0], f.stream.id)

    def _reads(self, asked: list[Following]) -> bool:
        """Whether guesses are to be known before they are verified: a constraint must hear of them."""
        return not (isinstance(self.drafter, DraftModel) and self.drafter.chains) or any(f.constrained for f in asked)

    def _allowed(self, f: Following, guesses: Sequence[int]) -> tuple[int, ...]:
        """Those that may be verified under the sequence's constraint."""
        if not f.constrained or self._choosing is None or not guesses:
            return tuple(guesses)
        assert f.stream.slot is not None
        try:
            return self._choosing.guessed(f.stream.slot, guesses)
        except Exception as error:  # whatever somebody's constraint raises
            self._refused(f.stream, error)
            return ()

    # --- coming and going --------------------------------------------------------------------------------------------

    def _end_drafting(self, error: Exception) -> None:
        """Nobody guesses any more: sequences run ahead from now on, and what the drafter held is let go of at once."""
        drafter, self.drafter = self.drafter, None
        said = f"{self.name}: {type(error).__name__}: {error}; no more tokens are guessed"
        try:
            if drafter is not None:
                drafter.close()
        except Exception as second:  # of a device that is gone already
            said += "" if str(second) == str(error) else f" (closing it: {type(second).__name__}: {second})"
        self._failed(said)
        self._let_go(list(self._of.values()))

    def _let_go(self, following: Sequence[Following]) -> None:
        for f in following:
            f.run_ahead(True)
