"""Many prompts at once, their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hybrid.cli.progress import progress_bar
from hybrid.core.errors import QueueFull
from hybrid.engine.handle import Completion, Handle

Prompt = str | Sequence[int]


def completions(submit: Callable[..., Handle], requests: Iterable[tuple[Prompt, Mapping[str, Any]]]) -> Iterator[Completion]:
    """What each (prompt, options) became, in their order. As many are submitted as the queue takes; those before the end of a
    full queue are waited for. Whoever drops the iterator cancels the rest; so does the first error of a request."""
    running = deque[Handle]()
    try:
        for prompt, options in requests:
            while True:
                try:
                    running.append(submit(prompt, **options))
                    break
                except QueueFull:
                    if not running:  # others fill the queue
                        raise
                    yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for handle in running:
            handle.cancel()


def texts(submit: Callable[..., Handle], prompts: Sequence[Prompt], options: Mapping[str, Any], progress: bool) -> list[str]:
    """See Model.generate_batch."""
    found: list[str] = []
    if isinstance(prompts, str):
        raise ValueError("generate_batch takes a list of prompts; generate takes one text")
    with progress_bar(len(prompts), "prompts", True, " prompts") if progress else nullcontext(lambda amount: None) as advance:
        for one in completions(submit, ((p, options) for p in prompts)):
            found.append(one.text)
            advance(1)
    return found
