"""Attention designs compute exactly the visible key tiles: counted in the interpreter against the positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.kernels.npu.artefact import fabric_digest
from hybrid.kernels.npu.attend import fitted, headers, plan, rounded, shape_of
from hybrid.kernels.npu.check import check
from hybrid.kernels.npu.design import DTYPES, Design, Element, Loop, Move
from hybrid.kernels.npu.designs import flash_attention, shipped
from hybrid.kernels.npu.designs.attention import CORES, Attention
from hybrid.kernels.npu.interpreter import Counts, Deadlock, Interpreter, NpuFault
from hybrid.kernels.npu.lower import Lowered, lower
from hybrid.kernels.npu.objects import on_this_computer
from hybrid.kernels.npu.ops import OPS
from hybrid.kernels.npu.resident import in_pages
from hybrid.kernels.npu.views import KeyViews
from hybrid.kernels.npu.xrt import Job
from hybrid.kernels.oracle import ORACLE
from hybrid.perf.npu.attention import work
from hybrid.perf.npu.cycles import rates

SCORES = {"attention": "attention_stream_tile", "attention_i8": "attention_i8_stream_tile"}


class Direct:
    """Runs jobs in the interpreter, without a host, and keeps the counts. `change`: of each design."""

    def __init__(self, change: Callable[[Design], Design | Lowered] = lambda design: design) -> None:
        self.change = change
        self.counts: list[Counts] = []
        self.views = KeyViews(in_pages)
        self.designs: list[Design] = []

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            memory = {n: job.input(n) for n in job.inputs}
            memory |= {n: np.empty(a.size, DTYPES[a.dtype]) for n, a in job.design.arguments if n in job.outputs}
            self.counts.append(Interpreter(self.change(job.design), on_this_computer(job.design)).run(memory))
            for name in job.outputs:
                job.deliver(name, memory[name])
            self.designs.append(job.design)


def inputs(rows: int, start: int, heads: int, kv_heads: int, d: int, window: int, block: int = 16) -> dict[str, Any]:
    """One sequence whose last `rows` positions begin at `start`."""
    rng = np.random.default_rng(rows + start + window)
    blocks = -(-(start + rows) // block)
    k, v = (rng.normal(size=(blocks, block, kv_heads, d)).astype(np.float32) for _ in "kv")
    return {
        "q": rng.normal(size=(rows, heads * d)).astype(np.float32),
        "k_cache": k,
        "v_cache": v,
        "block_table": rng.permutation(blocks)[None].astype(np.int32),
        "slots": np.zeros(rows, np.int32),
        "positions": np.arange(start, start + rows, dtype=np.int32),
        "scale": d**-0.5,
        "window": window,
    }


def visible(positions: np.ndarray, window: int, lk: int, most: int) -> int:
    """Key tiles with a position that some row of their query tile sees, position by position."""
    count = 0
    for i in range(0, len(positions), most):
        keys = {k for p in positions[i : i + most] for k in range(max(0, p - window + 1) if window else 0, p + 1)}
        count += len({k // lk for k in keys})
    return count


@pytest.mark.parametrize("op", SCORES)
@pytest.mark.parametrize(
    ("rows", "start", "window"), [(128, 0, 0), (70, 45, 0), (130, 200, 40), (1, 300, 0), (1, 300, 33)]
)
@pytest.mark.slow
def test_only_visible_key_tiles_are_computed(op: str, rows: int, start: int, window: int) -> None:
    args, npu = inputs(rows, start, 2, 2, 16, window), Direct()
    (got,) = OPS[op](npu, **args)
    (wanted,) = ORACLE[op](**args)
    assert np.abs(got - wanted).max() < 0.05
    a = shape_of(2, 1, 16, "bf16" if op == "attention" else "i8")
    assert npu.counts[0].calls[SCORES[op]] == 2 * visible(args["positions"], window, a.LK, a.LQ)
    assert npu.counts[0].calls[SCORES[op]] == work(2, 1, 16, rows, start, window, a.scores, rates()).tiles


@pytest.mark.parametrize("op", SCORES)
def test_three_heads_run_on_three_columns(op: str) -> None:
    args, npu = inputs(40, 5, 6, 3, 16, 0), Direct()
    (got,) = OPS[op](npu, **args)
    assert npu.designs[0].columns == 3 and np.abs(got - ORACLE[op](**args)[0]).max() < 0.05


def _loops(design: Design, change: Callable[[Loop], Loop | None]) -> Design:
    core = design.cores[0]
    body = tuple(made for s in core.body if (made := change(s) if isinstance(s, Loop) else s) is not None)
    return replace(design, cores=(replace(core, body=body),))


def _counted(exchange: dict[int, int]) -> Callable[[Design], Design]:
    def change(loop: Loop) -> Loop:
        assert isinstance(loop.count, Element)
        return replace(loop, count=Element("bounds", exchange.get(loop.count.index, loop.count.index)))

    return lambda design: _loops(design, change)


def _moved(fifo: str, objects: int) -> Callable[[Design], Design]:
    """The tasks that feed a fifo begin some objects later; the last of them ends at the same place."""

    def change(design: Design) -> Design:
        step = objects * design.fifo(fifo).array.size
        most = design.argument("kv").size
        return replace(
            design,
            sequence=tuple(
                replace(s, offset=min(s.offset + step, most - s.size)) if isinstance(s, Move) and s.fifo == fifo else s
                for s in design.sequence
            ),
        )

    return change


def _dealt(design: Design) -> Design:
    """Two cores swap their queries, and write their results to the original places."""
    names = {"q0_0": "q0_1", "q0_1": "q0_0"}
    exchanged = (tuple((f, replace(b, name=names.get(b.name, b.name))) for f, b in w.binds) for w in design.workers)
    return replace(design, workers=tuple(replace(w, binds=b) for w, b in zip(design.workers, exchanged, strict=True)))


def _early(design: Design) -> Lowered:
    """A lock is released before its tile of keys has arrived."""
    low = lower(design)
    low.locks["kv0@0.2.full"] = replace(low.locks["kv0@0.2.full"], init=1)
    return low


MUTATIONS: dict[str, Callable[[Design], Design | Lowered]] = {
    "tiles before and tiles seen exchanged": _counted({0: 1, 1: 0}),
    "tiles after taken for tiles seen": _counted({1: 2, 2: 1}),
    "tiles before not let pass": lambda d: _loops(d, lambda s: None if s.count == Element("bounds", 0) else s),
    "a span that begins one tile late": _moved("kv_in0", 2),
    "queries exchanged between cores": _dealt,
    "a lock's count": _early,
}


@pytest.mark.parametrize("op", SCORES)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_of_the_data_flow_is_seen(name: str, op: str) -> None:
    args = inputs(130, 200, 2, 2, 16, 40)
    (sound,) = OPS[op](Direct(), **args)
    try:
        (got,) = OPS[op](Direct(MUTATIONS[name]), **args)
    except (Deadlock, NpuFault):
        return
    assert not np.array_equal(got, sound), f"{name}: the result is unchanged"


def test_causal_prefill_computes_half_the_square() -> None:
    """128 rows in four query tiles over four key tiles: 1 + 2 + 3 + 4 of 16 for each head."""
    npu = Direct()
    OPS["attention"](npu, **inputs(128, 0, 2, 2, 16, 0))
    assert npu.counts[0].calls["attention_stream_tile"] == 2 * 10


def test_hidden_key_tiles_are_not_sent_either() -> None:
    """No tile left of a window is sent, and at most a power of two of key tiles; to a prompt's first rows, none after
    them."""
    npu = Direct()
    OPS["attention"](npu, **inputs(256, 1000, 2, 2, 16, 64))
    design, counts = npu.designs[0], npu.counts[0]
    facts = design.facts
    query, key = facts["LQ"] * 16 * 2 + 64, facts["LK"] * 16 * 4
    assert (facts["tiles"], facts["blocks"]) == (64, 2)  # space for 1264 positions, which is all of the table
    for sent, read in (
        (2 * 16, counts.ddr_read),
        (4 + 8, _first_rows(npu)),
    ):  # tiles 29 to 39 are 11; 128 rows a block, 4 tiles
        assert read == 2 * (facts["blocks"] * CORES * query + sent * key)


def _first_rows(npu: Direct) -> int:
    """Bytes that a prompt's first 256 rows read."""
    OPS["attention"](npu, **inputs(256, 0, 2, 2, 16, 64))
    return npu.counts[-1].ddr_read


@given(
    starts=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    length=st.integers(1, 90),
    window=st.sampled_from([0, 1, 7, 64, 300]),
    group=st.sampled_from([1, 2, 4]),
    d=st.sampled_from([16, 128, 256]),
)
def test_a_plan_covers_what_is_seen(starts: list[int], length: int, window: int, group: int, d: int) -> None:
    """For any rows of a sequence: each query tile's range is exactly what its rows see, each block's span contains the
    ranges of its four tiles, and the three numbers appended to a query tile add up to the sent tiles."""
    positions = np.unique(np.concatenate([np.arange(s, s + length) for s in starts]))
    shape = shape_of(2, group, d)
    p = plan(np.arange(len(positions)), positions, window, shape)
    a = fitted(shape, p)
    assert np.array_equal(np.concatenate(p.runs), np.arange(len(positions)))
    header = headers(p, a, positions, int(positions.max()) + 1, window)
    for i, words in enumerate(header):
        begin, count = a.span(i // CORES)
        assert words[3:6].min() >= 0 and words[3:6].sum() == count
        if i >= len(p.runs):
            assert words[4] == 0
            continue
        rows = positions[p.runs[i]]
        keys = range(max(0, rows[0] - window + 1) if window else 0, rows[-1] + 1)
        seen = sorted({k // a.LK for k in keys})
        assert words[6] == seen[0] * a.LK and words[4] == len(seen) and words[3] == seen[0] - p.base - begin
    flash_attention(a)


def test_spans_take_few_lengths() -> None:
    """An instruction stream for each: a power of two, from 8 on."""
    found = [rounded(n) for n in range(1, 1025)]
    assert all(n <= r < max(2 * n, 9) for n, r in enumerate(found, 1)) and len(set(found)) == 8


def test_one_fabric_serves_every_length_and_position() -> None:
    shape = shape_of(4, 2, 64)
    longer = replace(shape, blocks=3, tiles=40, spans=((0, 3), (1, 12), (20, 20)))
    assert fabric_digest(flash_attention(shape)) == fabric_digest(flash_attention(longer))
    for wrong in ({"spans": ((0, 3),)}, {"spans": ((0, 3), (1, 12), (21, 20))}, {"spans": ((0, 3), (1, 0), (20, 20))}):
        with pytest.raises(ValueError):
            replace(longer, **wrong)


def run(design: Design, a: Attention, words: Sequence[int]) -> Counts:
    """Run the design on zeros, every query tile with the same header."""
    memory = {n: np.zeros(x.size, DTYPES[x.dtype]) for n, x in design.arguments}
    tiles = memory["q"].view(np.uint8).reshape(-1, a.query_bytes)
    tiles[:, -64:].view(np.int32)[:, :7] = words
    return Interpreter(design, on_this_computer(design)).run(memory)


@pytest.mark.parametrize("name", ["small.attention", "small.attention.i8"])
def test_loops_count_to_the_numbers_after_the_queries(name: str) -> None:
    design = shipped()[name]()
    a = Attention(2, 1, 2, 32, 32, 32, 2, 2, "i8" if name.endswith("i8") else "bf16")
    kernel = SCORES["attention_i8" if name.endswith("i8") else "attention"]
    for before, seen, after in ((0, 2, 0), (1, 1, 0), (0, 1, 1), (2, 0, 0)):
        counts = run(design, a, (0, 64, 0, before, seen, after, 32 * before))
        assert counts.calls.get(kernel, 0) == a.heads * CORES * seen
    with pytest.raises(NpuFault, match=r"counts to element 1 of bounds, which is -1"):
        run(design, a, (0, 64, 0, 0, -1, 3, 0))
    with pytest.raises(Deadlock, match="kv"):
        run(design, a, (0, 64, 0, 0, 3, 0, 0))  # more than are sent
    with pytest.raises(NpuFault, match=r"kv.* stay behind"):
        run(design, a, (0, 64, 0, 0, 1, 0, 0))  # fewer


def test_a_loop_counts_to_an_element_of_an_i32_buffer() -> None:
    design = shipped()["small.attention"]()
    core = design.cores[0]
    for wrong in (Element("bounds", 8), Element("o", 0), Element("kv", 0), Element("nothing", 0)):
        body = tuple(replace(s, count=wrong) if isinstance(s, Loop) else s for s in core.body)
        texts = [v.text for v in check(replace(design, cores=(replace(core, body=body),))).violations]
        assert any("counts to" in t for t in texts), (wrong, texts)
