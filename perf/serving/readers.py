"""Host cost per pass of an engine's thread while asyncio reads every token. Passes go to a stub device that answers
after a fixed time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from hybrid.checkpoint.random import random_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options
from hybrid.kernels.oracle.device import CpuDevice

PASS = 0.004  # seconds that a pass takes
WARM, CTX, VOCAB, PROMPT = 20, 1024, 512, 24


@dataclass(frozen=True, slots=True)
class Spent:
    """Microseconds of a pass, of the processor: of the engine's thread, and of the process, readers included."""

    engine: float
    process: float
    passes: int


def measure(rows: int, passes: int) -> Spent:
    """`rows` sequences decode `passes` tokens each, every one read by a task of one event loop."""
    device: Any = CpuDevice()
    try:
        with random_checkpoint("gemma3-270m", "q8_0", None, 1, VOCAB) as checkpoint:
            config = EngineConfig(ctx=CTX, slots=rows, n_tokens=VOCAB)
            engine: Any = Engine(checkpoint, device, config, queue=rows)
            engine.scheduler.limits = replace(engine.scheduler.limits, ahead=2)  # as on a device beside the host
            device.peek = lambda *place: VOCAB // 2
            runner = engine.runner
            tokens, step, marks = runner.tokens, engine.step, list[tuple[float, float, int]]()

            def submit(program: Any, began: float, p: Any) -> int:
                return 0

            def answered(flight: Any) -> Any:
                time.sleep(PASS)
                return tokens(flight)

            def counted() -> bool:
                done: bool = step()
                marks.append((time.thread_time(), time.process_time(), engine.scheduler.counts.passes))
                return done

            runner._submit, runner.tokens, engine.step = submit, answered, counted
            asyncio.run(_read(engine, rows, passes + 2 * WARM))
            engine.close(RuntimeError("measured"))
    finally:
        device.close()
    inside = [m for m in marks if WARM <= m[2] < marks[-1][2] - WARM]
    first, last = inside[0], inside[-1]
    n = last[2] - first[2]
    return Spent(1e6 * (last[0] - first[0]) / n, 1e6 * (last[1] - first[1]) / n, n)


async def _read(engine: Engine, rows: int, count: int) -> None:
    async def one(i: int) -> int:
        handle = engine.submit([(7 * i + j) % VOCAB for j in range(PROMPT)], Options(max_tokens=count, ignore_eos=True))
        return sum([len(event.ids) async for event in handle.aevents()])

    found = await asyncio.gather(*(one(i) for i in range(rows)))
    if set(found) != {count}:
        raise RuntimeError(f"readers got {sorted(set(found))} tokens, not {count}: the measurement is invalid")
