"""How the next token of a sequence is chosen, as the words that sample, adjust_logits and logprobs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid.spec.step import Option

WORDS = 8
MOST_BIASES = 1024
"""Biases that a sequence may have: room of the schedules' tensors `bias_ids` and `bias`."""
MOST_LOGPROBS = 20
"""Most likely tokens that can be reported of each choice."""
RING = 64
"""Positions of a sequence whose log-probabilities the device keeps."""
_MOST_F32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off. The same seed gives the same choices.

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
