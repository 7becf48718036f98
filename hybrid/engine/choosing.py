"""What the sequences of a device are chosen by: each slot's rows of the tables that sample, adjust_logits and logprobs read, the
masks of its constraint, and the log-probabilities that come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hybrid.core.device import Device
from hybrid.core.tensor import Tensor
from hybrid.engine.constraint import Constraint, checked_mask
from hybrid.engine.sampling import RING, Sampling, reported
from hybrid.planning.planner import Target
from hybrid.spec.step import Option


class Choosing:
    """Host side of one engine's tables, by slot. Nothing here waits, but for what reads results; who calls it sees to it that no
    pass reads a row that is written."""

    def __init__(self, device: Device, target: Target) -> None:
        self.device, self.target = device, target
        self._sampling: dict[int, Sampling] = {}
        self._constraints: dict[int, Constraint] = {}
        self._masks: dict[int, np.ndarray | None] = {}
        """Slot -> what its constraint allows next, once asked."""

    def admit(self, slot: int, sampling: Sampling, prompt: Sequence[int] = (), constraint: Constraint | None = None) -> None:
        """A slot's sequence is chosen by these from now on. prompt: all tokens before the first that is chosen; needed where
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
            history[0, : len(prompt)] = prompt
            self.device.write("history", Tensor.of(history), slot)
        self._sampling[slot] = sampling
        if constraint is not None:
            self._constraints[slot] = constraint

    def release(self, slot: int) -> None:
        """Forget a slot's sequence."""
        for of in (self._sampling, self._constraints, self._masks):
            of.pop(slot, None)

    def options(self, slots: Iterable[int]) -> frozenset[Option]:
        """What plans must be made with for a pass that chooses tokens of these slots."""
        wanted = (self._sampling[s].options(s in self._constraints) for s in slots if s in self._sampling)
        return frozenset[Option]().union(*wanted)

    def constrained(self, slots: Iterable[int]) -> bool:
        """Whether one of these may not run ahead of what its constraint has been told."""
        return any(s in self._constraints for s in slots)

    def prepare(self, slot: int) -> None:
        """Ask a slot's constraint, if it has one, what may come next; raises what the constraint raises, and ValueError for a
        mask that is none or allows nothing."""
        if slot in self._constraints and slot not in self._masks:
            mask, t = self._constraints[slot].mask(), self.target
            self._masks[slot] = None if mask is None else checked_mask(mask, t.hparams.vocab, t.n_tokens)

    def mask_rows(self, slots: Sequence[int]) -> np.ndarray:
        """int32 [slots]: the rows of `masks` for a pass whose output rows are of these slots, written here; -1: none."""
        rows = np.full(len(slots), -1, np.int32)
        for i, slot in enumerate(slots):
            self.prepare(slot)
            mask = self._masks.get(slot)
            if mask is not None:
                self.device.write("masks", Tensor.of(mask[None]), slot)
                rows[i] = slot
        return rows

    def accept(self, slot: int, token: int) -> None:
        """A token was chosen for a slot, and goes on."""
        if slot in self._constraints:
            self._masks.pop(slot, None)
            self._constraints[slot].accept(token)

    def reported(
        self, slot: int, position: int, ticket: int | None = None
    ) -> tuple[tuple[int, float], tuple[tuple[int, float], ...]] | None:
        """The token chosen for a position with its log-probability, and the most likely ones, after the pass `ticket`; None
        where nobody asked. At most 64 positions late: the device keeps no more of a slot."""
        wanted = self._sampling[slot].logprobs
        if not wanted:
            return None
        ids, values = (
            self.device.read(name, slot, slot + 1, ticket).array[0, position % RING] for name in ("top_ids", "top_logprobs")
        )
        return reported(ids, values, wanted)
