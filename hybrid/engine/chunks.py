"""Chunked prefill: prompts cut into passes of at most `chunk` rows, those of several sequences one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid.core.errors import ContextExceeded


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one prefill pass: tokens, positions and slots int32 [rows]; out_rows int32 [outs]: the last row of each
    prompt that ends in it, whose logits are needed."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    out_rows: np.ndarray

    @property
    def context(self) -> int:
        """The longest context of any row, in positions."""
        return int(self.positions.max()) + 1


def chunks(prompts: Mapping[int, Sequence[int]], starts: Mapping[int, int], size: int) -> Iterator[Chunk]:
    """Prefill passes of at most `size` rows over prompts {slot: ids}; a slot's first id stands at position
    starts[slot]."""
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids in prompts.values()])
    slots = np.concatenate([np.full(len(ids), s, np.int32) for s, ids in prompts.items()])
    positions = np.concatenate(
        [np.arange(starts[s], starts[s] + len(ids), dtype=np.int32) for s, ids in prompts.items()]
    )
    lasts = np.cumsum([len(ids) for ids in prompts.values()]) - 1
    for a in range(0, len(tokens), size):
        b = min(a + size, len(tokens))
        outs = (lasts[(lasts >= a) & (lasts < b)] - a).astype(np.int32)
        yield Chunk(tokens[a:b], positions[a:b], slots[a:b], outs)


def token_ids(ids: Sequence[int]) -> list[int]:
    """Token ids as Python's integers; ValueError for what is none, such as text."""
    found: list[Any] = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)) else [None]
    if not all(isinstance(i, (int, np.integer)) for i in found):
        raise ValueError("token ids must be integers: encode(text) makes them")
    return list(map(int, found))


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """ValueError for an empty prompt, or an id that the embedding has no row for."""
    if not len(ids):
        raise ValueError("the prompt is empty: it needs at least one token")
    bad = next((i for i in ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab}")


def check_prompts(prompts: Mapping[int, Sequence[int]], positions: Mapping[int, int], vocab: int, ctx: int) -> None:
    """ValueError for a prompt that cannot be run after the tokens that its slot holds (`positions`, of admitted
    slots)."""
    for slot, ids in prompts.items():
        if slot not in positions:
            raise ValueError(f"slot {slot} holds no sequence: admit it first")
        check_ids(ids, vocab)
        if positions[slot] + len(ids) > ctx:
            raise ContextExceeded(
                f"a prompt of {len(ids)} tokens does not fit in the context of {ctx}: "
                "shorten it or load the model with a larger ctx"
            )
