"""Teacher forcing: logits and hidden states at every position of given sequences, read back pass by pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hybrid.core.plan import TensorDecl
from hybrid.engine.chunks import Chunk, chunks
from hybrid.engine.faults import check_finite
from hybrid.engine.interface import PassRunner
from hybrid.planning.passes import bucket_of
from hybrid.planning.pipeline import name_in_slot


def logits_of(
    engine: PassRunner, sequences: Sequence[Sequence[int]], chunk: int | None
) -> Generator[np.ndarray, None, None]:
    """See Engine.logits_of."""
    rows = min(chunk or engine.sizes.logits, engine.sizes.logits)
    decl = TensorDecl("logits", "f32", (engine.sizes.logits, engine.target.hparams.vocab), "io")
    left = list(sequences)
    while left:
        n = engine.tables.fitting([len(ids) for ids in left])
        now, left = left[:n], left[n:]
        for done, (logits,) in _passes(engine, now, rows, [decl], capture=False):
            check_finite(engine.checkpoint.path, logits, done.positions)
            yield logits


def hidden_states(engine: PassRunner, ids: Sequence[int], chunk: int | None, streams: bool = False) -> np.ndarray:
    """See Engine.hidden_states."""
    hp = engine.target.hparams
    rows, width = min(chunk or engine.sizes.hidden, engine.sizes.hidden), hp.n_streams * hp.hidden
    decls = [TensorDecl(f"hidden.{i}", "f32", (engine.sizes.hidden, width), "io") for i in range(hp.n_layers + 1)]
    own = slice(hp.altup_active * hp.hidden, (hp.altup_active + 1) * hp.hidden)
    passes = _passes(engine, [ids], rows, decls, capture=True)
    states = np.concatenate([np.stack([t if streams else t[:, own] for t in p]) for _, p in passes], axis=1)
    return states.reshape(*states.shape[:2], hp.n_streams, hp.hidden) if streams else states


def _passes(
    engine: PassRunner, sequences: Sequence[Sequence[int]], rows: int, decls: list[TensorDecl], capture: bool
) -> Iterator[tuple[Chunk, list[np.ndarray]]]:
    """Passes over sequences, each in a slot of its own; yields each pass's rows and the live rows of its result
    tensors, read while the next pass runs where passes overlap."""
    depth = engine.device.pipeline_depth
    for i in range(depth):
        for decl in decls:
            engine.result(replace(decl, name=name_in_slot(decl.name, i)))
    prompts: dict[int, Sequence[int]] = {}
    running = deque[tuple[Chunk, int, int]]()  # with ticket and pipeline slot

    def give_back() -> None:
        engine.wait()
        for slot in prompts:
            engine.release(slot)

    try:
        for ids in sequences:
            prompts[engine.admit(max(len(ids), 1))] = ids
        engine.check(prompts)
        for chunk in chunks(prompts, engine.positions, rows):
            if len(running) == depth:
                yield _results(engine, decls, *running.popleft())
            n, pipeline_slot = len(chunk.tokens), engine.next_pipeline_slot()
            size = bucket_of(n, engine.sizes.rows)
            every = Chunk(chunk.tokens, chunk.positions, chunk.slots, np.arange(0 if capture else n, dtype=np.int32))
            program = engine.program(
                "prefill", size, 0 if capture else size, capture, sample=False, pipeline_slot=pipeline_slot
            )
            running.append((every, engine.run_chunk(every, program), pipeline_slot))
        while running:
            yield _results(engine, decls, *running.popleft())
    except GeneratorExit:
        engine.lock.call_soon(give_back)  # collected as garbage, this may run while another thread holds the lock
        raise
    except BaseException:
        give_back()
        raise
    give_back()  # the next sequences take these slots before the lock is released


def _results(
    engine: PassRunner, decls: Sequence[TensorDecl], chunk: Chunk, ticket: int, pipeline_slot: int
) -> tuple[Chunk, list[np.ndarray]]:
    rows = len(chunk.tokens)
    return chunk, [engine.device.read(name_in_slot(d.name, pipeline_slot), 0, rows, ticket).array for d in decls]
