"""How the next token of a sequence is chosen, as the words that the sample operation reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

WORDS = 8


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off. The same seed gives the same choices."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or above, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or above, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 (off) and 1, not {self.min_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, not {self.seed}")

    def words(self) -> np.ndarray:
        """uint32 [1, 8]: temperature, top_k, top_p, min_p (floats as their bits), seed low and high, 0, 0."""
        floats = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.uint32)
        ints = [floats[0], self.top_k, floats[1], floats[2], self.seed & 0xFFFFFFFF, self.seed >> 32, 0, 0]
        return np.array([ints], np.uint32)
