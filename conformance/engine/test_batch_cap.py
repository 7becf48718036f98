"""Sequences sit out steps where pass time grows in jumps (scheduler.BatchCap)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

import hybrid
from conformance.support.devices import for_model
from conformance.support.fake_runner import Loop, Uneven
from conformance.support.models import BOTH, cut
from conformance.support.paths import DEMO
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.blocks import Group
from hybrid.engine.scheduler import OFTEN, RARELY, SOON, TRY, BatchCap, Limits
from hybrid.planning.passes import buckets

H100 = {
    1: 6.7e-3,
    2: 7.9e-3,
    4: 9.1e-3,
    8: 9.3e-3,
    16: 10.0e-3,
    24: 11.0e-3,
    32: 11.85e-3,
    40: 13.5e-3,
    48: 15.1e-3,
    64: 17.9e-3,
    96: 26.2e-3,
    128: 29.3e-3,
}
"""Seconds of a 27B pass by its plan's rows."""
SIZES = tuple(H100)


def by_plan(rows: int) -> float:
    return H100[next(size for size in SIZES if rows <= size)]


def next_rows(cap: BatchCap, n: int) -> int:
    fewer = cap.fewer(n)
    return fewer if fewer and cap.pays(n) else n


def rate(
    n: int, cost: Callable[[int], float] = by_plan, passes: int = 2000, slots: int = 128
) -> tuple[float, list[int]]:
    """Tokens a second of n sequences, and the rows of each pass."""
    cap, seconds, rows = BatchCap(buckets(slots, SIZES), SIZES), 0.0, list[int]()
    for i in range(passes):
        rows.append(next_rows(cap, n))
        seconds += (took := cost(rows[-1]))
        cap.took(rows[-1], 20 * took if i % 50 == 7 else took)  # sometimes the host was busy elsewhere
    return sum(rows) / seconds, rows


def test_more_sequences_never_decode_fewer_tokens() -> None:
    rates = [rate(n)[0] for n in range(1, 129)]
    for n in range(2, 129):
        assert rates[n - 1] > 0.975 * max(rates[: n - 1]), n
    assert rates[32] > 1.07 * 33 / by_plan(33) and rates[64] > 1.35 * 65 / by_plan(65)


@pytest.mark.parametrize("slots", [33, 41, 65])
def test_a_slot_count_just_above_a_size_is_capped(slots: int) -> None:
    """Plans exist for so many rows, too, and cost as much as the next larger size."""
    assert rate(slots, slots=slots)[0] > 0.98 * rate(slots)[0] > 1.04 * slots / by_plan(slots)


@pytest.mark.parametrize("n", [3, 8, 9, 31, 32, 40, 47, 128])
def test_all_sequences_run_where_that_is_fastest(n: int) -> None:
    assert rate(n)[1].count(n) >= 2000 - 4 * TRY, "tries become rarer"


def test_a_cap_is_tried_again_as_times_change() -> None:
    """Attention of long sequences costs by their number, so that a lower cap no longer pays."""
    cap, rows = BatchCap(SIZES, SIZES), list[int]()
    for i in range(RARELY):
        rows.append(next_rows(cap, 33))
        cap.took(rows[-1], by_plan(rows[-1]) + (4e-3 * rows[-1] if OFTEN < i <= RARELY // 2 else 0.0))
    long = rows[2 * OFTEN : RARELY // 2]
    assert set(rows[SOON + TRY + 3 : SOON + OFTEN // 2]) == {32} and long.count(33) > 0.98 * len(long)
    assert rows[RARELY // 2 + 3 * SOON :][:OFTEN].count(32) >= OFTEN - TRY, "soon: pass times have changed"


def test_tries_that_change_nothing_become_rare() -> None:
    rows = rate(33, lambda n: n * 1e-3, passes=3 * RARELY)[1]
    tries = [i for i in range(1, len(rows)) if rows[i] == 32 and rows[i - 1] == 33]
    assert [b - a for a, b in pairwise(tries)][:5] == [OFTEN, 512, 1024, 2048, RARELY], tries


@pytest.mark.parametrize("n", [1, 8, 129])
def test_a_single_size_has_no_cap(n: int) -> None:
    cap = BatchCap(SIZES, SIZES)
    assert {next_rows(cap, n) for _ in range(200)} == {n}


# --- in a scheduler --------------------------------------------------------------------------------------------------


class Three(BatchCap):
    def fewer(self, n: int) -> int:
        return 3 if n > 3 else 0

    def pays(self, n: int) -> bool:
        return True


def loop(cap: BatchCap, slots: int = 5) -> Loop:
    return Loop([Group("global", 80), Group("local", 80, 9)], 4, Limits(slots, 60, 40), cap=cap)


def test_every_sequence_runs_and_gets_its_own_text() -> None:
    made = loop(Three((1,), ()))
    streams = [made.add(range(3, 3 + n), 24) for n in (4, 5, 6, 7, 8)]
    while any(s.rest > 1 or s.slot is None for s in streams):
        made.step()
    passes = made.steps(18)
    rows = Counter(run.seq for done in passes for run in done.runs)
    assert all(len(done.runs) == 3 for done in passes) and rows[streams[0]] == 18, (
        "the first in order runs in every pass"
    )
    assert max(rows[s] for s in streams[1:]) - min(rows[s] for s in streams[1:]) <= 1
    made.drain()
    assert made.right(*streams)


def test_the_first_by_priority_never_sits_out() -> None:
    made = loop(Three((1,), ()))
    first = made.add([1, 2], 20, priority=1)
    others = [made.add([n, 3], 30) for n in range(4)]
    made.steps(3)
    passes = made.steps(10)
    assert all(any(run.seq is first for run in done.runs) for done in passes) and {
        len(done.runs) for done in passes
    } == {3}
    second = [made.add([9, 9, n], 30, priority=2) for n in range(2)]
    made.drain()
    assert made.right(first, *others, *second)


@pytest.mark.parametrize("low", [1, 2, 3])
def test_no_sequence_sits_out_more_than_every_second_pass(low: int) -> None:
    """However many of a higher priority there are."""
    made = loop(Three((1,), ()))
    streams = [made.add([n], 30, priority=int(n >= low)) for n in range(5)]
    made.steps(5)
    passes = made.steps(12)
    for stream in streams:
        ran = [any(run.seq is stream for run in done.runs) for done in passes]
        assert all(a or b for a, b in pairwise(ran)), "twice in a row"
    made.drain()
    assert made.right(*streams)


def test_trials_are_for_passes_in_which_a_sequence_may_sit_out() -> None:
    made = loop(cap := BatchCap((1, 4, 5), (1, 4)))
    for n in range(5):
        made.add([n], 40, ahead=n != 2)
    made.steps(30)
    assert cap._pairs[2].left == SOON


def test_no_sequence_sits_out_beside_prompts_or_host_sampling() -> None:
    made = loop(Three((1,), ()))
    some = [made.add([n], 40) for n in range(5)]
    made.steps(3)
    waiting = made.add([5, 6], 20)
    assert all(len(done.runs) == 5 for done in made.steps(5)), "a request waits"
    made.scheduler.cancel(waiting)
    assert {len(done.runs) for done in made.steps(4)} == {3}
    some[1].ahead = some[1].steady = False
    made.steps(2)
    assert max(len(done.runs) for done in made.steps(4)) == 5
    made.drain()
    assert made.right(*some)


def test_a_varying_batch_cap_gives_the_same_texts() -> None:
    made = loop(Uneven())
    streams = [made.add(range(n + 1), 7 * n + 3) for n in range(5)]
    made.drain()
    assert made.right(*streams)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_sequences_that_sat_out_continue_on_a_device(backend: str) -> None:
    prompts = ["def read_file(path):", "class Stack:", "import os", "return", "def __init__(self"]
    with hybrid.load(cut(open_checkpoint(DEMO), BOTH), for_model(backend), ctx=64, slots=5, precision="exact") as model:
        alone = ["".join(model.generate(prompt, max_tokens=16)) for prompt in prompts]
        model.engine.scheduler.cap = cap = Uneven()
        assert model.generate_batch(prompts, max_tokens=16) == alone
        assert cap.rested > 2, "passes with sequences that sat out"
