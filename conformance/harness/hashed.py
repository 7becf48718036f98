"""Numbers from a counter hash of (seed, tensor name, index): the same on every machine and in every order.

Nothing here uses a stateful generator or a transcendental function, so a failure's seed reproduces its bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def bits(seed: int, name: str, count: int) -> np.ndarray:
    """u64[count]: splitmix64 of a counter, keyed by a hash of (seed, name)."""
    key = np.uint64(int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        z = key + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        return z ^ (z >> np.uint64(31))


def integers(seed: int, name: str, shape: Sequence[int], low: int, high: int) -> np.ndarray:
    """i64 in low..high, both included."""
    words = bits(seed, name, _count(shape)) >> np.uint64(32)
    return ((words * np.uint64(high - low + 1)) >> np.uint64(32)).astype(np.int64).reshape(shape) + low


def uniform(seed: int, name: str, shape: Sequence[int], low: float, high: float) -> np.ndarray:
    """f64 in low..high, from 53 bits."""
    unit = (bits(seed, name, _count(shape)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return low + (high - low) * unit.reshape(shape)


def normal(seed: int, name: str, shape: Sequence[int], scale: float = 1.0) -> np.ndarray:
    """f64, near normal with deviation `scale`: the sum of a word's four 16-bit fields (no logarithm, exact
    everywhere)."""
    words = bits(seed, name, _count(shape))
    mask = np.uint64(0xFFFF)
    total = sum(((words >> np.uint64(s)) & mask).astype(np.float64) for s in (0, 16, 32, 48))
    return ((total - 2 * 65535.0) * (scale * 3.0**0.5 / 65536.0)).reshape(shape)


def permutation(seed: int, name: str, count: int) -> np.ndarray:
    """i64[count]: 0..count-1 shuffled."""
    return np.argsort(bits(seed, name, count), kind="stable").astype(np.int64)


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
