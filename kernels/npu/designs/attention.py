"""Flash attention: the 4 cores of a column share a KV head's stream, each with a query tile of its own.

A tile holds LQ / GROUP consecutive positions of the GROUP query heads that read the KV head. Keys and values come in tiles,
K and V in turn on one channel (a core has two: the other brings queries), in the order of the matrix unit: the gather step
that makes the cache contiguous also deals it out (gather.py). In front of them the query tile carries its position, the
cache's length and the window. Every query tile walks over `tiles` key tiles; those it may not see are masked, not skipped:
the loop's length is the fabric's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.npu.design import (
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
    Tile,
    Worker,
)

CORES = 4
HEAD = 32  # bfloat16 places behind a query tile for its 16 words of parameters


@dataclass(frozen=True, slots=True)
class Attention:
    """heads: KV heads; blocks: of CORES query tiles for each of them; tiles: key tiles of the cache."""

    heads: int
    blocks: int
    tiles: int
    D: int
    LQ: int = 32
    LK: int = 32
    group: int = 1
    columns: int = 4

    def __post_init__(self) -> None:
        if self.heads % self.columns:
            raise ValueError(f"{self.heads} KV heads do not divide into {self.columns} columns")
        if self.LQ % (8 * self.group) and self.LQ % self.group:
            raise ValueError(f"a query tile of {self.LQ} rows does not hold {self.group} heads")


def attention(a: Attention, start: Kernel, tile: Kernel, finish: Kernel) -> Design:
    """The design with the given tile kernels (aie/attention_stream.cc)."""
    q, kv, out = Array("bf16", (a.LQ * a.D + HEAD,)), Array("bf16", (a.LK * a.D,)), Array("bf16", (a.LQ * a.D,))
    f32, bf16 = "f32", "bf16"
    buffers = (
        Buffer("o", Array(f32, (a.LQ * a.D,))),
        Buffer("m", Array(bf16, (a.LQ * 8,))),
        Buffer("l", Array(f32, (a.LQ * 8,))),
        Buffer("s", Array(f32, (8 * a.LK,))),
        Buffer("p", Array(bf16, (8 * a.LK,))),
        Buffer("count", Array("i32", (8,))),
    )
    to_rows = ((a.LQ // 4, 4 * a.D), (4, 4), (a.D // 4, 16), (4, 1))
    fifos, links, workers, steps = [], [], [], list[Move | Finish]()
    for col in range(a.columns):
        parts, at = range(CORES), Tile(col, 1)
        fifos += [Fifo(f"q_in{col}", Array(bf16, (CORES * q.size,))), *(Fifo(f"q{col}_{i}", q, 1) for i in parts)]
        links.append(Link(at, (f"q_in{col}",), tuple(f"q{col}_{i}" for i in parts), tuple(i * q.size for i in parts)))
        fifos += [Fifo(f"kv_in{col}", kv, 4), Fifo(f"kv{col}", kv, 2)]
        links.append(Link(at, (f"kv_in{col}",), (f"kv{col}",)))
        fifos += [
            *(Fifo(f"o{col}_{i}", out, 1) for i in parts),
            Fifo(f"o_out{col}", Array(bf16, (CORES * out.size,)), to_stream=to_rows),
        ]
        links.append(Link(at, tuple(f"o{col}_{i}" for i in parts), (f"o_out{col}",), tuple(i * out.size for i in parts)))
        shared = [
            ("start", Bind("kernel", start.name)),
            ("tile", Bind("kernel", tile.name)),
            ("finish", Bind("kernel", finish.name)),
            *((b.name, Bind("buffer", b.name)) for b in buffers),
        ]
        for i in parts:
            ports = (
                ("q", Bind("consume", f"q{col}_{i}")),
                ("kv", Bind("consume", f"kv{col}")),
                ("out", Bind("produce", f"o{col}_{i}")),
            )
            workers.append(Worker(Tile(col, 2 + i), "query_tile", (*ports, *shared)))
    for h in range(a.heads // a.columns):
        for block in range(a.blocks):
            group = h * a.blocks + block
            for col in range(a.columns):
                head, shim = h * a.columns + col, Tile(col, 0)
                which = head * a.blocks + block
                steps += [
                    _linear("drain", f"o_out{col}", "o", shim, which, CORES * out.size, group),
                    _linear("fill", f"q_in{col}", "q", shim, which, CORES * q.size, group),
                    _linear("fill", f"kv_in{col}", "kv", shim, head, a.tiles * 2 * kv.size, group),
                ]
            if group > 0:
                steps.append(Finish(group - 1))
    steps.append(Finish(a.heads // a.columns * a.blocks - 1))
    total = a.heads * a.blocks * CORES
    arguments = (
        ("q", Array(bf16, (total * q.size,))),
        ("kv", Array(bf16, (a.heads * a.tiles * 2 * kv.size,))),
        ("o", Array(bf16, (total * out.size,))),
    )
    facts = {"heads": a.heads, "blocks": a.blocks, "tiles": a.tiles, "D": a.D, "LQ": a.LQ, "LK": a.LK}
    return Design(
        f"attention_d{a.D}_g{a.group}_{a.LQ}x{a.LK}_t{a.tiles}_c{a.columns}",
        a.columns,
        arguments,
        (start, tile, finish),
        tuple(fifos),
        tuple(links),
        (_core(a),),
        tuple(workers),
        tuple(steps),
        buffers,
        facts,
    )


def _linear(kind: Literal["fill", "drain"], fifo: str, argument: str, tile: Tile, index: int, size: int, group: int) -> Move:
    """The index-th stretch of `size` elements."""
    return Move(kind, fifo, argument, tile, index * size, (1, 1, 1, size), (0, 0, 0, 1), group, wait=kind == "drain")


def _core(a: Attention) -> Core:
    walk = (
        Acquire("kv", ("k_tile", "v_tile")),
        Call("tile", ("query", "k_tile", "v_tile", "o", "m", "l", "s", "p", "count")),
        Release("kv", 2),
    )
    body = (
        Acquire("q", ("query",)),
        Call("start", ("o", "m", "l", "count")),
        Loop(a.tiles, walk),
        Acquire("out", ("result",)),
        Call("finish", ("o", "l", "result")),
        Release("out"),
        Release("q"),
    )
    return Core("query_tile", ("q", "kv", "out", "start", "tile", "finish", "o", "m", "l", "s", "p", "count"), body)
