"""Texts of an engine for tests: ids through requests whose passes the caller runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybrid.engine.handle import Handle
from hybrid.engine.loop import Engine
from hybrid.engine.request import Event, Options


def ask(engine: Engine, ids: Sequence[int], n: int, **options: Any) -> Handle:
    """A request for `n` tokens after these, run by its reader; end-of-text tokens do not end it."""
    return engine.generate(ids, Options(max_tokens=n, ignore_eos=True, **options))


def greedy(engine: Engine, ids: Sequence[int], n: int, **options: Any) -> list[int]:
    """The next `n` tokens, fewer at the context's end."""
    return list(ask(engine, ids, n, **options).result().ids)


def take(events: Iterator[Event], n: int) -> list[int]:
    """The next `n` tokens of a request's events."""
    found: list[int] = []
    while len(found) < n:
        found += next(events).ids
    return found


def until(handle: Handle, n: int) -> list[int]:
    """The first `n` tokens of a request; passes of later ones may run."""
    found: list[int] = []
    for event in handle.events():
        found += event.ids
        if len(found) >= n:
            break
    return found


def together(engine: Engine, prompts: Sequence[Sequence[int]], n: int, **options: Any) -> list[list[int]]:
    """The next `n` tokens of each of these prompts, all in the same passes."""
    handles = [ask(engine, ids, n, **options) for ids in prompts]
    return [list(handle.result().ids) for handle in handles]
