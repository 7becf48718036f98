"""Timed runs of one engine: prompts in passes, and tokens one after another, each repeated from the same state.

The cache is filled by running random tokens through the model; every repetition starts from the same number of them
(of a ring that later tokens have entered, those are seen instead: the same work on other numbers).
How many tokens a run consumed is read from the device afterwards (`next_position`), and what it chose from `history`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybrid.devices.energy import Energy, Meter
from hybrid.engine.engine import Engine
from hybrid.engine.streams import submit_ahead
from hybrid.planning.cost import Cost, plan_cost


@dataclass(frozen=True, slots=True)
class Row:
    """One test: `tokens` of all sequences, counted by the device, in each of `seconds` (one per repetition)."""

    phase: Literal["prefill", "decode"]
    n: int
    depth: int
    """Positions in the cache before it, per sequence."""
    batch: int
    tokens: int
    seconds: tuple[float, ...]
    flops: int
    """Of one repetition, by the operations' declared cost; so are the bytes."""
    nbytes: int
    counted: Mapping[str, float]
    """The device's counters per pass: submits, dispatches, barriers, allocations, recordings, transfers."""
    host_us: float | None = None
    """Of the engine's own work per token, waits excluded; None where submitting is running."""
    energy: Energy | None = None
    """Of all repetitions, where it was asked for."""

    @property
    def name(self) -> str:
        return f"{self.phase} {self.n} @ {self.depth}" + (f" x {self.batch}" if self.batch > 1 else "")

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.tokens / s for s in self.seconds]

    @property
    def tokens_per_second(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / statistics.median(self.seconds) / 1e9

    @property
    def tflops(self) -> float:
        return self.flops / statistics.median(self.seconds) / 1e12


class Bench:
    """Tests on an engine that nothing else uses, with `batch` sequences at a time (default: as many as it has
    slots)."""

    def __init__(
        self,
        engine: Engine,
        repeats: int,
        at_once: int = 1,
        seed: int = 0,
        batch: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.engine, self.repeats, self.at_once, self.meter = engine, repeats, at_once, meter
        self.slots = tuple(range(engine.cache.slots if batch is None else batch))
        self._random = np.random.default_rng(seed)

    def prefill(self, n: int, depth: int) -> Row:
        """`n` tokens of each sequence after `depth` others: time until the next token is chosen."""
        engine, seconds, prompts = self.engine, [], {s: self.ids(n) for s in self.slots}
        before, cost = engine.counters.copy(), self._prefill_cost(prompts, depth)
        for run in range(-1, self.repeats):  # the first warms up
            self.fill(depth)
            before = engine.counters.copy()
            with self._metered(run):
                begin = time.perf_counter()
                engine.wait(engine.submit_prefill(prompts))
                spent = time.perf_counter() - begin
            if run >= 0:
                seconds.append(spent)
        counted = self._per(before, -(-n * len(self.slots) // engine.sizes.rows[-1]))
        return self._row("prefill", n, depth, self._consumed(depth), seconds, cost, counted)

    def decode(self, n: int, depth: int) -> Row:
        """`n` tokens of each sequence, one after another, from `depth` (at least 2) positions on."""
        engine, seconds, hosts, before = self.engine, [], [], self.engine.counters.copy()
        start = max(depth, 2)
        for run in range(-1, self.repeats):
            self.fill(start - 2)
            engine.wait(engine.submit_prefill({s: self.ids(1) for s in self.slots}))
            engine.wait(engine.submit_decode(self.slots))  # its rows are set up: what follows only submits
            before = engine.counters.copy()
            with self._metered(run):
                spent, host = self._tokens(n)
            if run >= 0:
                seconds.append(spent)
                hosts.append(host / (n * len(self.slots)) * 1e6)
        counted = self._per(before, n)
        plan = engine.plan("decode", len(self.slots), len(self.slots))
        one = plan_cost(plan, start + n // 2)
        host_us = None if engine.target.device == "cpu" else statistics.median(hosts)
        cost = Cost(one.flops * n, one.nbytes * n)
        return self._row("decode", n, depth, self._consumed(start), seconds, cost, counted, host_us)

    def _tokens(self, n: int) -> tuple[float, float]:
        """Seconds of n steps, and those that the host worked. The next submit is made before a token is read."""
        engine, clock, slots = self.engine, time.perf_counter, self.slots
        first, read, submits = engine.positions[0] + 1, 0, submit_ahead(engine, slots, n, self.at_once)
        host, begin = 0.0, clock()
        while read < n:
            mark = clock()
            ticket, count = next(submits)
            host += clock() - mark
            engine.wait(ticket)
            mark = clock()
            for position in range(first + read, first + read + count):
                for slot in slots:
                    engine.token(slot, position, ticket)
            read += count
            host += clock() - mark
        return clock() - begin, host

    def _metered(self, run: int) -> AbstractContextManager[object]:
        """The energy of a repetition is counted, that of warming up is not."""
        return self.meter.running() if self.meter and run >= 0 else nullcontext()

    # --- state ---------------------------------------------------------------------------------------------------

    def fill(self, depth: int) -> None:
        """Every sequence holds `depth` tokens: by forgetting what came after them, else by running random ones."""
        engine = self.engine
        engine.wait()
        for slot in self.slots:
            if slot not in engine.positions:
                engine.admit(slot=slot)
            if engine.positions[slot] > depth:
                engine.rewind(slot, depth, anyway=True)
        prompts = {s: self.ids(depth - engine.positions[s]) for s in self.slots if engine.positions[s] < depth}
        if prompts:
            engine.wait(engine.submit_prefill(prompts))

    def ids(self, n: int) -> list[int]:
        """Random tokens."""
        return self._random.integers(0, self.engine.target.n_tokens, n).tolist()

    def _consumed(self, start: int) -> int:
        """Tokens that the device has run since `start`, all sequences. RuntimeError where it chose an id that is
        none."""
        device, vocab = self.engine.device, self.engine.target.n_tokens
        ends = device.read("next_position").array[: len(self.slots)].tolist()
        for slot, end in zip(self.slots, ends, strict=True):
            chosen = device.read("history", slot, slot + 1).array[0, start : end + 1]
            if ((chosen < 0) | (chosen >= vocab)).any():
                raise RuntimeError(
                    f"the device chose {chosen.tolist()} for slot {slot}: not all are tokens below {vocab}"
                )
        return sum(ends) - start * len(self.slots)

    # --- sums ----------------------------------------------------------------------------------------------------

    def _prefill_cost(self, prompts: Mapping[int, Sequence[int]], depth: int) -> Cost:
        engine, total = self.engine, Cost()
        for chunk in engine.passes(prompts, dict.fromkeys(prompts, depth)):
            plan = engine.plan("prefill", len(chunk.tokens), len(chunk.out_rows))
            total += plan_cost(plan, round(float(chunk.positions.mean())) + 1)
        return total

    def _per(self, before: object, passes: int) -> dict[str, float]:
        done = self.engine.counters.minus(before)  # type: ignore[arg-type]
        names = ("submits", "dispatches", "barriers", "allocations", "recordings", "transfers")
        return {name: getattr(done, name) / passes for name in names}

    def _row(
        self,
        phase: Literal["prefill", "decode"],
        n: int,
        depth: int,
        tokens: int,
        seconds: list[float],
        cost: Cost,
        counted: Mapping[str, float],
        host_us: float | None = None,
    ) -> Row:
        wanted = n * len(self.slots)
        if tokens != wanted:
            raise RuntimeError(f"{phase} {n} @ {depth}: the device consumed {tokens} tokens, {wanted} were asked for")
        energy = self.meter.take() if self.meter else None
        return Row(
            phase, n, depth, len(self.slots), tokens, tuple(seconds), cost.flops, cost.nbytes, counted, host_us, energy
        )
