"""Exact accounting of a scheduler: every block, slot and token in flight. For tests and for debugging leaks."""

from __future__ import annotations

from hybrid.engine.scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """AssertionError that names what does not add up. Inspects every block."""
    blocks, limits = scheduler.blocks, scheduler.limits
    running, waiting, prompts, flights = (
        scheduler.running,
        scheduler._queue.requests,
        scheduler._prompts,
        scheduler._flights,
    )
    held = [s.held for s in running if s.held is not None]
    assert len(held) == len(running)
    blocks.check(held)
    assert all(s.held is not None and not s.held.size and s.slot is None for s in waiting), (
        "one that waits holds blocks"
    )
    slots = [
        *scheduler._slots,
        *(slot for _, slot in scheduler._cooling),
        *(-1 if s.slot is None else s.slot for s in running),
    ]
    assert sorted(slots) == list(range(limits.slots)), f"slots {slots}"
    for streams in (running, waiting, prompts):
        assert [s.order for s in streams] == sorted({s.order for s in streams}), "out of order, or twice"
        assert all(s.finish is None for s in streams), "an ended sequence is still listed"
    assert all(s in running for s in prompts) and all(s in prompts for s in running if s.rest > (s.capture is None)), (
        "prompts that run"
    )
    flying = [run.seq for p in flights for run in p.runs if run.wants and not p.capture]
    for s in (*running, *waiting):
        assert s.pending == sum(f is s for f in flying), f"{s.id}: {s.pending} tokens in flight"
        assert s.overtaken <= limits.overtakes, f"{s.id} was overtaken {s.overtaken} times"
    for s, h in zip(running, held, strict=True):
        assert s.until == h.size * blocks.block and s.position <= s.until, f"{s.id}: rows without blocks"
        for g, group in enumerate(blocks.groups):
            assert h.first[g] <= group.first(s.position, blocks.block), (
                f"{s.id}: blocks that its next row sees are gone"
            )
    for s, slot, start, ids, *_ in flights[-1].runs if flights else ():
        if (
            s.slot == slot and s.held is not None and s.position == start + len(ids or (0,))
        ):  # not ended or preempted since
            for g, group in enumerate(blocks.groups):
                # Passes run in order: what its next row does not see may go once that row has asked for a block.
                next_row = s.held.first[g] == group.first(s.position, blocks.block)
                kept = s.held.first[g] <= group.first(start, blocks.block)
                assert kept or next_row, f"{s.id}: blocks in the window of rows in flight are gone"
    if scheduler.idle:
        assert not any(blocks.used.values()), f"idle, but blocks are held: {blocks.used}"
