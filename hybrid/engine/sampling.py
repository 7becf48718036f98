"""How the next token of a sequence is chosen: sampling parameters, constraints on the next token, and the per-slot
state of both on the device.

A constraint's mask is words of 32 ids: bit id % 32 of word id // 32 says that the id may be chosen. The engine asks for
a mask before each token and tells the constraint which one was chosen, so a constrained sequence does not run ahead of
the host. One that takes a while has `ready`: its sequence waits, and no other does.
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
"""Seconds that a pass waits for masks; sequences without theirs are left to a later one."""
GUESSED_ROWS = 16
"""Rows of `masks` beside one for each slot: after guessed tokens, of all sequences together."""


MOST_BIASES = 1024
"""Biases that a sequence may have: room of the schedules' tensors `bias_ids` and `bias`."""
MOST_LOGPROBS = 20
"""Most likely tokens that can be reported of each choice."""
RING = 64
"""Positions of a sequence whose log-probabilities the device keeps."""
_MOST_F32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off. The same seed gives the same choices.

    repetition_penalty r (1 = off): logits of tokens that the prompt or the text has are divided by r where positive,
    else multiplied. presence_penalty and frequency_penalty (0 = off): subtracted once, and as often as the token was
    generated. logit_bias {id: bias}: added. logprobs: how many of the most likely tokens are reported with each choice
    (0: none), by the model's own distribution: before penalties, biases, masks and temperature.
    Raises ValueError, one line that names the parameter.
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
        object.__setattr__(self, "logit_bias", dict(biases))  # whoever gave it may change theirs

    def check(self, n_tokens: int) -> None:
        """ValueError for biases of ids that a model with `n_tokens` tokens does not have."""
        for token in self.logit_bias or ():
            if token >= n_tokens:
                raise ValueError(f"logit_bias: the model has no token {token}; its ids are 0..{n_tokens - 1}")

    @property
    def counts(self) -> bool:
        """Whether choices depend on the tokens before: the device needs all of them in `history`."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether tokens are chosen by other logits than the model's."""
        return self.counts or bool(self.logit_bias)

    def options(self, masked: bool = False) -> frozenset[Option]:
        """The options that plans must be made with to choose so; `masked`: under a constraint."""
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
        """Rows of `bias_ids` int32 [1, 1024] and `bias` float32 [1, 1024]; what is beyond their number is not read."""
        ids, biases = np.zeros((1, MOST_BIASES), np.int32), np.zeros((1, MOST_BIASES), np.float32)
        for i, (token, bias) in enumerate((self.logit_bias or {}).items()):
            ids[0, i], biases[0, i] = token, bias
        return ids, biases


def reported(
    ids: np.ndarray, logprobs: np.ndarray, wanted: int
) -> tuple[tuple[int, float], tuple[tuple[int, float], ...]]:
    """The chosen token with its log-probability, and the most likely ones, falling: from one position's rows of
    `top_ids` int32 [21] and `top_logprobs` float32 [21]. Fewer than `wanted` where fewer have a probability."""
    pairs = [(int(i), float(p)) for i, p in zip(ids[: wanted + 1], logprobs[: wanted + 1], strict=True)]
    return pairs[0], tuple((i, p) for i, p in pairs[1:] if i >= 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating))


def _bits(*values: float) -> np.ndarray:
    """uint32: the bits of float32 numbers."""
    return np.array(values, np.float32).view(np.uint32)


class Constraint(Protocol):
    """What may follow in one sequence. Used by one thread at a time; a request has its own."""

    def mask(self) -> np.ndarray | None:
        """uint32 [ceil(n / 32)], n being the tokenizer's size: which ids may come next; None: any."""
        ...

    def accept(self, token: int) -> None:
        """`token` comes next."""
        ...

    def copy(self) -> Constraint:
        """One in the same state, independent of this."""
        ...


def is_ready(constraint: Constraint, wait: float) -> bool:
    """Whether `mask` answers at once, after at most `wait` seconds: what the constraint's own `ready(wait)` says, else
    yes."""
    ready = getattr(constraint, "ready", None)
    return True if ready is None else bool(ready(wait))


def mask_words(vocab: int) -> int:
    """Words of a mask over `vocab` ids."""
    return -(-vocab // 32)


def mask_of(ids: Iterable[int], vocab: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)]: a mask that allows these ids; IndexError for one that is none."""
    bits = np.zeros(32 * mask_words(vocab), np.uint8)
    wanted = np.fromiter(ids, np.int64)
    outside = wanted[(wanted < 0) | (wanted >= vocab)]
    if outside.size:
        raise IndexError(f"there is no id {outside[0]}: ids are 0..{vocab - 1}")
    bits[wanted] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def ids_of(mask: np.ndarray) -> np.ndarray:
    """int64: the ids that a mask allows, rising."""
    return np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little"))


def allows(mask: np.ndarray, token: int) -> bool:
    """Whether a mask has the id."""
    return bool(int(mask[token // 32]) >> (token % 32) & 1) if 0 <= token < 32 * len(mask) else False


def checked_mask(mask: np.ndarray, vocab: int, n_tokens: int) -> np.ndarray:
    """A constraint's mask as the device takes it: uint32 [ceil(vocab / 32)], vocab being the rows of the output matrix.
    It may be given over the tokenizer's ids alone, of which a matrix may have more rows. ValueError where it is no such
    mask, and where it allows none of the `n_tokens` ids that can be chosen: such a row has no next token."""
    least, words = mask_words(n_tokens), mask_words(vocab)
    if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.ndim != 1 or not least <= len(mask) <= words:
        shown = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else repr(mask)
        raise ValueError(f"a constraint's mask must be uint32 [{least}], a bit for each of {n_tokens} ids, not {shown}")
    whole, rest = divmod(n_tokens, 32)
    if not mask[:whole].any() and not (rest and int(mask[whole]) & ((1 << rest) - 1)):
        raise ValueError("the constraint allows no token here: it must allow one, an end of text for example")
    return np.pad(mask, (0, words - len(mask)))


class Allowed:
    """The simplest constraint: the same ids at every position. ValueError for none."""

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
    """Per-slot sampling state: each slot's rows of the tables that sample, adjust_logits and logprobs read, and the masks
    of its constraint. Only reading results waits; the caller sees to it that no pass reads a row that is written."""

    def __init__(self, device: Device, target: Target) -> None:
        self.device, self.target = device, target
        self._options: dict[int, frozenset[Option]] = {}
        self._logprobs: dict[int, int] = {}
        self._constraints: dict[int, Constraint] = {}
        self._masks: dict[int, list[np.ndarray | None]] = {}
        """Slot -> what its constraint allows next, once asked; then after each guessed token."""
        self._rows: dict[int, list[int]] = {}
        """Slot -> rows of `masks` that hold what it allows after guesses; its own row holds what it allows next."""
        self._free = list(range(target.cache.slots, target.cache.slots + GUESSED_ROWS))
        self._patience = 0.0  # until when the next pass waits

    def assign(
        self,
        slot: int,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        generated: Sequence[int] = (),
    ) -> None:
        """Sample a slot's sequence by these from now on. prompt, generated: all its tokens until now; needed where
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
            tokens = np.array([*prompt, *generated], np.int32)
            history[0, : len(tokens)] = np.where(tokens < self.target.n_tokens, tokens, -1)  # others name no token
            self.device.write("history", Tensor.of(history), slot)
        self._options[slot], self._logprobs[slot] = sampling.options(constraint is not None), sampling.logprobs
        if constraint is not None:
            self._constraints[slot] = constraint

    def release(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._forget(slot)
        self._options.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._constraints.pop(slot, None)

    def forget(self, constraint: Constraint) -> None:
        """A constraint's sequence has ended."""
        for slot in [s for s, c in self._constraints.items() if c is constraint]:
            self._forget(slot)
            del self._constraints[slot]

    def _forget(self, slot: int) -> None:
        """Drop a slot's masks."""
        self._masks.pop(slot, None)
        self._free += self._rows.pop(slot, [])

    def options(self, slots: Iterable[int]) -> frozenset[Option]:
        """What plans must be made with for a pass that chooses tokens of these slots."""
        return PLAIN.union(*(self._options.get(s, PLAIN) for s in slots))

    def constrained(self, slots: Iterable[int]) -> bool:
        """Whether one of these may not run ahead of what its constraint has been told."""
        return False if not self._constraints else any(s in self._constraints for s in slots)

    def begin_pass(self) -> None:
        """A pass is being made: it waits for masks no longer than PATIENCE from now."""
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

    def allowed(self, slot: int, guesses: Sequence[int]) -> tuple[int, ...]:
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
        """Tell a slot's constraint which token was chosen."""
        if slot in self._constraints:
            self._forget(slot)
            self._constraints[slot].accept(token)

    def reported(
        self, slot: int, position: int, ticket: int | None = None
    ) -> tuple[tuple[int, float], tuple[tuple[int, float], ...]] | None:
        """The token chosen for a position with its log-probability, and the most likely ones, after the pass `ticket`;
        None where nobody asked. At most 64 positions late: the device keeps no more of a slot."""
        wanted = self._logprobs[slot]
        if not wanted:
            return None
        ids, values = (
            self.device.read(name, slot, slot + 1, ticket).array[0, position % RING]
            for name in ("top_ids", "top_logprobs")
        )
        return reported(ids, values, wanted)
