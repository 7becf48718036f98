"""Scheduled passes on an engine: the scheduler says which rows, this says which program, which message, and reads the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hybrid.core.plan import FAULTED
from hybrid.engine.engine import Engine
from hybrid.engine.inbox import Rows
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.sequence import Limits, Pass, Run, Stream
from hybrid.engine.work import Work
from hybrid.planning.passes import bucket_of
from hybrid.spec.schedule import Phase

MIXED_ROWS = 512
"""Most rows of a pass in which a sequence decodes: its next token comes in the time of so many."""
AHEAD = 2
"""Passes in flight: the host prepares one while another runs."""


class VoidPass(Exception):
    """A pass chose no tokens (voids.py), and those behind it neither: the cache holds nothing of them."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass that was submitted, with its ticket."""

    scheduled: Pass
    ticket: int

    @property
    def wanting(self) -> list[Run]:
        return [run for run in self.scheduled.runs if run.wants]


def scheduler_of(engine: Engine, clock: Callable[[], float], queue: int) -> Scheduler:
    """A scheduler of the engine's blocks and slots."""
    sizes, slots = engine.sizes, engine.cache.slots
    device = engine.device
    alone = device.backend == "cpu" or device.drives != {device.backend}  # submitting is running, or overlaps of itself
    mixed = max(slots, min(sizes.rows[-1], MIXED_ROWS))
    limits = Limits(slots, engine.cache.ctx, sizes.rows[-1], mixed, sizes.outs[-1], ahead=1 if alone else AHEAD, queue=queue)
    return Scheduler(engine.blocks, limits, clock, engine.tables.free)


class Runner:
    """refused: called with a sequence whose constraint does not say what may come next, and why; its row is run for nothing."""

    def __init__(self, engine: Engine, refused: Callable[[Stream, Exception], object]) -> None:
        self.engine, self.refused = engine, refused
        self._rows: tuple[object, ...] = ()  # what the device's rows are set up for
        self._message = -1  # the number of messages when they were
        self.work = Work()

    def start(self, p: Pass) -> Flight:
        """Submit a pass, which waits for none that runs."""
        engine = self.engine
        wanting = [run for run in p.runs if run.wants]
        slots = [run.slot for run in wanting]
        options = engine.choosing.options(slots)
        onward = len(wanting) == len(p.runs) == p.rows and not engine.config.deterministic  # one row of each sequence
        phase: Phase = "decode" if onward else "prefill"
        outs = bucket_of(p.outs, engine.sizes.decode if onward else engine.sizes.outs) if p.outs else 0
        rows = outs if onward else bucket_of(p.rows, engine.sizes.rows)
        slot = 0 if onward else engine.next_pipeline_slot()
        program = engine.program(phase, rows, outs, pipeline_slot=slot, options=options)
        self.work.begin(p, onward, program.plan)
        same = (program, *slots)
        if onward and not p.writes and self._rows == same and self._message == engine.inbox.messages and _go_on(p):
            return Flight(p, engine.submit_scheduled(program, None))
        tokens, positions, of, out_rows = p.arrays()
        ticket = engine.submit_scheduled(program, Rows(tokens, positions, of, out_rows, self._masks(wanting), p.writes))
        self._rows, self._message = same, engine.inbox.messages
        return Flight(p, ticket)

    def tokens(self, flight: Flight) -> list[int]:
        """The token that each run wanted, once the pass has finished; NOT_FINITE where there was none to choose. VoidPass."""
        peek, ticket = self.engine.device.peek, flight.ticket
        found = [peek("history", run.slot, run.start + (len(run.ids) if run.ids else 1), ticket) for run in flight.wanting]
        if flight.wanting:  # else nothing was waited for
            self.work.end(flight.scheduled)
        if FAULTED in found:
            self.work.lost()
            self.engine.settle()
            raise VoidPass
        return found

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


def _go_on(p: Pass) -> bool:
    return all(run.ids is None for run in p.runs)
