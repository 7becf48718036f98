"""Teacher-forced passes: logits and hidden states of every row of a sequence, read back pass by pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybrid.batch import Chunk, bucket_of, chunks
from hybrid.spec.plan import TensorDecl

if TYPE_CHECKING:
    from hybrid.engine import Engine


def logits_of(engine: Engine, sequences: Sequence[Sequence[int]], chunk: int | None) -> Iterator[np.ndarray]:
    """See Engine.logits_of."""
    rows = min(chunk or engine.logits_rows, engine.logits_rows)
    decl = TensorDecl("logits", "f32", (engine.logits_rows, engine.target.hparams.vocab), "io")
    free = max(1, engine.cache.slots - len(engine.positions))
    for at in range(0, len(sequences), free):
        for (part,) in _passes(engine, sequences[at : at + free], rows, [decl], capture=False):
            yield part


def hidden_states(engine: Engine, ids: Sequence[int], chunk: int | None) -> np.ndarray:
    """See Engine.hidden_states."""
    hp = engine.target.hparams
    rows = min(chunk or engine.hidden_rows, engine.hidden_rows)
    decls = [TensorDecl(f"hidden.{i}", "f32", (engine.hidden_rows, hp.hidden), "io") for i in range(hp.n_layers + 1)]
    return np.concatenate([np.stack(p) for p in _passes(engine, [ids], rows, decls, capture=True)], axis=1)


def _passes(
    engine: Engine, sequences: Sequence[Sequence[int]], rows: int, decls: list[TensorDecl], capture: bool
) -> Iterator[list[np.ndarray]]:
    """Passes over sequences, each in a slot of its own; after each pass, the live rows of the result tensors."""
    for decl in decls:
        engine.result(decl)
    prompts: dict[int, Sequence[int]] = {}
    try:
        for ids in sequences:
            prompts[engine.admit(max(len(ids), 1))] = ids
        engine.check(prompts)
        for chunk in chunks(prompts, engine.positions, rows):
            n = len(chunk.tokens)
            size = bucket_of(n, engine.row_buckets)
            every = Chunk(chunk.tokens, chunk.positions, chunk.slots, np.arange(0 if capture else n, dtype=np.int32))
            program = engine.program("prefill", size, 0 if capture else size, capture, sample=False)
            engine.wait(engine.run_chunk(every, program))
            yield [engine.device.read(d.name, 0, n).array for d in decls]
    finally:
        engine.wait()
        for slot in prompts:
            engine.release(slot)
