"""A draft on a device of its own guesses on while its guesses are verified: what is right is there, what is not is
dropped."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hybrid.engine.GONE import Ahead, Counts, Pace, Wanted, likely
from threadpoolctl import threadpool_limits

import hybrid
from conformance.engine.test_drafting import Clock
from conformance.engine.test_speculation import PROMPT, WAYS, run_as_it_is, run_plain
from conformance.support.audit import audit
from conformance.support.devices import BACKENDS, for_model
from conformance.support.fake_runner import VOCAB, Oracle, Runner
from conformance.support.models import BOTH, cut
from conformance.support.profile import LONG
from hybrid.checkpoint import open_checkpoint
from hybrid.core.places import DEMO
from hybrid.engine.blocks import Blocks, Group
from hybrid.engine.request import Request
from hybrid.engine.sampling import Sampling
from hybrid.engine.scheduler import Limits, Scheduler
from hybrid.engine.speculation import Costs, DraftModel, Replay, Speculator, share

PATIENCE = 60.0


class Counting:
    """Guesses the next number, of every sequence; waits before each for `may`, which is given where nothing is to
    wait."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.may, self.taken, self.fails_at = threading.Semaphore(100), 0, fails_at

    def __call__(self, wanted: Wanted) -> Generator[dict[Hashable, int], None, None]:
        for i in range(max(most for _, most in wanted.values())):
            assert self.may.acquire(timeout=PATIENCE)
            if i == self.fails_at:
                raise RuntimeError("the draft's device is gone")
            self.taken += 1
            yield {key: ids[-1] + 1 + i for key, (ids, most) in wanted.items() if i < most}


def test_what_was_supposed_rightly_is_there_and_the_rest_is_dropped() -> None:
    ahead = Ahead(Counting())
    assert ahead.take({"a": ([1, 2], 3)}) == {}, "nothing was begun"
    ahead.start({"a": ([1, 2, 3], 4), "b": ([7, 8], 3), "c": ([4, 5], 3), "d": ([1], 2)})
    found = ahead.take({"a": ([1, 2, 3, 4], 3), "b": ([7, 9], 2), "c": ([4, 5, 7], 2), "e": ([1], 2)})
    assert found == {"a": [5, 6, 7]}, "not after a guess that was wrong, nor after another token than its own"
    assert ahead.dropped == {"b": 3, "c": 3, "d": 2} and ahead.take({"a": ([1, 2, 3, 4], 3)}) == {}, "it is taken once"
    ahead.start({"a": ([1, 2, 3], 4)})
    assert ahead.take({"a": ([1, 2], 2)}) == {"a": [3, 4]}, "fewer were verified than were given"
    ahead.start({"a": ([1, 2, 3], 4)})
    assert ahead.take({"a": ([1, 2, 3, 4, 5], 7)}) == {"a": [6, 7]}, "it has gone on without guesses meanwhile"
    ahead.start({"a": ([1, 2, 3], 1)})
    assert ahead.take({"a": ([1, 2, 3, 4], 2)}) == {}, "there are none"


def test_a_draft_whose_guesses_are_wrong_is_stopped() -> None:
    """After the pass that runs; and so is one of a sequence that ends. What was made of others stays."""
    for end in (lambda a: a.take({"a": ([1, 9], 5)}), lambda a: a.forget("a"), Ahead.close, Ahead.rest):
        guess = Counting()
        guess.may, ahead = threading.Semaphore(2), Ahead(guess)
        ahead.start({"a": ([1, 2], 50), "b": ([5], 50)})
        ahead._wait(2)  # it waits for the third
        stopped = threading.Timer(0.01, lambda may=guess.may: [may.release() for _ in range(40)])
        ending = threading.Thread(target=end, args=(ahead,))
        ending.start()
        while ahead._most:  # told to stop
            assert ending.is_alive() or not ahead._most
        stopped.start()
        ending.join(PATIENCE)
        assert guess.taken == 3 and not ending.is_alive()
        assert all(thread.name != "hybrid draft" for thread in threading.enumerate())
    assert ahead.take({"b": ([5, 6], 7)}) == {"b": [7, 8]}, "what was made of others stays"


def test_what_fails_is_raised_by_who_waits_for_it() -> None:
    for wait in (
        lambda a: a.take({"a": ([1, 2, 3], 9)}),
        Ahead.rest,
        lambda a: a.forget("a"),
        lambda a: a.start({"a": ([1], 2)}),
    ):
        ahead = Ahead(Counting(fails_at=2))
        ahead.start({"a": ([1, 2], 50)})
        ahead._wait(None)  # or it would be stopped before it fails
        with pytest.raises(RuntimeError, match="the draft's device is gone"):
            wait(ahead)
        ahead.rest()
        assert ahead.take({"a": ([1, 2, 3], 1)}) == {}
    ahead = Ahead(Counting(fails_at=0))
    ahead.start({"a": ([1, 2], 50)})
    ahead.close()


def test_the_cheaper_way_is_taken() -> None:
    """Pass after drafting, or both at a time, by what was measured and by how likely it is in vain."""
    costs = Costs({1: 1.0, 8: 1.0}, {1: 0.2, 7: 1.4}, apart=True)
    assert costs.beside(8, 4, 1.0) == pytest.approx(1.0) and costs.beside(8, 7, 1.0) == pytest.approx(1.6)
    assert costs.beside(8, 4, 0.0) == pytest.approx(1.8) and costs.beside(8, 7, 0.0) == pytest.approx(2.6), "in vain"
    assert costs.round(8, 4, 0.5) == pytest.approx(1.4) and costs.goes_on(8, 4, 0.5)
    assert costs.round(8, 7, 0.0) == pytest.approx(2.4) and not costs.goes_on(8, 7, 0.0)
    assert not costs.goes_on(5, 4, 1.0), "what such a pass takes alone is not known"
    assert likely([(0.5, 1), (0.9, 0)]) == 0.25
    good = Pace(rate=0.95)
    beside, alone = share([good], 1, 8, costs)[0], share([good], 1, 8, Costs(costs.passes, costs.drafts))[0]
    assert alone >= 1 and beside == 4, "as many as are drafted while a pass runs"
    for _ in range(3):
        costs.took_beside(8, 2.5)
    assert costs.slower == pytest.approx(2.5) and not costs.goes_on(8, 4, 1.0), "they share memory, or processors"
    for _ in range(60):
        costs.took(8, 1.0)
    assert costs.goes_on(8, 4, 1.0), "it is tried again some time"


class Always(Costs):
    """So that no time decides."""

    def goes_on(self, rows: int, guesses: int, ready: float) -> bool:
        return self.apart


Pairs = Callable[[str], tuple[hybrid.Model, DraftModel]]


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    """By backend, a model of few layers as its own draft, which is on `cpu`, on a device of its own. One thread for
    products: two models on the cpu take turns otherwise."""
    with ExitStack() as opened:
        opened.enter_context(threadpool_limits(1, "blas"))

        @cache
        def make(backend: str) -> tuple[hybrid.Model, DraftModel]:
            where = for_model(backend) if backend == "vulkan" else backend
            file, small = (cut(open_checkpoint(DEMO), BOTH) for _ in range(2))
            options = {"draft": small, "draft_device": "cpu", "speculate": 3}
            model = opened.enter_context(hybrid.load(file, where, ctx=64, slots=2, precision="exact", **options))
            assert model.drafting is not None
            draft = model.drafting.drafter
            assert isinstance(draft, DraftModel) and draft.apart
            model.drafting.costs = Always()
            return model, draft

        yield make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "way"),
    [(b, w) for b in BACKENDS for w in ("greedy", "sampled") if LONG or b == "cpu" or w == "sampled"],
)
def test_a_pass_of_the_draft_runs_while_its_guesses_are_verified(
    pairs: Pairs, backend: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the verification nor the draft's first pass beside it goes on before the other has begun; the text is the
    same."""
    model, draft = pairs(backend)
    assert model.drafting is not None
    options = {**WAYS[way], "max_tokens": 14}
    wanted = run_plain(model, options)
    before, begun = replace(model.drafting.counts), draft.beside.started
    meets, met = threading.Barrier(2, timeout=PATIENCE), {"hybrid draft": begun, "": begun}

    def meeting(submit: Callable[..., int], who: str) -> Callable[..., int]:
        def begin(*args: Any) -> int:
            if (threading.current_thread().name == who or not who) and met[who] < draft.beside.started:
                met[who] += 1
                meets.wait()
            return submit(*args)

        return begin

    for engine, who in ((model.engine, ""), (draft.engine, "hybrid draft")):
        monkeypatch.setattr(engine, "submit_scheduled", meeting(engine.submit_scheduled, who))
    assert run_as_it_is(model, options) == wanted and not model.engine.faults
    assert met["hybrid draft"] == met[""] == draft.beside.started >= begun + 2
    counts, stats = model.drafting.counts, model.stats
    drafted, ready = counts.drafted - before.drafted, counts.ready - before.ready
    assert (
        stats is not None and f"; {ready} (" in stats.guessed and "drafted while others were verified" in stats.guessed
    )
    assert ready >= 0.5 * drafted > 0, "all but the first, where the device rounds as the draft does"


@pytest.mark.slow
def test_a_draft_apart_that_lies_and_dies_costs_no_token(pairs: Pairs) -> None:
    """Several sequences; cancelled between; then the draft's device goes away while it guesses ahead: said once."""
    model, draft = pairs("cpu")
    prompts = [model.encode(text) for text in (PROMPT[:40], "class Reader:\n", "import os\n")]
    wanted = [run_plain(model, {"ids": ids, "max_tokens": 8}) for ids in prompts]
    begun = draft.beside.started

    def lying(ids: Sequence[int], chosen: list[int]) -> list[int]:
        return [token ^ ((len(ids) + i) % 3 == 0) for i, token in enumerate(chosen)]

    def dying(*args: Any) -> int:
        if threading.current_thread().name == "hybrid draft":
            raise RuntimeError("the draft's device is gone")
        return kept(*args)

    def run() -> None:
        handles = [model.submit(ids, max_tokens=8, ignore_eos=True) for ids in prompts]
        gone = model.submit(prompts[0], max_tokens=30, ignore_eos=True)
        next(iter(gone.events()))
        gone.cancel()
        assert [list(h.result(timeout=300).ids) for h in handles] == wanted
        gone.result(timeout=300)
        assert not any(model.engine.blocks.used.values())
        audit(model._serving.scheduler)

    run()
    honest, kept = draft._guessed, draft.engine.submit_scheduled
    draft._guessed = lying  # type: ignore[method-assign]
    run()
    assert not draft.engine.positions and not any(draft.engine.blocks.used.values())
    assert draft.beside.started > begun + 3 and not model.engine.faults
    draft._guessed, draft.engine.submit_scheduled = honest, dying  # type: ignore[method-assign]
    run()
    assert (
        len(model.engine.faults) == 1
        and "the draft's device is gone; no more tokens are guessed" in model.engine.faults[0]
    )
    assert model.drafting is not None and model.drafting.drafter is None
    model.engine.faults.clear()
    draft.engine.submit_scheduled, model.drafting.drafter = kept, draft  # type: ignore[method-assign]
    for key in list(draft._followed):
        draft.end(key)


class Timed(DraftModel):
    """A draft model by given costs: guesses that are right with a rate, `each` seconds for one, on a device of its
    own."""

    def __init__(self, rate: float, each: float, apart: bool) -> None:
        self.name, self.chains, self.apart, self.watches, self.steady, self.compiled = (
            "timed",
            False,
            apart,
            0,
            True,
            False,
        )
        self.clock, self.oracle, self.rate, self.each, self.ready = Clock(), Oracle([2]), rate, each, {}
        self.beside = Ahead(self._guess_on)
        self.begun: tuple[float, list[int], int] | None = None  # when, what it goes on from, guesses
        self.beside.stop = self.end  # type: ignore[method-assign]

    def follows(self, key: Hashable) -> bool:
        return True

    def end(self, key: Hashable = None) -> None:
        self.begun = None

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        text = [*ids, *self.oracle.text(ids, most, frozenset())]
        return [token % VOCAB for token in Replay(text, self.rate, 3).propose(ids, most)]

    def propose_all(self, wanted: Wanted) -> dict[Hashable, list[int]]:
        ((key, (ids, most)),) = wanted.items()
        begun, self.begun, self.ready, clock = self.begun, None, {}, self.clock
        if begun is not None:
            since, after, n = begun
            if list(ids) == [*after, *self.guess(after, 1)]:
                clock.now = max(clock.now, since + n * self.each)
                self.ready = {key: min(most, n - 1)}
                self.steady = False
                return {key: self.guess(ids, self.ready[key])}
            whole = math.ceil((clock.now - since) / self.each) * self.each  # the pass that runs is waited for
            clock.now = max(clock.now, since + min(n * self.each, whole))
        clock.now, self.steady = clock.now + most * self.each, True
        return {key: self.guess(ids, most)}

    def go_on(self, verified: Wanted) -> None:
        ((_, (ids, n)),) = verified.items()
        self.begun = self.clock.now, list(ids), n


def seconds(rate: float, each: float, apart: bool, slower: float = 1.0, tokens: int = 240) -> tuple[float, Counts]:
    """Of a text, on a device whose passes take 1 and 0.02 for each row, `slower` times as long while the draft goes
    on."""
    draft, limits = Timed(rate, each, apart), Limits(1, tokens + 4, rows=8, outs=8, ahead=1)
    blocks = Blocks([Group("local", tokens, 2)], 4)
    scheduler, runner = Scheduler(blocks, limits, lambda: 0.0), Runner(blocks.groups, 4, 1, -(-limits.ctx // 4))
    drafting = Speculator(
        draft, 8, None, None, lambda s: (Sampling(), None, False), lambda s, e: None, pytest.fail, draft.clock
    )
    scheduler.add(stream := Request(0, [1], tokens))
    while not scheduler.idle:
        before = draft.clock.now
        assert drafting.prepare(scheduler)
        done, between = scheduler.schedule(), draft.clock.now - before
        assert done is not None
        took = (1 + 0.02 * done.rows) * (1.0 if draft.begun is None else slower)
        draft.clock.now += took
        chosen, counts = runner.run(done)
        drafting.committed(done, scheduler.commit(done, chosen, counts), took, between)
    assert stream.generated == draft.oracle.text([1], tokens, frozenset())
    return draft.clock.now, drafting.counts


@pytest.mark.parametrize(
    ("each", "slower"), [(0.2, 1.0), (0.2, 3.0), *([(0.05, 1.0), (0.5, 1.0), (0.2, 1.3)] if LONG else [])]
)
def test_a_round_takes_the_longer_of_pass_and_drafting_where_guesses_are_right(each: float, slower: float) -> None:
    """And hardly more than both one after another where they are not, or where the two devices slow each other down."""
    for rate in (0.0, 0.5, 0.8, 0.95, 1.0) if LONG else (0.0, 0.8, 1.0):
        (waits, _), (goes_on, counts) = (seconds(rate, each, apart, slower) for apart in (False, True))
        assert goes_on <= 1.05 * waits, (rate, counts)
        if rate == 1.0 and slower == 1.0:
            k = round(counts.drafted / counts.verified)
            assert counts.ready > 0.7 * counts.drafted
            assert goes_on <= 1.15 * 240 / (k + 1) * max(1 + 0.02 * (k + 1), each * (k + 1)) < 0.95 * waits, counts
