"""Requests that run in the background: one thread owns the device while there are any, `submit` is callable from every thread.

    submit -> arrived -> the scheduler: waits, runs in passes together with others, is put back, ends -> events all the while

The thread takes what has arrived, lets the scheduler make passes as long as it wants any, submits them, and reads the oldest
while the next one runs. What goes wrong with one request ends that one; what goes wrong with the device ends all of them. The
thread ends after a while without work.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

from hybrid.core.errors import QueueFull
from hybrid.engine.engine import Engine
from hybrid.engine.faults import fault
from hybrid.engine.handle import Completion, Event, Handle, Timings, TokenLogprob, Usage
from hybrid.engine.handle import Stream as Readers
from hybrid.engine.metrics import Metrics
from hybrid.engine.options import Options
from hybrid.engine.queue import length_at_end
from hybrid.engine.request import Request
from hybrid.engine.runner import Flight, Runner, VoidPass, scheduler_of
from hybrid.engine.sequence import Stream
from hybrid.text.tokenizer import Tokenizer

QUEUE = 1024
"""Requests that may wait, unless told otherwise."""
IDLE = 5.0  # seconds without work after which the thread ends; the next request begins another
JOIN = 600.0  # seconds that closing waits for the thread's last pass
RECHECK = 0.005  # seconds until requests for which there is no room are looked at again
_serving: weakref.WeakSet[Serving] = weakref.WeakSet()


class Job:
    """A request with its options, its readers, and what the scheduler knows of it."""

    def __init__(self, number: int, request: Request, options: Options) -> None:
        self.request, self.options, self.readers = request, options, Readers()
        self.arrived = time.perf_counter()
        self.begun: float | None = None
        self.first: float | None = None
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.stream = Stream(
            number, request.prompt, request.limit, ends=request.end_ids, priority=options.priority, tag=self,
            deadline=None if options.deadline is None else self.arrived + options.deadline, ahead=options.constraint is None,
        )  # fmt: skip

    def push(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """The next token: an event, and the end where it is one."""
        if self.first is None:
            self.first = time.perf_counter()
        text = self.request.push(token)
        self.text.append(text)
        of = () if logprob is None else (logprob,)
        self.logprobs += of
        self.readers.push(Event(text, (token,), of or None))

    def end(self) -> None:
        """Tell the readers that it has ended, as the request says or, where that has not ended, the scheduler."""
        request, stream = self.request, self.stream
        if request.finish is None and (rest := request.cancel("deadline" if stream.finish == "deadline" else "cancelled")):
            self.text.append(rest)
            self.readers.push(Event(rest))
        assert request.finish is not None
        usage = Usage(len(request.prompt), stream.cached, len(request.out))
        times = [None if t is None else t - self.arrived for t in (self.begun, self.first)]
        timings = Timings(times[0], times[1], time.perf_counter() - self.arrived)
        logprobs = tuple(self.logprobs) if self.options.logprobs else None
        self.readers.end(Completion("".join(self.text), tuple(request.out), request.finish, logprobs, usage, timings))


class Serving:
    """The queue and the thread of one engine. check: raises where the model cannot be used (closed, device lost)."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, check: Callable[[], object], queue: int = QUEUE) -> None:
        if not isinstance(queue, int) or queue < 1:
            raise ValueError(f"queue must be a positive integer, the requests that may wait, not {queue!r}")
        self.engine, self.tokenizer, self.check, self.queue = engine, tokenizer, check, queue
        self.scheduler = scheduler_of(engine, time.perf_counter, queue)
        self.runner = Runner(engine, self._refused)
        # The scheduler, the runner and the flights are the thread's, which holds the engine's lock meanwhile.
        self._flights: deque[Flight] = deque()
        # The rest is guarded by this; who holds it takes no other lock.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._arrived: list[Job] = []
        self._jobs: dict[int, Job] = {}  # by number, all that have not ended
        self._number = self._refusals = 0
        self._closed: BaseException | None = None
        self._woken = False
        self._finished: dict[str, int] = {}
        self._ends: deque[float] = deque(maxlen=33)  # when the last requests ended
        _serving.add(self)

    # ------------------------------------------------------------------------------------------------- from any thread
    def submit(self, prompt: Sequence[int], options: Options) -> Handle:
        """Put a request into the queue. ValueError, ContextExceeded (the prompt), QueueFull."""
        hp, o = self.engine.target.hparams, options
        (sampling := o.sampling()).check(self.engine.target.n_tokens)
        request = Request(prompt, self.tokenizer, vocab=hp.vocab, ctx=self.engine.cache.ctx, max_tokens=o.max_tokens,
                          sampling=sampling, stop=o.stop, ignore_eos=o.ignore_eos)  # fmt: skip
        with self._changed:
            if self._closed is not None:
                raise self._closed
            waiting = len(self._arrived) + self.scheduler.waiting
            if waiting >= self.queue:
                self._refusals += 1
                raise QueueFull(waiting, self._retry_after())
            self._number += 1
            job = Job(self._number, request, options)
            length_at_end(job.stream, self.engine.cache.ctx, self.engine.blocks)  # ContextExceeded where it would never fit
            job.readers.wake = self.wake
            self._jobs[self._number] = job
            self._arrived.append(job)
            self._start()
            self._changed.notify_all()
        return Handle(job.readers)

    def wake(self) -> None:
        """Something has changed that the thread should see before its next pass."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def metrics(self) -> Metrics:
        """Numbers of now; those of a pass that begins meanwhile may be in some and not in others."""
        s = self.scheduler
        blocks, counts = s.blocks, s.counts
        held = {g.name: (blocks.used[g.name], blocks.cached[g.name], blocks.free[g.name]) for g in blocks.groups}
        with self._changed:
            return Metrics(
                waiting=len(self._arrived) + s.waiting,
                running=s.running,
                prompt_tokens=counts.prompt,
                cached_tokens=counts.cached,
                generated_tokens=counts.generated,
                finished=dict(self._finished),
                refused=self._refusals,
                passes=counts.passes,
                preemptions=counts.preemptions,
                evictions=blocks.evictions,
                recomputed=counts.recomputed,
                work=self.runner.work.totals,
                blocks={name: dict(zip(("used", "cached", "free"), n, strict=True)) for name, n in held.items()},
            )

    def close(self, error: BaseException) -> None:
        """End every request with `error`, and the thread; refuse what comes later with it."""
        with self._changed:
            if self._closed is None:
                self._closed = error
            thread, self._woken = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread() and self._process == os.getpid():
            thread.join(JOIN)  # it waits for nothing but the device, which bounds its waits itself
        self._fail_all(error)

    # ---------------------------------------------------------------------------------------------- the device's thread
    def _start(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this model's requests run in the process that it was loaded in: load it anew in this one")
        if self._thread is None:
            _close_at_exit()
            self._thread = threading.Thread(target=self._run, name="hybrid engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                with self.engine.lock:
                    self.check()
                    blocked = self._round()
            except Exception as error:  # of the device, or of what was not foreseen: nobody is left waiting
                self._fail_all(error)
                continue
            if blocked:  # slots or blocks are somebody else's, who does not say when they are free
                with self._changed:
                    if not (self._woken or self._arrived):
                        self._changed.wait(RECHECK)

    def _wait_for_work(self) -> bool:
        """False: the thread ends."""
        until = time.monotonic() + IDLE
        with self._changed:
            while True:
                if self._closed is not None:
                    self._thread = None
                    return False
                if self._jobs or self._flights:
                    return True
                if (left := until - time.monotonic()) <= 0:
                    self._thread = None
                    return False
                self._changed.wait(left)

    def _round(self) -> bool:
        """Submit what the scheduler wants, then take the tokens of the oldest pass. True: nothing can run now."""
        self._look()
        scheduler = self.scheduler
        while (scheduled := scheduler.schedule()) is not None:
            for stream in scheduled.params:
                self._place(stream.tag)
            self._flights.append(self.runner.start(scheduled))
        if not self._flights:
            return bool(self._jobs)
        try:
            self._take(self._flights[0])
        except VoidPass:  # every sequence starts again from the tokens that it has
            self._flights.clear()
            scheduler.lose()
        return False

    def _look(self) -> None:
        """Take in what has arrived, end what was cancelled or is late."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            woken, self._woken = self._woken, False
            cancelled = [j for j in self._jobs.values() if j.readers.cancelled] if woken else []
        for job in arrived:
            try:
                self.scheduler.add(job.stream)
            except Exception as error:  # it would never fit
                self._end(job, error)
        for job in cancelled:
            if self.scheduler.cancel(job.stream):
                self._end(job)
        for stream in self.scheduler.expire():
            self._end(stream.tag)

    def _place(self, job: Job) -> None:
        """It has a slot, for the first time or again: its tokens are chosen as its options say."""
        stream, choosing = job.stream, self.engine.choosing
        if job.begun is None:
            job.begun = time.perf_counter()
            job.request.begin(0)
        if job.request.sampling.counts:  # `history` is written here: no pass may note a token of the slot's last sequence there
            self.engine.device.wait()
        assert stream.slot is not None
        choosing.admit(stream.slot, job.request.sampling, job.request.prompt, job.options.constraint, stream.generated)

    def _take(self, flight: Flight) -> None:
        """Wait for a pass, hand its tokens out, end what ends with them."""
        tokens, wrong = self.runner.tokens(flight), {}
        found: dict[int, TokenLogprob | None] = {}
        for run, token in zip(flight.wanting, tokens, strict=True):
            if run.seq.finish is not None:
                continue
            at = run.start + (len(run.ids) if run.ids else 1)
            if token < 0:
                wrong[run.seq.id] = fault(token, self.engine.checkpoint.path, run.slot, at)
            elif run.seq.tag.options.logprobs:
                said = self.engine.choosing.reported(run.slot, at, flight.ticket)
                found[run.seq.id] = None if said is None else TokenLogprob(*said[0], said[1])
        for number, error in wrong.items():
            job = self._jobs[number]
            self.scheduler.cancel(job.stream, "error")
            self._end(job, error)
        self._flights.popleft()
        for stream, n in self.scheduler.commit(flight.scheduled, tokens):
            job = stream.tag
            for token in stream.ids[len(stream.ids) - n :]:
                self._hand_out(job, token, found.get(stream.id))

    def _hand_out(self, job: Job, token: int, logprob: TokenLogprob | None) -> None:
        stream, constraint = job.stream, job.options.constraint
        job.push(token, logprob)
        if job.request.finish is not None:
            self.scheduler.cancel(stream, "stop")  # where the scheduler has not seen the end itself
            self._end(job)
        elif constraint is not None:
            try:
                if stream.slot is None:  # put back: it has no slot at the moment
                    constraint.accept(token)
                else:
                    self.engine.choosing.accept(stream.slot, token)
            except Exception as error:  # whatever somebody's constraint raises
                self._refused(stream, error)

    def _refused(self, stream: Stream, error: Exception) -> None:
        if self.scheduler.cancel(stream, "error"):
            self._end(stream.tag, error)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """Tell the readers of one that the scheduler has let go of."""
        with self._changed:
            if self._jobs.pop(job.stream.id, None) is None:
                return
        if error is None:
            job.end()
        else:
            job.readers.end(None, error)
        reason = "error" if error is not None else str(job.request.finish)
        with self._changed:
            self._finished[reason] = self._finished.get(reason, 0) + 1
            self._ends.append(time.perf_counter())

    def _fail_all(self, error: BaseException) -> None:
        """End every request, whatever state it is in."""
        with self._changed:
            jobs, self._arrived = list(self._jobs.values()), []
        if not jobs and not self._flights:
            return
        with self.engine.lock:
            self._flights.clear()
            self.runner.work.lost()
            for job in jobs:
                if job.stream.held is not None:  # else it was never added
                    self.scheduler.cancel(job.stream, "error")
                self._end(job, error)
            self.scheduler.lose()

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is likely to be free, by how the last requests ended."""
        ends = self._ends
        return max(1.0, (ends[-1] - ends[0]) / (len(ends) - 1)) if len(ends) > 1 else 1.0


@cache
def _close_at_exit() -> None:
    """End the threads before the devices are closed: what was registered last runs first, and the devices are open by now."""

    def close_all() -> None:
        for serving in list(_serving):
            serving.close(RuntimeError("the interpreter ends"))

    atexit.register(close_all)
