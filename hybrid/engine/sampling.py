"""Sampling parameters, constraints, and the per-slot sampling state on the device.

A constraint masks the next token: bit id % 32 of word id // 32 allows an id. The engine asks for a mask before each token
and reports the sampled one, so a constrained sequence does not run ahead of the host. A slow constraint has `ready`; only
its own sequence waits. A constraint that knows which tokens will follow has `likely`; they become drafts (speculation.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hybrid.core.device import Device
from hybrid.core.tensor import Tensor
from hybrid.planning.planner import Target
from hybrid.spec.step import Option

PLAIN = frozenset[Option]()
PATIENCE = 0.003
"""Seconds that a pass waits for masks; sequences without one miss the pass."""
DRAFT_MASKS = 16
"""Rows of `masks` for drafts, beside one per slot."""


MOST_BIASES = 1024
"""Most biases of a sequence: the size of the tensors `bias_ids` and `bias`."""
MOST_LOGPROBS = 20
"""Most alternatives with a reported log-probability."""
RING = 64
"""Positions per slot whose log-probabilities the device keeps."""
_MOST_F32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. temperature 0 = greedy; top_k 0, top_p 1, min_p 0 = off. The same seed gives the same text.

    repetition_penalty r (1 = off): divides positive and multiplies negative logits of tokens in the prompt or the text.
    presence_penalty, frequency_penalty (0 = off): subtracted once, or per occurrence, for generated tokens. logit_bias
    {id: bias}: added. logprobs: reported alternatives per token (0: none), from the model's own distribution, before
    penalties, biases, masks and temperature. ValueError names the parameter.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not _is_number(getattr(self, name)):
                raise ValueError(f"{name} must be a number, not {getattr(self, name)!r}")
        for name in ("top_k", "seed", "logprobs"):
            if not isinstance(getattr(self, name), (int, np.integer)):
                raise ValueError(f"{name} must be an integer, not {getattr(self, name)!r}")
        if not 0 <= self.temperature <= _MOST_F32:  # devices take it as float32
            raise ValueError(f"temperature must be 0 (greedy) or above, and finite in float32, not {self.temperature}")
        if not 0 <= self.top_k < 2**32:
            raise ValueError(f"top_k must be between 0 (off) and 2**32 - 1, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 (off) and 1, not {self.min_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, not {self.seed}")
        if not 0.01 <= self.repetition_penalty <= 100:  # no finite logit becomes infinite
            raise ValueError(f"repetition_penalty must be between 0.01 and 100 (1: off), not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be between -2 and 2 (0: off), not {getattr(self, name)}")
        if not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ValueError(f"logprobs must be between 0 (off) and {MOST_LOGPROBS}, not {self.logprobs}")
        self._check_biases()

    def _check_biases(self) -> None:
        biases = self.logit_bias
        if biases is None:
            return
        if not isinstance(biases, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not be {type(biases).__name__}")
        if len(biases) > MOST_BIASES:
            raise ValueError(f"logit_bias must have at most {MOST_BIASES} ids, not {len(biases)}")
        for token, bias in biases.items():
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or token < 0:
                raise ValueError(f"logit_bias must have token ids as its keys, not {token!r}")
            if not _is_number(bias) or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must have biases between -100 and 100, not {bias!r} for id {token}")
        object.__setattr__(self, "logit_bias", dict(biases))  # the caller may change its own

    def check(self, n_tokens: int) -> None:
        """ValueError for biases of ids >= n_tokens."""
        for token in self.logit_bias or ():
            if token >= n_tokens:
                raise ValueError(f"logit_bias: the model has no token {token}; its ids are 0..{n_tokens - 1}")

    @property
    def counts(self) -> bool:
        """Whether penalties count tokens; `history` must then have all of them."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether sampling changes the logits."""
        return self.counts or bool(self.logit_bias)

    def options(self, masked: bool = False) -> frozenset[Option]:
        """The plan options that these parameters need. masked: under a constraint."""
        wanted: dict[Option, bool] = {"adjust": self.adjusts or masked, "logprobs": self.logprobs > 0}
        return frozenset(option for option, on in wanted.items() if on)

    def words(self) -> np.ndarray:
        """A row of `params`, uint32 [1, 8]: temperature, top_k, top_p, min_p (floats as their bits), seed low and high,
        logprobs, 0."""
        floats = _bits(self.temperature, self.top_p, self.min_p)
        seed = int(self.seed)
        ints = [floats[0], self.top_k, floats[1], floats[2], seed & 0xFFFFFFFF, seed >> 32, self.logprobs, 0]
        return np.array([ints], np.uint32)

    def penalty_words(self, first_generated: int) -> np.ndarray:
        """A row of `penalties`, uint32 [1, 8]: repetition, presence, frequency (as their bits), first_generated (the
        position of the first token that was chosen: the prompt's length), number of biases, 0, 0, 0."""
        floats = _bits(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return np.array([[*floats, first_generated, len(self.logit_bias or ()), 0, 0, 0]], np.uint32)

    def bias_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of `bias_ids` int32 [1, 1024] and `bias` float32 [1, 1024]; unused ones are not read."""
        ids, biases = np.zeros((1, MOST_BIASES), np.int32), np.zeros((1, MOST_BIASES), np.float32)
        for i, (token, bias) in enumerate((self.logit_bias or {}).items()):
            ids[0, i], biases[0, i] = token, bias
        return ids, biases


def reported(
    ids: np.ndarray, logprobs: np.ndarray, wanted: int
) -> tuple[tuple[int, float], tuple[tuple[int, float], ...]]:
    """(id, log-probability) of the sampled token, and of the `wanted` most likely ones or fewer, from rows of `top_ids`
    int32 [21] and `top_logprobs` float32 [21]."""
    pairs = [(int(i), float(p)) for i, p in zip(ids[: wanted + 1], logprobs[: wanted + 1], strict=True)]
    return pairs[0], tuple((i, p) for i, p in pairs[1:] if i >= 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating))


def _bits(*values: float) -> np.ndarray:
    """uint32: the bits of float32 numbers."""
    return np.array(values, np.float32).view(np.uint32)


class Constraint(Protocol):
    """Masks the next token of one sequence. Called from one thread at a time."""

    def mask(self) -> np.ndarray | None:
        """Allowed ids as uint32 [ceil(n / 32)], n the tokenizer's size; None: all."""
        ...

    def accept(self, token: int) -> None:
        """Advance by `token`."""
        ...

    def copy(self) -> Constraint:
        """An independent copy of the state."""
        ...


def is_ready(constraint: Constraint, wait: float) -> bool:
    """The constraint's `ready(wait)`: whether its mask is there within `wait` seconds; True without such a method."""
    ready = getattr(constraint, "ready", None)
    return True if ready is None else bool(ready(wait))


def likely_by(constraint: Constraint) -> Sequence[int]:
    """The constraint's `likely()`: the next tokens, those that must follow and others that it expects; none without such a
    method. Asked once the mask is there."""
    likely = getattr(constraint, "likely", None)
    return () if likely is None else likely()


def steady_by(constraint: Constraint) -> int:
    """The constraint's `steady()`: for how many tokens, whatever they are, its mask stays what it is; 0 without such a
    method. Asked once the mask is there."""
    steady = getattr(constraint, "steady", None)
    return 0 if steady is None else steady()


def mask_words(vocab: int) -> int:
    """Words of a mask over `vocab` ids."""
    return -(-vocab // 32)


def mask_of(ids: Iterable[int], vocab: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)]: a mask of these ids. IndexError for an id outside the vocabulary."""
    bits = np.zeros(32 * mask_words(vocab), np.uint8)
    wanted = np.fromiter(ids, np.int64)
    outside = wanted[(wanted < 0) | (wanted >= vocab)]
    if outside.size:
        raise IndexError(f"there is no id {outside[0]}: ids are 0..{vocab - 1}")
    bits[wanted] = 1
    return _packed(bits)


def mask_without(ids: Iterable[int], n_tokens: int, vocab: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)]: a mask of the ids below `n_tokens` except these."""
    bits = np.zeros(32 * mask_words(vocab), np.uint8)
    bits[:n_tokens] = 1
    bits[list(ids)] = 0
    return _packed(bits)


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def ids_of(mask: np.ndarray) -> np.ndarray:
    """int64: the allowed ids, ascending."""
    return np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little"))


def allows(mask: np.ndarray, token: int) -> bool:
    """Whether a mask has the id."""
    return bool(int(mask[token // 32]) >> (token % 32) & 1) if 0 <= token < 32 * len(mask) else False


def checked_mask(mask: np.ndarray, vocab: int, n_tokens: int) -> np.ndarray:
    """A mask padded to the rows of the output matrix: uint32 [ceil(vocab / 32)]. It may cover the tokenizer's ids only.
    ValueError for another shape or dtype, and for a mask that allows none of the `n_tokens` ids."""
    least, words = mask_words(n_tokens), mask_words(vocab)
    if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.ndim != 1 or not least <= len(mask) <= words:
        shown = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else repr(mask)
        raise ValueError(f"a constraint's mask must be uint32 [{least}], a bit for each of {n_tokens} ids, not {shown}")
    whole, rest = divmod(n_tokens, 32)
    if not mask[:whole].any() and not (rest and int(mask[whole]) & ((1 << rest) - 1)):
        raise ValueError("the constraint allows no token here: it must allow one, an end of text for example")
    return np.pad(mask, (0, words - len(mask)))


class Allowed:
    """A constraint that always allows the same ids. ValueError for no ids."""

    def __init__(self, ids: Iterable[int], vocab: int) -> None:
        self._mask = mask_of(ids, vocab)
        if not self._mask.any():
            raise ValueError("a constraint that allows no token has no text: give at least one id")

    def mask(self) -> np.ndarray:
        return self._mask

    def accept(self, token: int) -> None:
        pass

    def copy(self) -> Allowed:
        return self


class SamplingState:
    """Per-slot sampling state: rows of the tensors that sample, adjust_logits and logprobs read, and constraint masks. Only
    reading results waits. The caller ensures that no running pass reads a row that is written."""

    def __init__(self, device: Device, target: Target) -> None:
        self.device, self.target = device, target
        self._options: dict[int, frozenset[Option]] = {}
        self._logprobs: dict[int, int] = {}
        self._constraints: dict[int, Constraint] = {}
        self._masks: dict[int, list[np.ndarray | None]] = {}
        """Slot -> masks for the next token and after each draft."""
        self._rows: dict[int, list[int]] = {}
        """Slot -> rows of `masks` for its drafts."""
        self._free = list(range(target.cache.slots, target.cache.slots + DRAFT_MASKS))
        self._patience = 0.0  # end of the next pass's wait for masks

    def assign(
        self,
        slot: int,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        generated: Sequence[int] = (),
    ) -> None:
        """Set a slot's sampling parameters. prompt, generated: its known tokens, needed where sampling.counts. ValueError for
        biases of unknown ids."""
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
            tokens = np.array([*prompt, *generated], np.int32)
            history[0, : len(tokens)] = np.where(tokens < self.target.n_tokens, tokens, -1)  # others name no token
            self.device.write("history", Tensor.of(history), slot)
        self._options[slot], self._logprobs[slot] = sampling.options(constraint is not None), sampling.logprobs
        if constraint is not None:
            self._constraints[slot] = constraint

    def release(self, slot: int) -> None:
        """Clear a slot."""
        self._forget(slot)
        self._options.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._constraints.pop(slot, None)

    def forget(self, constraint: Constraint) -> None:
        """Drop a constraint whose sequence has ended."""
        for slot in [s for s, c in self._constraints.items() if c is constraint]:
            self._forget(slot)
            del self._constraints[slot]

    def _forget(self, slot: int) -> None:
        """Drop a slot's masks."""
        self._masks.pop(slot, None)
        self._free += self._rows.pop(slot, [])

    def options(self, slots: Iterable[int]) -> frozenset[Option]:
        """Plan options for a pass that samples for these slots."""
        return PLAIN.union(*(self._options.get(s, PLAIN) for s in slots))

    def constrained(self, slots: Iterable[int]) -> bool:
        """Whether any of these has a constraint."""
        return False if not self._constraints else any(s in self._constraints for s in slots)

    def begin_pass(self) -> None:
        """Start the wait for masks of the next pass (PATIENCE)."""
        if self._constraints:
            self._patience = time.monotonic() + PATIENCE

    def ready(self, constraint: Constraint | None) -> bool:
        """Whether a constraint's next mask is there, within the pass's wait."""
        return constraint is None or is_ready(constraint, max(0.0, self._patience - time.monotonic()))

    def likely(self, slot: int) -> Sequence[int]:
        """The next tokens that a slot's constraint expects; none where its mask is not there. Raises the constraint's
        errors."""
        constraint = self._constraints.get(slot)
        return likely_by(constraint) if constraint is not None and self.ready(constraint) else ()

    def steady(self, slot: int) -> int:
        """For how many tokens the mask of a slot's constraint stays what it is; 0 where it is not there. Raises the
        constraint's errors."""
        constraint = self._constraints.get(slot)
        return steady_by(constraint) if constraint is not None and self.ready(constraint) else 0

    def prepare(self, slot: int) -> None:
        """Ask a slot's constraint for its next mask. Raises the constraint's errors, and ValueError for an invalid mask."""
        if slot in self._constraints and slot not in self._masks:
            self._masks[slot] = [self._asked(self._constraints[slot])]

    def _asked(self, constraint: Constraint) -> np.ndarray | None:
        mask, t = constraint.mask(), self.target
        return None if mask is None else checked_mask(mask, t.hparams.vocab, t.n_tokens)

    def allowed(self, slot: int, drafts: Sequence[int]) -> tuple[int, ...]:
        """The leading drafts that the slot's constraint allows. While its mask is steady, these are as many as it is, also
        those that only the device knows. Raises as `prepare`."""
        if slot not in self._constraints:
            return tuple(drafts)
        self._forget(slot)
        if not self.ready(self._constraints[slot]):
            return ()
        self.prepare(slot)
        if steady := steady_by(self._constraints[slot]):
            return tuple(drafts[:steady])
        masks, rows = self._masks[slot], self._rows.setdefault(slot, [])
        ahead = self._constraints[slot].copy()
        for token in drafts:
            mask = masks[-1]
            if not self._free or (mask is not None and not allows(mask, token)):
                break
            try:
                ahead.accept(token)
                if not self.ready(ahead):
                    break
                masks.append(self._asked(ahead))
            except Exception:  # raised again if the token is really sampled
                break
            rows.append(self._free.pop())
        return tuple(drafts[: len(masks) - 1])

    def mask_rows(self, slots: Sequence[int]) -> np.ndarray:
        """int32 [slots]: rows of `masks` for output rows of these slots, written here; -1: none. Repeated slots are runs of
        drafts, which share a steady mask."""
        rows = np.full(len(slots), -1, np.int32)
        nth: dict[int, int] = {}
        for i, slot in enumerate(slots):
            self.prepare(slot)
            if slot not in self._masks:
                continue
            at = nth[slot] = min(nth.get(slot, -1) + 1, len(self._masks[slot]) - 1)
            mask = self._masks[slot][at]
            if mask is not None:
                rows[i] = self._rows[slot][at - 1] if at else slot
                self.device.write("masks", Tensor.of(mask[None]), int(rows[i]))
        return rows

    def accept(self, slot: int, token: int) -> None:
        """Advance a slot's constraint by a sampled token."""
        if slot in self._constraints:
            self._forget(slot)
            self._constraints[slot].accept(token)

    def reported(
        self, slot: int, position: int, ticket: int | None = None
    ) -> tuple[tuple[int, float], tuple[tuple[int, float], ...]] | None:
        """Log-probabilities of a position after the pass `ticket` (`reported`); None if not requested. The device keeps the
        last RING positions of a slot."""
        wanted = self._logprobs[slot]
        if not wanted:
            return None
        ids, values = (
            self.device.read(name, slot, slot + 1, ticket).array[0, position % RING]
            for name in ("top_ids", "top_logprobs")
        )
        return reported(ids, values, wanted)
