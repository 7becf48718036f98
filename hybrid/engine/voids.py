"""Void passes: a wait between the workgroups of a kernel timed out (FAULT_WORD), so that this decode pass and those
submitted after it sampled no token and advanced no sequence. They are run again with one dispatch per step, which
decoding then keeps.

A wait times out where the workgroups that wait for one another were not all resident: the driver, or another program on
the GPU, preempted some of them. What void passes appended to the KV cache is overwritten when the same tokens are run
again."""

from __future__ import annotations

import logging

import numpy as np

from hybrid.core.plan import CONTROL_TENSOR, CONTROL_WORDS, FAULT_WORD
from hybrid.core.tensor import Tensor
from hybrid.engine.interface import PassRunner

log = logging.getLogger("hybrid")


def is_void(engine: PassRunner, ticket: int | None = None) -> bool:
    """Whether one of the decode passes submitted since the rows were set up, up to `ticket` (default: all), was given
    up. Waits for them."""
    return engine.cooperative and bool(engine.device.read(CONTROL_TENSOR, ticket=ticket).array[FAULT_WORD])


def run_again(engine: PassRunner, slots: tuple[int, ...]) -> None:
    """Run the void passes of `slots` again, without waits between workgroups; returns when they have finished. If that
    fails or is interrupted, the sequences stay at the positions that the device has for them."""
    reached = engine.device.read("next_position").array
    held, submitted = ({s: int(at[s]) for s in slots} for at in (reached, engine.positions))
    lost = {submitted[s] - held[s] for s in slots}
    if len(lost) > 1 or min(lost, default=0) < 0:
        raise RuntimeError(
            f"{engine.device.name}: void passes left sequences at positions {held}, submitted were {submitted}: "
            "load the model again"
        )
    engine.positions.update(held)
    drop(engine)
    if times := lost.pop() if lost else 0:
        engine.wait(engine.submit_decode(slots, times))


def drop(engine: PassRunner) -> None:
    """Forget that passes were void, say so once, and decode without waits between workgroups from now on. Every pass is
    done."""
    engine.forget_programs("decode")  # their mailboxes hold messages that were never read
    engine.cooperative = False
    text = (
        f"{engine.device.name}: workgroups of one dispatch waited for one another for too long (other work on this device may "
        "have taken their place): the pass was run again by separate steps, which decoding goes on with"
    )
    log.warning("%s", text)
    engine.faults.append(text)
    engine.device.write(CONTROL_TENSOR, Tensor.of(np.zeros(CONTROL_WORDS, np.uint32)))
