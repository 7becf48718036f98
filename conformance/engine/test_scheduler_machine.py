"""Random requests against a scheduler on a simulated device with memory. Every text equals that of its sequence alone,
every block is accounted for after every step, and no block or slot stays in use at the end.

A step is one rule. `python -m conformance.engine.test_scheduler_machine STEPS` runs many and prints counts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conformance.support.audit import audit
from conformance.support.fake_runner import VOCAB, Guides, Oracle, Runner, Uneven, request
from conformance.support.profile import LONG
from hybrid.core.errors import ContextExceeded, QueueFull
from hybrid.engine.blocks import Blocks, Group
from hybrid.engine.request import Request
from hybrid.engine.scheduler import Limits, Pass, Scheduler
from hybrid.engine.speculation import Speculator

TOKENS = st.integers(0, VOCAB - 1)
TOTALS: Counter[str] = Counter()
"""Event counts of all machines of this process."""

WAYS = ("right", "wrong", "mixed", "long", "none", "fails")

ARRIVAL: dict[str, st.SearchStrategy[Any]] = {
    "system": st.integers(0, 2),
    "keep": st.integers(0, 70),
    "own": st.lists(TOKENS, min_size=1, max_size=9),
    "limit": st.integers(1, 30),
    "ends": st.sampled_from([(), (0,), (0, 1, 2)]),
    "priority": st.sampled_from([0, 0, 0, 1, 2]),
    "patience": st.one_of(st.none(), st.integers(0, 20)),
    "ahead": st.sampled_from([True, True, False]),
    "speculate": st.sampled_from([None, None, 0, 2]),
    "cuts": st.one_of(st.just([]), st.lists(st.integers(0, 99), min_size=2, max_size=6)),
}
"""Arguments of `Machine.arrive`."""


class ModalDrafter:
    """Drafts by a mode: right, wrong, both, too many, none; or it fails."""

    name = "modal"

    def __init__(self, oracle: Oracle) -> None:
        self.oracle, self.way, self.closed = oracle, WAYS[0], False

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: self.drafts(request.ids, most) for request, most in wanted.items()}

    def drafts(self, ids: Sequence[int], most: int) -> list[int]:
        match self.way:
            case "fails":
                raise RuntimeError("no more")
            case "none":
                return []
        text = self.oracle.text(ids, most + (self.way == "long"), frozenset())
        wrong = {"wrong": 0, "mixed": (len(ids) * 7) % 5}.get(self.way, len(text))
        return [token if i < wrong else (token + 1) % VOCAB for i, token in enumerate(text)]

    def verified(self, request: Request, accepted: int) -> None:
        pass

    def end(self, request: Request) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Machine(RuleBasedStateMachine):
    """One engine without a device."""

    @initialize(
        block=st.sampled_from([1, 2, 4, 5]),
        ctx=st.sampled_from([16, 40, 70]),
        slots=st.sampled_from([1, 2, 3, 4, 5, 5]),
        window=st.sampled_from([0, 1, 2, 5, 9, 17]),
        spare=st.tuples(*[st.sampled_from([0, 0, 1, 3, 9, 30])] * 2),
        rows=st.integers(0, 20),
        mixed=st.one_of(st.none(), st.integers(0, 20)),
        outs=st.sampled_from([None, 3]),
        ahead=st.sampled_from([1, 2, 2, 3, 3]),
        queue=st.sampled_from([3, 30]),
        overtakes=st.sampled_from([0, 1, 5]),
        drafts=st.sampled_from([0, 1, 3, None, None]),
        bare=st.booleans(),
        overlap=st.booleans(),
        cap=st.booleans(),
        pace=st.integers(0, 2),
        first=st.lists(st.fixed_dictionaries(ARRIVAL), min_size=1, max_size=6),
        data=st.data(),
    )
    def start(
        self,
        block,
        ctx,
        slots,
        window,
        spare,
        rows,
        mixed,
        outs,
        ahead,
        queue,
        overtakes,
        drafts,
        bare,
        overlap,
        cap,
        pace,
        first,
        data,
    ):
        table = -(-ctx // block)
        groups = [Group("global", table + spare[0])]
        if window:
            groups.append(Group("local", Group("local", 1, window).need(ctx, block) + spare[1], window))
        self.limits = Limits(
            slots,
            ctx,
            slots + rows,
            mixed=None if mixed is None else slots + min(mixed, rows),
            outs=None if outs is None else slots + outs,
            ahead=ahead,
            queue=queue,
            overtakes=overtakes,
            overlap=overlap,
        )
        self.now = 0.0
        blocks = Blocks(groups, block, b"a model")
        self.scheduler = Scheduler(
            blocks, self.limits, lambda: self.now, Uneven() if cap else None, lambda r: not r.captured
        )
        self.runner = Runner(blocks.groups, block, slots, table)
        self.oracle = Oracle([g.window for g in blocks.groups])
        self.failures: list[str] = []
        self.drafter, room = ModalDrafter(self.oracle), self.limits.outs or slots
        self.bare, guides = bare, Guides(self.scheduler, self.expected)
        self.speculator = Speculator(
            None if bare else self.drafter, room, drafts, guides, lambda s, e: None, self.failures.append
        )
        self.streams: list[Request] = []
        self.flights: list[Pass] = []
        self.overtaken: Counter[int] = Counter()
        self.read: defaultdict[int, set[int]] = defaultdict(set)
        self.systems = data.draw(st.lists(st.lists(TOKENS, min_size=1, max_size=ctx - 4), min_size=1, max_size=3))
        self.pace = pace
        for asked in first:
            self.arrive(**asked)

    def expected(self, stream: Request) -> list[int]:
        """The drafts of a request's constraint."""
        found = [] if self.drafter.way == "fails" else self.drafter.drafts(stream.ids, len(stream.ids) % 6)
        TOTALS["drafts that constraints expect"] += len(found)
        return found

    # --- rules -------------------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], limit: int, cuts: Sequence[int] = (), **options: Any) -> None:
        edges = sorted({cut % (len(prompt) + 1) for cut in cuts})
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        stream = request(len(self.streams), prompt, limit, spans=spans, **options)
        try:
            self.scheduler.add(stream)
        except (QueueFull, ContextExceeded) as refusal:
            TOTALS[type(refusal).__name__] += 1
            if isinstance(refusal, QueueFull):
                assert self.scheduler.waiting >= self.limits.queue and refusal.retry_after > 0
        except ValueError as refusal:
            assert "do not fit into a pass" in str(refusal) and spans
            TOTALS["spans that never fit"] += 1
        else:
            self.streams.append(stream)

    @rule(**ARRIVAL)
    def arrive(self, system, keep, own, limit, ends, priority, patience, ahead, speculate, cuts):
        prompt = self.systems[system % len(self.systems)][:keep] + own
        deadline = None if patience is None else self.now + patience
        asked = {"ends": ends, "priority": priority, "deadline": deadline, "ahead": ahead, "speculate": speculate}
        self.add(prompt, limit, cuts, **asked)

    @precondition(lambda self: self.streams)
    @rule(
        of=st.integers(0, 99),
        keep=st.integers(1, 70),
        own=st.lists(TOKENS, min_size=1, max_size=4),
        limit=st.integers(1, 30),
    )
    def continue_text(self, of, keep, own, limit):
        """The next turn of a conversation, or another branch of it."""
        self.add(self.streams[of % len(self.streams)].ids[:keep] + own, limit)

    @precondition(lambda self: self.streams)
    @rule(of=st.integers(0, 99))
    def cancel(self, of):
        stream = self.streams[of % len(self.streams)]
        live = stream.finish is None
        assert self.scheduler.cancel(stream) == live
        assert stream.finish == "cancelled" or not live
        self.speculator.end(stream)

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds):
        self.now += seconds
        for stream in self.scheduler.expire():
            assert stream.finish == "deadline" and stream.deadline is not None and stream.deadline <= self.now
            self.speculator.end(stream)

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=40),
        what=st.sampled_from(["logits", "hidden"]),
        rows=st.integers(0, 3),
        cuts=st.lists(st.integers(0, 40), max_size=2),
    )
    def read_back(self, prompt, what, rows, cuts):
        """A request that reads rows back: its reader takes them some time later."""
        self.add(prompt, 1, cuts, capture=what, rows=rows)

    @precondition(lambda self: any(s.captured for s in self.streams))
    @rule(of=st.integers(0, 99))
    def take(self, of):
        some = [s for s in self.streams if s.captured]
        stream = some[of % len(some)]
        while stream.captured:
            self.taken(stream)

    def taken(self, stream: Request) -> None:
        start, values = stream.captured.pop(0)
        wanted = self.oracle.values(tuple(stream.ids))
        assert values == wanted[start : start + len(values)], f"{stream.id}: wrong rows"
        self.read[stream.id] |= set(range(start, start + len(values)))

    @precondition(lambda self: any(not s.ahead for s in self.streams))
    @rule(of=st.integers(0, 99), right=st.integers(0, 3), wrong=st.lists(TOKENS, max_size=2))
    def draft(self, of, right, wrong):
        """Drafts, some of which are correct."""
        some = [s for s in self.streams if not s.ahead and not s.pending and s.finish is None and not s.capture]
        if some:
            stream = some[of % len(some)]
            self.scheduler.draft(stream, self.oracle.text(stream.ids, right, frozenset()) + wrong)

    @rule(way=st.sampled_from(WAYS[:-1] * 2 + WAYS[-1:]))
    def switch_drafter(self, way):
        self.drafter.way = way

    @rule(times=st.integers(1, 6))
    def prepare(self, times):
        """Submit passes, as many ahead as allowed."""
        for _ in range(times):
            if self.schedule() is None:
                break

    @rule(times=st.integers(1, 6))
    def work(self, times):
        """An engine's steps: submit all that may be in flight, commit the oldest, submit again."""
        for _ in range(times):
            self.prepare(self.limits.ahead)
            self.finish()
            self.prepare(self.limits.ahead)

    @rule()
    def finish(self):
        """The device has run the oldest pass."""
        if self.flights:
            done = self.flights.pop(0)
            tokens, counts = self.runner.run(done)
            known = {run.seq: len(run.seq.ids) for run in done.runs}
            live = {run.seq for run in done.runs if run.wants and run.seq.finish is None and not done.capture}
            news = self.scheduler.commit(done, tokens, counts if sum(counts) != len(counts) else None)
            self.speculator.committed(done, news, 1 + 0.02 * done.rows)
            for stream, _ in news:
                if stream.finish is not None:
                    self.speculator.end(stream)
            assert {s for s, _ in news} == live and all(len(s.ids) == known[s] + n for s, n in news)

    @precondition(lambda self: self.flights)
    @rule(first=st.integers(0, 1))
    def lose(self, first):
        """The device is lost, before or after it has run a pass whose tokens are unread."""
        if first:
            self.runner.run(self.flights[0])
        self.scheduler.lose()
        self.runner.lose()
        self.flights.clear()
        TOTALS["lost devices"] += 1

    @precondition(lambda self: self.scheduler._cooling)
    @rule(first=st.integers(0, 1))
    def lose_while_a_slot_cools(self, first):
        """As `lose`, in a state that is rare."""
        self.lose(first)

    # --- invariants --------------------------------------------------------------------------------------------------

    def schedule(self) -> Pass | None:
        scheduler, limits = self.scheduler, self.limits
        waiting = [s for s in self.streams if s.slot is None and s.finish is None and not s.entered]
        pending = {s: s.pending for s in self.streams}
        if not self.speculator.prepare(scheduler):
            assert self.flights, "nothing is in flight, and no pass may be made"
            TOTALS["waits for drafts"] += 1
            return None
        done = scheduler.schedule()
        for stream in waiting:  # recounted by another rule: later arrivals that got slots first
            if not stream.entered:
                self.overtaken[stream.id] += sum(s.entered and s.number > stream.number for s in waiting)
                assert self.overtaken[stream.id] <= limits.overtakes
        if done is None:
            assert self.flights or scheduler.idle or any(s.captured for s in self.streams)
            return None
        first = min((s for s in self.streams if s.slot is not None), key=lambda s: s.order)
        assert (
            first.capture is not None
            or done.capture is not None
            or first.captured
            or pending[first]
            or any(run.seq is first for run in done.runs)
            or (first.spans and first in done.params)  # drafts took its span's rows before it was admitted
        ), f"{first.id} is first in order, and does not run"
        assert 0 < done.rows <= limits.rows and (done.capture or done.outs <= (limits.outs or limits.slots))
        assert len(done.writes) <= scheduler.max_writes
        assert all(run.seq.capture == done.capture for run in done.runs)
        if any(run.ids is None for run in done.runs):
            assert done.rows <= (limits.mixed or limits.rows)
        tokens, positions, slots, outs = done.arrays()
        assert len(tokens) == len(positions) == len(slots) == done.rows and len(outs) == done.outs
        assert done.context == positions.max() + 1
        self.flights.append(done)
        TOTALS["drafts in a pass"] += any(run.wants > 1 for run in done.runs)
        TOTALS["mixed passes"] += len({run.wants and run.ids is None for run in done.runs}) > 1
        return done

    @invariant()
    def accounted(self):
        """The engine goes on between rules by `pace` steps: Hypothesis leaves about half of the rules out of a machine."""
        if hasattr(self, "scheduler"):
            TOTALS["steps"] += 1
            audit(self.scheduler)
            self.work(self.pace)
            audit(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler") or sys.exc_info()[0]:  # a rule has failed: its error, not what follows
            return
        scheduler = self.scheduler
        for _ in range(10000):
            if scheduler.idle:
                break
            for stream in self.streams:
                while stream.captured:
                    self.taken(stream)
            self.schedule()
            self.finish()
        assert scheduler.idle, "a request never ends"
        audit(scheduler)
        for stream in self.streams:
            while stream.captured:
                self.taken(stream)
            text = stream.generated
            if stream.capture is not None:
                whole = self.read[stream.id] == set(range(stream.n_prompt))
                assert not text and (whole or stream.finish != "length"), f"{stream.id}: rows are missing"
                continue
            assert text == self.oracle.text(stream.ids[: stream.n_prompt], len(text), frozenset()), (
                f"{stream.id}: a wrong token"
            )
            assert not any(t in stream.ends for t in text[:-1]), "it continues after its end"
            match stream.finish:
                case "eos":
                    assert text[-1] in stream.ends
                case "length":
                    assert len(text) == stream.limit and text[-1] not in stream.ends
                case "context":
                    assert len(stream.ids) == self.limits.ctx
                case _:
                    assert stream.finish in ("cancelled", "deadline")
        self.prefixes_are_right()
        assert len(self.failures) == (self.speculator.drafter is None and not self.bare)
        TOTALS.update({"drafters that failed": len(self.failures)})
        assert not (self.speculator._of or self.speculator._guided or self.speculator._gave)
        self.speculator.close()
        counts = asdict(scheduler.counts)
        for reason, n in counts.pop("finished").items():
            TOTALS[f"finished: {reason}"] += n
        TOTALS.update(counts)
        TOTALS.update({"machines": 1, "evictions": scheduler.blocks.evictions})

    def prefixes_are_right(self) -> None:
        """Cached values for a next request equal recomputed ones."""
        blocks = self.scheduler.blocks
        for stream in self.streams:
            held, values = blocks.held(), self.oracle.values(tuple(stream.ids))
            for i in range(len(stream.ids) // blocks.block):
                key = blocks.key(held, stream.ids, i)
                for pool in blocks.pools:
                    if key in pool.by_key:
                        memory = self.runner.memory[pool.group.name][pool.by_key[key]]
                        assert tuple(memory) == values[i * blocks.block : (i + 1) * blocks.block], (
                            "a cached block is wrong"
                        )


FRESH = 9
"""Machines of a Hypothesis run. After ten it mostly repeats one with a step copied; with ten or more the first are small."""


def drive(runs: int, steps: int, seeded: bool) -> None:
    """seeded: the same machines every time."""
    for n in range(runs):
        run_state_machine_as_test(
            seed(n)(Machine) if seeded else Machine,
            settings=settings(
                max_examples=FRESH,
                stateful_step_count=steps,
                derandomize=False,
                deadline=None,
                database=None,
                report_multiple_bugs=False,  # one fault fails in many ways, each of which takes a minute to shrink
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_texts_are_those_of_each_sequence_alone():
    drive(200 if LONG else 3, 100, not LONG)


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    while TOTALS["steps"] < wanted:
        drive(20, 100, False)
        print(json.dumps(TOTALS), flush=True)
