"""Decode passes submitted ahead: the next submit is made before the tokens of one are read, so that the device never
waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from hybrid.engine.interface import PassRunner


def submit_ahead(
    engine: PassRunner, slots: Sequence[int], tokens: int, at_once: int, prefill: int | None = None
) -> Iterator[tuple[int, int]]:
    """(ticket, tokens of each slot) of the submits that decode `tokens` more tokens of each slot, `at_once` of them in
    one submit; `prefill`: the ticket of a pass before, which chooses one. A ticket is yielded when the next submit has
    been made. Not on cpu, where submitting is running: the tokens would come, and be timed, late."""
    running = deque([] if prefill is None else [(prefill, 1)])  # submits whose tokens have not been read
    depth, submitted = 1 if engine.target.device == "cpu" else 2, 0
    while running or submitted < tokens:
        while len(running) < depth and submitted < tokens:
            count = min(at_once, tokens - submitted)
            running.append((engine.submit_decode(slots, count), count))
            submitted += count
        yield running.popleft()


def stream(engine: PassRunner, slot: int, ids: Sequence[int], most: int, at_once: int) -> Iterator[int]:
    """See Engine.stream."""
    if at_once < 1:
        raise ValueError(f"tokens per submit must be 1 or more, not {at_once}")
    prefill = engine.submit_prefill({slot: ids})
    first = engine.positions[slot]
    most = min(most, engine.cache.ctx - first)
    if most < 1:
        return
    at = first
    for ticket, count in submit_ahead(engine, (slot,), most - 1, at_once, prefill):
        for position in range(at, at + count):
            yield engine.token(slot, position, ticket)
        at += count
