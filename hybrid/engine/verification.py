"""Passes that verify: the last token of a sequence and guesses of the ones after it, a row each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid.core.errors import ContextExceeded
from hybrid.core.plan import FAULTED
from hybrid.engine import voids
from hybrid.engine.chunks import Chunk
from hybrid.engine.inbox import GOES_ON
from hybrid.engine.interface import PassRunner
from hybrid.planning.passes import bucket_of
from hybrid.spec.step import Option


def submit(engine: PassRunner, slot: int, guesses: Sequence[int]) -> int:
    """Choose the tokens after a slot's last one and after each of these guesses of what comes next, in one pass; returns its
    ticket. Until `read` nothing else may be submitted for the slot. ValueError for more guesses than the engine was made for,
    ContextExceeded where they do not fit."""
    n, k, sizes = engine.positions[slot], len(guesses), engine.sizes
    most = min(sizes.guesses, sizes.wanted - 1)
    if not 1 <= k <= most:
        raise ValueError(f"{k} guesses in a pass, of 1..{most}: make the engine with more `guesses`")
    if n + k >= engine.cache.ctx:
        raise ContextExceeded(f"slot {slot} has {n} tokens of {engine.cache.ctx}: no room for {k} guesses")
    tokens, rows = np.array([GOES_ON, *guesses], np.int32), np.arange(k + 1, dtype=np.int32)
    options: set[Option] = {*engine.choosing.options([slot]), "verify"}
    program = engine.program("prefill", bucket_of(k + 1, sizes.rows), bucket_of(k + 1, sizes.wants), options=options)
    return engine.run_chunk(Chunk(tokens, n + rows, np.full(k + 1, slot, np.int32), rows), program)


def read(engine: PassRunner, slot: int, guesses: Sequence[int], ticket: int) -> list[int]:
    """The tokens that the pass has chosen: the guesses that are right, up to the first that is not, and the one after them. The
    slot goes on from there, on the device too (specs/ops/verify.toml). Waits for the pass. NotFinite."""
    n, found = engine.positions[slot], list[int]()
    if engine.device.peek("history", slot, n + 1, ticket) == FAULTED:  # void: the slot stands where it stood
        voids.drop(engine)
        ticket = submit(engine, slot, guesses)
    for guess in (*guesses, None):
        found.append(engine.token(slot, n + 1 + len(found), ticket))
        if found[-1] != guess:
            break
    engine.positions[slot] = n + len(found)
    return found
