"""The order in which blocks are run: whoever is behind goes first, so lanes that took different ways meet where the module says."""

from __future__ import annotations

from conformance.interpreter.module import Block


def targets(block: Block) -> list[int]:
    op, a = block.end
    if op == 249:
        return [a[0]]
    if op == 250:
        return [a[1], a[2]]
    if op == 251:
        return [a[1], *a[3::2]]
    return []


def ordered(blocks: list[Block]) -> list[Block]:
    """Every header before what it governs, all that before where its ways meet; of a loop the block that continues it last."""
    by_label = {b.label: b for b in blocks}
    seen: set[int] = set()
    found: list[Block] = []
    work: list[tuple[int, bool]] = [(blocks[0].label, False)]
    while work:
        label, done = work.pop()
        if done:
            found.append(by_label[label])
            continue
        if label in seen:
            continue
        seen.add(label)
        block = by_label[label]
        work.append((label, True))
        after = [*block.merge, *(t for t in reversed(targets(block)) if t not in block.merge)]
        work += [(t, False) for t in reversed(after) if t not in seen]  # popped in the order of `after`
    return found[::-1]
