"""One sequence's tokens as they come, the next submit made before those of one are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.engine.engine import Engine


def stream(engine: Engine, slot: int, ids: Sequence[int], most: int, at_once: int) -> Iterator[int]:
    """See Engine.stream."""
    if at_once < 1:
        raise ValueError(f"tokens per submit must be 1 or more, not {at_once}")
    running = deque([(engine.submit_prefill({slot: ids}), 1)])  # submits whose tokens have not been read
    first = at = engine.positions[slot]
    last = min(first + most, engine.cache.ctx)
    ahead = 2 if engine.target.device != "cpu" else 1
    while at < last:
        while len(running) < ahead and (count := min(at_once, last - engine.positions[slot] - 1)) > 0:
            running.append((engine.submit_decode((slot,), count), count))
        ticket, count = running.popleft()
        for at in range(at, min(at + count, last)):  # noqa: B020 (goes on where it was)
            yield engine.token(slot, at, ticket)
        at += 1
