"""A state machine of arriving and ending requests on a real engine, with faults of devices, drafts, consumers and
readers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from conformance.support.stepped import Stepped, alone, same
from hybrid.core.errors import DeviceLost, QueueFull
from hybrid.engine.handle import Handle
from hybrid.engine.sampling import mask_words

LONG_PROMPT = [2, *range(20, 90)]  # more than two blocks
TOTALS: Counter[str] = Counter()
"""Event counts of all machines of this process."""
PROMPTS = {"prefix": st.sampled_from([0, 3, 33, 70]), "own": st.integers(1, 5), "count": st.integers(1, 40)}


def prompt_of(prefix: int, own: int) -> list[int]:
    return [i % 300 for i in (*LONG_PROMPT[: prefix or 1], *range(100 * own, 100 * own + 4 * own))]


class ConsumerError(Exception):
    """An exception of a consumer's own code."""


class Faulty:
    """A constraint that allows every id; the given call of one of its methods raises."""

    def __init__(self, words: int, where: str, left: int) -> None:
        self.words, self.where, self.left, self.raised = words, where, left, False

    def _called(self, name: str) -> None:
        self.left -= name == self.where
        if self.left < 0:
            self.raised = True
            raise ConsumerError(name)

    def mask(self) -> np.ndarray:
        self._called("mask")
        return np.full(self.words, 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> None:
        self._called("accept")

    def copy(self) -> Faulty:
        self._called("copy")
        return Faulty(self.words, self.where, self.left)


class Arrivals(RuleBasedStateMachine):
    """Requests with shared prefixes arrive, are cancelled, dropped and abandoned, on an engine with few blocks and
    faults."""

    made: Stepped
    wanted: dict[tuple[int, ...], list[int]]

    @initialize()
    def begin(self) -> None:
        self.handles: list[tuple[Handle, list[int], int, Faulty | None]] = []
        self.left: list[tuple[Generator[str, None, None], list[str], list[int]]] = []
        """Abandoned generators, the text read of each, its prompt."""
        self.read: list[tuple[list[str], list[int], list[int]]] = []
        """Texts whose reader has left: the pieces read, the prompt, the tokens."""
        self.made.engine.scheduler.blocks.clear()
        TOTALS["machines"] += 1
        if (speculator := self.made.engine.speculator) is not None and (draft := self.made.draft) is not None:
            speculator.drafter = draft  # a drafter that failed before works again
            draft.scheduler.lose()
            for request in list(draft._copies):
                draft.end(request)

    @rule(**PROMPTS, priority=st.integers(0, 2))
    def arrive(self, prefix: int, own: int, count: int, priority: int) -> None:
        self.submit(prompt_of(prefix, own), count, priority=priority)

    @rule(**PROMPTS, where=st.sampled_from(["mask", "accept", "copy"]), after=st.integers(0, 9))
    def arrive_with_a_constraint_that_raises(self, prefix: int, own: int, count: int, where: str, after: int) -> None:
        """The constraint raises some time, perhaps after the request's end. Other requests are not affected."""
        words = mask_words(self.made.engine.target.hparams.vocab)
        self.submit(prompt_of(prefix, own), count, constraint=Faulty(words, where, after))

    def submit(self, ids: list[int], count: int, **options: Any) -> None:
        TOTALS["steps"] += 1
        try:
            handle = self.made.submit(ids, max_tokens=count, **options)
        except QueueFull as full:
            assert full.retry_after >= 1
            TOTALS["refused"] += 1
        else:
            self.handles.append((handle, ids, count, options.get("constraint")))

    @rule(**PROMPTS, pieces=st.integers(1, 3), way=st.sampled_from(["closes", "raises", "drops", "stops"]))
    def read_some(self, prefix: int, own: int, count: int, pieces: int, way: str) -> None:
        """One reader runs all requests' passes, piece by piece. It then leaves, or stops reading while other readers
        continue."""
        TOTALS["steps"] += 1
        TOTALS[f"a reader {way}"] += 1
        ids = prompt_of(prefix, own)
        text = self.made.model.generate(ids, max_tokens=count, ignore_eos=True)
        found = list(islice(text, pieces))
        if way == "stops" and len(found) == pieces:  # it may have ended before
            self.left.append((text, found, ids))
            return
        if way == "raises":
            with suppress(ConsumerError):
                text.throw(ConsumerError("a reader"))
        elif way == "closes":
            text.close()
        del text
        self.gone(found, ids)
        self.made.check()

    def gone(self, found: list[str], ids: list[int]) -> None:
        """Drop the handle of the request that ended last."""
        assert self.made.model.stats is not None
        self.read.append((found, ids, list(self.made.model.stats.ids)))
        assert len(self.made.engine._driven) <= len(self.left)

    @rule(count=st.integers(1, 9))
    def step_engine(self, count: int) -> None:
        TOTALS["steps"] += 1
        self.made.step(count)

    @rule(which=st.integers(0, 30), drop=st.booleans())
    def cancel(self, which: int, drop: bool) -> None:
        TOTALS["steps"] += 1
        if self.handles:
            handle = self.handles[which % len(self.handles)][0]
            if drop:
                some = list(islice(handle.events(), len(handle.request.events) // 2))  # read in part, then abandoned
                assert [e.ids for e in some] == [e.ids for e in handle.request.events[: len(some)]]
                del self.handles[which % len(self.handles)], handle
                gc.collect(0)
            else:
                handle.cancel()

    @rule(error=st.sampled_from([MemoryError("injected"), RuntimeError("injected"), DeviceLost("injected")]))
    def fail(self, error: Exception) -> None:
        """Fail a submit, as the serving thread handles it."""
        TOTALS["steps"] += 1
        engine, runner = self.made.engine, self.made.engine.runner
        kept = runner._submit

        def failing(*args: Any, **options: Any) -> int:
            raise error

        if not engine._requests:
            return
        runner._submit = failing  # type: ignore[method-assign]
        try:
            with engine.lock:
                engine.step()
        except Exception as raised:
            assert raised is error
            engine._fail_all(raised)
            TOTALS[f"{type(error).__name__} injected"] += 1
        finally:
            runner._submit = kept  # type: ignore[method-assign]

    @rule(after=st.integers(0, 5))
    def fail_to_draft(self, after: int) -> None:
        """The draft's device fails during its passes: no text changes."""
        TOTALS["steps"] += 1
        draft, left = self.made.draft, [after]
        if draft is None or draft is not self.made.engine.speculator.drafter:  # type: ignore[union-attr]
            return
        kept = draft.runner._submit

        def failing(*args: Any, **options: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise DeviceLost("injected")
            return kept(*args, **options)

        draft.runner._submit = failing  # type: ignore[method-assign]
        try:
            self.made.step(4)
        finally:
            draft.runner._submit = kept  # type: ignore[method-assign]
            TOTALS["drafts that failed"] += left[0] < 0

    def teardown(self) -> None:
        self.made.finish()  # whether or not a reader remains
        while self.left:
            text, found, ids = self.left.pop()
            text.close()
            self.gone(found, ids)
        for handle, ids, count, faulty in self.handles:
            try:
                one = handle.result(0)
            except (MemoryError, RuntimeError) as error:  # DeviceLost is a subclass
                assert "injected" in str(error)
                TOTALS["failed"] += 1
                continue
            except ConsumerError:
                assert faulty is not None and faulty.raised
                TOTALS["constraints that raised"] += 1
                continue
            TOTALS[one.finish] += 1
            ends = {"length": count, "context": self.made.engine.cache.ctx - len(ids), "cancelled": len(one.ids)}
            assert len(one.ids) == ends[one.finish] <= count, f"{len(one.ids)} tokens of {count}, then {one.finish}"
            assert faulty is None or not faulty.raised or one.finish == "cancelled"
            self.check(ids, list(one.ids))
        decode = self.made.engine.checkpoint.tokenizer.decode
        for found, ids, chosen in self.read:
            assert decode(chosen).startswith("".join(found))
            self.check(ids, chosen)
        self.handles, self.read = [], []

    def check(self, ids: list[int], chosen: list[int]) -> None:
        """Compare each text with the same sequence run alone."""
        key = tuple(ids)
        if len(self.wanted.get(key, ())) < len(chosen):
            self.wanted[key] = alone(self.made.engine, ids, len(chosen))
        same(self.made.engine, ids, chosen, self.wanted.get(key, []))  # no token may be sampled yet
