"""Execution order of blocks: the earliest block runs first, so that diverged lanes meet at the module's merge blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hybrid.harness.interpreter.module import Block

BARRIER, ATOMIC_LOAD = 224, 227


def targets(block: Block) -> list[int]:
    op, a = block.end
    if op == 249:
        return [a[0]]
    if op == 250:
        return [a[1], a[2]]
    if op == 251:
        return [a[1], *a[3::2]]
    return []


def cut(blocks: list[Block], of_workgroup: Callable[[int], bool]) -> list[Block]:
    """Split blocks so that a workgroup barrier is always a block's first instruction."""
    found = []
    for block in blocks:
        parts: list[list] = [[]]
        for one in block.body:
            if one[0] == BARRIER and of_workgroup(one[3][0]):
                parts.append([])
            else:
                parts[-1].append(one)
        for i, body in enumerate(parts):
            last = i == len(parts) - 1
            found.append(
                replace(
                    block,
                    label=block.label if i == 0 else -block.label * 1000 - i,
                    phis=block.phis if i == 0 else [],
                    body=body,
                    end=block.end if last else (249, [-block.label * 1000 - i - 1]),
                    merge=block.merge if last else (),
                    origin=block.label,
                    waits=i > 0,
                    polls=any(op == ATOMIC_LOAD for op, *_ in body),
                )
            )
    return found


def ordered(blocks: list[Block]) -> list[Block]:
    """Order blocks: every header before its construct, all of the construct before its merge block, a loop's continue
    block last."""
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
