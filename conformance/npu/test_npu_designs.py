"""Run designs: every kind in the interpreter against NumPy; depth, locks and bounds as on the hardware; IRON source
that parses back to the design; and mutations that must all be detected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support.profile import LONG
from hybrid.kernels.npu.catalogue import AIE
from hybrid.kernels.npu.check import check
from hybrid.kernels.npu.design import DTYPES, Call, Design, Finish, Loop, Move, Release
from hybrid.kernels.npu.designs import gemm_blocks, gemm_i8, shipped
from hybrid.kernels.npu.designs.attention import Attention
from hybrid.kernels.npu.designs.gemm import Gemm
from hybrid.kernels.npu.designs.rmsnorm import Norm
from hybrid.kernels.npu.emitter import emit
from hybrid.kernels.npu.emitter import main as emitter_main
from hybrid.kernels.npu.interpreter import Deadlock, Interpreter, NpuFault
from hybrid.kernels.npu.iron import check_program
from hybrid.kernels.npu.lower import Descriptor, Lowered, lower
from hybrid.kernels.npu.objects import on_this_computer
from hybrid.kernels.npu.ops import choose
from hybrid.kernels.npu.reader import read
from hybrid.kernels.npu.tiles import tile_weights
from hybrid.spec import SpecError

G = Gemm(128, 64, 64, 16, 32, 16, 2)  # two row blocks, two blocks of columns, two steps over K


def codes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


def product(g: Gemm, design: Design | Lowered, sources: dict[str, Path] | None = None) -> np.ndarray:
    """The design's result for fixed matrices."""
    a, w = codes(1, g.M, g.K), codes(2, g.N, g.K)
    plain = design.design if isinstance(design, Lowered) else design
    c = np.full(g.M * g.N, -1, DTYPES[plain.argument("C").dtype])
    Interpreter(design, on_this_computer(plain, sources)).run({"A": a.reshape(-1), "B": tile_weights(w, g), "C": c})
    return c.reshape(g.M, g.N)


def wanted(g: Gemm) -> np.ndarray:
    return codes(1, g.M, g.K).astype(np.int64) @ codes(2, g.N, g.K).astype(np.int64).T


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_a_product_is_exact_on_any_number_of_columns(columns: int) -> None:
    g = replace(G, columns=columns, N=32 * columns)
    assert (product(g, gemm_i8(g)) == wanted(g)).all()


def test_rows_that_go_out_more_often_than_a_task_repeats() -> None:
    """200 blocks of columns on one column: a row block is sent in four tasks, as many as a channel's queue holds."""
    g = Gemm(128, 32, 200 * 16, 16, 32, 16, 1)
    design = gemm_i8(g)
    assert [m.sizes[0] for m in design.moves() if m.fifo == "a_in0"] == 2 * [64, 64, 64, 8] and check(
        design
    ).violations == []
    assert (product(g, design) == wanted(g)).all()
    with pytest.raises(ValueError, match="300 times, in 5 tasks of 64 at most, and a shim channel holds 4"):
        gemm_i8(replace(g, N=300 * 16))


@pytest.mark.slow
def test_rows_that_a_mem_tile_sends_again() -> None:
    """66 blocks of columns on four columns: the mem tile holds a row block and sends it 33 times for each of two."""
    g = Gemm(128, 64, 66 * 64, 16, 32, 16, 4)
    design = gemm_i8(g)
    assert g.repeat == 33 and [m.sizes[0] for m in design.moves() if m.fifo == "a_in0"] == [2, 2]
    assert check(design).violations == []
    c = np.zeros(g.M * g.N, np.int32)
    memory = {"A": codes(1, g.M, g.K).reshape(-1), "B": tile_weights(codes(2, g.N, g.K), g), "C": c}
    counts = Interpreter(design, on_this_computer(design)).run(memory)
    assert (c.reshape(g.M, g.N) == wanted(g)).all() and counts.ddr_read == 2 * g.M * g.K + 2 * g.K * g.N
    with pytest.raises(Deadlock, match=r"b1|a1"):  # sent too seldom: B and C wait
        product(g, with_fifo(design, "a1", repeat=11))


@pytest.mark.parametrize(
    "name", [f"{m}.gate_up.{w}" for m in ("27b", "e2b", "4b", "12b") for w in ("i8", "q4_0", "q8_0")]
)
def test_the_largest_matrices_keep_repeats_and_queues(name: str) -> None:
    """Every model's gate_up at 512 rows, with the design that the operations select: one task of a row block, at most
    four at once."""
    model, _, kind = name.split(".")
    hidden, ffn = {"27b": (5376, 21504), "12b": (3840, 15360), "4b": (2560, 10240), "e2b": (2048, 8192)}[model]
    g = choose(512, hidden, 2 * ffn, kind, "i32" if kind == "i8" else "f32")  # type: ignore[arg-type]
    report = check((gemm_i8 if kind == "i8" else gemm_blocks)(g))
    shim = [u for u in report.uses if u.tile.kind == "shim"]
    assert report.violations == [] and len(g.tasks) == 1 and sum(g.tasks) * g.repeat == g.across
    assert max(u.queued for u in shim) <= 4 and max(u.repeats for u in shim) <= 64


def test_results_are_requantised_with_ties_to_even() -> None:
    g = replace(G, out="i8", shift=10)
    assert (product(g, gemm_i8(g)) == np.clip(np.rint(wanted(g) / 2.0**10), -128, 127)).all()


def test_a_fabric_keeps_its_state_between_runs() -> None:
    """Rings and locks keep their state between runs; another sequence of the same fabric runs other sizes."""
    small, large = replace(G, M=64), replace(G, M=192)
    fabric = Interpreter(gemm_i8(small), on_this_computer(gemm_i8(small)))
    w = tile_weights(codes(2, G.N, G.K), G)
    for g in (small, large, small):
        a, c = codes(1, g.M, g.K), np.zeros(g.M * g.N, np.int32)
        fabric.run({"A": a.reshape(-1), "B": w, "C": c}, gemm_i8(g).sequence)
        assert (c.reshape(g.M, g.N) == wanted(g)).all()


def test_nothing_depends_on_what_memory_held() -> None:
    design = gemm_i8(G)
    results = []
    for poison in (0xA5, 0x3C):
        c = np.zeros(G.M * G.N, np.int32)
        memory = {"A": codes(1, G.M, G.K).reshape(-1), "B": tile_weights(codes(2, G.N, G.K), G), "C": c}
        Interpreter(design, on_this_computer(design), poison).run(memory)
        results.append(c)
    assert (results[0] == results[1]).all()


def test_transfers_are_counted() -> None:
    design = gemm_i8(G)
    memory = {
        "A": codes(1, G.M, G.K).reshape(-1),
        "B": tile_weights(codes(2, G.N, G.K), G),
        "C": np.zeros(G.M * G.N, np.int32),
    }
    counts = Interpreter(design, on_this_computer(design)).run(memory)
    blocks, across = G.M // (4 * G.m), G.N // (2 * G.n)
    assert counts.ddr_written == 4 * G.M * G.N
    assert counts.ddr_read == across * G.M * G.K + blocks * G.K * G.N
    assert counts.calls["gemm_i8"] == G.M // G.m * (G.N // G.n) * (G.K // G.k)


# --- deadlock and faults


def with_fifo(design: Design, name: str, **changes: Any) -> Design:
    return replace(design, fifos=tuple(replace(f, **changes) if f.name == name else f for f in design.fifos))


def test_a_depth_too_small_deadlocks() -> None:
    """Attention takes keys and values together: a fifo of one object never holds both. The check and a run both report
    it."""
    design = shipped()["small.attention"]()
    shallow = design
    for col in range(design.columns):
        shallow = with_fifo(shallow, f"kv{col}", depth=1)
    assert any("waits for itself" in v.text for v in check(shallow).violations)
    memory = {n: np.zeros(a.size, DTYPES[a.dtype]) for n, a in design.arguments}
    memory["q"].reshape(-1, design.fifo("q0_0").array.size)[:, -32:].view(np.int32)[:, 4] = (
        2  # both key tiles are visible
    )
    with pytest.raises(Deadlock, match="kv0"):
        Interpreter(shallow, on_this_computer(design)).run(memory)


def test_a_run_that_waits_for_what_is_never_sent_deadlocks() -> None:
    design = gemm_i8(G)
    steps = [s for s in design.sequence if not (isinstance(s, Move) and s.fifo == "b_in1")]
    design = replace(design, sequence=(*steps, replace(next(m for m in design.moves() if m.fifo == "b_in1"), group=99)))
    with pytest.raises(Deadlock, match=r"b_in1|runtime sequence"):
        product(G, design)


def test_a_push_on_a_full_queue_is_dropped_and_the_run_hangs() -> None:
    """Five row blocks started at once: the check refuses it, and in the interpreter the fifth task never runs."""
    g = replace(G, M=5 * 64)
    design = gemm_i8(g)
    at_once = replace(design, sequence=(*(replace(m, group=0) for m in design.moves()), Finish(0)))
    assert {v.limit for v in check(at_once).violations} == {"shim.queue"}
    with pytest.raises(Deadlock, match=r"a fill of a_in0 was dropped: MM2S \d of shim tile \(0, 0\) held 4 tasks"):
        product(g, at_once)
    assert (product(g, design) == wanted(g)).all()


def test_a_task_that_repeats_too_often_is_a_fault() -> None:
    g = Gemm(64, 32, 65 * 16, 16, 32, 16, 1)
    design = gemm_i8(g)
    first, second = [m for m in design.moves() if m.fifo == "a_in0"]
    steps = tuple(
        replace(s, sizes=(65, *first.sizes[1:])) if s is first else s for s in design.sequence if s is not second
    )
    design = replace(design, sequence=steps)
    assert [v.limit for v in check(design).violations] == ["repeat"]
    with pytest.raises(NpuFault, match="a fill of a_in0 is repeated 65 times, of 64 at most"):
        product(g, design)


def test_a_kernel_that_writes_past_its_buffer_is_caught() -> None:
    def spill(c: np.ndarray) -> None:
        at = np.lib.stride_tricks.as_strided(c, (c.size + 1,), c.strides)
        at[...] = 0

    design = gemm_i8(G)
    kernels = {**on_this_computer(design), "gemm_i8_zero": spill}
    with pytest.raises(NpuFault, match="outside"):
        Interpreter(design, kernels).run({n: np.zeros(a.size, DTYPES[a.dtype]) for n, a in design.arguments})


def test_a_transfer_outside_of_its_argument_is_caught() -> None:
    design = gemm_i8(G)
    steps = tuple(
        replace(s, offset=s.offset + 64) if isinstance(s, Move) and s.fifo == "a_in1" else s for s in design.sequence
    )
    with pytest.raises(NpuFault, match="reaches element"):
        product(G, replace(design, sequence=steps))


# --- mutations: each must change the result, or be refused


def _descriptors(low: Lowered, fifo: str, **changes: Any) -> Lowered:
    for i, channel in enumerate(low.channels):
        if channel.fifo == fifo and channel.outward:
            ring = tuple(replace(bd, **changes) if isinstance(bd, Descriptor) else bd for bd in channel.ring)
            low.channels[i] = replace(channel, ring=ring)
    return low


def _stride(design: Design) -> Design:
    dims = design.fifo("a1").to_stream
    return with_fifo(design, "a1", to_stream=(dims[1], dims[0], *dims[2:]))


def _shim_stride(design: Design) -> Design:
    steps = tuple(
        replace(s, strides=(*s.strides[:2], s.strides[2] + 4, s.strides[3]))
        if isinstance(s, Move) and s.fifo == "c_out0"
        else s
        for s in design.sequence
    )
    return replace(design, sequence=steps)


def _lock(design: Design) -> Lowered:
    low = lower(design)
    lock = low.locks["c0_0@0.2.full"]
    low.locks["c0_0@0.2.full"] = replace(lock, init=1)  # a result is sent before it is computed
    return low


def _sync(design: Design) -> Design:
    """The core releases C before the second step over K."""
    core = design.cores[0]
    body = tuple(replace(s, count=1) if isinstance(s, Loop) else s for s in core.body)
    return replace(design, cores=(replace(core, body=body),))


def _swap(design: Design) -> Design:
    """Rows 0 and 1 of cores swap their A."""

    def swapped(w: Any) -> Any:
        names = {"a0": "a1", "a1": "a0"}
        return replace(w, binds=tuple((f, replace(b, name=names.get(b.name, b.name))) for f, b in w.binds))

    return replace(design, workers=tuple(map(swapped, design.workers)))


def _order(design: Design) -> Design:
    core = design.cores[0]
    body = tuple(
        replace(
            s,
            body=tuple(replace(c, args=("b_tile", "a_tile", c.args[2])) if isinstance(c, Call) else c for c in s.body),
        )
        if isinstance(s, Loop)
        else s
        for s in core.body
    )
    return replace(design, cores=(replace(core, body=body),))


def _never_zeroed(design: Design) -> Design:
    core = design.cores[0]
    return replace(
        design,
        cores=(replace(core, body=tuple(s for s in core.body if not (isinstance(s, Call) and s.kernel == "zero"))),),
    )


def _dropped_release(design: Design) -> Design:
    core = design.cores[0]
    body = tuple(
        replace(s, body=tuple(c for c in s.body if not (isinstance(c, Release) and c.port == "a")))
        if isinstance(s, Loop)
        else s
        for s in core.body
    )
    return replace(design, cores=(replace(core, body=body),))


MUTATIONS: dict[str, Callable[[Design], Design | Lowered]] = {
    "a stride of the mem tile": _stride,
    "a stride of the shim tile": _shim_stride,
    "a lock's count": _lock,
    "a dropped sync": _sync,
    "a swapped fifo": _swap,
    "operands exchanged": _order,
    "C never zeroed": _never_zeroed,
    "a release dropped": _dropped_release,
    "an offset of a link": lambda d: replace(
        d, links=tuple(replace(x, offsets=(0, *x.offsets[:-1])) if x.whole == "c_out0" else x for x in d.links)
    ),
    "the order of one ring": lambda d: _descriptors(lower(d), "b0", dims=((2, 8), (32, 16), (8, 1))),
    "a drain that is not waited for": lambda d: replace(
        d,
        sequence=tuple(replace(s, wait=False) if isinstance(s, Move) and s.fifo == "c_out1" else s for s in d.sequence),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_of_a_design_is_seen(name: str) -> None:
    """A changed design gives another result, or deadlocks, or faults."""
    try:
        result = product(G, MUTATIONS[name](gemm_i8(G)))
    except (Deadlock, NpuFault, TypeError, ValueError):
        return
    assert not (result == wanted(G)).all(), f"{name}: the result is unchanged"


@pytest.mark.slow
def test_a_wrong_entry_of_the_exponential_table_is_seen(tmp_path: Path) -> None:
    """The tile kernel with one value of 2^f changed gives another attention; the shipped one, run the same way, does
    not."""
    from conformance.support.devices import open_backend
    from hybrid.harness import run_case
    from hybrid.harness.fixed import variant
    from hybrid.harness.sizes import base_bind
    from hybrid.kernels.npu import ops, xrt_sim
    from hybrid.spec import load_op

    spec = load_op("attention")
    case = variant(
        spec, {**base_bind(spec), "T": 9, "D": 32, "HQ": 2, "HK": 2}, spec.dtypes({"k_cache": "f32", "o": "f32"}), 3
    )
    run_case(spec, open_backend("npu", guard=256), case)
    table = (AIE / "exp2_table.h").read_text()
    assert table.count("return power < -126 ? 0 : (power + 127) << 7;") == 1
    (tmp_path / "exp2_table.h").write_text(table.replace("(power + 127) << 7", "(power + 127 + (power == -1)) << 7"))
    for file in ("softmax.h", "split.h"):
        (tmp_path / file).write_text((AIE / file).read_text())
    (tmp_path / "attention.cc").write_text((AIE / "attention.cc").read_text())
    source = tmp_path / "attention_stream.cc"
    source.write_text((AIE / "attention_stream.cc").read_text())
    sources = {f"attention_stream_{part}": source for part in ("start", "tile", "finish")}
    shipped_kernels = xrt_sim.on_this_computer
    xrt_sim.on_this_computer = lambda design: shipped_kernels(design, sources)  # type: ignore[assignment]
    try:
        with pytest.raises(AssertionError):
            run_case(spec, open_backend("npu", guard=256), case)
    finally:
        xrt_sim.on_this_computer = shipped_kernels
        assert ops.OPS


# --- IRON source


def _sorted(design: Design) -> Design:
    """Fifos have no order: a link's parts are written at the link."""
    return replace(design, fifos=tuple(sorted(design.fifos, key=lambda f: f.name)))


@pytest.mark.parametrize("name", list(shipped())[:: 1 if LONG else 2])
def test_emitted_programs_read_back_as_the_design(name: str) -> None:
    """27B and E2B shapes among them: every call exists in the release, and the text equals the data. In the short
    profile every second design."""
    design = shipped()[name]()
    source = emit(design)
    assert check_program(source) > 3 * len(design.workers)
    assert _sorted(read(source)) == _sorted(design)


def test_a_changed_program_reads_back_as_another_design() -> None:
    source = emit(gemm_i8(G))
    for was, becomes in (
        ("depths=[2]", "depths=[1]"),
        ("(4, 8)", "(8, 4)"),
        ("stack_size=3392", "stack_size=2048"),
        ("prod(tile=Tile(0, 0))", "prod(tile=Tile(1, 0))"),
        ("range_(2)", "range_(3)"),
    ):
        assert was in source and _sorted(read(source.replace(was, becomes, 1))) != _sorted(gemm_i8(G))


def test_the_emitter_prints_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert emitter_main(["27b.down.i8"]) == 0
    printed = capsys.readouterr().out
    assert "Program(NPU1(), rt, workers=[worker_0_2, " in printed and printed.endswith(".resolve_program())\n")
    for gone in ("placement", "placers", "rt.fill", "rt.drain", "rt.start", "task_group"):  # removed in 1.4.0
        assert gone not in printed
    assert emitter_main(["nothing"]) == 1


def test_sizes_that_fit_no_tile_are_refused() -> None:
    for change in ({"M": 100}, {"K": 33}, {"N": 33}, {"columns": 3}, {"m": 12}, {"weights": "q4_0", "k": 16}):
        with pytest.raises(ValueError):
            replace(G, **change)
    with pytest.raises(ValueError):
        Norm(15, 64)
    with pytest.raises(ValueError):
        Attention(3, 1, 1, 64, columns=4)
    with pytest.raises(SpecError, match="no NPU kernel"):
        from hybrid.kernels.npu.objects import tile_kernel

        tile_kernel("gemm_i9")


def test_groups_are_finished_in_order() -> None:
    """Two groups of tasks are in flight, never three: a shim tile has sixteen descriptors."""
    design = gemm_i8(replace(G, M=64 * 7))
    live, most = set(), 0
    for step in design.sequence:
        if isinstance(step, Finish):
            live.discard(step.group)
        else:
            live.add(step.group)
        most = max(most, len(live))
    assert most == 2 and not live
