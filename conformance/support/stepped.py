"""An engine without its thread, for tests: the test runs each step. Also the texts of sequences alone, for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.support.audit import audit
from conformance.support.ties import EXACT_NEAR, lead
from hybrid.devices.opening import Opened
from hybrid.engine.handle import Handle
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options, Request
from hybrid.engine.runner import Runner
from hybrid.engine.speculation import LENT, DraftModel
from hybrid.model import Model


class Stepped:
    """An engine that the test steps. draft: its drafter."""

    def __init__(self, engine: Engine, queue: int = 64, draft: DraftModel | None = None) -> None:
        self.engine, self.draft = engine, draft
        self.model = Model(engine.checkpoint, Opened(engine.device, engine.device), engine)
        engine.queue(queue)
        if draft is not None:
            engine.speculate(draft, 2)
        engine._start = lambda: None  # type: ignore[method-assign]

    def submit(self, ids: list[int], **options: Any) -> Handle:
        return self.engine.submit(ids, Options(ignore_eos=True, **options))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.engine._requests or self.engine._flights:
                with self.engine.lock:
                    self.engine.step()
                self.check()

    def check(self) -> None:
        scheduler = self.engine.scheduler
        audit(scheduler)
        held = {request.id for request in (*scheduler.running, *scheduler._queue.requests)}
        assert held <= set(self.engine._requests), "an ended request runs"

    def finish(self) -> None:
        for _ in range(5000):
            if not (self.engine._requests or self.engine._flights):
                break
            self.step()
        assert not self.engine._requests, "a request does not end"
        assert self.engine.scheduler.idle, "blocks are held without a sequence"
        if (speculator := self.engine.speculator) is not None and speculator.drafter is not None:
            small = speculator.draft
            assert small is None or not small._copies, "the draft model keeps an ended sequence"


def alone(engine: Engine, ids: list[int], count: int) -> list[int]:
    """The text of a sequence without cache hits, and without cached blocks afterwards."""
    request = Request(0, ids, Options(max_tokens=count, ignore_eos=True, speculate=0 if engine.speculator else None))
    request.private = True
    return list(engine.drive(request).result().ids)


def same(engine: Engine, ids: list[int], found: list[int], wanted: list[int]) -> None:
    """The same greedy tokens, up to a near tie: a row's sums may differ with the other rows of its pass."""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    if at is not None:
        logits = engine.logits([*ids, *wanted[:at]])[-1:, : engine.target.n_tokens]
        assert lead(logits)[0] < EXACT_NEAR, f"token {at} of {found}, alone {wanted}"


class Doubtful(DraftModel):
    """A drafter that changes some of its drafts."""

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        found = super().propose(wanted)
        return {r: [5 if (len(r.ids) + i) % 6 == 0 else w for i, w in enumerate(words)] for r, words in found.items()}


def draft_of(engine: Engine) -> DraftModel:
    """The same model as its own draft model."""
    config = engine.config
    runner = Runner(engine.checkpoint, engine.device.sibling(LENT), config)
    return Doubtful(runner, "small", lambda: None)
