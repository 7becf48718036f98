"""Lost passes: the cache blocks that stay valid and the rows to repeat; and a row without a block."""

from __future__ import annotations

from conformance.engine.test_scheduler import loop, prompt
from conformance.support.fake_runner import Loop
from hybrid.engine.blocks import Group
from hybrid.engine.scheduler import Limits


def test_lost_passes_leave_no_blocks_and_repeat_only_their_rows():
    server = loop(window=6)
    first = server.add(prompt(30), 20)
    server.steps(8)
    second = server.add(prompt(24, 3), 6)
    assert server.scheduler.schedule().rows > 24, "none of its rows is run"
    server.scheduler.lose(cache=False)
    server._flights.clear()
    server.drain()
    assert server.right(first, second)
    assert server.scheduler.counts.recomputed == 1 + 24, "the first's last known token, the second's prompt"


def test_a_slot_that_cools_comes_back_when_the_passes_are_lost():
    """The second sequence is preempted while a pass that samples its token runs, and that pass is lost."""
    server = loop(slots=2, blocks=13, ctx=60, ahead=3)
    first, second = server.add(prompt(20), 30), server.add(prompt(22, 5), 10)
    while not second.preemptions:
        server.step()
    assert server.scheduler._cooling, "its slot is free at once"
    server.scheduler.lose()
    server.runner.lose()
    server._flights.clear()
    server.drain()
    assert server.right(first, second)
    again = [server.add(prompt(4, i), 9) for i in range(2)]
    assert len(server.step().runs) == 2, "a slot is gone"
    server.drain()
    assert server.right(*again)


def test_a_row_without_a_block_waits_though_its_window_has_moved():
    """No block is free. Blocks that the rows in flight see may be reused by later passes."""
    server = Loop([Group("global", 8), Group("local", 11, 1)], 1, Limits(1, 8, 4, ahead=3))
    blocks = server.scheduler.blocks
    others = blocks.held()
    assert blocks.grow(others, 2, 0, [])
    stream = server.add(prompt(6), 2)
    made = [server.scheduler.schedule() for _ in range(4)]
    assert [done.rows for done in made if done is not None] == [4, 2], "no block for a third"
    blocks.release(others)
    server._flights.extend(done for done in made if done is not None)
    server.drain()
    assert server.right(stream)
