"""Executes a design: its strides, its locks and its depths, with the compiled tile kernels.

Every DMA channel, every core and the runtime sequence is an agent; an agent runs until it needs a missing lock, object
or word. When all agents wait and the sequence is not at its end, the design is deadlocked: on the
hardware the driver's timer would end the run, here no clock is involved. Memory starts poisoned, buffers stand between
guard bands, and a buffer is poisoned again whenever its next writer takes it, so that nothing works by accident.

A shim channel holds as many tasks as the device sheet says: one more is dropped, as the hardware drops it, and what
waits for that task waits for ever. A task that repeats more often than its descriptor counts is a fault: the compiler
refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from hybrid.kernels.npu.check import npu_limits
from hybrid.kernels.npu.design import (
    DTYPES,
    Acquire,
    Call,
    Design,
    Element,
    Finish,
    Loop,
    Move,
    Release,
    Statement,
    Worker,
    walk,
)
from hybrid.kernels.npu.lower import Channel, Descriptor, Lowered, lower

POISON, GUARD = 0xA5, 64
MOST = 1 << 16
"""Most iterations of a loop whose count is read at run time: a larger count is uninitialised memory."""
RESET = ("floor", "none")
Waits = Callable[[], object] | None
"""What an agent yields: true when it can continue, None where it asks itself."""
Agent = Generator[Waits, None, None]


@dataclass(slots=True)
class Task:
    """A shim task. A drain's data is in the host's memory once its task is waited for. Before that the hardware may
    write it at any time; the interpreter does not."""

    move: Move
    done: bool = False
    index: np.ndarray | None = None
    data: bytes = b""


KernelFunction = Callable[..., None]
"""Takes NumPy arrays (raw bits for bf16) and numbers, writes in place."""


class NpuFault(RuntimeError):
    """The design did something that corrupts memory on the hardware."""


class Deadlock(RuntimeError):
    """No agent can continue: the hardware would end in ERT_CMD_STATE_TIMEOUT. The message lists the waits."""


@dataclass(slots=True)
class Counts:
    """What a run did, for tests and the cycle model."""

    calls: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    ddr_read: int = 0
    ddr_written: int = 0


@dataclass(slots=True)
class _Stream:
    """Bytes on their way from one channel to its consumers; a sender continues when all have taken them."""

    pending: dict[int, bytes] = field(default_factory=dict)
    sinks: tuple[int, ...] = ()

    def put(self, data: bytes) -> None:
        for s in self.sinks:
            self.pending[s] = self.pending.get(s, b"") + data

    def take(self, sink: int, most: int) -> bytes:
        """What has arrived, as a DMA takes it: at once, up to the end of its descriptor."""
        data = self.pending.get(sink, b"")
        self.pending[sink] = data[most:]
        return data[:most]

    def empty(self) -> bool:
        return not any(self.pending.values())


class Interpreter:
    """One run of a design's sequence. `memory`: the host's argument buffers as the device sees them, by name."""

    def __init__(
        self,
        design: Design | Lowered,
        kernels: Mapping[str, KernelFunction],
        poison: int = POISON,
        queue: int | None = None,
    ) -> None:
        """`queue`: tasks that a shim channel holds, the running one included; of the device sheet if not given."""
        self.low = design if isinstance(design, Lowered) else lower(design)
        self.design = self.low.design
        self.kernels, self.poison = kernels, poison
        self.counts = Counts()
        self.why: dict[str, str] = {}
        npu = npu_limits()
        limit = npu.shim.queue
        self.queue = queue if queue is not None else limit.value if limit else sys.maxsize
        self.repeats = (npu.repeat.value, npu.shim.bd.iterations.value)
        self.dropped: list[str] = []
        self.modes: dict[Any, tuple[str, str]] = {}
        """Rounding and saturation mode of each core: they outlive a call, and begin as after reset."""
        self._guard = bytes([poison]) * GUARD
        self.locks = {name: lock.init for name, lock in self.low.locks.items()}
        self._room: dict[str, np.ndarray] = {}
        self.buffers: dict[str, np.ndarray] = {}
        for name, place in self.low.buffers.items():
            room = _aligned(place.array.nbytes + 2 * GUARD)
            room.fill(poison)
            self._room[name] = room
            self.buffers[name] = room[GUARD:-GUARD].view(DTYPES[place.array.dtype])
        self.streams: dict[str, _Stream] = {}
        for i, channel in enumerate(self.low.channels):
            stream = self.streams.setdefault(channel.fifo, _Stream())
            if not channel.outward:
                stream.sinks = (*stream.sinks, i)
        self._walks: dict[tuple[Any, ...], np.ndarray] = {}
        self.memory: Mapping[str, np.ndarray] = {}
        self._tasks: dict[int, list[Task]] = {i: [] for i, c in enumerate(self.low.channels) if c.tile.kind == "shim"}
        self._agents: dict[str, Agent] = {}
        self._ready: dict[str, Waits] = {}
        """What each agent waits for, so that it is not run before."""
        for i, channel in enumerate(self.low.channels):
            self._agents[channel.name] = self._shim(i, channel) if i in self._tasks else self._channel(i, channel)
        self._binds = {worker.tile: dict(worker.binds) for worker in self.design.workers}
        for worker in self.design.workers:
            self._agents[str(worker.tile)] = self._core(worker)

    def run(self, memory: Mapping[str, np.ndarray], sequence: Sequence[Move | Finish] | None = None) -> Counts:
        """Execute the design's sequence, or another for the same fabric, on `memory` (flat arrays of the arguments'
        dtypes). Rings, locks and modes keep the state of the last run. Raises Deadlock or NpuFault."""
        self.memory = memory
        self._drive(self._sequence(self.design.sequence if sequence is None else sequence))
        left = [name.removesuffix(".full") for name, value in self.locks.items() if name.endswith(".full") and value]
        if left:
            raise NpuFault(
                f"{self.design.name}: objects of {', '.join(left)} stay behind: the next run would begin with them"
            )
        return self.counts

    def _drive(self, sequence: Agent) -> None:
        self.moved = True
        while True:
            if not self.moved:
                waits = "; ".join([*self.dropped, *(f"{name} {why}" for name, why in sorted(self.why.items()) if why)])
                raise Deadlock(f"{self.design.name}: nothing can go on: {waits}")
            self.moved = False
            for name, agent in self._agents.items():
                ready = self._ready.get(name)
                if ready is None or ready():
                    self._now = name
                    self._ready[name] = next(agent)
            self._now = "runtime sequence"
            if next(sequence, "done") == "done":
                return

    def _wait(self, why: str) -> None:
        self.why[self._now] = why

    def _go(self) -> None:
        self.moved = True
        self.why.pop(self._now, None)

    # --- locks

    def _take(self, lock: str, count: int = 1) -> Agent:
        locks = self.locks
        if locks[lock] < count:
            self._wait(f"waits for {lock}")
            yield lambda: locks[lock] >= count
        locks[lock] -= count
        self._go()

    # --- DMA

    def _channel(self, sink: int, channel: Channel) -> Agent:
        stream = self.streams[channel.fifo]
        parts = [self.buffers[bd.buffer][bd.offset : bd.offset + bd.array.size] for bd in channel.ring]
        for bd, part, index in cycle(list(zip(channel.ring, parts, map(self._index, channel.ring), strict=True))):
            yield from self._take(bd.take, bd.count)
            if channel.outward:
                stream.put(part[index].tobytes())
                self._go()
                if not stream.empty():
                    self._wait(f"sends {channel.fifo}, which is not taken")
                    yield stream.empty
            else:
                part.view(np.uint8).fill(self.poison)
                data = yield from self._receive(channel, sink, part.nbytes)
                part[index] = np.frombuffer(data, part.dtype)
            self.locks[bd.give] += bd.count
            self.counts.objects += 1
            self._go()

    def _receive(self, channel: Channel, sink: int, nbytes: int) -> Generator[Waits, None, bytes]:
        stream, got = self.streams[channel.fifo], bytearray()
        while True:
            piece = stream.take(sink, nbytes - len(got))
            got += piece
            if piece:
                self._go()
            if len(got) == nbytes:
                return bytes(got)
            self._wait(f"waits for {channel.fifo}")
            yield partial(stream.pending.get, sink)

    def _index(self, bd: Descriptor) -> np.ndarray:
        key = (bd.dims, bd.array.size)
        if key not in self._walks:
            self._walks[key] = walk(*key)
        return self._walks[key]

    def _shim(self, sink: int, channel: Channel) -> Agent:
        stream, tasks = self.streams[channel.fifo], self._tasks[sink]
        while True:
            if not tasks:
                self.why.pop(self._now, None)
                yield tasks.__len__
            task = tasks[0]
            move = task.move
            host = self.memory[move.argument]
            index = move.offset + walk(tuple(zip(move.sizes, move.strides, strict=True)), 0)
            if index.min() < 0 or index.max() >= host.size:
                raise NpuFault(
                    f"{self.design.name}: a {move.kind} of {move.fifo} reaches element {index.max()} of {move.argument}, "
                    f"which has {host.size}"
                )
            if channel.outward:
                stream.put(host[index].tobytes())
                self._go()
                self.counts.ddr_read += index.size * host.itemsize
                if not stream.empty():
                    self._wait(f"sends {channel.fifo}, which is not taken")
                    yield stream.empty
            else:
                task.data = yield from self._receive(channel, sink, index.size * host.itemsize)
                task.index = index
                self.counts.ddr_written += index.size * host.itemsize
            task.done = True
            tasks.pop(0)
            self._go()

    # --- runtime sequence

    def _sequence(self, steps: Sequence[Move | Finish]) -> Agent:
        groups: dict[int, list[Task]] = {}
        for step in steps:
            if isinstance(step, Move):
                entry = Task(step)
                where = next(
                    (
                        i
                        for i, c in enumerate(self.low.channels)
                        if c.tile == step.tile and c.fifo == step.fifo and c.outward == (step.kind == "fill")
                    ),
                    None,
                )
                if where is None:
                    raise NpuFault(f"{self.design.name}: no shim channel of {step.tile} carries {step.fifo}")
                most = self.repeats[step.strides[0] != 0]
                if step.sizes[0] > most:
                    which = f"a {step.kind} of {step.fifo}"
                    raise NpuFault(f"{self.design.name}: {which} is repeated {step.sizes[0]} times, of {most} at most")
                if len(self._tasks[where]) < self.queue:
                    self._tasks[where].append(entry)
                else:
                    self.dropped.append(
                        f"a {step.kind} of {step.fifo} was dropped: {self.low.channels[where].name} held {self.queue} tasks"
                    )
                groups.setdefault(step.group, []).append(entry)
                self._go()
            else:
                for task in groups.pop(step.group, []):
                    while not task.done:  # of those not waited for the descriptor is freed: it must not be under way
                        self._wait(f"waits for the {task.move.kind} of {task.move.fifo}")
                        yield None
                    if task.move.wait and task.index is not None:
                        host = self.memory[task.move.argument]
                        host[task.index] = np.frombuffer(task.data, host.dtype)
                self._go()
        self.why.pop("runtime sequence", None)

    # --- cores

    def _core(self, worker: Worker) -> Agent:
        core, held, at = self.design.core(worker.core), dict[str, Any](), dict.fromkeys(worker.ports, 0)
        for formal, bind in worker.binds:
            if bind.kind == "buffer":
                held[formal] = f"{bind.name}@{worker.tile.col}.{worker.tile.row}"
        while True:
            yield from self._run(worker, core.body, held, at)

    def _run(self, worker: Worker, body: Sequence[Statement], held: dict[str, Any], at: dict[str, int]) -> Agent:
        for s in body:
            if isinstance(s, Loop):
                for i in range(self._count(worker, s.count, held)):
                    if s.index:
                        held[s.index] = i
                    yield from self._run(worker, s.body, held, at)
            elif isinstance(s, Acquire):
                port = self.low.ports[worker.tile, s.port]
                for formal in s.names:
                    yield from self._take(port.take)
                    name = port.buffers[at[s.port] % len(port.buffers)]
                    if self._binds[worker.tile][s.port].kind == "produce":
                        self.buffers[name].view(np.uint8).fill(self.poison)
                    held[formal] = name
                    at[s.port] += 1
            elif isinstance(s, Release):
                self.locks[self.low.ports[worker.tile, s.port].give] += s.count
                self._go()
            else:
                self._call(worker, s, held)

    def _count(self, worker: Worker, count: int | Element, held: Mapping[str, Any]) -> int:
        if isinstance(count, int):
            return count
        value = int(self.buffers[held[count.buffer]][count.index])
        if not 0 <= value <= MOST:
            raise NpuFault(
                f"{self.design.name}: a loop on {worker.tile} counts to element {count.index} of {count.buffer}, which is {value}"
            )
        return value

    def _call(self, worker: Worker, call: Call, held: dict[str, Any]) -> None:
        kernel = self.design.kernel(self._binds[worker.tile][call.kernel].name)
        names = [held.get(a) if isinstance(a, str) else None for a in call.args]
        args = [
            self.buffers[n] if isinstance(n, str) else a if n is None else n
            for a, n in zip(call.args, names, strict=True)
        ]
        function = self.kernels[kernel.name]
        modal = hasattr(function, "modes")
        if modal:
            function.modes = self.modes.get(worker.tile, RESET)  # type: ignore[attr-defined]
        function(*args)
        if modal:
            self.modes[worker.tile] = function.modes  # type: ignore[attr-defined]
        self.counts.calls[kernel.name] = self.counts.calls.get(kernel.name, 0) + 1
        for name in names:
            if isinstance(name, str) and not self._intact(name):
                raise NpuFault(f"{self.design.name}: {kernel.name} on {worker.tile} wrote outside of {name}")

    def _intact(self, name: str) -> bool:
        room = self._room[name]
        return room[:GUARD].tobytes() == room[-GUARD:].tobytes() == self._guard


def _aligned(nbytes: int) -> np.ndarray:
    """uint8, starting at a multiple of GUARD: vectors of the core are loaded from multiples of 32 bytes."""
    raw = np.empty(nbytes + GUARD, np.uint8)
    start = -raw.ctypes.data % GUARD
    return raw[start : start + nbytes]
