"""A smaller model that guesses what a larger one chooses: an engine of its own, on the same device or another, with a sequence
that follows the larger model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid.engine.interface import PassRunner
from hybrid.engine.sampling import Sampling


class DraftModel:
    """Drives one slot of an engine whose tokenizer is the target's. The slot chooses by the target's sampling parameters, so that
    both add the same noise to their logits, and agree more often than two draws would."""

    def __init__(self, engine: PassRunner, name: str, close: Callable[[], object]) -> None:
        self.engine, self.name, self._close = engine, name, close
        self._slot: int | None = None
        self._ids: list[int] = []  # what the slot's cache holds, in part perhaps guesses that were wrong

    def begin(self, sampling: Sampling) -> None:
        """Guess for a sequence that is chosen so, from its beginning."""
        self.end()
        self._slot = self.engine.admit(self.engine.cache.ctx, sampling)
        self._ids = []

    def end(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self.engine.release(slot)

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """Run what is new of ids, then go on from its own tokens."""
        if self._slot is None:
            self.begin(Sampling())
        assert self._slot is not None
        engine, slot = self.engine, self._slot
        most = min(most, engine.cache.ctx - len(ids))
        if most < 1:
            return []
        held = self._same(ids)
        if held < len(self._ids) and not engine.rewind(slot, held):
            engine.rewind(slot, 0)
            held = 0
        ticket = engine.submit_prefill({slot: ids[held:]})
        tickets = [ticket, *(engine.submit_decode((slot,)) for _ in range(most - 1))]
        found = [engine.token(slot, len(ids) + i, ticket) for i, ticket in enumerate(tickets)]
        self._ids = [*ids, *found[:-1]]
        return found

    def close(self) -> None:
        self.end()
        self._close()

    def _same(self, ids: Sequence[int]) -> int:
        """Tokens that the cache holds of ids, at most all but the last: its logits are wanted."""
        most = min(len(self._ids), len(ids) - 1)
        return next((i for i in range(most) if self._ids[i] != ids[i]), most)
