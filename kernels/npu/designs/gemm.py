"""C = A @ B on 4 rows of cores x 1 to 4 columns: A is broadcast along rows, B along columns, C is joined in the mem
tiles.

A [M, K] is row-major: the mem tile's DMA reorders it into the r x s tiles of the matrix unit. B is stored once in the
order in which the columns read it (tiles.py), so that one shim task without strides brings a whole stripe. The core
keeps a tile of C while it walks over K. Its program ends after each tile of C and begins again: M and N live in the
runtime sequence alone, and one xclbin serves every M and N of the same K with several instruction streams.

Every row block of A meets every block of columns: the shim sends it as often, by a repeat of its task, up to 64 times.
Where that does not reach, on four columns, the mem tile holds the row block whole and sends it `repeat` times for each
time of the shim's. (Reads of A fall as much, and the cores wait while the next is loaded: m k / 4 cycles in `repeat`
steps over K.) Where it does not fit the mem tile, the shim sends it in several tasks, and fewer row blocks are under
way at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid.kernels.npu.design import (
    Acquire,
    Array,
    Bind,
    Buffer,
    Call,
    Core,
    Design,
    Fifo,
    Finish,
    Kernel,
    Link,
    Loop,
    Move,
    Release,
    Statement,
    Tile,
    Worker,
)

Weights = Literal["i8", "q4_0", "q8_0"]
ROWS = 4
QUEUE = 4  # tasks that a shim channel holds
TASK = 64  # times that a task can send the same
LOCK = 63  # what a lock counts to: times that a mem tile can send the same
MEM = 512 * 1024


@dataclass(frozen=True, slots=True)
class Gemm:
    """Sizes of a product. m, k, n: a core's tile; r, s, t: the matrix unit's. weights: bare int8, or codes with their
    scales."""

    M: int
    K: int
    N: int
    m: int
    k: int
    n: int
    columns: int = 4
    r: int = 4
    s: int = 8
    t: int = 8
    weights: Weights = "i8"
    out: Literal["i32", "i8", "f32"] = "i32"
    shift: int = 0
    """Of i8 results: C = saturate(round(A @ B / 2^shift))."""

    def __post_init__(self) -> None:
        for axis, value, unit, why in (
            ("M", self.M, ROWS * self.m, "4 rows of cores x m"),
            ("K", self.K, self.k, "k"),
            ("N", self.N, self.columns * self.n, "columns x n"),
            ("m", self.m, 2 * self.r, "2 r: blocks of 2 x 2 accumulators"),
            ("k", self.k, self.s, "s"),
            ("n", self.n, 2 * self.t, "2 t"),
        ):
            if value < 1 or value % unit:
                raise ValueError(
                    f"a product of {self.M} x {self.K} x {self.N}: {axis} = {value} is no multiple of {unit} ({why})"
                )
        if self.weights != "i8" and self.k % 32:
            raise ValueError(f"a tile of {self.k} over K: {self.weights} has a scale for every 32")
        if not 1 <= self.columns <= ROWS:
            raise ValueError(f"{self.columns} columns: each brings one of the {ROWS} row blocks of A at least")

    def rows(self, col: int) -> list[int]:
        """Row blocks of A that come through a column: of three columns the first brings two."""
        return [row for row in range(ROWS) if row * self.columns // ROWS == col]

    @property
    def tile_bytes(self) -> int:
        """Of B in a core: codes; with scales also two int16 for each 32 of them and a float for each column."""
        codes = self.k * self.n // (2 if self.weights == "q4_0" else 1)
        return codes if self.weights == "i8" else codes + self.k // 8 * self.n + 4 * self.n

    @property
    def across(self) -> int:
        """Blocks of columns: as often does a row block of A go to the cores."""
        return self.N // (self.columns * self.n)

    @property
    def repeat(self) -> int:
        """Times that the mem tile sends a row block of A; 1: it holds tiles of m x k, not the row block."""
        others = 2 * self.tile_bytes + 2 * ROWS * self.m * self.n * (1 if self.out == "i8" else 4)
        if self.across <= TASK or self.columns < ROWS or self.m * self.K + others > MEM:
            return 1
        return next(r for r in range(LOCK, 0, -1) if self.across % r == 0)

    @property
    def tasks(self) -> list[int]:
        """Of a row block of A: how often each of its shim tasks sends it. ValueError where its channel's queue holds
        fewer."""
        times = self.across // self.repeat
        found = [min(TASK, times - start) for start in range(0, times, TASK)]
        if len(found) > QUEUE:
            raise ValueError(
                f"a product of {self.M} x {self.K} x {self.N}: a row block of A goes out {times} times, in {len(found)} tasks of "
                f"{TASK} at most, and a shim channel holds {QUEUE}: make N smaller"
            )
        return found

    @property
    def stripe_bytes(self) -> int:
        """Of B, that one column reads for a row block."""
        return self.N // self.columns // self.n * (self.K // self.k) * self.tile_bytes


def gemm(g: Gemm, zero: Kernel, multiply: Kernel, requantise: Kernel | None = None, name: str = "gemm_i8") -> Design:
    """The design of a product with the given tile kernels; `requantise` for i8 results."""
    a, b = Array("i8", (g.m * g.k,)), Array("i8" if g.weights == "i8" else "u8", (g.tile_bytes,))
    c, acc = Array(g.out, (g.m * g.n,)), Array("i32", (g.m * g.n,))
    depth = 2 if 2 * (a.nbytes + b.nbytes + c.nbytes) + (acc.nbytes if requantise else 0) < 60 * 1024 else 1
    to_mmul = ((g.m // g.r, g.r * g.k), (g.k // g.s, g.s), (g.r, g.k), (g.s, 1))
    to_rows = ((g.m // g.r, g.r * g.n), (g.r, g.t), (g.n // g.t, g.r * g.t), (g.t, 1))
    fifos, links = [], []
    for col in range(g.columns):
        rows = g.rows(col)
        if g.repeat > 1:  # of each tile over K after the other, m / r rows of matrix tiles: one dimension counts both
            fifos.append(Fifo(f"a_in{col}", Array("i8", (g.m * g.K,)), depth=1))
            whole = ((g.K // g.k * (g.m // g.r), g.r * g.k), *to_mmul[1:])
            fifos += [Fifo(f"a{row}", a, to_stream=whole, repeat=g.repeat) for row in rows]
        else:
            fifos.append(Fifo(f"a_in{col}", Array("i8", (len(rows) * g.m * g.k,))))
            fifos += [Fifo(f"a{row}", a, to_stream=to_mmul) for row in rows]
        starts = tuple(i * a.size for i in range(len(rows)))
        links.append(Link(Tile(col, 1), (f"a_in{col}",), tuple(f"a{row}" for row in rows), starts))
        fifos += [Fifo(f"b_in{col}", b), Fifo(f"b{col}", b)]
        links.append(Link(Tile(col, 1), (f"b_in{col}",), (f"b{col}",)))
        fifos += [Fifo(f"c{row}_{col}", c, depth=depth) for row in range(ROWS)]
        fifos.append(Fifo(f"c_out{col}", Array(g.out, (ROWS * c.size,)), to_stream=to_rows))
        links.append(
            Link(
                Tile(col, 1),
                tuple(f"c{row}_{col}" for row in range(ROWS)),
                (f"c_out{col}",),
                tuple(i * c.size for i in range(ROWS)),
            )
        )
    core = _core(g, requantise is not None)
    kernels = (zero, multiply, *([requantise] if requantise else []))
    shared = [("zero", Bind("kernel", zero.name)), ("multiply", Bind("kernel", multiply.name))]
    if requantise:
        shared += [("requantise", Bind("kernel", requantise.name)), ("acc", Bind("buffer", "acc"))]
    workers = [
        Worker(
            Tile(col, 2 + row),
            core.name,
            (
                ("a", Bind("consume", f"a{row}")),
                ("b", Bind("consume", f"b{col}")),
                ("c", Bind("produce", f"c{row}_{col}")),
                *shared,
            ),
        )
        for row in range(ROWS)
        for col in range(g.columns)
    ]
    arguments = (
        ("A", Array("i8", (g.M * g.K,))),
        ("B", Array(b.dtype, (g.columns * g.stripe_bytes,))),
        ("C", Array(g.out, (g.M * g.N,))),
    )
    facts = {"M": g.M, "K": g.K, "N": g.N, "m": g.m, "k": g.k, "n": g.n, "repeat": g.repeat}
    return Design(
        f"{name}_k{g.K}_{g.m}x{g.k}x{g.n}_c{g.columns}{f'_r{g.repeat}' if g.repeat > 1 else ''}",
        g.columns,
        arguments,
        kernels,
        tuple(fifos),
        tuple(links),
        (core,),
        tuple(workers),
        tuple(_sequence(g)),
        (Buffer("acc", acc),) if requantise else (),
        facts,
    )


def _core(g: Gemm, requantised: bool) -> Core:
    target = "acc" if requantised else "c_tile"
    steps: tuple[Statement, ...] = (
        Acquire("a", ("a_tile",)),
        Acquire("b", ("b_tile",)),
        Call("multiply", ("a_tile", "b_tile", target)),
        Release("a"),
        Release("b"),
    )
    inner: tuple[Statement, ...] = (Call("zero", (target,)), Loop(g.K // g.k, steps))
    if requantised:
        body = (*inner, Acquire("c", ("c_tile",)), Call("requantise", ("acc", "c_tile", g.shift)), Release("c"))
        return Core("tile_of_c", ("a", "b", "c", "zero", "multiply", "requantise", "acc"), body)
    return Core("tile_of_c", ("a", "b", "c", "zero", "multiply"), (Acquire("c", ("c_tile",)), *inner, Release("c")))


def _sequence(g: Gemm) -> list[Move | Finish]:
    """Tasks of all row blocks of 4 m rows; a descriptor is made for each block, because a stride over several of them
    would not fit its field (4 m N words)."""
    blocks, across, stripe = g.M // (ROWS * g.m), g.across, g.stripe_bytes
    ahead = max(
        1, QUEUE // (2 * len(g.tasks))
    )  # row blocks of a group; two groups are under way, where the queue holds both
    both = 2 * len(g.tasks) <= QUEUE
    steps: list[Move | Finish] = []
    for block in range(blocks):
        group = block // ahead
        for col in range(g.columns):
            tile, rows, own = Tile(col, 0), block * ROWS * g.m, g.rows(col)
            steps.append(
                Move(
                    "drain",
                    f"c_out{col}",
                    "C",
                    tile,
                    rows * g.N + col * g.n,
                    (1, across, ROWS * g.m, g.n),
                    (0, g.columns * g.n, g.N, 1),
                    group,
                    wait=True,
                )
            )
            for times in g.tasks:
                steps.append(
                    Move(
                        "fill",
                        f"a_in{col}",
                        "A",
                        tile,
                        (rows + own[0] * g.m) * g.K,
                        (times, g.K // g.k, len(own) * g.m, g.k),
                        (0, g.k, g.K, 1),
                        group,
                    )
                )
            steps.append(Move("fill", f"b_in{col}", "B", tile, col * stripe, (1, 1, 1, stripe), (0, 0, 0, 1), group))
        if block % ahead == ahead - 1 and not both:
            steps.append(Finish(group))
        elif block % ahead == ahead - 1 and group > 0:
            steps.append(Finish(group - 1))
    last = (blocks - 1) // ahead
    done = {s.group for s in steps if isinstance(s, Finish)}
    return steps + [Finish(i) for i in range(last + 1) if i not in done]
