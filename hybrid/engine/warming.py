"""Everything that passes of many sequences need, made before the first request: so that none waits for a plan, a recording or a
pipeline."""

from __future__ import annotations

from hybrid.cli.progress import tracked
from hybrid.engine.engine import Engine
from hybrid.planning.passes import PassSizes
from hybrid.spec.schedule import Phase


def programs(sizes: PassSizes) -> list[tuple[Phase, int, int]]:
    """(phase, rows, rows whose logits are wanted) of every plan that a scheduled pass may take (Runner.start), for requests that
    ask for nothing special."""
    found: list[tuple[Phase, int, int]] = [("decode", n, n) for n in sizes.decode]
    return found + [("prefill", rows, outs) for rows in sizes.rows for outs in (0, *sizes.outs) if outs <= rows]


def warm(engine: Engine) -> None:
    """Make them, in every pipeline slot; with a bar where the engine shows progress. On cpu nothing is compiled: plans are made as
    they come."""
    if engine.device.backend == "cpu":
        return
    wanted = programs(engine.sizes)
    for phase, rows, outs in tracked(wanted, "plans") if engine.config.progress else wanted:
        for i in range(engine.device.pipeline_depth if phase == "prefill" else 1):
            engine.program(phase, rows, outs, pipeline_slot=i)
