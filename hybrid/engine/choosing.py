"""What the sequences of a device are chosen by: each slot's rows of the tables that sample, adjust_logits and logprobs
read, the masks of its constraint, and the log-probabilities that come back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from hybrid.core.device import Device
from hybrid.core.tensor import Tensor
from hybrid.engine.constraint import Constraint, allows, checked_mask, is_ready
from hybrid.engine.sampling import RING, Sampling, reported
from hybrid.planning.planner import Target
from hybrid.spec.step import Option

PATIENCE = 0.003
"""Seconds that a pass waits for masks; sequences without theirs are left to a later one."""
GUESSED_ROWS = 16
"""Rows of `masks` beside one for each slot: after guessed tokens, of all sequences together."""


class Choosing:
    """Host side of one engine's tables, by slot. Nothing here waits, but for what reads results; who calls it sees to
    it that no pass reads a row that is written."""

    def __init__(self, device: Device, target: Target) -> None:
        self.device, self.target = device, target
        self._sampling: dict[int, Sampling] = {}
        self._constraints: dict[int, Constraint] = {}
        self._masks: dict[int, list[np.ndarray | None]] = {}
        """Slot -> what its constraint allows next, once asked; then after each guessed token."""
        self._rows: dict[int, list[int]] = {}
        """Slot -> rows of `masks` that hold what it allows after guesses; its own row holds what it allows next."""
        self._free = list(range(target.cache.slots, target.cache.slots + GUESSED_ROWS))
        self._patience = 0.0  # until when the next pass waits

    def admit(
        self,
        slot: int,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        generated: Sequence[int] = (),
    ) -> None:
        """A slot's sequence is chosen by these from now on. prompt, generated: all its tokens until now; needed where
        sampling.counts. ValueError for biases of ids that the model does not have."""
        sampling.check(self.target.n_tokens)
        self.release(slot)
        self.device.write("params", Tensor.of(sampling.words()), slot)
        self.device.write("penalties", Tensor.of(sampling.penalty_words(len(prompt))), slot)
        if sampling.logit_bias:
            ids, biases = sampling.bias_rows()
            self.device.write("bias_ids", Tensor.of(ids), slot)
            self.device.write("bias", Tensor.of(biases), slot)
        if sampling.counts:
            history = np.full((1, self.target.cache.ctx), -1, np.int32)
            history[0, : len(prompt) + len(generated)] = [*prompt, *generated]
            self.device.write("history", Tensor.of(history), slot)
        self._sampling[slot] = sampling
        if constraint is not None:
            self._constraints[slot] = constraint

    def release(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._forget(slot)
        self._sampling.pop(slot, None)
        self._constraints.pop(slot, None)

    def forget(self, constraint: Constraint) -> None:
        """A constraint's sequence has ended."""
        for slot in [s for s, c in self._constraints.items() if c is constraint]:
            self._forget(slot)
            del self._constraints[slot]

    def _forget(self, slot: int) -> None:
        """What a slot's constraint allowed next is over."""
        self._masks.pop(slot, None)
        self._free += self._rows.pop(slot, [])

    def options(self, slots: Iterable[int]) -> frozenset[Option]:
        """What plans must be made with for a pass that chooses tokens of these slots."""
        wanted = (self._sampling[s].options(s in self._constraints) for s in slots if s in self._sampling)
        return frozenset[Option]().union(*wanted)

    def constrained(self, slots: Iterable[int]) -> bool:
        """Whether one of these may not run ahead of what its constraint has been told."""
        return False if not self._constraints else any(s in self._constraints for s in slots)

    def begin_pass(self) -> None:
        """A pass is made: from now on it waits for masks no longer than PATIENCE."""
        if self._constraints:
            self._patience = time.monotonic() + PATIENCE

    def ready(self, constraint: Constraint | None) -> bool:
        """Whether a constraint's next mask is there; waits for it as long as the pass may."""
        return constraint is None or is_ready(constraint, max(0.0, self._patience - time.monotonic()))

    def prepare(self, slot: int) -> None:
        """Ask a slot's constraint, if it has one, what may come next; raises what the constraint raises, and ValueError
        for a mask that is none or allows nothing."""
        if slot in self._constraints and slot not in self._masks:
            self._masks[slot] = [self._asked(self._constraints[slot])]

    def _asked(self, constraint: Constraint) -> np.ndarray | None:
        mask, t = constraint.mask(), self.target
        return None if mask is None else checked_mask(mask, t.hparams.vocab, t.n_tokens)

    def guessed(self, slot: int, guesses: Sequence[int]) -> tuple[int, ...]:
        """The first of these guesses that a pass may verify, after the slot's last token: all of them without a
        constraint; under one, those before the first that it forbids, which could not be chosen anyway. Raises as
        `prepare` does."""
        if slot not in self._constraints:
            return tuple(guesses)
        self._forget(slot)
        if not self.ready(self._constraints[slot]):
            return ()
        self.prepare(slot)
        masks, rows = self._masks[slot], self._rows.setdefault(slot, [])
        ahead = self._constraints[slot].copy()
        for token in guesses:
            mask = masks[-1]
            if not self._free or (mask is not None and not allows(mask, token)):
                break
            try:
                ahead.accept(token)
                if not self.ready(ahead):
                    break
                masks.append(self._asked(ahead))
            except Exception:  # if the token really comes, the constraint says it again, and then it counts
                break
            rows.append(self._free.pop())
        return tuple(guesses[: len(masks) - 1])

    def mask_rows(self, slots: Sequence[int]) -> np.ndarray:
        """int32 [slots]: the rows of `masks` for a pass whose output rows are of these slots, written here; -1: none. A
        slot that stands there several times has its guesses in these rows."""
        rows = np.full(len(slots), -1, np.int32)
        nth: dict[int, int] = {}
        for i, slot in enumerate(slots):
            self.prepare(slot)
            if slot not in self._masks:
                continue
            at = nth[slot] = nth.get(slot, -1) + 1
            mask = self._masks[slot][at]
            if mask is not None:
                rows[i] = self._rows[slot][at - 1] if at else slot
                self.device.write("masks", Tensor.of(mask[None]), int(rows[i]))
        return rows

    def accept(self, slot: int, token: int) -> None:
        """A token was chosen for a slot, and goes on."""
        if slot in self._constraints:
            self._forget(slot)
            self._constraints[slot].accept(token)

    def reported(
        self, slot: int, position: int, ticket: int | None = None
    ) -> tuple[tuple[int, float], tuple[tuple[int, float], ...]] | None:
        """The token chosen for a position with its log-probability, and the most likely ones, after the pass `ticket`;
        None where nobody asked. At most 64 positions late: the device keeps no more of a slot."""
        wanted = self._sampling[slot].logprobs
        if not wanted:
            return None
        ids, values = (
            self.device.read(name, slot, slot + 1, ticket).array[0, position % RING]
            for name in ("top_ids", "top_logprobs")
        )
        return reported(ids, values, wanted)
