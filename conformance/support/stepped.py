"""Serving without its thread, for tests: rounds when the test says so, and the texts of sequences alone to hold its own
against."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.support.audit import audit
from conformance.support.ties import EXACT_NEAR, lead
from hybrid.core.tensor import Tensor
from hybrid.devices.opening import Opened
from hybrid.engine.handle import Handle
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options
from hybrid.engine.speculation import DraftModel
from hybrid.model import Model


class Stepped:
    """Serving without its thread: a round when the test says so. draft: guesses for it, on a device of its own."""

    def __init__(self, engine: Engine, queue: int = 64, draft: DraftModel | None = None) -> None:
        self.engine, self.draft = engine, draft
        k = None if draft is None else 2
        self.model = Model(engine.checkpoint, Opened(engine.device, engine.device), engine, queue, draft, k)
        self.serving = self.model._serving
        self.serving._start = lambda: None  # type: ignore[method-assign]

    def submit(self, ids: list[int], **options: Any) -> Handle:
        return self.serving.submit(ids, Options(ignore_eos=True, **options))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.serving._jobs or self.serving._flights:
                with self.engine.lock:
                    self.serving._round()
                self.check()

    def check(self) -> None:
        scheduler = self.serving.scheduler
        audit(scheduler)
        held = {stream.id for stream in (*scheduler._running, *scheduler._queue.streams)}
        assert held <= set(self.serving._jobs), "a sequence without a request goes on"

    def finish(self) -> None:
        for _ in range(5000):
            if not (self.serving._jobs or self.serving._flights):
                break
            self.step()
        assert not self.serving._jobs, "a request does not end"
        blocks = self.serving.scheduler.blocks
        assert set(blocks.used.values()) == {0}, "blocks are held by nobody's sequence"
        assert sorted(self.engine.tables.free) == list(range(self.engine.cache.slots)), "a slot was kept"
        if (drafting := self.serving.drafting) is not None and drafting.drafter is not None:
            small = drafting.drafter.engine
            assert not small.positions and not any(small.blocks.used.values()), (
                "the draft follows a sequence that has ended"
            )


def alone(engine: Engine, ids: list[int], count: int) -> list[int]:
    slot = engine.admit()
    found = list(engine.stream(slot, ids, count))
    engine.wait()
    engine.release(slot)
    engine.device.write(
        "history", Tensor.of(np.full((1, engine.cache.ctx), 5, np.int32)), slot
    )  # nobody finds these tokens there
    return found


def same(engine: Engine, ids: list[int], found: list[int], wanted: list[int]) -> None:
    """The same greedy tokens, up to a near tie: a row's sums may differ with the rows beside it."""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    if at is not None:
        logits = engine.logits([*ids, *wanted[:at]])[-1:, : engine.target.n_tokens]
        assert lead(logits)[0] < EXACT_NEAR, f"token {at} of {found}, alone {wanted}"


def draft_of(engine: Engine, small: Engine) -> DraftModel:
    """Guesses by another engine of the same model."""
    assert engine.device.exclusive.isdisjoint(small.device.exclusive)
    draft = DraftModel(small, "small", lambda: None, apart=True)
    draft._guessed = lambda ids, chosen: [t ^ ((len(ids) + i) % 6 == 0) for i, t in enumerate(chosen)]  # type: ignore[method-assign]
    return draft
