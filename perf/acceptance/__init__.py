"""Acceptance rates of draft models and the speed that they give: measured pairs (pairs.toml), and the arithmetic of
passes. `python -m perf.acceptance` measures a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybrid.spec.load import Model, load_toml

LENGTHS = tuple(range(1, 9))
"""Draft lengths that figures are given for."""
FILE = Path(__file__).with_name("pairs.toml")


@dataclass(frozen=True, slots=True)
class Measured:
    """choices: sampled tokens of the model; agreed: share of them that the draft samples too; tokens: tokens per
    pass, by draft length."""

    choices: int
    agreed: float
    tokens: tuple[float, ...]


class Pair(Model):
    """[[pair]] of pairs.toml: two models and the acceptance rate of the second's drafts."""

    model: str
    draft: str
    text: Annotated[str, Field(min_length=1)]
    temperature: float = Field(ge=0)
    choices: int = Field(gt=0)
    agreed: float = Field(ge=0, lt=1)
    tokens: tuple[float, ...] = Field(min_length=len(LENGTHS), max_length=len(LENGTHS))
    """Tokens per pass with 1, 2, .. draft tokens."""
    provenance: Literal["measured"]
    source: Annotated[str, Field(min_length=1)]


class Pairs(Model):
    schema_version: Literal[1] = Field(alias="schema")
    pair: tuple[Pair, ...] = Field(min_length=1)


@lru_cache(maxsize=1)
def pairs() -> tuple[Pair, ...]:
    """The measured pairs. SpecError for an invalid file."""
    return load_toml(FILE, Pairs).pair


def passes(agreed: Sequence[bool], length: int) -> int:
    """Passes of speculation with `length` draft tokens for a text of len(agreed) tokens. agreed: where the draft,
    after the same tokens, samples the model's token. A pass gives the drafts before the first mismatch, and one token
    more."""
    at = count = 0
    while at < len(agreed):
        right = 0
        while right < length and at + right < len(agreed) and agreed[at + right]:
            right += 1
        at, count = at + right + 1, count + 1
    return count


def summed(texts: Sequence[Sequence[bool]]) -> Measured:
    """The figures of several texts. ValueError for none."""
    choices = sum(map(len, texts))
    if not choices:
        raise ValueError("no text has a token: nothing was measured")
    tokens = tuple(choices / sum(passes(t, k) for t in texts) for k in LENGTHS)
    return Measured(choices, sum(map(sum, texts)) / choices, tokens)
