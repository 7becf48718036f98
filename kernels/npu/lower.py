"""A design as the hardware sees it: buffers, locks, and chains of buffer descriptors on DMA channels.

This follows mlir-aie's lowering of object fifos: every end of a fifo on a core tile has `depth` buffers and a pair of
counting locks (free, full); a DMA channel walks a ring of descriptors, one for each buffer, each with one lock to take
before and one to give after. In a link both fifos share the mem tile's buffers, with a pair of locks and a descriptor
for each part; an object that is sent several times counts as often in its locks.
check.py counts these, interpreter.py executes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid.kernels.npu.design import Array, Bind, Design, DesignError, Dims, Fifo, Link, Tile, Worker


@dataclass(frozen=True, slots=True)
class Place:
    """A buffer in a tile's memory."""

    name: str
    tile: Tile
    array: Array


@dataclass(frozen=True, slots=True)
class Lock:
    name: str
    tile: Tile
    init: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    buffer: str
    array: Array
    """What is moved: the buffer, or a part of it."""
    offset: int
    """Element of the buffer where the part begins."""
    dims: Dims
    take: str
    give: str
    count: int = 1
    """What is taken and given: of an object that is sent several times, all of them at once when it arrives."""


@dataclass(frozen=True, slots=True)
class Channel:
    tile: Tile
    outward: bool
    index: int
    fifo: str
    ring: tuple[Descriptor, ...]
    """Empty on shim tiles: the runtime sequence gives the descriptors."""

    @property
    def name(self) -> str:
        return f"{'MM2S' if self.outward else 'S2MM'} {self.index} of {self.tile}"


@dataclass(frozen=True, slots=True)
class Port:
    """A core's side of a fifo."""

    buffers: tuple[str, ...]
    take: str
    give: str


@dataclass(slots=True)
class Lowered:
    design: Design
    buffers: dict[str, Place] = field(default_factory=dict)
    locks: dict[str, Lock] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)
    ports: dict[tuple[Tile, str], Port] = field(default_factory=dict)
    """By worker's tile and formal name."""

    def of(self, fifo: str, outward: bool) -> list[Channel]:
        return [c for c in self.channels if c.fifo == fifo and c.outward == outward]

    def on(self, tile: Tile, outward: bool | None = None) -> list[Channel]:
        return [c for c in self.channels if c.tile == tile and outward in (None, c.outward)]

    @property
    def tiles(self) -> list[Tile]:
        return sorted({c.tile for c in self.channels} | {w.tile for w in self.design.workers})

    def add(self, tile: Tile, outward: bool, fifo: str, ring: tuple[Descriptor, ...]) -> None:
        self.channels.append(Channel(tile, outward, len(self.on(tile, outward)), fifo, ring))


def lower(design: Design) -> Lowered:
    """Buffers, locks and descriptors of a design. DesignError where an object does not fit what it is read as."""
    low = Lowered(design)
    for link in design.links:
        _link(low, link)
    for worker in design.workers:
        for formal, bind in worker.ports.items():
            _port(low, worker, formal, bind)
    for fifo in design.fifos:
        for kind, outward in (("fill", True), ("drain", False)):
            for tile in sorted({m.tile for m in design.moves() if m.kind == kind and m.fifo == fifo.name}):
                low.add(tile, outward, fifo.name, ())
    for worker in design.workers:
        for _, bind in worker.binds:
            if bind.kind == "buffer":
                name = f"{bind.name}@{worker.tile.col}.{worker.tile.row}"
                low.buffers[name] = Place(name, worker.tile, design.buffer(bind.name).array)
    return low


def _pair(low: Lowered, name: str, tile: Tile, depth: int) -> tuple[str, str]:
    free, full = f"{name}.free", f"{name}.full"
    low.locks[free], low.locks[full] = Lock(free, tile, depth), Lock(full, tile, 0)
    return free, full


def _ring(low: Lowered, name: str, tile: Tile, fifo: Fifo) -> tuple[str, ...]:
    names = tuple(f"{name}[{i}]" for i in range(fifo.depth))
    low.buffers.update({n: Place(n, tile, fifo.array) for n in names})
    return names


def _port(low: Lowered, worker: Worker, formal: str, bind: Bind) -> None:
    fifo, outward = low.design.fifo(bind.name), bind.kind == "produce"
    name = f"{fifo.name}@{worker.tile.col}.{worker.tile.row}"
    buffers, (free, full) = _ring(low, name, worker.tile, fifo), _pair(low, name, worker.tile, fifo.depth)
    dims = fifo.to_stream if outward else fifo.from_stream
    _covers(low.design, fifo.name, dims, fifo.array)
    take, give = (full, free) if outward else (free, full)
    low.add(worker.tile, outward, fifo.name, tuple(Descriptor(b, fifo.array, 0, dims, take, give) for b in buffers))
    low.ports[worker.tile, formal] = Port(buffers, give, take)  # the core takes what its DMA gives


def _link(low: Lowered, link: Link) -> None:
    design = low.design
    whole = design.fifo(link.whole)
    buffers = _ring(low, f"{whole.name}@{link.tile.col}.{link.tile.row}", link.tile, whole)
    split, forward = len(link.source) == 1, len(link.source) == len(link.target) == 1
    times = design.fifo(link.target[0]).repeat
    rings: dict[str, list[Descriptor]] = {}
    pairs = {p: _pair(low, f"{p}@{link.tile.col}.{link.tile.row}", link.tile, whole.depth * times) for p in link.parts}
    for buffer in buffers:
        for part, offset in zip(link.parts, link.offsets, strict=True):
            free, full = pairs[part]
            array = whole.array if forward else design.fifo(part).array
            source, target = (whole.name, part) if split else (part, whole.name)
            arrive, leave = design.fifo(source).from_stream, design.fifo(target).to_stream
            _covers(design, source, arrive, array)
            _covers(design, target, leave, array)
            rings.setdefault(f"in {source}", []).append(Descriptor(buffer, array, offset, arrive, free, full, times))
            # A single buffer's descriptor is repeated by its DMA task; several need one for each time.
            out = [Descriptor(buffer, array, offset, leave, full, free)] * (1 if whole.depth == 1 else times)
            rings.setdefault(f"out {target}", []).extend(out)
    for key, ring in rings.items():
        way, name = key.split(" ", 1)
        low.add(link.tile, way == "out", name, tuple(ring))


def _covers(design: Design, fifo: str, dims: Dims, array: Array) -> None:
    if not dims:
        return
    count, last = 1, 0
    for size, stride in dims:
        count, last = count * size, last + (size - 1) * stride
    if count != array.size or last >= array.size:
        raise DesignError(
            f"{design.name}: fifo {fifo}: dims {list(dims)} touch {count} elements up to {last} of an object of {array.size}"
        )
