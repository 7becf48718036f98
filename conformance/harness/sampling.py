"""Check that a sampled token is allowed: a second implementation of the rules, independent of the oracle.

Greedy tokens must be equal. A random token is checked by its score z + g(id): top-k, top-p and min-p must keep it, and
no token that is certainly kept may beat it, up to the error of float32 scores.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from hybrid.harness.compare import Disagreement

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Params:
    """One row of `params`: a slot's sampling parameters."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int = 0
    """Number of most likely ids to report."""

    def words(self) -> np.ndarray:
        """u32[8]"""
        floats = [_bits(x) for x in (self.temperature, self.top_p, self.min_p)]
        low, high = self.seed & _MASK, self.seed >> 32 & _MASK
        return np.array([floats[0], self.top_k, floats[1], floats[2], low, high, self.logprobs, 0], np.uint32)

    @classmethod
    def of(cls, words: np.ndarray) -> Params:
        temperature, top_p, min_p = (float(words[i : i + 1].view(np.float32)[0]) for i in (0, 2, 3))
        return cls(temperature, int(words[1]), top_p, min_p, int(words[4]) | int(words[5]) << 32, int(words[6]))


@dataclass(frozen=True, slots=True)
class Penalties:
    """One row of `penalties`: penalties and biases on a sequence's logits."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    first: int = 0
    """Position of the first generated token."""
    biases: int = 0

    def words(self) -> np.ndarray:
        """u32[8]"""
        floats = [_bits(x) for x in (self.repetition, self.presence, self.frequency)]
        return np.array([*floats, self.first, self.biases, 0, 0, 0], np.uint32)


def hash32(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """u64, below 2^32: the counter hash of the tokens' Gumbel numbers."""
    h = _mix(np.array([seed & _MASK], np.uint64))
    for words in (np.array([seed >> 32 & _MASK], np.uint64), np.array([position], np.uint64), tokens.astype(np.uint64)):
        h = _mix(h ^ words * 0x9E3779B9 & _MASK)
    return h


def gumbel(seed: int, position: int, tokens: int) -> np.ndarray:
    """f64[tokens]: -log(-log(u)) with u = ((hash >> 8) + 0.5) / 2^24."""
    u = ((hash32(seed, position, np.arange(tokens)) >> 8) + 0.5) * 2.0**-24
    return -np.log(-np.log(u))


def judge(label: str, logits: np.ndarray, params: Params, position: int, chosen: int, slack: float = 2e-4) -> None:
    """Raise Disagreement unless `chosen` is allowed for logits f64[valid ids], the greatest finite; `slack` bounds the
    error of a score."""
    if not 0 <= chosen < len(logits):
        raise Disagreement(f"{label}: token {chosen} is not one of the {len(logits)} valid ids ({params})")
    z = logits
    if params.temperature == 0:
        best = int(z.argmax())
        if chosen != best:
            raise Disagreement(f"{label}: token {chosen} (logit {z[chosen]:.9g}), greedy is {best} ({z[best]:.9g})")
        return
    z = z / params.temperature
    slack = slack * (1 + float(np.abs(z[np.isfinite(z)]).max()) / 100)
    certain, possible = kept(z, params, -slack), kept(z, params, slack)
    score = z + gumbel(params.seed, position, len(z))
    best = int(np.argmax(np.where(certain, score, -np.inf)))
    if not possible[chosen]:
        raise Disagreement(f"{label}: token {chosen} is cut off by {params}; {best} was expected")
    if score[chosen] < score[best] - slack:
        raise Disagreement(
            f"{label}: token {chosen} scores {score[chosen]:.6f}, token {best} {score[best]:.6f} ({params})"
        )


def kept(z: np.ndarray, params: Params, slack: float) -> np.ndarray:
    """bool[ids]: what top-k, top-p and min-p keep; slack > 0 also keeps borderline ids, < 0 drops them."""
    keep = np.isfinite(z)
    if 0 < params.top_k < len(z):
        keep &= z >= np.sort(z)[-params.top_k] - (slack if slack > 0 else 0)
    if params.top_p < 1:
        order = np.argsort(-z, kind="stable")
        mass = np.where(keep, np.exp(z - z.max()), 0.0)
        above = np.concatenate([[0.0], np.cumsum(mass[order])[:-1]])  # mass of the larger values
        first = np.searchsorted(-z[order], -z[order], side="left")  # ties are kept or cut together
        limit = params.top_p * mass.sum() * (1 + slack)
        mine = np.empty_like(z)
        mine[order] = above[first]
        keep &= mine < limit
    if params.min_p > 0:
        keep &= z >= z.max() + math.log(params.min_p) - slack
    return keep


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _mix(x: np.ndarray) -> np.ndarray:
    x = x ^ x >> 16
    x = x * 0x85EBCA6B & _MASK
    x = x ^ x >> 13
    x = x * 0xC2B2AE35 & _MASK
    return x ^ x >> 16
