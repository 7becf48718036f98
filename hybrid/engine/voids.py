"""Void passes: a kernel gave up a wait between its workgroups (FAULT_WORD), so that this decode pass and those submitted after
it chose no token and left every sequence where it was. They are run again by separate steps, which decoding goes on with.

A wait is given up where workgroups that wait for one another were not all running: a driver, or a neighbour on the GPU, took
some of them away. What the passes appended to the KV cache lies at the positions that the same tokens take again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from hybrid.core.plan import CONTROL_TENSOR, CONTROL_WORDS, FAULT_WORD
from hybrid.core.tensor import Tensor

if TYPE_CHECKING:
    from hybrid.engine.engine import Engine

log = logging.getLogger("hybrid")


def is_void(engine: Engine, ticket: int | None = None) -> bool:
    """Of the decode passes submitted since the rows were set up, up to `ticket` (default: all; waited for): was one given up?"""
    return engine.cooperative and bool(engine.device.read(CONTROL_TENSOR, ticket=ticket).array[FAULT_WORD])


def run_again(engine: Engine, slots: tuple[int, ...]) -> None:
    """Run the void passes of `slots` again, without waits between workgroups; returns when they have ended. Interrupted or
    failed before that, it leaves the sequences where the device has them."""
    reached = engine.device.read("next_position").array
    held, submitted = ({s: int(at[s]) for s in slots} for at in (reached, engine.positions))
    lost = {submitted[s] - held[s] for s in slots}
    if len(lost) > 1 or min(lost, default=0) < 0:
        raise RuntimeError(f"{engine.device.name}: void passes left sequences at positions {held}, submitted were {submitted}: "
                           "load the model again")  # fmt: skip
    engine.positions.update(held)
    engine.forget_programs("decode")  # their mailboxes hold what was never read
    engine.cooperative = False
    text = (f"{engine.device.name}: workgroups of one dispatch waited for one another for too long (other work on this device may "
            "have taken their place): the pass was run again by separate steps, which decoding goes on with")  # fmt: skip
    log.warning("%s", text)
    engine.faults.append(text)
    engine.device.write(CONTROL_TENSOR, Tensor.of(np.zeros(CONTROL_WORDS, np.uint32)))
    if times := lost.pop() if lost else 0:
        engine.wait(engine.submit_decode(slots, times))
