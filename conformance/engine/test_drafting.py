"""How many tokens are guessed, and for whom: seconds by given costs of passes, on the device of the scheduler's
tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hybrid.engine.GONE import AHEAD, FIRST, SHARE, Ahead, Budget, Counts, Pace, Rightness, trial

from conformance.support.audit import audit
from conformance.support.fake_runner import VOCAB, Oracle, Runner
from conformance.support.profile import LONG
from hybrid.engine.blocks import Blocks, Group
from hybrid.engine.request import Request
from hybrid.engine.sampling import Sampling
from hybrid.engine.scheduler import Limits, Pass, Run, Scheduler
from hybrid.engine.speculation import MOST, Costs, DraftModel, Replay, Speculator, expected, share

BLOCK, WINDOW = 4, 2
TOKENS = 400


def reads(rows: int) -> float:
    """Of a device whose time is that of reading weights."""
    return 1 + 0.03 * rows


def computes(rows: int) -> float:
    return float(rows)


def full(rows: int) -> float:
    """Reads weights up to 32 rows, and computes from there on."""
    return 1.5 if rows <= 32 else 1.5 * rows / 32


class Clock:
    """Of a device whose times are known."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rated:
    """Guesses that are right with a rate, by the text of the sequence; `cost` seconds for the most guesses of a
    sequence, and once `slow` more."""

    name = "rated"

    def __init__(
        self, oracle: Oracle, rate: float, clock: Clock, cost: Callable[[int], float], slow: float = 0.0, seed: int = 5
    ) -> None:
        self.oracle, self.rate, self.clock, self.cost, self.slow, self.seed = oracle, rate, clock, cost, slow, seed
        self.asked, self.took = 0, 0.0

    def fork(self) -> Rated:
        return self

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        if most > self.asked:
            took, self.slow = self.cost(most) + self.slow, 0.0
            self.clock.now, self.took, self.asked = self.clock.now + max(0.0, took - self.took), took, most
        text = [*ids, *self.oracle.text(ids, most, frozenset())]
        return [token % VOCAB for token in Replay(text, self.rate, self.seed).propose(ids, most)]

    def close(self) -> None:
        pass


class Watched(Rated):
    """Says what it would have guessed, too; a look takes `look` seconds."""

    watches, look = 64, 2e-3

    def agreed(self, ids: Sequence[int], since: int) -> tuple[int, int]:
        since = max(since, len(ids) - 16)
        if since < len(ids):
            self.clock.now += self.look
        return Replay(ids, self.rate, self.seed).agreed(ids, since)


def spent(
    rate: float,
    cost: Callable[[int], float],
    sequences: int = 1,
    guess: float | Callable[[int], float] = 0.0,
    k: int | None = None,
    wanted: int | None = None,
    tokens: int = TOKENS,
    slow: float = 0.0,
    kind: type[Rated] = Rated,
    seed: int = 5,
) -> tuple[float, Counts, Speculator]:
    """Seconds of a text of `tokens` tokens of each sequence, what was guessed, and by whom. wanted: guesses that
    requests ask for. slow: seconds that the first guesses take more."""
    room = max(sequences + MOST, min(32, sequences * (1 + MOST)))
    limits = Limits(sequences, tokens + 4, rows=room, outs=room, ahead=1)
    blocks = Blocks([Group("local", sequences * (tokens // 4 + 4), WINDOW)], BLOCK)
    scheduler, clock, each = (
        Scheduler(blocks, limits, lambda: 0.0),
        Clock(),
        guess if callable(guess) else lambda n: guess * n,
    )
    runner = Runner(blocks.groups, BLOCK, sequences, -(-limits.ctx // BLOCK))
    drafter = kind(Oracle([WINDOW]), rate, clock, each, slow, seed)
    wish = lambda stream: (Sampling(), wanted, False)  # noqa: E731
    drafting = Speculator(drafter, room, k, None, wish, lambda s, e: None, lambda why: None, clock)
    streams = [Request(i, [i % VOCAB], tokens) for i in range(sequences)]
    for stream in streams:
        scheduler.add(stream)
    while not scheduler.idle:
        drafter.asked, drafter.took, before = 0, 0.0, clock.now
        assert drafting.prepare(scheduler)
        done, between = scheduler.schedule(), clock.now - before
        assert done is not None
        clock.now += (took := cost(done.rows))
        chosen, counts = runner.run(done)
        drafting.committed(done, scheduler.commit(done, chosen, counts), took, between)
        if done.number % 32 == 1:
            audit(scheduler)
    assert all(s.generated == drafter.oracle.text(s.ids[:1], tokens, frozenset()) for s in streams)
    assert drafting.counts.tokens == tokens * sequences
    return clock.now - slow, drafting.counts, drafting


@pytest.mark.parametrize(
    ("rate", "cost", "guess", "most"),
    [
        (0.0, reads, 0.0, 1.03),
        (0.0, computes, 0.0, 1.05),
        (0.0, reads, 0.3, 1.05),
        (0.9, computes, 0.1, 1.05),
        (0.9, reads, 0.0, 0.35),
        (0.8, reads, 0.05, 0.55),
        (1.0, reads, 0.0, 0.25),
    ],
)
def test_what_guesses_cost_and_bring(rate: float, cost: Callable[[int], float], guess: float, most: float) -> None:
    """Of a text of 400 tokens: half of the tries of an unguessable one are in its first 64."""
    seconds, counts, _ = spent(rate, cost, guess=guess)
    assert seconds <= most * TOKENS * cost(1), counts


def steps(rows: int) -> float:
    """Two kernels: for one row, and for eight."""
    return 5.7 if rows == 1 else 10.6 if rows > 4 else 10.9


@pytest.mark.parametrize("cost", [computes, steps])
@pytest.mark.parametrize("guess", [0.0, 0.3])
def test_what_guesses_may_lose_is_bounded_by_a_budget(cost: Callable[[int], float], guess: float) -> None:
    """Whatever is right of them: SHARE of the time, FIRST passes, and what the first pass of so many rows took more."""
    for rate in (0.0, 0.3, 0.6):
        for tokens in (50, 150):
            seconds, counts, drafting = spent(rate, cost, guess=guess, tokens=tokens)
            unknown = sum(cost(rows) - cost(1) for rows in drafting.costs.passes)
            assert seconds <= (1 + SHARE) * (tokens + FIRST) * cost(1) + unknown, (rate, tokens, counts)
    seconds, counts, _ = spent(0.0, cost, guess=guess, tokens=600)
    assert seconds <= 1.03 * 600 * cost(1) and counts.drafted <= 80, counts


def test_sequences_with_guesses_share_one_pass() -> None:
    """Nothing is submitted for one of them before the passes in flight have been read, or they would take turns ever
    after."""
    limits = Limits(2, 40, rows=16, outs=16, ahead=2)
    blocks = Blocks([Group("local", 80, WINDOW)], BLOCK)
    scheduler, drafter = Scheduler(blocks, limits, lambda: 0.0), Rated(Oracle([WINDOW]), 1.0, Clock(), float)
    runner = Runner(blocks.groups, BLOCK, 2, 10)
    drafting = Speculator(
        drafter, 16, None, None, lambda s: (Sampling(), None, False), lambda s, e: None, lambda why: None
    )
    for i in range(2):
        scheduler.add(Request(i, [i + 1], 30))
    assert drafting.prepare(scheduler)
    flights = [scheduler.schedule()]
    drafting.costs.took(2, 1.0)
    drafting.costs.took(8, 1.1)
    drafting.budget.passed(1.0, 1.0)
    while drafting.prepare(scheduler) and (made := scheduler.schedule()) is not None:
        flights.append(made)
    assert len(flights) < limits.ahead or all(run.ids is None for run in flights[-1].runs)  # type: ignore[union-attr]
    for done in flights:
        assert not drafting.prepare(scheduler), "passes are in flight"
        assert done is not None
        chosen, counts = runner.run(done)
        drafting.committed(done, scheduler.commit(done, chosen, counts), 1.0)
    assert drafting.prepare(scheduler)
    verified = scheduler.schedule()
    assert verified is not None and [run.wants > 1 for run in verified.runs] == [True, True]


def test_what_drafting_takes_is_part_of_what_guesses_are_worth() -> None:
    assert share([Pace()], 1, 8, Costs({1: 1.0, 8: 1.2}, {1: 0.05}))[0] > 2
    assert (
        share([Pace()], 1, 8, Costs({1: 1.0, 8: 1.2}, {1: 2.0}))
        == [0]
        == [trial(1, 8, Costs({1: 1.0, 8: 1.2}, {1: 2.0}))]
    )


def test_a_budget_is_earned_and_spent() -> None:
    budget = Budget()
    assert not budget.allows(0.0), "nothing is known of passes"
    budget.passed(10.0, 10.0)
    assert budget.allows(FIRST * 10) and not budget.allows(FIRST * 10 + 0.2)
    budget.passed(10.0, 10 * (FIRST + 1.5), 10.0)  # so many passes' time for one token
    assert not budget.allows(0.0)
    passes = budget.until(2.0, 10.0)
    assert passes > 20
    for _ in range(passes - 1):
        budget.passed(10.0, 10.0)
    assert not budget.allows(2.0)
    budget.passed(10.0, 10.0)
    assert budget.allows(2.0)
    for _ in range(100):
        budget.passed(10.0, 10.0, 40.0)
    assert budget.allows(160.0) and not budget.allows(161.0), "what was saved is not kept for ever"


def test_drafting_costs_what_was_measured_and_what_follows_from_it() -> None:
    costs = Costs()
    assert costs.drafting(3) == 0.0
    costs.drafted(4, 5.0)
    assert costs.drafting(2) == 2.5 and costs.drafting(8) == 10.0 and costs.drafting(0) == 0.0, "in proportion"
    costs.drafted(2, 3.0)
    assert [costs.drafting(k) for k in (1, 2, 3, 4, 6)] == [1.5, 3.0, 4.0, 5.0, 7.0], "it has a constant part"
    costs.fade(1)
    assert costs.drafting(4) == 1.25, "trusted less"
    costs.drafted(2, 9.0)
    assert costs.drafting(4) == 18.0, "measured anew"
    costs.took(3, 2.0)
    assert costs.of(2) == 0.0 and costs.of(32) == 2.0 and costs.of(48) == 3.0, (
        "in proportion where a batch fills a device"
    )


def test_a_slow_reading_among_others_counts_for_nothing() -> None:
    costs = Costs({1: 1.0})
    costs.took(3, 9.0, 1.0)
    costs.drafted(2, 9.0, 1.0)
    assert costs.of(3) == 1.0 and not costs.drafting(2), (
        "more than a pass for each row or guess is not believed at once"
    )
    for seconds in (2.0, 2.2, 40.0, 2.1):
        costs.took(3, seconds)
    assert costs.of(3) == pytest.approx(2.05) and costs.of(2) == pytest.approx(1.2625), "rather like one"
    for _ in range(3):
        costs.took(8, 30.0, 1.0)
        costs.drafted(2, 9.0, 1.0)
    assert costs.of(8) == 30.0 and costs.drafting(2) == 9.0, "it is so"
    costs.fade(1)
    assert costs.of(8) == 15.0 and costs.of(3) == pytest.approx(2.05), "seen once, seen often"


H200 = {1: 5.65e-3, 2: 7.5e-3, 3: 10.5e-3, 4: 10.8e-3, 5: 10.0e-3, 6: 10.05e-3, 7: 10.1e-3, 8: 10.3e-3}
"""Seconds of a 27B pass by its rows, as measured there; a 1B draft takes 0.3 ms and 0.97 ms a guess, a look of 16
tokens 2.4."""


@pytest.mark.parametrize(
    ("rate", "most"), [(0.0, 1.03), (0.8, 1.05), *([(0.3, 1.05), (0.6, 1.05), (0.9, 1.05)] if LONG else [])]
)
def test_the_best_number_is_found_whatever_is_seen_first(rate: float, most: float) -> None:
    """Of a draft model by the costs of a real device, which vary by a few percent, and whose first guesses seem to take
    350 ms; in the mean of some texts, against the number that is best for this rate, none included."""
    took = []
    for seed in range(4):
        noise = random.Random(seed)
        vary = lambda seconds: seconds * (1 + 0.03 * abs(noise.gauss(0, 1)))  # noqa: E731, B023
        seconds, counts, _ = spent(
            rate,
            lambda rows: vary(H200[rows]),  # noqa: B023
            guess=lambda k: vary(drafts(k)),  # noqa: B023
            slow=0.35,
            kind=Watched,
            seed=seed,
        )
        took.append(seconds)
    best = min((H200[1 + k] + drafts(k)) / expected(rate, k) for k in range(MOST + 1))
    assert sum(took) / len(took) <= most * 1.024 * TOKENS * best, counts  # 1.024: the mean of what varies


def drafts(k: int) -> float:
    return 0.3e-3 + 0.97e-3 * k if k else 0.0


def test_what_would_have_been_guessed_is_watched_while_nothing_is() -> None:
    pace = Pace(watches=16)
    pace.settle(0, pace.offer(0, 5))
    assert pace.looks and not pace.due and not pace.soon, "nothing is tried blindly"
    rests = []
    for _ in range(3):
        rests.append(rested(pace))
        pace.settle(0, 0)
    assert rests == [8, 16, 16]
    pace.chosen(12)
    assert pace.soon
    for _ in range(4):
        pace.watched(0, 8)
    assert pace.rate < 0.1
    pace.watched(16, 16)
    few, many = Pace(rate=0.8), Pace(rate=0.8)
    many.watched(40, 50)
    assert pace.rate > 0.4 and few.surely < many.surely < many.rate, "the more is known the surer"
    pace.settle(3, 3)
    assert not pace.looks


class ByHand(DraftModel):
    """A draft model without an engine, whose passes are over when this says so."""

    def __init__(self, fails: bool) -> None:
        self.name, self.chains, self.compiled, self.watches, self.fails, self.waited = (
            "by hand",
            True,
            False,
            0,
            fails,
            0,
        )
        self.apart, self.beside, self.closed = False, Ahead(self._guess_on), False

    def finish(self) -> None:
        self.waited += 1
        if self.fails:
            raise RuntimeError("the draft's device is gone")

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("nothing to free")


@pytest.mark.parametrize("fails", [False, True])
def test_drafting_on_the_same_queue_ends_before_its_verification(fails: bool) -> None:
    """Its time is measured there; where it fails, guessing ends, and is reported once."""
    said: list[str] = []
    clock, model = Clock(), ByHand(fails)
    drafting = Speculator(
        model, 8, None, None, lambda s: (Sampling(), None, False), lambda s, e: None, said.append, clock
    )
    stream = Request(0, [1], 9)
    plain, verified = (Pass(1, [Run(stream, 0, 0, (1,) * n, n)], rows=n, outs=n) for n in (1, 4))
    assert drafting.finish(verified) == 0.0 and not model.waited, "nothing was drafted"
    for done in (plain, verified):
        drafting._drafting = 0.0, 3
        clock.now = 0.25
        ended = drafting.finish(done)
        good = done is verified and not fails
        assert ended == (0.25 if good else 0.0) and drafting._drafting is None
        assert drafting.costs.drafts == ({3: 0.25} if good else {})
    assert model.waited == 1 and (drafting.drafter is None) == fails == bool(said)
    assert drafting.finish(verified) == 0.0 and model.waited == 1
    if fails:
        assert said == [
            "by hand: RuntimeError: the draft's device is gone; no more tokens are guessed (closing it: RuntimeError: "
            "nothing to free)"
        ]
    assert model.closed == fails


def test_a_drafter_that_was_slow_once_is_found_again() -> None:
    """Its first guesses took as long as thirty passes; and a pass that made programs is no pass's cost."""
    _, counts, drafting = spent(0.9, reads, guess=0.05, slow=30.0)
    assert counts.drafted / counts.verified > 2 and counts.tokens / counts.passes > 2, counts
    before = dict(drafting.costs.passes), drafting.budget.seconds
    stream = Request(9, [1], 4)
    drafting.committed(Pass(1, [Run(stream, 0, 0, None, 1)], rows=1, outs=1), [(stream, 1)], 0.0)
    assert before == (drafting.costs.passes, drafting.budget.seconds)


def test_where_the_batch_fills_the_device_nothing_is_guessed() -> None:
    seconds, counts, _ = spent(0.9, full, sequences=32, tokens=100)
    assert seconds <= 1.02 * 100 * full(32) and not counts.drafted, counts
    some, counts, _ = spent(0.9, full, sequences=4, tokens=100)
    assert some < 0.4 * 100 * full(4) and counts.drafted / counts.verified > 3
    few, fewer, _ = spent(0.9, full, sequences=12, tokens=100)
    assert few < 0.75 * 100 * full(12) and 1 <= fewer.drafted / fewer.verified <= 2.5, "32 rows for 12 sequences"


def test_requests_may_ask_for_their_own_number() -> None:
    _, counts, drafting = spent(1.0, reads, wanted=3)
    assert counts.drafted == 3 * counts.verified or counts.drafted == counts.accepted
    assert counts.passes == -(-TOKENS // 4) + 1 and drafting.costs.of(4) == reads(4)
    assert spent(1.0, reads, wanted=0)[1].drafted == 0
    assert spent(0.0, computes, k=2)[1].verified == TOKENS - 2, "as many as asked for, whatever they are worth"


def test_a_sequence_that_may_be_as_all_are_is_taken_for_one_of_them() -> None:
    whole = Rightness(0.6)
    for _ in range(100):
        whole.verified(5, 3)
        whole.verified(1, 0)
    alone, among = Pace(), Pace(among=whole)
    for pace in (alone, among):
        for accepted in (1, 1, 0, 1):
            pace.verified(1, accepted)
    assert whole.rate < among.rate < alone.rate, "by what little its own guesses say, and by all others"
    for pace in (alone, among):
        for _ in range(12):
            pace.verified(7, 7)
    assert among.rate == alone.rate, "its own guesses say that it is another"


def test_more_is_guessed_where_more_is_right() -> None:
    assert [round(expected(0.5, k), 3) for k in range(4)] == [1.0, 1.5, 1.75, 1.875]
    mean = [c.drafted / c.verified for _, c, _ in (spent(rate, reads, guess=0.05) for rate in (0.5, 0.7, 0.95))]
    assert mean[0] < mean[1] < mean[2]


def test_guesses_go_where_they_are_likeliest_to_be_right() -> None:
    costs, sure, doubtful, fixed = Costs({1: 1.0, 3: 1.01, 8: 1.1, 20: 3.0}), Pace(), Pace(), Pace(2, fixed=True)
    for _ in range(30):
        sure.verified(4, 4)
        doubtful.verified(4, 0)
    assert share([sure, doubtful], 3, 7, costs) == [4, 0], "room for four"
    assert share([doubtful, sure], 3, 20, costs)[0] == 0
    assert share([fixed, doubtful], 3, 4, costs) == [1, 0], "as many as there is room for"
    assert share([sure], 3, 3, costs) == [0]
    steep = Costs({1: 1.0, 2: 2.0, 8: 8.0})
    assert share([sure], 1, 8, steep) == [0] and trial(1, 8, steep) == 0 and trial(3, 8, costs) > 3


def rested(pace: Pace) -> int:
    """Tokens until the next try."""
    n = 0
    while not pace.due:
        pace.chosen(1)
        n += 1
    return n


def test_tries_in_vain_become_rare() -> None:
    pace, rests = Pace(), []
    for _ in range(8):
        assert pace.due and pace.offer(0, 2) == 2
        pace.settle(0, 2)
        assert pace.due and pace.offer(0, 2) == 0, "tried, and not worth it"
        pace.settle(0, 0)
        rests.append(rested(pace))
    assert rests == [8, 16, 32, 64, 128, 128, 128, 128]
    pace.settle(3, 3)
    assert pace.offer(0, 0) == 0
    pace.settle(0, 0)
    assert rested(pace) == 8, "after guesses that paid"
    pace.pause(AHEAD)
    assert not pace.due
