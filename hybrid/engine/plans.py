"""Every plan that an engine with a configuration would compile, from a checkpoint's headers: nothing is loaded.

For commands that prepare a device ahead of a model (python -m kernels.npu.build --list MODEL).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.random import random_checkpoint
from hybrid.core.plan import Plan
from hybrid.engine.config import EngineConfig
from hybrid.engine.weights import stored_types
from hybrid.planning.cache import CacheShape
from hybrid.planning.footprint import thinned
from hybrid.planning.passes import CHUNK, pass_sizes
from hybrid.planning.pipeline import pipeline_depth
from hybrid.planning.planner import Target, plan
from hybrid.spec.schedule import Schedule, named_schedule


def plans_of_model(
    model: str,
    schedule: str | Schedule,
    ctx: int | None = None,
    slots: int = 1,
    chunk: int | None = None,
    backend: str = "vulkan",
) -> Iterator[Plan]:
    """Plans of two layers of each kind, of every number of rows: the others' steps have the same sizes.

    model: a file, a directory, or the name of a sheet of specs/models. schedule: a shipped one's name, or a file.
    chunk: rows of a prefill pass (default: 512, that of devices without matrix units). backend: of the main device."""
    chosen = schedule if isinstance(schedule, Schedule) else named_schedule(schedule)
    with open_checkpoint(model) if Path(model).exists() else random_checkpoint(model) as checkpoint:
        hp = checkpoint.hparams
        config = EngineConfig(ctx=ctx, slots=slots, chunk=chunk)
        sizes = pass_sizes(hp, config.context(hp), slots, CHUNK if chunk is None else chunk)
        cache = CacheShape.of(hp, config.context(hp), slots, sizes.rows[-1], pipeline_depth(chosen))
        whole = Target(chosen, hp, stored_types(checkpoint, None, backend), cache, hp.vocab, device=backend)
        target, _ = thinned(whole)
        for count in sizes.decode:
            yield plan(target, count, count, "decode")
        for rows in sizes.rows:
            yield plan(target, rows, max(o for o in (*sizes.outs, 1) if o <= rows), "prefill")
        yield plan(target, sizes.logits, sizes.logits, "prefill", sample=False)
        yield plan(target, sizes.hidden, 0, "prefill", capture=True)
