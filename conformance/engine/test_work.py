"""Measured cost of scheduled passes: seconds between submission and end, bytes and operations as their plans declare."""

from __future__ import annotations

import itertools

import pytest

from conformance.support.fake_runner import request
from conformance.support.paths import DEMO
from hybrid.checkpoint import open_checkpoint
from hybrid.core.plan import Plan
from hybrid.devices.opening import open_device
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.scheduler import Pass, Run
from hybrid.engine.stats import Total, Work, phase_of
from hybrid.planning.cost import plan_cost


def decoding(starts: list[int]) -> list[Run]:
    return [Run(request(i, [1], 5), i, start, None, 1) for i, start in enumerate(starts)]


def prompt(start: int, rows: int, wants: int = 1) -> Run:
    return Run(request("p", [1], 5), 7, start, tuple(range(rows)), wants)


def made(number: int, runs: list[Run]) -> Pass:
    rows = sum(1 if r.ids is None else len(r.ids) for r in runs)
    return Pass(number, runs, rows=rows, outs=sum(r.wants for r in runs))


@pytest.fixture(scope="module")
def engine() -> Engine:
    checkpoint = open_checkpoint(DEMO)
    opened = open_device("cpu")
    return Engine(checkpoint, opened.device, EngineConfig(slots=8, ctx=512))


@pytest.mark.parametrize(
    ("runs", "phase"),
    [
        (decoding([5, 9]), "decode"),
        ([prompt(0, 20)], "prefill"),
        ([prompt(0, 20, 0)], "prefill"),
        ([*decoding([5]), prompt(0, 20)], "mixed"),
        ([Run(request(0, [1], 5), 0, 3, (4, 5, 6), 3)], "decode"),  # two drafts to verify
    ],
)
def test_phases(runs: list[Run], phase: str) -> None:
    assert phase_of(made(1, runs)) == phase


def test_seconds_are_from_the_submission_or_the_pass_before_until_the_end(engine: Engine) -> None:
    clock = iter([10.0, 11.0, 14.0, 20.0, 21.0, 22.0, 26.0, 30.0])
    work, plan = Work(lambda: next(clock)), engine.runner.plan("prefill", 32, 1)
    first, second, chunk, last = (made(i, [prompt(0, n)]) for i, n in enumerate([8, 8, 30, 10]))
    work.begin(first, False, plan)  # at 10
    work.begin(second, False, plan)  # at 11, queued after the first
    work.end(first)  # at 14: 4 s
    work.end(second)  # at 20: 6 s, since the first had ended
    work.begin(chunk, False, plan)  # at 21
    work.begin(last, False, plan)  # at 22
    work.end(last)  # at 26: both, by their rows
    total = work.totals()["prefill"]
    assert (total.passes, total.rows) == (4, 56) and total.seconds == pytest.approx(4 + 6 + 5)
    work.end(last)  # it has ended before
    assert work.totals()["prefill"].passes == 4


def test_passes_that_were_lost_take_nothing(engine: Engine) -> None:
    clock = iter([1.0, 5.0])
    work = Work(lambda: next(clock))
    work.begin(lost := made(1, decoding([3])), True, engine.runner.plan("decode", 1, 1))
    work.lost()
    work.end(lost)
    assert work.totals()["decode"] == Total()


def declared(plan: Plan, rows: int, sequences: int, context: int, onward: bool) -> tuple[int, int]:
    cost = plan_cost(plan, context, {"tokens": rows, "slots": sequences, **({"outs": rows} if onward else {})})
    return cost.nbytes, cost.flops


@pytest.mark.parametrize("onward", [True, False])
def test_declared_costs_are_those_of_the_passes_that_ran(engine: Engine, onward: bool) -> None:
    """Contexts are whole blocks, where costs are linear between powers of two; sums of different passes are exact."""
    plan = engine.runner.plan("decode", 8, 8) if onward else engine.runner.plan("prefill", 512, 1)
    work, want, number = Work(), [0, 0], itertools.count()
    block = engine.cache.block
    for blocks, sequences in [(1, 1), (2, 8), (3, 5), (5, 2), (8, 7)]:
        context = blocks * block
        if onward:
            runs = decoding([context - 1] * sequences)
        else:  # the mean of positions 0..2c-2 is c
            runs = (
                [prompt(0, 2 * context - 1)] if sequences == 1 else [prompt(context - 40, 79), prompt(context - 20, 39)]
            )
        p = made(next(number), runs)
        work.begin(p, onward, plan)
        work.end(p)
        found = declared(plan, p.rows, len(runs), context, onward)
        want = [want[0] + found[0], want[1] + found[1]]
    (total,) = work.totals().values()
    assert total.flops == pytest.approx(want[1], rel=1e-9)
    assert total.nbytes == pytest.approx(want[0], rel=1e-9 if onward else 0.02)  # windows of prompts are rounded up
