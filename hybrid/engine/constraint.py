"""Constraints on the next token: a mask of the ids that may be chosen, made anew after each token.

A mask is words of 32 ids: bit id % 32 of word id // 32 says that the id may be chosen. Whoever needs structured output
writes a Constraint; the engine asks it for a mask before each token and tells it which one was chosen, so a constrained
sequence does not run ahead of the host. One that takes a while has `ready`: its sequence waits, and no other does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np


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
