"""What is done with the device for the requests of one engine: passes are submitted, their tokens taken and handed out.
Whoever does it holds the engine's lock (serving.py), within which Ctrl-C waits except where the device is at work."""

from __future__ import annotations

import time
from collections import deque

from hybrid.core import interrupts
from hybrid.engine.drafting import Drafting
from hybrid.engine.drafts import Drafter
from hybrid.engine.engine import Engine
from hybrid.engine.faults import fault
from hybrid.engine.handle import TokenLogprob, Wakes
from hybrid.engine.job import Job
from hybrid.engine.runner import Flight, Runner, VoidPass, decodes_only, scheduler_of
from hybrid.engine.sampling import Sampling
from hybrid.engine.sequence import Pass, Stream


class Rounds:
    """The scheduler of an engine, the runner of its passes, and those in flight. Serving, which is one, has the
    requests."""

    def __init__(self, engine: Engine, queue: int, drafter: Drafter | None = None, k: int | None = None) -> None:
        self.engine, self.queue = engine, queue
        self.scheduler = scheduler_of(engine, time.perf_counter, queue)
        self.runner = Runner(engine, self._refused)
        engine.tables.make_room = self._make_room
        self.drafting: Drafting | None = None
        if drafter is not None:
            room = engine.sizes.wants[-1]
            self.drafting = Drafting(drafter, room, k, engine.choosing, _wish, self._refused, engine.faults.append)
        self._read = 0.0  # when the last pass had been waited for
        self._recorded = engine.counters.recordings  # programs at that time
        self._flights: deque[Flight] = deque()
        self._chosen: list[tuple[Job, int, TokenLogprob | None]] = []  # tokens that are still to be handed out
        self._wakes = Wakes()
        self._jobs: dict[int, Job] = {}  # by number, all that have not ended; guarded by Serving
        self._due = True  # whether a pass may be made or a token handed out

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """Tell the readers of one that the scheduler has let go of."""
        raise NotImplementedError

    def _submit(self) -> None:
        """Passes as long as the scheduler makes any; those of a request alone several at a time, if it wants that."""
        scheduler, at_once = self.scheduler, 1
        if len(self._jobs) == 1:
            (job,) = self._jobs.values()
            at_once = job.at_once
        ahead = scheduler.limits.ahead
        if at_once > 1 and len(self._flights) > at_once * (ahead - 1):
            return
        group: list[Pass] = []
        self.engine.choosing.begin_pass()
        while True:
            may = self.drafting is None or self.drafting.prepare(scheduler)
            made = scheduler.schedule(at_once) if may else None
            if group and (made is None or not self.runner.continues(group[0], made)):
                self._start_passes(group)
                group = []
            if made is None:
                return
            for stream in made.params:
                self._place(stream.tag)
            group.append(made)
            if len(group) == at_once or (ahead == 1 and not self.runner.continues(made, made)):
                self._start_passes(group)
                group = []
                if ahead == 1:  # submitting is running: the tokens of what ran would come late
                    return

    def _start_passes(self, group: list[Pass]) -> None:
        with interrupts.allowed():
            flight = self.runner.start(group[0], len(group))
        self._flights.append(flight)
        for later in group[1:]:
            self._flights.append(self.runner.follow(flight, later))

    def _deliver(self) -> None:
        """Hand out the tokens that were taken, and wake the readers of these and of what was handed out at once or
        ended."""
        chosen, self._chosen = self._chosen, []
        for job, token, logprob in chosen:
            if job.stream.id in self._jobs:
                self._hand_out(job, token, logprob)
        self._wakes.send()

    def _place(self, job: Job) -> None:
        """It has a slot, for the first time or again: its tokens are chosen as its options say."""
        stream, choosing = job.stream, self.engine.choosing
        if job.begun is None:
            job.begun = time.perf_counter()
            job.request.begin(0)
        assert stream.slot is not None
        if (
            job.request.sampling.counts
        ):  # `history` is written here: no pass may note a token of the slot's last sequence there
            for flight in reversed(self._flights):
                if any(run.slot == stream.slot for run in flight.scheduled.runs):
                    self.engine.device.wait(flight.ticket)
                    break
        choosing.admit(stream.slot, job.request.sampling, job.request.prompt, job.options.constraint, stream.generated)

    def _take(self) -> None:
        """Wait for the oldest pass and take its tokens, which are handed out after the next is submitted; those of
        requests whose next pass depends on what their reader's side says of them at once."""
        flight = self._flights[0]
        self._due = True
        try:
            with interrupts.allowed():
                drafted = 0.0 if self.drafting is None else self.drafting.finish(flight.scheduled)
                tokens, counts = self.runner.tokens(flight)
            now, began = time.perf_counter(), max(flight.began, drafted)
            seconds, between, self._read = now - max(self._read, began), max(0.0, began - self._read), now
            if self._recorded != (recorded := self.engine.counters.recordings):  # a program was made meanwhile
                seconds, self._recorded = 0.0, recorded
        except VoidPass:  # every sequence starts again from the tokens that it has
            self._flights.clear()
            self.scheduler.lose(cache=False)
            return
        wrong: dict[int, BaseException] = {}
        found: dict[int, list[TokenLogprob | None]] = {}
        end = 0
        for i, run in enumerate(flight.scheduled.wanting):
            begin, end = end, end + (1 if counts is None else counts[i])
            if run.seq.finish is not None:
                continue
            first = run.start + (len(run.ids) if run.ids else 1) - run.wants + 1
            for at, token in enumerate(tokens[begin:end], first):
                if token < 0:
                    wrong[run.seq.id] = fault(token, self.engine.checkpoint.path, run.slot, at)
                elif run.seq.tag.options.logprobs:
                    said = self.engine.choosing.reported(run.slot, at, flight.ticket)
                    found.setdefault(run.seq.id, []).append(None if said is None else TokenLogprob(*said[0], said[1]))
        for number, error in wrong.items():
            job = self._jobs[number]
            self.scheduler.cancel(job.stream, "error")
            self._end(job, error)
        self._flights.popleft()
        news = self.scheduler.commit(flight.scheduled, tokens, counts)
        if self.scheduler.turns is not None and seconds and decodes_only(flight.scheduled):
            self.scheduler.turns.took(flight.scheduled.rows, seconds)
        if self.drafting is not None:
            self.drafting.committed(flight.scheduled, news, seconds, between)
        for stream, n in news:
            job, said_of = stream.tag, found.get(stream.id)
            for i, token in enumerate(stream.ids[-n:]):
                logprob = None if said_of is None else said_of[i]
                if job.options.constraint is None:
                    self._chosen.append((job, token, logprob))
                elif job.request.finish is None:
                    self._hand_out(job, token, logprob)

    def _hand_out(self, job: Job, token: int, logprob: TokenLogprob | None) -> None:
        stream, constraint = job.stream, job.options.constraint
        job.push(token, logprob, self._wakes)
        if job.request.finish is not None:
            self.scheduler.cancel(stream, "stop")  # where the scheduler has not seen the end itself
            self._end(job)
        elif constraint is not None:
            try:
                if stream.slot is None:  # put back: it has no slot at the moment
                    constraint.accept(token)
                else:
                    self.engine.choosing.accept(stream.slot, token)
            except BaseException as error:  # whatever somebody's constraint raises; Ctrl-C is none of it, which waits
                self._refused(stream, error)

    def _refused(self, stream: Stream, error: BaseException) -> None:
        if self.scheduler.cancel(stream, "error"):
            self._end(stream.tag, error)

    def _make_room(self) -> bool:
        """Let the last of the requests that run wait: its slot and blocks are for somebody else's sequence. False where
        none runs."""
        with interrupts.held():
            while self._flights:
                self._take()
            self._wakes.send()
            self._due = True
            return self.scheduler.put_back_last()


def _wish(stream: Stream) -> tuple[Sampling, int | None, bool]:
    """See Drafting."""
    job: Job = stream.tag
    return job.request.sampling, 0 if job.at_once > 1 else job.options.speculate, job.options.constraint is not None
