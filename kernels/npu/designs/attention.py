"""Flash attention: the 4 cores of a column share a KV head's stream, each with a query tile of its own.

A tile holds LQ / GROUP consecutive positions of the GROUP query heads that read the KV head. Keys and values come in
tiles on one channel (a core has two: the other brings queries), in the order of the matrix unit: the gather step that
makes the cache contiguous also deals it out (tiles.py). With scores in bfloat16 K and V come in turn, each an object;
with scores in int8 a key tile is one object: codes, their scales, values.

Key tiles that causality or the window hides from a whole block of four query tiles are not sent: the runtime sequence
sends each block its own span. Within it a core skips the tiles that its query tile does not see. Its three loops
(before, seen, after) take their counts from the query tile's header, so the fabric is independent of lengths and
positions.
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
    Element,
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

Scores = Literal["bf16", "i8"]
CORES = 4
HEAD = 64  # bytes after a query tile: 16 words of parameters (aie/softmax.h, header)


@dataclass(frozen=True, slots=True)
class Attention:
    """heads: KV heads; blocks: of CORES query tiles for each of them; tiles: key tiles of the gathered cache."""

    heads: int
    blocks: int
    tiles: int
    D: int
    LQ: int = 32
    LK: int = 32
    group: int = 1
    columns: int = 4
    scores: Scores = "bf16"
    spans: tuple[tuple[int, int], ...] = ()
    """Of each block: its first key tile and how many. None: every block gets all tiles."""

    def __post_init__(self) -> None:
        for first, count in self.spans:
            if first < 0 or count < 1 or first + count > self.tiles:
                raise ValueError(f"a span of {count} key tiles from {first} on does not lie in {self.tiles}")
        if self.spans and len(self.spans) != self.blocks:
            raise ValueError(f"{len(self.spans)} spans for {self.blocks} blocks of query tiles")
        if self.heads % self.columns:
            raise ValueError(f"{self.heads} KV heads do not divide into {self.columns} columns")
        if self.LQ % (8 * self.group) and self.LQ % self.group:
            raise ValueError(f"a query tile of {self.LQ} rows does not hold {self.group} heads")

    @property
    def query_bytes(self) -> int:
        """Of a query tile: bfloat16, or codes with a float each row; and its header."""
        return (2 * self.LQ * self.D if self.scores == "bf16" else self.LQ * (self.D + 4)) + HEAD

    @property
    def key_bytes(self) -> int:
        """Of a tile of keys and values."""
        return self.LK * (4 * self.D if self.scores == "bf16" else 3 * self.D + 4)

    def span(self, block: int) -> tuple[int, int]:
        return self.spans[block] if self.spans else (0, self.tiles)


def attention(a: Attention, start: Kernel, tile: Kernel, finish: Kernel) -> Design:
    """The design with the given tile kernels (aie/attention_stream.cc, aie/attention_i8_stream.cc)."""
    f32, bf16, raw = "f32", "bf16", "bf16" if a.scores == "bf16" else "u8"
    width = 2 if raw == "bf16" else 1
    parts_of_kv = 2 if raw == "bf16" else 1  # objects of a key tile
    q, kv = Array(raw, (a.query_bytes // width,)), Array(raw, (a.key_bytes // width // parts_of_kv,))
    out = Array(bf16, (a.LQ * a.D,))
    buffers = (
        Buffer("o", Array(f32, (a.LQ * a.D,))),
        Buffer("m", Array(bf16, (a.LQ * 8,))),
        Buffer("l", Array(f32, (a.LQ * 8,))),
        Buffer("s", Array(f32, (8 * a.LK,))),
        Buffer("p", Array(bf16, (8 * a.LK,))),
        Buffer("bounds", Array("i32", (8,))),
    )
    to_rows = ((a.LQ // 4, 4 * a.D), (4, 4), (a.D // 4, 16), (4, 1))
    fifos, links, workers, steps = [], [], [], list[Move | Finish]()
    for col in range(a.columns):
        parts, at = range(CORES), Tile(col, 1)
        fifos += [Fifo(f"q_in{col}", Array(raw, (CORES * q.size,))), *(Fifo(f"q{col}_{i}", q, 1) for i in parts)]
        links.append(Link(at, (f"q_in{col}",), tuple(f"q{col}_{i}" for i in parts), tuple(i * q.size for i in parts)))
        fifos += [Fifo(f"kv_in{col}", kv, 2 * parts_of_kv), Fifo(f"kv{col}", kv, 2)]
        links.append(Link(at, (f"kv_in{col}",), (f"kv{col}",)))
        fifos += [
            *(Fifo(f"o{col}_{i}", out, 1) for i in parts),
            Fifo(f"o_out{col}", Array(bf16, (CORES * out.size,)), to_stream=to_rows),
        ]
        links.append(
            Link(at, tuple(f"o{col}_{i}" for i in parts), (f"o_out{col}",), tuple(i * out.size for i in parts))
        )
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
    tile_size = parts_of_kv * kv.size
    for h in range(a.heads // a.columns):
        for block in range(a.blocks):
            group, (first, count) = h * a.blocks + block, a.span(block)
            for col in range(a.columns):
                head, shim = h * a.columns + col, Tile(col, 0)
                which = head * a.blocks + block
                steps += [
                    _linear("drain", f"o_out{col}", "o", shim, which * CORES * out.size, CORES * out.size, group),
                    _linear("fill", f"q_in{col}", "q", shim, which * CORES * q.size, CORES * q.size, group),
                    _linear(
                        "fill",
                        f"kv_in{col}",
                        "kv",
                        shim,
                        (head * a.tiles + first) * tile_size,
                        count * tile_size,
                        group,
                    ),
                ]
            if group > 0:
                steps.append(Finish(group - 1))
    steps.append(Finish(a.heads // a.columns * a.blocks - 1))
    total = a.heads * a.blocks * CORES
    arguments = (
        ("q", Array(raw, (total * q.size,))),
        ("kv", Array(raw, (a.heads * a.tiles * tile_size,))),
        ("o", Array(bf16, (total * out.size,))),
    )
    facts = {"heads": a.heads, "blocks": a.blocks, "tiles": a.tiles, "D": a.D, "LQ": a.LQ, "LK": a.LK, "group": a.group}
    return Design(
        f"attention_{a.scores}_d{a.D}_g{a.group}_{a.LQ}x{a.LK}_c{a.columns}",
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


def _linear(
    kind: Literal["fill", "drain"], fifo: str, argument: str, tile: Tile, at: int, size: int, group: int
) -> Move:
    """A stretch of `size` elements."""
    return Move(kind, fifo, argument, tile, at, (1, 1, 1, size), (0, 0, 0, 1), group, wait=kind == "drain")


def _core(a: Attention) -> Core:
    names = ("k_tile", "v_tile") if a.scores == "bf16" else ("kv_tile",)
    take, give = Acquire("kv", names), Release("kv", len(names))
    walk = (take, Call("tile", ("query", *names, "o", "m", "l", "s", "p", "bounds")), give)
    body = (
        Acquire("q", ("query",)),
        Call("start", ("query", "o", "m", "l", "bounds")),
        Loop(Element("bounds", 0), (take, give)),
        Loop(Element("bounds", 1), walk),
        Loop(Element("bounds", 2), (take, give)),
        Acquire("out", ("result",)),
        Call("finish", ("o", "l", "result")),
        Release("out"),
        Release("q"),
    )
    return Core("query_tile", ("q", "kv", "out", "start", "tile", "finish", "o", "m", "l", "s", "p", "bounds"), body)
