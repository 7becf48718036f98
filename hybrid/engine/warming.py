"""Everything that passes of many sequences need, made before the first request: so that none waits for a plan, a
recording or a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.cli.progress import tracked
from hybrid.engine.engine import Engine
from hybrid.engine.runner import most_mixed
from hybrid.planning.passes import PassSizes, bucket_of
from hybrid.spec.schedule import Phase
from hybrid.spec.step import Option

PLAIN, VERIFY = frozenset[Option](), frozenset[Option]({"verify"})


def programs(sizes: PassSizes, draft: bool = False) -> list[tuple[Phase, int, int, frozenset[Option]]]:
    """(phase, rows, rows whose logits are wanted, options) of every plan that a scheduled pass may take (Runner.start),
    for requests that ask for nothing special. draft: of an engine that guesses for another; what it verifies itself,
    Engine.warm_up makes."""
    found: list[tuple[Phase, int, int, frozenset[Option]]] = [("decode", n, n, PLAIN) for n in sizes.decode]
    found += [("prefill", rows, outs, PLAIN) for rows in sizes.rows for outs in (0, *_outs(sizes.outs, rows))]
    if sizes.guesses and not draft:
        mixed = bucket_of(most_mixed(sizes), sizes.rows)  # who has guesses decodes
        wants = [(rows, outs) for rows in sizes.rows for outs in _outs(sizes.wants, rows) if rows <= mixed and outs > 1]
        found += [("prefill", rows, outs, VERIFY) for rows, outs in wants]
    return found


def _outs(buckets: Sequence[int], rows: int) -> list[int]:
    """Those that some pass of so many rows takes: one has more rows than the bucket before it, if not as many as
    itself."""
    return [outs for before, outs in zip((0, *buckets), buckets, strict=False) if before < rows]


def warm(engine: Engine, draft: bool = False) -> None:
    """Make them, in every pipeline slot; with a bar where the engine shows progress. On cpu nothing is compiled: plans
    are made as they come. draft: as for `programs`."""
    if engine.device.backend == "cpu":
        return
    wanted = programs(engine.sizes, draft)
    for phase, rows, outs, options in tracked(wanted, "plans") if engine.config.progress else wanted:
        for i in range(engine.device.pipeline_depth if phase == "prefill" else 1):
            engine.program(phase, rows, outs, pipeline_slot=i, options=options)
    if draft:  # its sequences have slots of their own, whose tables are copied through memory that the first copy takes
        engine.release(engine.admit())
