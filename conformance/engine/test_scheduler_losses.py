"""Passes that were lost: what the cache keeps of them, and what they cost."""

from __future__ import annotations

from conformance.engine.test_scheduler import loop, prompt


def test_passes_that_did_nothing_leave_nothing_and_cost_no_more_than_themselves():
    server = loop(window=6)
    first = server.add(prompt(30), 20)
    server.steps(8)
    second = server.add(prompt(24, 3), 6)
    assert server.scheduler.schedule().rows > 24, "nothing of it is run"
    server.scheduler.lose(cache=False)
    server._flights.clear()
    server.drain()
    assert server.right(first, second) and server.scheduler.counts.recomputed <= 24 + 8, "more than what was in flight"
