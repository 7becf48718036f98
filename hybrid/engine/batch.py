"""Many prompts at once, their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from hybrid.cli.progress import progress_bar
from hybrid.core.errors import QueueFull
from hybrid.engine.faults import NotFinite
from hybrid.engine.handle import Completion, Handle

Prompt = str | Sequence[int]


OF_ONE = (ValueError, NotFinite)
"""What is wrong with one request, not with the device or the model."""


def outcomes(requests: Iterable[Callable[[], Handle]]) -> Iterator[Completion | Exception]:
    """What each request became, in their order: its completion, or what was wrong with it (OF_ONE). As many are
    submitted as the queue takes; those before the end of a full queue are waited for. Whoever drops the iterator
    cancels the rest; so does an error of the device."""
    running = deque[Handle | Exception]()
    try:
        for submit in requests:
            while True:
                try:
                    running.append(submit())
                    break
                except OF_ONE as error:
                    running.append(error)
                    break
                except QueueFull:
                    if not running:  # others fill the queue
                        raise
                    yield _outcome(running.popleft())
        while running:
            yield _outcome(running.popleft())
    finally:
        for one in running:
            if isinstance(one, Handle):
                one.cancel()


def _outcome(of: Handle | Exception) -> Completion | Exception:
    if isinstance(of, Exception):
        return of
    try:
        return of.result()
    except OF_ONE as error:
        return error


def completions(
    submit: Callable[..., Handle], requests: Iterable[tuple[Prompt, Mapping[str, Any]]]
) -> Iterator[Completion]:
    """What each (prompt, options) became, in their order; the first error of one ends the others."""
    for one in outcomes(partial(submit, prompt, **options) for prompt, options in requests):
        if isinstance(one, Exception):
            raise one
        yield one


def texts(
    submit: Callable[..., Handle], prompts: Sequence[Prompt], options: Mapping[str, Any], progress: bool
) -> list[str]:
    """See Model.generate_batch."""
    found: list[str] = []
    if isinstance(prompts, str):
        raise ValueError("generate_batch takes a list of prompts; generate takes one text")
    with (
        progress_bar(len(prompts), "prompts", True, " prompts")
        if progress
        else nullcontext(lambda amount: None) as advance
    ):
        for one in completions(submit, ((p, options) for p in prompts)):
            found.append(one.text)
            advance(1)
    return found
