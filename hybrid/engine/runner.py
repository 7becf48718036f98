"""Scheduled passes on an engine: the scheduler says which rows, this says which program, which message, and reads the
tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hybrid.core.device import Program
from hybrid.core.plan import FAULTED
from hybrid.engine.engine import Engine
from hybrid.engine.inbox import GOES_ON, Rows
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.sequence import Limits, Pass, Run, Stream
from hybrid.engine.turns import Turns
from hybrid.engine.work import Work
from hybrid.planning.passes import MATRIX_BUCKETS, PassSizes, bucket_of
from hybrid.spec.schedule import Phase

MIXED_ROWS = 512
"""Most rows of a pass in which a sequence decodes: its next token comes in the time of so many."""
AHEAD = 2
"""Passes in flight: the host prepares one while another runs."""


class VoidPass(Exception):
    """A pass chose no tokens (voids.py), and those behind it neither: the cache holds nothing of them."""


class Flight(NamedTuple):
    """A pass that was submitted, with its ticket."""

    scheduled: Pass
    ticket: int
    began: float = 0.0
    """When submitting it began, on time.perf_counter()."""


def most_mixed(sizes: PassSizes) -> int:
    """Most rows of a pass in which a sequence decodes: one of each sequence, however many there are."""
    return max(sizes.outs[-1], min(sizes.rows[-1], MIXED_ROWS))


def scheduler_of(engine: Engine, clock: Callable[[], float], queue: int) -> Scheduler:
    """A scheduler of the engine's blocks and slots."""
    sizes, slots = engine.sizes, engine.cache.slots
    device = engine.device
    alone = device.backend == "cpu" or device.drives != {device.backend}  # submitting is running, or overlaps of itself
    limits = Limits(
        slots,
        engine.cache.ctx,
        sizes.rows[-1],
        most_mixed(sizes),
        sizes.wants[-1],
        ahead=1 if alone else AHEAD,
        queue=queue,
    )
    steps = (
        device.has("f16_matrices") and len(sizes.decode) > 1
    )  # a pass costs by its plan's rows, not by those that live
    turns = Turns(sizes.decode, MATRIX_BUCKETS) if steps and not alone else None
    choosing = engine.choosing
    return Scheduler(
        engine.blocks, limits, clock, engine.tables.free, turns, lambda s: choosing.ready(s.tag.options.constraint)
    )


class Runner:
    """refused: called with a sequence whose constraint does not say what may come next, and why; its row is run for
    nothing."""

    def __init__(self, engine: Engine, refused: Callable[[Stream, Exception], object]) -> None:
        self.engine, self.refused = engine, refused
        self._last: Program | None = None  # of the pass before, where it had one row of each sequence
        self._sequences: list[tuple[Any, ...]] = []  # that the device's rows are set up for, with their slots
        self._message = -1  # the number of messages when they were
        self.work = Work()
        self._programs: object = None  # those of the engine at that time
        self.decoded = 0
        """Passes since the last with rows of a prompt."""

    def start(self, p: Pass, times: int = 1) -> Flight:
        """Submit a pass, which waits for none that runs, and with it those after it that continue it, `times` in
        all."""
        engine, same, began = self.engine, [run[:2] for run in p.runs], time.perf_counter()
        if self._last is not None and same == self._sequences and not p.writes and self._continues_last(p):
            self.decoded += times
            self.work.begin(p, True, self._last.plan)
            return Flight(p, self._submit(self._last, None, times), began)
        wanting = p.wanting
        slots = [run.slot for run in wanting]
        options, wants = engine.choosing.options(slots), engine.sizes.outs
        if p.outs > len(wanting):
            options, wants = options | {"verify"}, engine.sizes.wants
        onward = decodes_only(p) and not engine.config.deterministic
        phase: Phase = "decode" if onward else "prefill"
        outs = bucket_of(p.outs, engine.sizes.decode if onward else wants) if p.outs else 0
        rows = outs if onward else bucket_of(p.rows, engine.sizes.rows)
        slot = 0 if onward else engine.next_pipeline_slot()
        program = engine.program(phase, rows, outs, pipeline_slot=slot, options=options)
        self.work.begin(p, onward, program.plan)
        tokens, positions, of, out_rows = p.arrays()
        ticket = self._submit(program, Rows(tokens, positions, of, out_rows, self._masks(wanting), p.writes), times)
        self._last, self._sequences = program if onward else None, same
        self._message, self._programs = engine.inbox.messages, engine.programs
        if any(run.start < run.seq.n_prompt for run in p.runs):
            self.decoded, engine.prefilled = 0, engine.counters.copy()
        else:
            self.decoded += times
        return Flight(p, ticket, began)

    def _submit(self, program: Program, rows: Rows | None, times: int) -> int:
        try:
            return self.engine.submit_scheduled(program, rows, times)
        except BaseException:
            self.engine.inbox.lost_count()  # a later pass would take this message for its own
            raise

    def follow(self, flight: Flight, p: Pass) -> Flight:
        """A pass that the submit of another runs too."""
        assert self._last is not None
        self.work.begin(p, True, self._last.plan)
        return Flight(p, flight.ticket, flight.began)

    def _continues_last(self, p: Pass) -> bool:
        """Whether the device goes on with a pass as it is, with the rows of the pass before: nobody has used it
        meanwhile."""
        engine = self.engine
        return self._message == engine.inbox.messages and self._programs is engine.programs and _go_on(p)

    def continues(self, first: Pass, p: Pass) -> bool:
        """Whether the submit of a pass may run this one too, after it: the same rows, each going on."""
        if p.writes or p.params or self.engine.config.deterministic or not decodes_only(first):
            return False
        return _go_on(p) and [run[:2] for run in p.runs] == [run[:2] for run in first.runs]

    def tokens(self, flight: Flight) -> tuple[list[int], list[int] | None]:
        """The tokens that each run wanted, once the pass has finished: one, or, where it has drafts, those that are
        right and the one after them; NOT_FINITE where there was none to choose. And how many of each run (None: one
        each). VoidPass."""
        peek, ticket, runs = self.engine.device.peek, flight.ticket, flight.scheduled.wanting
        if flight.scheduled.outs == len(runs):
            found = [peek("history", slot, start + (len(ids) if ids else 1), ticket) for _, slot, start, ids, _ in runs]
            counts = None
        else:
            each = [self._verified(run, ticket) for run in runs]
            found, counts = [token for tokens in each for token in tokens], [len(tokens) for tokens in each]
        if runs:  # else nothing was waited for
            self.work.end(flight.scheduled)
        if FAULTED in found:
            self.work.lost()
            self.engine.settle()
            raise VoidPass
        return found, counts

    def _verified(self, run: Run, ticket: int) -> list[int]:
        """The guesses that are right, as the device has found, and the token after them."""
        peek, at = self.engine.device.peek, run.start + len(run.ids or (GOES_ON,)) - run.wants + 1
        right = peek("accepted", run.slot, 0, ticket) if run.wants > 1 else 0
        return [peek("history", run.slot, at + i, ticket) for i in range(right + 1)]

    def _masks(self, wanting: list[Run]) -> np.ndarray | None:
        choosing = self.engine.choosing
        if not choosing.constrained(run.slot for run in wanting):
            return None
        rows = []
        for run in wanting:
            try:
                rows += choosing.mask_rows([run.slot] * run.wants).tolist()
            except Exception as error:  # whatever somebody's constraint raises
                self.refused(run.seq, error)
                rows += [-1] * run.wants
        return np.array(rows, np.int32)


def decodes_only(p: Pass) -> bool:
    """Whether it has one row of each sequence."""
    return p.rows == p.outs == len(p.runs)


def _go_on(p: Pass) -> bool:
    return [run[3] for run in p.runs].count(None) == len(p.runs)
