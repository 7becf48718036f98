"""How the next token of a sequence is chosen, as the words that the sample operation reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORDS = 8
_MOST_F32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off. The same seed gives the same choices."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), (int, float, np.number)):
                raise ValueError(f"{name} must be a number, not {getattr(self, name)!r}")
        for name in ("top_k", "seed"):
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

    def words(self) -> np.ndarray:
        """uint32 [1, 8]: temperature, top_k, top_p, min_p (floats as their bits), seed low and high, 0, 0."""
        floats = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.uint32)
        seed = int(self.seed)
        ints = [floats[0], self.top_k, floats[1], floats[2], seed & 0xFFFFFFFF, seed >> 32, 0, 0]
        return np.array([ints], np.uint32)
