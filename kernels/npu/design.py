"""A design as data: data flow between tiles, its order, and the kernels that cores call.

The nouns are those of IRON (mlir-aie): object fifos, links in mem tiles, workers, a runtime sequence. Nothing here
runs: check.py compares a design with the hardware's limits, interpreter.py executes it, emitter.py writes it as IRON
source. Sizes and strides count elements, outermost first, unless a name says bytes or words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hybrid.core.errors import nearest

# bf16 travels as its 16 raw bits; 4-bit codes travel as bytes of two.
DTYPES: dict[str, np.dtype] = {
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
    "i16": np.dtype("i2"),
    "i32": np.dtype("i4"),
    "bf16": np.dtype("u2"),
    "f32": np.dtype("f4"),
}
STACK = 3392
"""Bytes of a worker's stack: what mlir-aie's published attention kernels ask for. 1024, its default, corrupted them
silently."""
Dims = tuple[tuple[int, int], ...]
"""(size, stride) pairs; empty: the object in memory order."""
SHIM, MEM, CORE = 0, 1, 2  # rows of the array: one of shim tiles, one of mem tiles, then core tiles


class DesignError(ValueError):
    """A design contradicts itself. The message names the design and the part."""


@dataclass(frozen=True, slots=True)
class Array:
    """The type of an object, a buffer, an argument or a parameter of a kernel."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise DesignError(f"unknown dtype {self.dtype!r}{nearest(self.dtype, DTYPES)}")
        if not self.shape or min(self.shape) < 1:
            raise DesignError(f"an array of shape {self.shape} holds nothing")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    col: int
    row: int

    @property
    def kind(self) -> Literal["shim", "mem", "core"]:
        return "shim" if self.row == SHIM else "mem" if self.row == MEM else "core"

    def __str__(self) -> str:
        return f"{self.kind} tile ({self.col}, {self.row})"


@dataclass(frozen=True, slots=True)
class Fifo:
    """A queue of `depth` objects between one producer and its consumers; the same depth on both sides."""

    name: str
    array: Array
    depth: int = 2
    to_stream: Dims = ()
    """How the producer's DMA reads the object."""
    from_stream: Dims = ()
    """How each consumer's DMA writes it."""
    repeat: int = 1
    """Times that a mem tile sends each object before the next; only where a link forwards to this fifo alone."""


@dataclass(frozen=True, slots=True)
class Link:
    """In a mem tile, objects of `source` become those of `target` without a copy: split (1 to n), join (n to 1) or
    forward. What is forwarded arrives whole: the target may take it as several smaller objects."""

    tile: Tile
    source: tuple[str, ...]
    target: tuple[str, ...]
    offsets: tuple[int, ...] = (0,)
    """Offset of each part in the larger object."""

    @property
    def parts(self) -> tuple[str, ...]:
        return self.target if len(self.source) == 1 else self.source

    @property
    def whole(self) -> str:
        return self.source[0] if len(self.source) == 1 else self.target[0]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A C function of an object file. `args`: arrays, or `i32` for a number. Macros are what its object is compiled
    with."""

    name: str
    object: str
    args: tuple[Array | Literal["i32"], ...]
    macros: tuple[tuple[str, int | float], ...] = ()
    static_bytes: int = 0
    """Tables and constants that the object puts into the core's data memory."""
    stack_bytes: int = STACK
    """What its calls may need, spills included. Declared; the build reads the frames off the object where the compiler
    is."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one core that no fifo moves: accumulators, running maxima."""

    name: str
    array: Array


@dataclass(frozen=True, slots=True)
class Acquire:
    """Each of `names` becomes an object: the oldest of a consumer port, or the next free ones of a producer port."""

    port: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    port: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    kernel: str
    args: tuple[str | int, ...]
    """Names of acquired objects, buffers and loop indices, or numbers."""


@dataclass(frozen=True, slots=True)
class Element:
    """A number that a kernel writes while the core runs: element `index` of an i32 buffer, by its formal name."""

    buffer: str
    index: int


@dataclass(frozen=True, slots=True)
class Loop:
    count: int | Element
    body: tuple[Statement, ...]
    index: str = ""
    """Name of the iteration number, an i32 that calls may take; empty where none does."""


Statement = Acquire | Release | Call | Loop


@dataclass(frozen=True, slots=True)
class Core:
    """The endless program of a core over formal names; workers can share it."""

    name: str
    params: tuple[str, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Bind:
    """What a formal name of a core stands for."""

    kind: Literal["consume", "produce", "kernel", "buffer"]
    name: str


@dataclass(frozen=True, slots=True)
class Worker:
    tile: Tile
    core: str
    binds: tuple[tuple[str, Bind], ...]
    stack_bytes: int = STACK
    allocation: Literal["bank-aware", "basic-sequential"] = "basic-sequential"

    @property
    def ports(self) -> dict[str, Bind]:
        return {formal: b for formal, b in self.binds if b.kind in ("consume", "produce")}


@dataclass(frozen=True, slots=True)
class Move:
    """One task of a shim DMA: argument `argument` read (fill) or written (drain) in the order of `sizes` and
    `strides`."""

    kind: Literal["fill", "drain"]
    fifo: str
    argument: str
    tile: Tile
    offset: int
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    group: int
    wait: bool = False
    """Finishing the group waits for it; its descriptor is free afterwards."""

    @property
    def size(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Finish:
    """Waits for the group's tasks that are to be waited for, then frees every descriptor of the group."""

    group: int


@dataclass(frozen=True, slots=True)
class Design:
    name: str
    columns: int
    arguments: tuple[tuple[str, Array], ...]
    """Host buffers in the order of the kernel's arguments."""
    kernels: tuple[Kernel, ...]
    fifos: tuple[Fifo, ...]
    links: tuple[Link, ...]
    cores: tuple[Core, ...]
    workers: tuple[Worker, ...]
    sequence: tuple[Move | Finish, ...]
    buffers: tuple[Buffer, ...] = ()
    facts: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Sizes it was made for, for tables and the cycle model: m, k, n, M, K, N, ..."""

    def __post_init__(self) -> None:
        for what, names in self._names().items():
            double = {n for n in names if names.count(n) > 1}
            if double:
                raise DesignError(f"{self.name}: {what} {sorted(double)} are declared twice")
        for worker in self.workers:
            self._check_worker(worker)
        for link in self.links:
            self._check_link(link)
        for move in self.moves():
            known = {"fifo": [f.name for f in self.fifos], "argument": [n for n, _ in self.arguments]}
            for key, names in known.items():
                if getattr(move, key) not in names:
                    raise DesignError(
                        f"{self.name}: a {move.kind} names no {key}: {getattr(move, key)!r}{nearest(getattr(move, key), names)}"
                    )
        for fifo in self.fifos:
            makers, takers = self.producers(fifo.name), self.consumers(fifo.name)
            if len(makers) != 1 or not takers:
                raise DesignError(
                    f"{self.name}: fifo {fifo.name} has {len(makers)} producers and {len(takers)} consumers; "
                    "it needs one and at least one"
                )

    def fifo(self, name: str) -> Fifo:
        return _find(self, "fifo", name, self.fifos)

    def kernel(self, name: str) -> Kernel:
        return _find(self, "kernel", name, self.kernels)

    def buffer(self, name: str) -> Buffer:
        return _find(self, "buffer", name, self.buffers)

    def core(self, name: str) -> Core:
        return _find(self, "core", name, self.cores)

    def argument(self, name: str) -> Array:
        return dict(self.arguments)[name]

    def moves(self) -> Iterator[Move]:
        return (s for s in self.sequence if isinstance(s, Move))

    def producers(self, fifo: str) -> list[Tile]:
        """Tiles that write into a fifo: a shim tile, the mem tile of a link, or a worker's."""
        found = [w.tile for w in self.workers for b in w.ports.values() if b == Bind("produce", fifo)]
        found += [link.tile for link in self.links if fifo in link.target]
        return found + sorted({m.tile for m in self.moves() if m.kind == "fill" and m.fifo == fifo})

    def consumers(self, fifo: str) -> list[Tile]:
        found = [w.tile for w in self.workers for b in w.ports.values() if b == Bind("consume", fifo)]
        found += [link.tile for link in self.links if fifo in link.source]
        return found + sorted({m.tile for m in self.moves() if m.kind == "drain" and m.fifo == fifo})

    def _names(self) -> dict[str, list[str]]:
        declared: dict[str, tuple[Any, ...]] = {
            "fifos": self.fifos,
            "kernels": self.kernels,
            "cores": self.cores,
            "buffers": self.buffers,
        }
        names = {what: [x.name for x in parts] for what, parts in declared.items()}
        return names | {
            "arguments": [n for n, _ in self.arguments],
            "workers on tiles": [str(w.tile) for w in self.workers],
        }

    def _check_worker(self, worker: Worker) -> None:
        core, where = self.core(worker.core), f"{self.name}: worker on {worker.tile}"
        if worker.tile.kind != "core":
            raise DesignError(f"{where}: workers run on core tiles, rows {CORE} and up")
        bound = [formal for formal, _ in worker.binds]
        if sorted(bound) != sorted(core.params):
            raise DesignError(f"{where}: binds {bound}, core {core.name} has {list(core.params)}")
        for _, b in worker.binds:
            {"kernel": self.kernel, "buffer": self.buffer}.get(b.kind, self.fifo)(b.name)

    def _check_link(self, link: Link) -> None:
        where = f"{self.name}: link of {link.whole}"
        if min(len(link.source), len(link.target)) != 1 or len(link.offsets) != len(link.parts):
            raise DesignError(f"{where}: links are 1 to n or n to 1, with an offset for each part")
        if link.tile.kind != "mem":
            raise DesignError(f"{where}: lies on {link.tile}; links are made in mem tiles, row {MEM}")
        whole, end = self.fifo(link.whole).array, 0
        for name, offset in zip(link.parts, link.offsets, strict=True):
            part = self.fifo(name).array
            if part.dtype != whole.dtype or offset + part.size > whole.size:
                raise DesignError(
                    f"{where}: part {name} of {part.size} {part.dtype} at {offset} does not lie in {whole.size} {whole.dtype}"
                )
            if offset < end:
                raise DesignError(f"{where}: part {name} at {offset} begins before the one before it ends, at {end}")
            end = offset + part.size
        repeated = [f for f in map(self.fifo, (*link.source, *link.target)) if f.repeat != 1]
        if repeated and (
            len(link.source) + len(link.target) > 2 or repeated[0].name != link.target[0] or repeated[0].repeat < 1
        ):
            raise DesignError(
                f"{where}: {repeated[0].name} is repeated {repeated[0].repeat} times: only forwarded objects are, once at least"
            )
        if len(link.source) == len(link.target) == 1 and whole.size % self.fifo(link.target[0]).array.size:
            raise DesignError(f"{where}: {whole.size} {whole.dtype} are no whole number of objects of {link.target[0]}")


def _find(design: Design, what: str, name: str, items: tuple[Any, ...]) -> Any:
    for item in items:
        if item.name == name:
            return item
    raise DesignError(f"{design.name}: no {what} {name!r}{nearest(name, [i.name for i in items])}")


def walk(dims: Dims, size: int) -> np.ndarray:
    """i64: the element that each step of a transfer touches; without dims, 0 .. size-1."""
    index = np.zeros((), np.int64)
    for extent, stride in dims or ((size, 1),):
        index = index[..., None] + np.arange(extent, dtype=np.int64) * stride
    return index.reshape(-1)
