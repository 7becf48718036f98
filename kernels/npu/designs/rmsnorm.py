"""y = RMSNorm(x) * w: rows distributed over the 4 cores of each column, w broadcast to them.

A core takes w anew for every `rows` rows, since its program begins again after them: the traffic of w is 2/rows of that
of x. Rows enter and leave as bfloat16; w as two of them, high and low parts (aie/rmsnorm.cc).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.kernels.npu.design import (
    STACK,
    Acquire,
    Array,
    Bind,
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
    Tile,
    Worker,
)

CORES = 4
GROUP = 5  # tasks of a shim tile under way: three descriptors each, of sixteen; four of a channel, as its queue holds


@dataclass(frozen=True, slots=True)
class Norm:
    """T rows of H. rows: of one core between two copies of w."""

    T: int
    H: int
    rows: int = 8
    columns: int = 4

    def __post_init__(self) -> None:
        unit = CORES * self.columns * self.rows
        if self.T < 1 or self.T % unit:
            raise ValueError(f"a norm of {self.T} rows: no multiple of {unit} (4 cores x columns x rows)")
        if self.H % 32:
            raise ValueError(f"a norm of rows of {self.H}: no multiple of 32")


def rmsnorm(n: Norm, kernel: Kernel) -> Design:
    """The design of a norm; `kernel` works on one row."""
    row, w = Array("bf16", (n.H,)), Array("bf16", (2 * n.H,))
    room = 64 * 1024 - STACK - w.nbytes  # of a core, beside w and its stack
    depth_in, depth_out = next(((i, o) for i, o in ((2, 2), (2, 1), (1, 1)) if (i + o) * row.nbytes <= room), (1, 1))
    fifos, links, workers, steps = [], [], [], list[Move | Finish]()
    for col in range(n.columns):
        tile, parts = Tile(col, 1), range(CORES)
        fifos += [
            Fifo(f"x_in{col}", Array("bf16", (CORES * n.H,))),
            *(Fifo(f"x{col}_{i}", row, depth_in) for i in parts),
        ]
        links.append(Link(tile, (f"x_in{col}",), tuple(f"x{col}_{i}" for i in parts), tuple(i * n.H for i in parts)))
        fifos += [Fifo(f"w_in{col}", w, 1), Fifo(f"w{col}", w, 1)]
        links.append(Link(tile, (f"w_in{col}",), (f"w{col}",)))
        fifos += [
            *(Fifo(f"y{col}_{i}", row, depth_out) for i in parts),
            Fifo(f"y_out{col}", Array("bf16", (CORES * n.H,))),
        ]
        links.append(Link(tile, tuple(f"y{col}_{i}" for i in parts), (f"y_out{col}",), tuple(i * n.H for i in parts)))
        for i in parts:
            binds = (
                ("x", Bind("consume", f"x{col}_{i}")),
                ("w", Bind("consume", f"w{col}")),
                ("y", Bind("produce", f"y{col}_{i}")),
                ("norm", Bind("kernel", kernel.name)),
            )
            workers.append(Worker(Tile(col, 2 + i), "norm_rows", binds))
    one = (
        Acquire("x", ("row",)),
        Acquire("y", ("out",)),
        Call("norm", ("row", "gain", "out")),
        Release("x"),
        Release("y"),
    )
    core = Core("norm_rows", ("x", "w", "y", "norm"), (Acquire("w", ("gain",)), Loop(n.rows, one), Release("w")))
    per = CORES * n.rows  # rows that one column takes with one w
    blocks = n.T // (per * n.columns)
    for block in range(blocks):
        for col in range(n.columns):
            at, size = (block * n.columns + col) * per * n.H, per * n.H
            linear = ((1, 1, 1, size), (0, 0, 0, 1), block // (GROUP // 2))
            steps += [
                Move("drain", f"y_out{col}", "y", Tile(col, 0), at, *linear, wait=True),
                Move("fill", f"x_in{col}", "x", Tile(col, 0), at, *linear),
                Move(
                    "fill", f"w_in{col}", "w", Tile(col, 0), 0, (1, 1, 1, w.size), (0, 0, 0, 1), block // (GROUP // 2)
                ),
            ]
        group, ends = block // (GROUP // 2), (block + 1) % (GROUP // 2) == 0
        if ends and group > 0:
            steps.append(Finish(group - 1))
    done = {s.group for s in steps if isinstance(s, Finish)}
    steps += [Finish(g) for g in range((blocks - 1) // (GROUP // 2) + 1) if g not in done]
    arguments = (("x", Array("bf16", (n.T * n.H,))), ("w", w), ("y", Array("bf16", (n.T * n.H,))))
    return Design(
        f"rmsnorm_h{n.H}_r{n.rows}_c{n.columns}",
        n.columns,
        arguments,
        (kernel,),
        tuple(fifos),
        tuple(links),
        (core,),
        tuple(workers),
        tuple(steps),
        facts={"T": n.T, "H": n.H, "rows": n.rows},
    )
