"""A slow constraint delays only its own sequence."""

from __future__ import annotations

import threading

import numpy as np

import hybrid
from conformance.support.paths import DEMO
from hybrid.engine.sampling import Allowed, is_ready, mask_words


class Gated:
    """Allows everything, once its gate is open."""

    def __init__(self, vocab: int, gate: threading.Event) -> None:
        self.vocab, self.gate, self.asked_early = vocab, gate, 0

    def ready(self, wait: float) -> bool:
        return self.gate.wait(wait)

    def mask(self) -> np.ndarray:
        self.asked_early += not self.gate.is_set()
        return np.full(mask_words(self.vocab), 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> None:
        pass

    def copy(self) -> Gated:
        return self


def test_a_constraint_without_ready_is_ready() -> None:
    assert is_ready(Allowed([1], 8), 0.0)


def test_a_slow_mask_holds_up_its_own_sequence_alone() -> None:
    gate = threading.Event()
    with hybrid.load(DEMO, device="cpu", slots=2, ctx=64, precision="exact") as model:
        slow = Gated(model.hparams.vocab, gate)
        waiting = model.submit("import ", max_tokens=4, constraint=slow)
        others = [model.submit("def f(", max_tokens=8, ignore_eos=True).result(60).text for _ in range(2)]
        assert not waiting.done and slow.asked_early == 0
        assert model.submit("def f(", max_tokens=8, ignore_eos=True, constraint=Gated(slow.vocab, gate)).done is False
        gate.set()
        assert waiting.result(60).text == model.submit("import ", max_tokens=4).result(60).text
        assert others[0] == others[1] == model.submit("def f(", max_tokens=8, ignore_eos=True).result(60).text
        assert slow.asked_early == 0


def test_a_sequence_whose_mask_never_comes_ends_at_its_deadline() -> None:
    with hybrid.load(DEMO, device="cpu", slots=2, ctx=64, precision="exact") as model:
        late = model.submit(
            "import ", max_tokens=4, deadline=0.3, constraint=Gated(model.hparams.vocab, threading.Event())
        )
        assert late.result(60).finish == "deadline"
