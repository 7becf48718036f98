"""The resource check: one design beyond each limit, the failures of real designs, and the shipped designs within all
limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hybrid.kernels.npu.check import Report, check, main, npu_limits, table
from hybrid.kernels.npu.design import (
    Acquire,
    Array,
    Bind,
    Buffer,
    Call,
    Core,
    Design,
    DesignError,
    Fifo,
    Finish,
    Kernel,
    Link,
    Loop,
    Move,
    Release,
    Tile,
    Worker,
)
from hybrid.kernels.npu.designs import shipped

CORE, MEM, SHIM = Tile(0, 2), Tile(0, 1), Tile(0, 0)
OBJECT = Array("i32", (64,))
TAKE, MAKE, COPY = Acquire("x", ("a",)), Acquire("y", ("b",)), Call("copy", ("a", "b"))
GIVE, SEND = Release("x"), Release("y")


def through(
    array: Array = OBJECT,
    depth: int = 2,
    dims: tuple[tuple[int, int], ...] = (),
    moves: tuple[Move | Finish, ...] = (),
    stack: int = 1024,
    kernel: Kernel | None = None,
    buffers: tuple[Buffer, ...] = (),
    columns: int = 1,
    allocation: str = "basic-sequential",
    host: int = 1 << 24,
) -> Design:
    """One core that copies objects: shim -> core -> shim."""
    kernel = kernel or Kernel("copy", "copy.o", (array, array), stack_bytes=512)
    body = (TAKE, MAKE, COPY, GIVE, SEND)
    core = Core("copy_core", ("x", "y", "copy", *(b.name for b in buffers)), body)
    binds = (
        ("x", Bind("consume", "x")),
        ("y", Bind("produce", "y")),
        ("copy", Bind("kernel", "copy")),
        *((b.name, Bind("buffer", b.name)) for b in buffers),
    )
    linear = ((1, 1, 1, array.size), (0, 0, 0, 1))
    steps = moves or (
        Move("drain", "y", "Y", SHIM, 0, *linear, 0, True),
        Move("fill", "x", "X", SHIM, 0, *linear, 0),
        Finish(0),
    )
    return Design(
        "through",
        columns,
        (("X", Array(array.dtype, (host,))), ("Y", Array(array.dtype, (host,)))),
        (kernel,),
        (Fifo("x", array, depth, from_stream=dims), Fifo("y", array, depth)),
        (),
        (core,),
        (Worker(CORE, "copy_core", binds, stack, allocation),),
        steps,
        buffers,
    )  # type: ignore[arg-type]


def through_mem(array: Array = OBJECT, dims: tuple[tuple[int, int], ...] = (), depth: int = 2, fan: int = 1) -> Design:
    """`fan` parallel paths shim -> mem -> shim through one mem tile, two at a shim tile."""
    fifos: list[Fifo] = []
    links, steps = [], list[Move | Finish]()
    for i in range(fan):
        fifos += [Fifo(f"in{i}", array, depth), Fifo(f"out{i}", array, depth, to_stream=dims)]
        links.append(Link(MEM, (f"in{i}",), (f"out{i}",)))
        linear = ((1, 1, 1, array.size), (0, 0, 0, 1), 0)
        steps += [
            Move("drain", f"out{i}", "Y", Tile(i // 2, 0), 0, *linear, wait=True),
            Move("fill", f"in{i}", "X", Tile(i // 2, 0), 0, *linear),
        ]
    arguments = (("X", array), ("Y", array))
    return Design("through_mem", 4, arguments, (), tuple(fifos), tuple(links), (), (), (*steps, Finish(0)))


def moved(
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    dtype: str = "i32",
    offset: int = 0,
    host: int = 1 << 24,
) -> Design:
    array = Array(dtype, (64,))
    n = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    drain = Move("drain", "y", "Y", SHIM, 0, (1, 1, 1, n), (0, 0, 0, 1), 0, True)
    return through(array, moves=(drain, Move("fill", "x", "X", SHIM, offset, sizes, strides, 0), Finish(0)), host=host)


def many(count: int) -> tuple[Move | Finish, ...]:
    linear = ((1, 1, 1, 64), (0, 0, 0, 1), 0)
    pair = (Move("drain", "y", "Y", SHIM, 0, *linear, wait=True), Move("fill", "x", "X", SHIM, 0, *linear))
    return (*(m for _ in range(count) for m in pair), Finish(0))


def taking(fifos: int) -> Design:
    """One core that reads so many fifos and writes as many."""
    base, names = through(), [f"{way}{i}" for i in range(fifos) for way in "xy"]
    linear = ((1, 1, 1, OBJECT.size), (0, 0, 0, 1), 0)
    steps: list[Move | Finish] = [
        Move("fill", n, "X", Tile(int(n[1:]) % 4, 0), 0, *linear)
        if n[0] == "x"
        else Move("drain", n, "Y", Tile(int(n[1:]) % 4, 0), 0, *linear, wait=True)
        for n in names
    ]
    body = tuple(s for n in names for s in (Acquire(n, (f"{n}_tile",)), Release(n)))
    binds = tuple((n, Bind("consume" if n[0] == "x" else "produce", n)) for n in names)
    return replace(
        base,
        columns=4,
        kernels=(),
        fifos=tuple(Fifo(n, OBJECT, 1) for n in names),
        cores=(Core("taking", tuple(names), body),),
        workers=(Worker(CORE, "taking", binds),),
        sequence=(*steps, Finish(0)),
    )


def sent_again(times: int, depth: int = 1, parts: int = 1) -> Design:
    """An object that a mem tile sends repeatedly, each time as `parts` smaller ones."""
    base = through_mem(depth=depth)
    part = Array("i32", (OBJECT.size // parts,))
    drain = replace(next(base.moves()), sizes=(1, 1, 1, max(1, times) * OBJECT.size))
    fifos = (base.fifos[0], replace(base.fifos[1], array=part, repeat=times))
    return replace(
        base,
        fifos=fifos,
        arguments=(("X", OBJECT), ("Y", Array("i32", (max(1, times) * OBJECT.size,)))),
        sequence=(drain, *base.sequence[1:]),
    )


def at_one_shim_tile(fan: int) -> Design:
    return replace(
        through_mem(fan=fan), sequence=(*(replace(m, tile=SHIM) for m in through_mem(fan=fan).moves()), Finish(0))
    )


BEYOND: dict[str, tuple[str, Callable[[], Design]]] = {
    "memory of a core": ("core.data_bytes", lambda: through(Array("i32", (4096,)), depth=2)),
    "memory of a mem tile": ("mem.data_bytes", lambda: through_mem(Array("i32", (70000,)))),
    "banks": ("core.banks", lambda: through(Array("i32", (4500,)), depth=1, allocation="bank-aware")),
    "stack": ("stack", lambda: through(kernel=Kernel("copy", "copy.o", (Array("i32", (64,)),) * 2, stack_bytes=1500))),
    "descriptors of a core": ("core.bds", lambda: through(Array("i32", (8,)), depth=9)),
    "descriptors of a mem tile": ("mem.bds", lambda: through_mem(Array("i32", (8,)), depth=5, fan=5)),
    "descriptors by parity": ("mem.bds_per_parity", lambda: through_mem(Array("i32", (8,)), depth=8, fan=3)),
    "descriptors of a shim tile": ("shim.bds", lambda: through(moves=many(9))),
    "channels into a mem tile": ("mem.channels_in", lambda: through_mem(fan=7)),
    "channels out of a mem tile": ("mem.channels_out", lambda: through_mem(fan=7)),
    "channels into a core": ("core.channels_in", lambda: taking(3)),
    "channels out of a core": ("core.channels_out", lambda: taking(3)),
    "channels into a shim tile": ("shim.channels_in", lambda: at_one_shim_tile(3)),
    "channels out of a shim tile": ("shim.channels_out", lambda: at_one_shim_tile(3)),
    "locks of a core": ("core.locks", lambda: taking(5)),
    "locks of a mem tile": ("mem.locks", lambda: through_mem(Array("i32", (8,)), depth=1, fan=33)),
    "lock value of a core": ("core.lock_max", lambda: through(Array("i32", (1,)), depth=64)),
    "lock value of a mem tile": ("mem.lock_max", lambda: through_mem(Array("i32", (1,)), depth=64)),
    "times that a mem tile sends an object": ("mem.lock_max", lambda: sent_again(64)),
    "words of a mem tile's descriptor": ("mem.bd.words", lambda: through_mem(Array("i32", (131072,)), depth=1)),
    "dimensions of a mem tile's descriptor": (
        "mem.bd.dimensions",
        lambda: through_mem(Array("i32", (512,)), dims=((4, 1), (2, 256), (4, 16), (4, 64), (4, 4))),
    ),
    "step of a mem tile's descriptor": (
        "mem.bd.step",
        lambda: through_mem(Array("i32", (262146,)), dims=((131073, 1), (2, 131073)), depth=1),
    ),
    "words of a core's descriptor": ("core.bd.words", lambda: through(Array("i32", (16384,)), depth=1)),
    "dimensions of a core's descriptor": (
        "core.bd.dimensions",
        lambda: through(Array("i32", (256,)), dims=((4, 16), (4, 64), (4, 1), (4, 4))),
    ),
    "wrap of a core's descriptor": ("core.bd.wrap", lambda: through(Array("i32", (600,)), dims=((2, 1), (300, 2)))),
    "step of a core's descriptor": (
        "core.bd.step",
        lambda: through(Array("i32", (16386,)), dims=((8193, 1), (2, 8193)), depth=1),
    ),
    "wrap of a mem tile's descriptor": (
        "mem.bd.wrap",
        lambda: through_mem(Array("i32", (4096,)), dims=((2, 1), (2048, 2))),
    ),
    "step of a shim descriptor": ("shim.bd.step", lambda: moved((1, 2, 1, 64), (0, (1 << 20) + 64, 0, 1))),
    "wrap of a shim descriptor": ("shim.bd.wrap", lambda: moved((1, 2, 1024, 1), (0, 8192, 2, 1))),
    "iterations of a shim task": ("shim.bd.iterations", lambda: moved((65, 1, 1, 64), (128, 0, 0, 1))),
    "repeats of a shim task": ("repeat", lambda: moved((65, 1, 1, 64), (0, 0, 0, 1))),
    "tasks of a shim channel": ("shim.queue", lambda: through(moves=many(5))),
    "words, not bytes": ("stream width", lambda: through(Array("i8", (6,)))),
    "single bytes": ("stream width", lambda: through(Array("i8", (64,)), dims=((8, 1), (8, 8)))),
    "runs of half words": ("stream width", lambda: through(Array("i8", (64,)), dims=((2, 2), (16, 4), (2, 1)))),
    "outside of an argument": ("argument", lambda: moved((1, 1, 1, 64), (0, 0, 0, 1), offset=1, host=64)),
    "columns": ("columns", lambda: through(columns=5)),
    "rows of cores": ("columns", lambda: replace(through(), workers=(replace(through().workers[0], tile=Tile(0, 6)),))),
    "arguments": (
        "arguments",
        lambda: replace(
            through(), arguments=(*through().arguments, *((f"z{i}", Array("i32", (4,))) for i in range(4)))
        ),
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_design_beyond_a_limit_is_refused(name: str) -> None:
    limit, make = BEYOND[name]
    found = [v.limit for v in check(make()).violations]
    assert limit in found, found


# Limits of the sheet that no design can exceed, and why.
ELSEWHERE = {
    "core.program_bytes": "the build measures the object files",
    "mem.banks": "buffers may straddle them",
    "core.bd.iterations": "rings have no iteration counter",
    "mem.bd.iterations": "the same",
    "shim.locks": "tasks take none",
    "shim.lock_max": "the same",
    "shim.bd.words": "4 GiB: more than an argument holds",
    "shim.bd.dimensions": "a move has four places",
}


def test_every_limit_of_the_sheet_has_a_design_beyond_it() -> None:
    npu = npu_limits()
    listed = set()
    for kind in ("core", "mem", "shim"):
        limits = getattr(npu, kind)
        own = {n for n in type(limits).model_fields if n != "bd" and getattr(limits, n) is not None}
        listed |= {f"{kind}.{n}" for n in own} | {f"{kind}.bd.{n}" for n in type(limits.bd).model_fields}
    covered = {limit for limit, _ in BEYOND.values() if "." in limit}
    assert covered | set(ELSEWHERE) == listed and not covered & set(ELSEWHERE)


def test_designs_within_all_limits_are_not_refused() -> None:
    assert check(taking(2)).violations == []
    assert check(through()).violations == []
    assert check(through_mem(fan=4)).violations == []
    assert check(through(moves=many(4))).violations == []
    assert check(moved((64, 1, 1, 64), (0, 0, 0, 1))).violations == []
    assert check(sent_again(63)).violations == [] and check(sent_again(4, depth=2, parts=4)).violations == []


@pytest.mark.parametrize("key", ["core", "mem", "shim"])
def test_every_number_comes_from_the_sheet(key: str) -> None:
    """A limit lowered in the sheet is enforced."""
    npu = npu_limits()
    tile = getattr(npu, key)
    fewer = tile.model_copy(update={"bds": tile.bds.model_copy(update={"value": 1})})
    design = through_mem() if key == "mem" else through()
    assert f"{key}.bds" in [v.limit for v in check(design, npu.model_copy(update={key: fewer})).violations]


def gemm_like(m: int, k: int, n: int, bytes_in: int, out: str, depth_c: int) -> Report:
    """A core of a product: A and B twice, C `depth_c` times."""
    dtype = {1: "i8", 2: "bf16"}[bytes_in]
    a, b, c = Array(dtype, (m * k,)), Array(dtype, (k * n,)), Array(out, (m * n,))
    base = next(iter(shipped().values()))()
    wanted = {"a": a, "b": b, "c": c}
    fifos = []
    for f in base.fifos:
        kind = f.name[0]
        whole = f.name.startswith(("a_in", "b_in", "c_out"))
        array = (
            wanted[kind] if not whole else Array(wanted[kind].dtype, ((4 if kind == "c" else 1) * wanted[kind].size,))
        )
        fifos.append(
            replace(
                f, array=array, depth=depth_c if kind == "c" and not whole else f.depth, to_stream=(), from_stream=()
            )
        )
    kernels = (Kernel("gemm_i8_zero", "k.o", (c,)), Kernel("gemm_i8", "k.o", (a, b, c)))
    offsets = {link.whole: tuple(i * wanted[link.whole[0]].size for i in range(len(link.parts))) for link in base.links}
    links = tuple(replace(link, offsets=offsets[link.whole]) for link in base.links)
    workers = tuple(replace(w, stack_bytes=0xD00) for w in base.workers)
    return check(replace(base, fifos=tuple(fifos), kernels=kernels, links=links, workers=workers))


def test_bf16_64_with_double_float32_results_does_not_fit() -> None:
    """A real failure: 64 x 64 x 64 in bfloat16 with float32 C twice: 2 x 8 + 2 x 8 + 2 x 16 KB and a stack of 0xD00
    bytes."""
    texts = [str(v) for v in gemm_like(64, 64, 64, 2, "f32", 2).violations]
    assert any("core.data_bytes: 68864 bytes" in t and "there are 65536" in t for t in texts), texts
    assert "core.data_bytes" not in [v.limit for v in gemm_like(64, 64, 64, 2, "f32", 1).violations]


def test_a_descriptor_of_22016_words_is_refused() -> None:
    """A real failure: one transfer of 22016 words on a core tile."""
    texts = [str(v) for v in check(through(Array("i32", (22016,)), depth=1)).violations]
    assert any("22016 words, its field holds 16383" in t for t in texts), texts


def test_a_stride_of_c_beyond_4_mib_is_refused() -> None:
    """A real failure: the rows of two blocks of C in one shim task, 4 x 64 rows of 21504 int32 apart."""
    sizes, strides = (2, 1, 64, 64), (256 * 21504, 0, 21504, 1)
    array = Array("i32", (64 * 64,))
    drain = Move("drain", "y", "Y", SHIM, 0, sizes, strides, 0, True)
    fill = Move("fill", "x", "X", SHIM, 0, (1, 1, 1, 2 * array.size), (0, 0, 0, 1), 0)
    design = through(array, depth=1, moves=(drain, fill, Finish(0)))
    assert [v.limit for v in check(design).violations if v.limit.startswith("shim.bd")] == ["shim.bd.step"]


def test_a_stack_of_1_kb_that_overruns_is_refused() -> None:
    """A real failure: a kernel that spills needs more than the default stack, and the rest grows into a tile's
    buffers."""
    kernel = Kernel("copy", "copy.o", (Array("i32", (64,)),) * 2, stack_bytes=1312)
    assert "stack" in [v.limit for v in check(through(kernel=kernel, stack=1024)).violations]
    assert check(through(kernel=kernel, stack=2048)).violations == []


ORDER: dict[str, tuple[str, tuple[object, ...]]] = {
    "used before it is acquired": ("not acquired", (COPY, TAKE, MAKE, GIVE, SEND)),
    "released twice": ("does not hold", (TAKE, GIVE, GIVE, MAKE, SEND)),
    "kept": ("keeps 1 objects", (TAKE, MAKE, COPY, SEND)),
    "more than the depth": ("waits for itself", (Acquire("x", ("a", "c", "d")), Release("x", 3), MAKE, SEND)),
    "acquired again": ("the same ones again", (TAKE, Acquire("x", ("c",)), Release("x", 2), MAKE, SEND)),
    "unbalanced loop": ("different numbers", (TAKE, MAKE, Loop(2, (GIVE,)), SEND)),
    "ports out of step": ("different numbers of iterations", (TAKE, GIVE, Loop(2, (MAKE, SEND)))),
}


@pytest.mark.parametrize("name", ORDER)
def test_program_order(name: str) -> None:
    text, body = ORDER[name]
    design = through()
    broken = replace(design, cores=(replace(design.cores[0], body=body),))  # type: ignore[arg-type]
    assert any(text in v.text for v in check(broken).violations if v.limit == "program order"), [
        str(v) for v in check(broken).violations
    ]


def test_sequences_out_of_order() -> None:
    design = through()
    drain, fill, finish = design.sequence
    cases = {
        "before anything is filled": (drain, finish, replace(fill, group=1), Finish(1)),
        "never finished": (drain, fill),
        "no drain is waited for": (replace(drain, wait=False), fill, finish),
        "not a whole number": (drain, replace(fill, sizes=(1, 1, 1, 32)), finish),
    }
    for text, steps in cases.items():
        assert any(text in v.text for v in check(replace(design, sequence=steps)).violations), text  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(shipped()))
def test_shipped_designs_keep_every_limit(name: str) -> None:
    report = check(shipped()[name]())
    assert report.violations == [] and report.uses
    assert all(u.bds <= u.bds_of and u.locks <= u.locks_of for u in report.uses)


def test_the_command_prints_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["27b.gate_up.i8"]) == 0
    printed = capsys.readouterr().out
    assert "memory  52544 of 65536" in printed and "BDs 22 of 48" in printed and "channels in 6" in printed
    assert "sent 56 times of 63" in printed and "repeats 3 of 64, queued 2 of 4" in printed
    assert main(["nothing"]) == 1
    assert "REFUSED" in table(check(through(columns=5)))


def test_contradictions_are_refused_when_a_design_is_made() -> None:
    design = through()
    for change in (
        {"fifos": design.fifos[:1]},
        {"fifos": (*design.fifos, Fifo("z", Array("i32", (4,))))},
        {"cores": ()},
        {"workers": (replace(design.workers[0], tile=MEM),)},
        {"arguments": design.arguments[:1]},
    ):
        with pytest.raises(DesignError):
            replace(design, **change)
    for wrong, says in ((lambda: sent_again(2, parts=3), "no whole number"), (lambda: sent_again(0), "once at least")):
        with pytest.raises(DesignError, match=says):
            wrong()
