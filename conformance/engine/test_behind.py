"""Guesses that are made behind the verification of those before them, on one queue: on whole models, and by given
costs."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hybrid.engine.GONE import Counts, Wanted

import hybrid
from conformance.engine.test_ahead import Timed
from conformance.engine.test_speculation import PROMPT
from conformance.support.audit import audit
from conformance.support.devices import for_model
from conformance.support.fake_runner import Runner
from conformance.support.models import BOTH, cut
from conformance.support.profile import LONG
from hybrid.checkpoint import open_checkpoint
from hybrid.core.places import DEMO
from hybrid.core.plan import FAULTED
from hybrid.engine.blocks import Blocks, Group
from hybrid.engine.request import Request
from hybrid.engine.sampling import Sampling
from hybrid.engine.scheduler import Limits, Scheduler
from hybrid.engine.speculation import DraftModel, Speculator


@pytest.mark.slow
def test_guesses_behind_a_verification_are_those_that_would_follow_it() -> None:
    """Of a draft that is sometimes wrong: as many are right as where the host reads each verification first, and the
    texts are those without guesses, also of two sequences in the same passes and a third that comes when one ends."""
    how = {"temperature": 2.0, "seed": 5, "max_tokens": 16, "ignore_eos": True}
    options = {"ctx": 64, "slots": 2, "precision": "exact", "draft": cut(open_checkpoint(DEMO), (4, 6)), "speculate": 3}
    with hybrid.load(cut(open_checkpoint(DEMO), BOTH), for_model("vulkan"), **options) as model:
        prompts = [model.encode(text) for text in (PROMPT[:40], "class Reader:\n", "import os\n")]
        draft, taken, found = model.drafting.drafter, list[int](), []  # type: ignore[union-attr]
        assert isinstance(draft, DraftModel) and draft.follows_on
        take = draft._take_behind
        draft._take_behind = lambda wanted: (taken.append(len(made := take(wanted))), made)[1]  # type: ignore[method-assign]
        wanted = [model.submit(ids, **how, speculate=0).result(timeout=300).ids for ids in prompts]
        for follows in (True, False):
            draft.follows_on = follows
            taken.clear()
            handles = [model.submit(ids, **how) for ids in prompts]
            done = [handle.result(timeout=300) for handle in handles]
            assert [d.ids for d in done] == wanted
            assert all(d.usage.accepted_tokens > 0 for d in done)
            assert sum(d.usage.accepted_tokens for d in done) < sum(d.usage.drafted_tokens for d in done), (
                "some are wrong"
            )
            assert (sum(taken) > 5) == follows
            alone = [model.submit(ids, **how).result(timeout=300) for ids in prompts]
            assert [d.ids for d in alone] == wanted
            found.append([(d.usage.drafted_tokens, d.usage.accepted_tokens) for d in alone])
            assert draft._behind is None and not model.engine.faults and not draft.engine.positions
        assert found[0] == found[1]
        audit(model._serving.scheduler)


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="half a minute of requests; the long profile has it")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_that_come_and_go_get_the_texts_that_they_get_without_guesses(seed: int) -> None:
    """Lengths, ends and cancellations at any time, of more requests than slots; blocks and slots are given back."""
    drawn = random.Random(seed)
    options = {"ctx": 96, "slots": 3, "precision": "exact", "draft": cut(open_checkpoint(DEMO), (4, 6)), "speculate": 3}
    with hybrid.load(cut(open_checkpoint(DEMO), BOTH), for_model("vulkan"), **options) as model:
        draft, behind = model.drafting.drafter, list[bool]()  # type: ignore[union-attr]
        assert isinstance(draft, DraftModel)
        make = draft.behind
        draft.behind = lambda *given: (behind.append(made := make(*given)), made)[1]  # type: ignore[method-assign]
        prompts = ["def area(w, h):\n", "class A:\n", "import os\nimport sys\n", "x = 1\ny = 2\n"]
        asked = [
            (
                drawn.choice(prompts),
                {
                    "temperature": drawn.choice([0, 1.5, 2.5]),
                    "seed": drawn.randrange(4),
                    "max_tokens": drawn.choice([3, 9, 24, 40]),
                    "ignore_eos": drawn.random() < 0.7,
                },
            )
            for _ in range(10)
        ]
        wanted = [model.submit(text, speculate=0, **how).result(timeout=300).ids for text, how in asked]
        for _ in range(2):
            handles = []
            for text, how in asked:
                handles.append(model.submit(text, **how))
                if drawn.random() < 0.25:
                    time.sleep(0.3 * drawn.random())
                    drawn.choice(handles).cancel()
            for handle, ids in zip(handles, wanted, strict=True):
                done = handle.result(timeout=300)
                assert done.ids == ids if done.finish != "cancelled" else done.ids == ids[: len(done.ids)]
        assert sum(behind) > 10 and not model.engine.faults and not draft.engine.positions
        assert not model.engine.blocks.used["global"]
        audit(model._serving.scheduler)


class Queued(Timed):
    """A draft model by given costs on the larger one's queue; `host` seconds until the first of its passes is
    submitted."""

    def __init__(self, rate: float, each: float, host: float, follows_on: bool) -> None:
        super().__init__(rate, each, False)
        self.chains, self.follows_on, self.host = True, follows_on, host
        self.free = self.ended = (
            0.0  # when the queue has nothing more to do; when the guesses that are verified next were made
        )
        self.known: tuple[list[int], list[int]] = [], []  # what was guessed last, and after what
        self.made, self.end_of_made, self.wasted = 0, 0.0, 0

    def runs(self, seconds: float) -> float:
        """Submit so much; when it will have ended."""
        self.free = max(self.free, self.clock.now) + seconds
        return self.free

    def missing(self, ids: Sequence[int]) -> int:
        """1 where all guesses were right: the last of them has not been run."""
        before, guesses = self.known
        return int(len(guesses) > 0 and list(ids)[:-1] == [*before, *guesses])

    def ahead(self, wanted: Wanted) -> dict[Hashable, list[int]]:
        ((key, (ids, most)),) = wanted.items()
        self.clock.now += self.host
        passes = most + self.missing(ids) - self.made
        self.ended = self.runs(passes * self.each) if passes > 0 else self.end_of_made
        self.known, self.made = (list(ids), self.guess(ids, most)), 0
        return {key: self.known[1]}

    def behind(self, verified: Mapping[Hashable, tuple[int, int]], most: int) -> bool:
        assert not self.made, "once"
        if self.follows_on and verified:
            self.made, self.end_of_made = most, self.runs(most * self.each)
        return self.made > 0

    def expects(self, key: Hashable, ids: Sequence[int]) -> int:
        return max(0, self.made - self.missing(ids))

    def drop(self) -> int:
        dropped, self.made = self.made, 0
        self.wasted += dropped
        return dropped

    def end(self, key: Hashable = None) -> None:
        self.drop()

    def finish(self) -> None:
        self.clock.now = max(self.clock.now, self.ended)


def seconds(
    rate: float, follows_on: bool, k: int | None = None, each: float = 0.1, host: float = 0.06, tokens: int = 240
) -> tuple[float, Counts, Queued, Speculator]:
    """Of a text, on a device whose passes take 1 and 0.02 for each row."""
    draft, limits = Queued(rate, each, host, follows_on), Limits(1, tokens + 4, rows=8, outs=8, ahead=1)
    blocks = Blocks([Group("local", tokens, 2)], 4)
    scheduler, runner = Scheduler(blocks, limits, lambda: 0.0), Runner(blocks.groups, 4, 1, -(-limits.ctx // 4))
    drafting = Speculator(
        draft, 8, k, None, lambda s: (Sampling(), None, False), lambda s, e: None, pytest.fail, draft.clock
    )
    clock, read = draft.clock, 0.0
    scheduler.add(stream := Request(0, [1], tokens))
    while not scheduler.idle:
        assert drafting.prepare(scheduler)
        done, submitted = scheduler.schedule(), clock.now
        assert done is not None
        end = draft.runs(1 + 0.02 * done.rows)
        drafting.prepare(scheduler)
        began = max(submitted, drafting.finish(done))
        clock.now = max(clock.now, end)
        took, between, read = clock.now - max(read, began), max(0.0, began - read), clock.now
        chosen, counts = runner.run(done)
        drafting.committed(done, scheduler.commit(done, chosen, counts), took, between)
        clock.now += 0.02
    assert stream.generated == draft.oracle.text([1], tokens, frozenset())
    assert not draft.made
    return clock.now, drafting.counts, draft, drafting


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("rate", [0.5, 0.8, 1.0])
def test_a_round_takes_what_its_passes_take_and_nothing_between(rate: float, k: int | None) -> None:
    (waits, before, _, _), (goes_on, counts, draft, drafting) = (seconds(rate, f, k) for f in (False, True))
    saved = (waits - goes_on) / before.verified
    assert saved >= 0.06 and counts.verified > 30
    if k:
        assert counts.verified == before.verified and saved <= 0.08 + 1e-9, "the host's in each round but the first"
    assert draft.wasted <= 8, "of a text's end, and a change of mind"
    drafts = drafting.costs.drafts
    assert all(0.1 * n - 1e-9 <= took <= 0.1 * (n + 1) + 1e-9 for n, took in drafts.items()), drafts


def test_guesses_that_are_never_right_cost_no_more_than_their_budget() -> None:
    lost, counts, draft, _ = seconds(0.0, True)
    assert lost <= 1.07 * 240 * (1.02 + 0.02), counts
    assert draft.wasted <= counts.drafted


def test_only_what_the_verification_alone_has_led_to_is_taken() -> None:
    """After another pass, or where nothing is to be guessed, it is dropped, and its time is not taken for a pass's."""
    draft = Queued(1.0, 0.1, 0.0, True)
    drafting = Speculator(
        draft, 8, None, None, lambda s: (Sampling(), None, False), lambda s, e: None, pytest.fail, draft.clock
    )
    stream = Request(0, [1, 2], 40)
    stream.last, stream.slot, stream.position = 42, 0, 1
    drafted = list[tuple[int, ...]]()
    scheduler: Any = SimpleNamespace(number=5, in_flight=0, _running=[stream], draft=lambda s, ids: drafted.append(ids))
    drafting.costs.passes, drafting.costs.drafts, drafting.budget.seconds = {1: 1.0, 8: 1.1}, {4: 0.2}, 9.0
    for number, taken in ((5, True), (6, False)):
        draft.made, drafting._behind, scheduler.number, draft.wasted = 7, 5, number, 0
        assert drafting.prepare(scheduler) and drafted.pop()
        assert draft.wasted == (0 if taken else 7) and (drafting._watching == number + 1) == (not taken)
    before, draft.made, drafting._behind, draft.wasted = drafting.budget.seconds, 7, 6, 0
    drafting._follow(stream).pace.pause(3)
    assert drafting.prepare(scheduler) and draft.wasted == 7 and not drafted and drafting.budget.seconds < before


def test_nothing_is_made_behind_what_the_budget_cannot_pay_or_what_ends() -> None:
    draft = Queued(0.8, 0.1, 0.0, True)
    drafting = Speculator(
        draft, 8, None, None, lambda s: (Sampling(), None, False), lambda s, e: None, pytest.fail, draft.clock
    )
    drafting.costs.passes, drafting.costs.drafts = {1: 1.0, 8: 1.2}, {4: 0.4}
    for seconds, last, behind in ((9.0, 42, True), (-9.0, 42, False), (9.0, 7, False), (9.0, 8, True)):
        stream = Request(0, [1, 2], 40)
        stream.last, stream.slot, stream.position, stream.flying = last, 0, 5, 1
        scheduler: Any = SimpleNamespace(number=6, in_flight=1, _running=[stream])
        drafting._of.clear()
        drafting._follow(stream)
        drafting.budget.seconds, drafting._given, draft.made = seconds, (6, {0: 3}), 0
        assert drafting.prepare(scheduler) and (draft.made > 0) == behind == (drafting._behind == 6), (seconds, last)
        draft.made, drafting._behind = 0, 0


def test_a_void_pass_of_the_draft_is_run_again() -> None:
    """What stands for its guesses is no token; all that it holds is run anew."""
    draft = object.__new__(DraftModel)
    waited, settled = list[int](), list[bool]()
    history = {(1, 6): 3, (2, 5): FAULTED}
    device = SimpleNamespace(wait=waited.append, peek=lambda name, row, at, ticket: history[row, at])
    draft.engine = SimpleNamespace(device=device, settle=lambda: settled.append(True))  # type: ignore[assignment]
    draft._followed = {"a": SimpleNamespace(slot=1, ids=[7, 8]), "b": SimpleNamespace(slot=2, ids=[9])}  # type: ignore[dict-item]
    for voided in (False, True):
        draft._open = {"a": ([1, 2, 3, 4], [10, 11, 12]), **({"b": ([5, 6, 7], [10, 11, 12])} if voided else {})}
        draft.finish()
        assert waited.pop() == 12 and bool(settled) == voided and bool(draft._open) != voided
        assert [f.ids for f in draft._followed.values()] == ([[], []] if voided else [[7, 8], [9]])
