"""A conversation benchmark: each prompt is the previous conversation and a new message. Measures the time to the first
token with prefix reuse and, with another first token in the same prompt, without reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybrid.bench.requests import Submit


@dataclass(frozen=True, slots=True)
class Turn:
    """Prompt tokens, cached ones of them, answer tokens, and milliseconds to the first token with and without the
    cache."""

    prompt: int
    cached: int
    answer: int
    first_ms: float
    first_ms_alone: float


def talk(
    submit: Submit,
    turns: int,
    message: tuple[int, int],
    answer: tuple[int, int],
    vocab: int,
    seed: int = 0,
    counted: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Turn]:
    """Run `turns` messages and answers of (least, most) tokens. counted: context manager around each turn, which
    excludes the comparison without reuse."""
    draw = np.random.default_rng(seed)
    ids: list[int] = []
    found: list[Turn] = []
    for _ in range(turns):
        ids += draw.integers(0, vocab, int(draw.integers(message[0], message[1] + 1))).tolist()
        n = int(draw.integers(answer[0], answer[1] + 1))
        with counted():
            done = submit(ids, max_tokens=n, ignore_eos=True).result()
        other = [(ids[0] + 1 + len(found)) % vocab, *ids[1:]]
        alone = submit(other, max_tokens=1, ignore_eos=True).result()
        times = (done.timings.first_token, alone.timings.first_token)
        if None in times or done.finish != "length" or len(done.ids) != n:
            raise RuntimeError(
                f"a turn ended with {done.finish!r} after {len(done.ids)} of {n} tokens: the measurement is invalid"
            )
        if alone.usage.cached_tokens:
            raise RuntimeError(f"{alone.usage.cached_tokens} tokens of a prompt that is new were found in the cache")
        found.append(Turn(len(ids), done.usage.cached_tokens, n, *(1e3 * t for t in times if t is not None)))
        ids += done.ids
    return found


def length(turns: int, message: tuple[int, int], answer: tuple[int, int]) -> int:
    """Most positions of the conversation."""
    return turns * (message[1] + answer[1])


def as_dicts(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [asdict(turn) for turn in turns]


def text(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Report lines."""
    lines = [f"{'turn':>6}{'prompt':>9}{'cached':>9}{'new':>7}{'first token ms':>17}{'without reuse':>16}"]
    for i, t in enumerate(turns, 1):
        new = t["prompt"] - t["cached"]
        lines.append(f"{i:6}{t['prompt']:9}{t['cached']:9}{new:7}{t['first_ms']:17.1f}{t['first_ms_alone']:16.1f}")
    return lines
