"""python -m kernels.npu.check [NAME ...]: resources that each design takes of every tile, and the
hardware limits that it exceeds.

Limits are from specs/devices/phoenix-npu.toml. A design within all of them may still be slow or deadlock: see perf.npu
and interpreter.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from hybrid.cli import Parser, run
from hybrid.core.errors import SpecError
from hybrid.kernels.npu.design import CORE, Array, Design, Dims, Finish, Kernel, Tile, Worker
from hybrid.kernels.npu.lower import Lowered, lower
from hybrid.kernels.npu.order import disorder
from hybrid.spec.devicesheet import find_sheet
from hybrid.spec.npusheet import Npu, TileLimits

WORD = 4
SHEET = "phoenix-npu"


@dataclass(frozen=True, slots=True)
class Violation:
    where: str
    limit: str
    """The key of the device sheet, or the rule: `core.bd.words`, `program order`."""
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.limit}: {self.text}"


@dataclass(slots=True)
class Use:
    """What one tile has in use."""

    tile: Tile
    memory: int = 0
    memory_of: int = 0
    bds: int = 0
    bds_of: int = 0
    locks: int = 0
    locks_of: int = 0
    channels_in: int = 0
    channels_out: int = 0
    channels_of: int = 0
    repeats: int = 0
    """Shim tiles: the most that a task sends the same. Mem tiles: the most that an object is sent."""
    queued: int = 0
    """Shim tiles: the most tasks of a channel that are under way at once."""


@dataclass(slots=True)
class Report:
    design: Design
    uses: list[Use] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def demand(self) -> None:
        """SpecError with every violation, if there is any."""
        if self.violations:
            raise SpecError("; ".join(map(str, self.violations)))


def npu_limits(sheet: str = SHEET) -> Npu:
    found = find_sheet(sheet).npu
    if found is None:
        raise SpecError(f"specs/devices/{sheet}.toml: npu: is missing; this sheet describes no NPU")
    return found


def check(design: Design, npu: Npu | None = None) -> Report:
    """Resources of a design and every limit it breaks. DesignError where it contradicts itself."""
    npu = npu or npu_limits()
    low, report = lower(design), Report(design)
    report.violations += [Violation(w, limit, text) for w, limit, text in disorder(low)]
    report.violations += _shape(design, npu)
    for tile in low.tiles:
        limits = getattr(npu, tile.kind)
        report.uses.append(_use(low, tile, limits))
        report.violations += _tile(low, report.uses[-1], limits)
        if tile.kind == "core":
            report.violations += _core(low, next(w for w in design.workers if w.tile == tile), limits)
    report.violations += _moves(design, npu)
    return report


def _shape(design: Design, npu: Npu) -> Iterator[Violation]:
    if design.columns > npu.columns.value:
        yield Violation(design.name, "columns", f"{design.columns} columns, {npu.columns.value} can be used")
    tiles = {m.tile for m in design.moves()} | {link.tile for link in design.links} | {w.tile for w in design.workers}
    for tile in sorted(tiles):
        if not 0 <= tile.col < min(design.columns, npu.columns.value) or tile.row >= CORE + npu.core_rows.value:
            yield Violation(
                design.name,
                "columns",
                f"{tile} lies outside of {design.columns} columns x {npu.core_rows.value} core rows",
            )
    if len(design.arguments) > npu.arguments.value:
        yield Violation(
            design.name, "arguments", f"{len(design.arguments)} buffers, a kernel takes {npu.arguments.value}"
        )


def _use(low: Lowered, tile: Tile, limits: TileLimits) -> Use:
    use = Use(tile, bds_of=limits.bds.value, locks_of=limits.locks.value)
    use.memory = sum(p.array.nbytes for p in low.buffers.values() if p.tile == tile)
    use.memory_of = limits.data_bytes.value if limits.data_bytes else 0
    for worker in (w for w in low.design.workers if w.tile == tile):
        use.memory += worker.stack_bytes + sum(k.static_bytes for k in _kernels(low.design, worker))
    use.locks = sum(lock.tile == tile for lock in low.locks.values())
    use.bds = _outstanding(low.design, tile) if tile.kind == "shim" else sum(len(c.ring) for c in low.on(tile))
    use.channels_in, use.channels_out = len(low.on(tile, False)), len(low.on(tile, True))
    use.channels_of = limits.channels_in.value
    if tile.kind == "shim":
        use.repeats = max((m.sizes[0] for m in low.design.moves() if m.tile == tile and m.strides[0] == 0), default=0)
        use.queued = max((_outstanding(low.design, tile, c.fifo, c.outward) for c in low.on(tile)), default=0)
    elif tile.kind == "mem":
        use.repeats = max((bd.count for c in low.on(tile) for bd in c.ring), default=0)
    return use


def _outstanding(design: Design, tile: Tile, fifo: str | None = None, fill: bool | None = None) -> int:
    """Most descriptors of a shim tile in use at once, or most tasks of one of its channels under way: a group's are
    free when it is finished."""
    live: dict[int, int] = {}
    most = 0
    for step in design.sequence:
        if isinstance(step, Finish):
            live.pop(step.group, None)
        elif step.tile == tile and (fifo is None or (step.fifo, step.kind == "fill") == (fifo, fill)):
            live[step.group] = live.get(step.group, 0) + 1
            most = max(most, sum(live.values()))
    return most


def _tile(low: Lowered, use: Use, limits: TileLimits) -> Iterator[Violation]:
    where, kind = f"{low.design.name}: {use.tile}", use.tile.kind
    counted = {
        "data_bytes": (use.memory, use.memory_of, "bytes of buffers, stack and tables"),
        "bds": (use.bds, use.bds_of, "buffer descriptors at once"),
        "locks": (use.locks, use.locks_of, "locks"),
        "channels_in": (use.channels_in, limits.channels_in.value, "DMA channels from streams"),
        "channels_out": (use.channels_out, limits.channels_out.value, "DMA channels to streams"),
    }
    for key, (used, available, what) in counted.items():
        if used > available and (available or key != "data_bytes"):
            yield Violation(where, f"{kind}.{key}", f"{used} {what}, there are {available}")
    if limits.queue is not None and use.queued > limits.queue.value:
        yield Violation(
            where,
            f"{kind}.queue",
            f"{use.queued} tasks of a channel under way, its queue holds {limits.queue.value}: the next is dropped, "
            "and what waits for it waits for ever",
        )
    if limits.bds_per_parity is not None:
        for parity in (0, 1):
            used = sum(len(c.ring) for c in low.on(use.tile) if c.index % 2 == parity)
            if used > limits.bds_per_parity.value:
                which = "odd" if parity else "even"
                yield Violation(
                    where,
                    f"{kind}.bds_per_parity",
                    f"{used} descriptors on {which} channels, which reach {limits.bds_per_parity.value}",
                )
    for lock in (lock for lock in low.locks.values() if lock.tile == use.tile):
        if lock.init > limits.lock_max.value:
            yield Violation(
                where,
                f"{kind}.lock_max",
                f"lock {lock.name} starts at {lock.init}, a lock counts to {limits.lock_max.value}",
            )
    for channel in low.on(use.tile):
        for text in dict.fromkeys(t for bd in channel.ring for t in _descriptor(bd.dims, bd.array, limits, kind)):
            yield Violation(f"{where}: {channel.fifo}", *text)


def _core(low: Lowered, worker: Worker, limits: TileLimits) -> Iterator[Violation]:
    where = f"{low.design.name}: {worker.tile}"
    for kernel in _kernels(low.design, worker):
        if kernel.stack_bytes > worker.stack_bytes:
            yield Violation(
                where,
                "stack",
                f"{kernel.name} needs {kernel.stack_bytes} bytes of stack, the worker has {worker.stack_bytes}: "
                "it would grow into the tile's buffers",
            )
    if worker.allocation == "bank-aware" and limits.banks and limits.data_bytes:
        yield from _banks(low, worker, limits.data_bytes.value // limits.banks.value, limits.banks.value, where)


def _banks(low: Lowered, worker: Worker, size: int, count: int, where: str) -> Iterator[Violation]:
    """Every buffer inside one bank, the largest first, each in the emptiest bank; stack and tables take bank 0."""
    room = [size] * count
    room[0] -= worker.stack_bytes + sum(k.static_bytes for k in _kernels(low.design, worker))
    for place in sorted((p for p in low.buffers.values() if p.tile == worker.tile), key=lambda p: -p.array.nbytes):
        best = max(range(count), key=room.__getitem__)
        if place.array.nbytes > room[best]:
            yield Violation(
                where,
                "core.banks",
                f"{place.name} of {place.array.nbytes} bytes fits no bank of {size}: make it smaller, or allocate basic-sequential",
            )
            return
        room[best] -= place.array.nbytes


def _kernels(design: Design, worker: Worker) -> list[Kernel]:
    """Kernels of a worker; those of one object share its tables."""
    named = [design.kernel(b.name) for _, b in worker.binds if b.kind == "kernel"]
    return list({k.object: k for k in sorted(named, key=lambda k: (k.static_bytes, k.stack_bytes))}.values())


def _moves(design: Design, npu: Npu) -> Iterator[Violation]:
    for move in design.moves():
        array = design.argument(move.argument)
        where = f"{design.name}: {move.tile}: {move.kind} of {move.fifo}"
        limits, bd = npu.shim, npu.shim.bd
        outer, inner = (move.sizes[0], move.strides[0]), tuple(zip(move.sizes[1:], move.strides[1:], strict=True))
        most = npu.repeat.value if outer[1] == 0 else bd.iterations.value
        if outer[0] > most:
            key = "repeat" if outer[1] == 0 else "shim.bd.iterations"
            yield Violation(where, key, f"{outer[0]} iterations, a task has {most}")
        if outer[0] > 1 and _words(outer[1], array) > bd.step.value:
            yield Violation(
                where, "shim.bd.step", f"stride of {_words(outer[1], array)} words, the field holds {bd.step.value}"
            )
        for text in _descriptor(inner, Array(array.dtype, (prod(move.sizes[1:]),)), limits, "shim"):
            yield Violation(where, *text)
        end = move.offset + sum((s - 1) * t for s, t in zip(move.sizes, move.strides, strict=True))
        if end >= array.size or move.offset * array.itemsize % WORD:
            yield Violation(
                where,
                "argument",
                f"elements {move.offset} to {end} of {move.argument}, which has {array.size}; transfers begin at whole words",
            )


def _words(stride: int, array: Array) -> int:
    return stride * array.itemsize // WORD


def _descriptor(dims: Dims, array: Array, limits: TileLimits, kind: str) -> Iterator[tuple[str, str]]:
    """Fields of one descriptor: (limit, what is beyond it)."""
    bd = limits.bd
    if array.nbytes % WORD:
        yield "stream width", f"an object of {array.nbytes} bytes is no whole number of {WORD}-byte words"
        return
    if array.nbytes // WORD > bd.words.value:
        yield f"{kind}.bd.words", f"a descriptor of {array.nbytes // WORD} words, its field holds {bd.words.value}"
    nested = [(size, stride) for size, stride in dims if size > 1]
    if _contiguous(nested):
        return
    if nested[-1][1] == 1:
        if nested[-1][0] * array.itemsize % WORD:
            yield (
                "stream width",
                f"runs of {nested[-1][0]} {array.dtype} are no whole words: a DMA moves {WORD} bytes at least",
            )
        sizes = [*[s for s, _ in nested[:-1]], nested[-1][0] * array.itemsize // WORD]
        outer = nested[:-1]
    else:
        if array.itemsize < WORD:
            yield (
                "stream width",
                f"single {array.dtype} elements with stride {nested[-1][1]}: a DMA moves {WORD} bytes at least",
            )
        sizes, outer = [s for s, _ in nested], nested
    places = bd.dimensions.value - (kind == "shim")  # the shim's fourth is the iteration
    if len(sizes) > places:
        yield f"{kind}.bd.dimensions", f"{len(sizes)} nested strides, a descriptor has {places}"
    for size in sizes[1:]:
        if size > bd.wrap.value:
            yield f"{kind}.bd.wrap", f"a dimension of {size}, its field holds {bd.wrap.value}"
    for _size, stride in outer:
        if stride * array.itemsize % WORD:
            yield "stream width", f"a stride of {stride} {array.dtype} is no whole number of words"
        elif _words(stride, array) > bd.step.value:
            yield f"{kind}.bd.step", f"a stride of {_words(stride, array)} words, its field holds {bd.step.value}"


def _contiguous(nested: Sequence[tuple[int, int]]) -> bool:
    run = 1
    for size, stride in reversed(nested):
        if stride != run:
            return False
        run *= size
    return True


def table(report: Report) -> str:
    """One line for each kind of tile: the fullest tile, used of available."""
    lines = [f"{report.design.name}: {len(report.design.workers)} workers on {report.design.columns} columns"]
    for kind in ("core", "mem", "shim"):
        uses = [u for u in report.uses if u.tile.kind == kind]
        if uses:
            top = {
                k: max(getattr(u, k) for u in uses) for k in ("memory", "bds", "locks", "channels_in", "channels_out")
            }
            memory = f"memory {top['memory']:>6} of {uses[0].memory_of}" if kind != "shim" else "memory         -"
            lines.append(
                f"  {kind:<5}{memory:<24} BDs {top['bds']:>2} of {uses[0].bds_of:<3} "
                f"locks {top['locks']:>2} of {uses[0].locks_of:<3} "
                f"channels in {top['channels_in']}, out {top['channels_out']} of {uses[0].channels_of}{_sent(kind, uses)}"
            )
    return "\n".join([*lines, *(f"  REFUSED {v}" for v in report.violations)])


def _sent(kind: str, uses: Sequence[Use]) -> str:
    """How often the same is sent, and how many tasks wait for a channel, beside the limits."""
    npu, repeats = npu_limits(), max(u.repeats for u in uses)
    if kind == "core":
        return ""
    if kind == "mem":
        return f"  sent {repeats} times of {npu.mem.lock_max.value}"
    queue = npu.shim.queue.value if npu.shim.queue else 0
    return f"  repeats {repeats} of {npu.repeat.value}, queued {max(u.queued for u in uses)} of {queue}"


def main(argv: list[str] | None = None) -> int:
    """Tables of designs by name; 1 if any is refused."""
    p = Parser(prog="python -m kernels.npu.check", description="What designs take of every tile; 1 if any is refused.")
    p.add_argument("names", nargs="*", metavar="NAME", help="designs (all)")
    args = p.parse_args(argv)

    def command() -> int:
        from hybrid.kernels.npu.designs import chosen

        refused = 0
        for name, make in chosen(args.names).items():
            report = check(make())
            print(f"{name} = {table(report)}")
            refused |= bool(report.violations)
        return refused

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
