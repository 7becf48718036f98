"""Timed runs of an engine with ordinary requests: prefill and decode.

Before the first repetition the cache is filled by running random tokens. Later repetitions mark these positions as
computed (`Request.start`), so that they do the same work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybrid.core.device import Counters
from hybrid.devices.energy import Energy, Meter
from hybrid.engine.handle import Handle
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options, Request
from hybrid.planning.cost import Cost, plan_cost


@dataclass(frozen=True, slots=True)
class Row:
    """One test: `tokens` of all sequences together, `seconds` of each repetition."""

    phase: Literal["prefill", "decode"]
    n: int
    depth: int
    """Positions in the cache before the test, per sequence."""
    batch: int
    tokens: int
    seconds: tuple[float, ...]
    flops: int
    """Operations of one repetition by the declared costs, like the bytes."""
    nbytes: int
    counted: Mapping[str, float]
    """The device's counters per pass: submits, dispatches, barriers, allocations, recordings, transfers."""
    host_us: float | None = None
    """Host time per token without waits, in microseconds; None if submit runs the pass itself."""
    energy: Energy | None = None
    """Energy of all repetitions, if measured."""

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
    """Tests on an otherwise idle engine, with `batch` sequences (default: its slots)."""

    def __init__(
        self, engine: Engine, repeats: int, seed: int = 0, batch: int | None = None, meter: Meter | None = None
    ) -> None:
        self.engine, self.repeats, self.meter = engine, repeats, meter
        self.batch = engine.cache.slots if batch is None else batch
        self._random = np.random.default_rng(seed)
        self._handles: list[Handle] = []

    def prefill(self, n: int, depth: int) -> Row:
        """Prefill `n` tokens of each sequence after `depth` positions: time until the next token is sampled."""
        engine, seconds = self.engine, []
        for run in range(-1, self.repeats):  # the first run warms up and fills the cache
            wanted = self.requests(depth + n, 1, 0 if run < 0 else depth)
            counters, passes, cost = engine.counters.copy(), self._passes, self._cost()
            with self._metered(run):
                begin = time.perf_counter()
                self.run(wanted)
                spent = time.perf_counter() - begin
            if run >= 0:
                seconds.append(spent)
        after = self._cost()
        done = Cost(after.flops - cost.flops, after.nbytes - cost.nbytes)
        return self._row("prefill", n, depth, seconds, done, self._per(counters, self._passes - passes))

    def decode(self, n: int, depth: int) -> Row:
        """Decode `n` tokens of each sequence after `depth` (at least 2) positions."""
        engine, seconds, hosts = self.engine, [], []
        start = max(depth, 2)
        for run in range(-1, self.repeats):
            wanted = self.requests(start, n + 1, 0 if run < 0 else start - 1)
            self.run(
                wanted, lambda request: len(request.ids) > request.n_prompt
            )  # a pass submitted early is running by now
            counters, passes, waited = engine.counters.copy(), self._passes, engine.waited
            with self._metered(run):
                begin = time.perf_counter()
                self.run(wanted)
                spent = time.perf_counter() - begin
            if run >= 0:
                seconds.append(spent)
                hosts.append((spent - (engine.waited - waited)) / (n * self.batch) * 1e6)
        counted = self._per(counters, self._passes - passes)
        one = plan_cost(engine.runner.plan("decode", self.batch, self.batch), start + n // 2)
        host_us = None if engine.scheduler.limits.ahead == 1 else statistics.median(hosts)
        return self._row("decode", n, depth, seconds, Cost(one.flops * n, one.nbytes * n), counted, host_us)

    def requests(self, length: int, most: int, start: int) -> list[Request]:
        """A request for each sequence: a prompt of random tokens, the first `start` marked as computed."""
        options = Options(max_tokens=most, ignore_eos=True)
        made = [Request(0, self.ids(length), options, start=start) for _ in range(self.batch)]
        for request in made:
            request.private = True  # no prefix reuse between runs
        self._handles = [self.engine.drive(request) for request in made]  # unreferenced handles are cancelled
        return made

    def run(
        self, wanted: Sequence[Request], until: Callable[[Request], bool] = lambda request: request.finish is not None
    ) -> None:
        """Run passes until `until` holds for every request. RuntimeError for an invalid or missing token."""
        while not all(map(until, wanted)):
            self.engine.drive_step()
        for request in wanted:
            if request.error is not None:
                raise request.error
            most = self.engine.target.n_tokens
            if max(request.generated, default=0) >= most:
                raise RuntimeError(f"the device sampled {request.generated}: not all are tokens below {most}")
            if request.finish is not None and len(request.generated) != request.limit:
                raise RuntimeError(f"a sequence got {len(request.generated)} tokens, {request.limit} were asked for")

    def ids(self, n: int) -> list[int]:
        """Random tokens."""
        return self._random.integers(0, self.engine.target.n_tokens, n).tolist()

    # --- sums ----------------------------------------------------------------------------------------------------

    @property
    def _passes(self) -> int:
        return self.engine.scheduler.counts.passes

    def _cost(self) -> Cost:
        """Cost of all passes so far, by the operations' declarations."""
        totals = self.engine.runner.work.totals().values()
        return Cost(round(sum(t.flops for t in totals)), round(sum(t.nbytes for t in totals)))

    def _metered(self, run: int) -> AbstractContextManager[object]:
        """Measure the energy of repetitions, not of the warm-up."""
        return self.meter.running() if self.meter and run >= 0 else nullcontext()

    def _per(self, before: Counters, passes: int) -> dict[str, float]:
        done = self.engine.counters.minus(before)
        names = ("submits", "dispatches", "barriers", "allocations", "recordings", "transfers")
        return {name: getattr(done, name) / max(1, passes) for name in names}

    def _row(
        self,
        phase: Literal["prefill", "decode"],
        n: int,
        depth: int,
        seconds: list[float],
        cost: Cost,
        counted: Mapping[str, float],
        host_us: float | None = None,
    ) -> Row:
        energy = self.meter.take() if self.meter else None
        return Row(
            phase,
            n,
            depth,
            self.batch,
            n * self.batch,
            tuple(seconds),
            cost.flops,
            cost.nbytes,
            counted,
            host_us,
            energy,
        )
