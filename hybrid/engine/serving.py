"""Requests of one engine: those of `Model.submit` run in the background, by one thread that owns the device while there
are any; those of `Model.generate` are run by whoever reads them. `submit` is callable from every thread.

    submit -> arrived -> the scheduler: waits, runs in passes together with others, is put back, ends -> events all the
    while

Whoever runs passes (holding the engine's lock for one at a time) takes what has arrived, lets the scheduler make passes
as long as it wants any, submits them, hands out the tokens of the pass before, and reads the oldest while the next one
runs. A pass has rows of all requests, whoever runs it. What goes wrong with one request ends that one; what goes wrong
with the device ends all of them. The thread ends after a while without work.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from hybrid.core.errors import NoFreeSlot, QueueFull
from hybrid.engine.drafts import Drafter
from hybrid.engine.engine import Engine
from hybrid.engine.handle import Handle, Pieces
from hybrid.engine.handle import Stream as Readers
from hybrid.engine.job import Job
from hybrid.engine.metrics import Metrics
from hybrid.engine.options import Options
from hybrid.engine.pace import Counts as Guessed
from hybrid.engine.queue import length_at_end
from hybrid.engine.request import Request
from hybrid.engine.rounds import Rounds
from hybrid.text.tokenizer import Tokenizer

QUEUE = 1024
"""Requests that may wait, unless told otherwise."""
IDLE = 5.0  # seconds without work after which the thread ends; the next request begins another
JOIN = 600.0  # seconds that closing waits for the thread's last pass
RECHECK = 0.005  # seconds until requests for which there is no room are looked at again
BLOCKED = 10.0  # seconds that a reader waits for room that is not the scheduler's
_serving: weakref.WeakSet[Serving] = weakref.WeakSet()


class Serving(Rounds):
    """The queue and the thread of one engine. check: raises where the model cannot be used (closed, device lost)."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        check: Callable[[], object],
        queue: int = QUEUE,
        drafter: Drafter | None = None,
        k: int | None = None,
    ) -> None:
        if not isinstance(queue, int) or queue < 1:
            raise ValueError(f"queue must be a positive integer, the requests that may wait, not {queue!r}")
        super().__init__(engine, queue, drafter, k)
        self.tokenizer, self.check = tokenizer, check
        # What is here is guarded by this; who holds it takes no other lock. The rest is of who holds the engine's lock.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._arrived: list[Job] = []
        self._behind = 0  # requests that the thread runs
        self._timed = False  # whether one ever had a deadline
        self._number = self._refusals = 0
        self._closed: BaseException | None = None
        self._woken = False
        self._finished: dict[str, int] = {}
        self._ends: deque[float] = deque(maxlen=33)  # when the last requests ended
        _serving.add(self)

    # ------------------------------------------------------------------------------------------------- from any thread
    def submit(self, prompt: Sequence[int], options: Options) -> Handle:
        """Put a request into the queue. ValueError, ContextExceeded (the prompt), QueueFull."""
        request, readers = self.request(prompt, options), Readers()
        with self._changed:
            if self._closed is not None:
                raise self._closed
            waiting = len(self._arrived) + self.scheduler.waiting
            if waiting >= self.queue:
                self._refusals += 1
                raise QueueFull(waiting, self._retry_after())
            self._put(request, options, readers)
            readers.wake = self.wake
            self._behind += 1
            self._start()
            self._changed.notify_all()
        return Handle(readers)

    def request(self, prompt: Sequence[int], options: Options) -> Request:
        """ValueError for what cannot be, ContextExceeded for a prompt that leaves no room for a token."""
        hp, o = self.engine.target.hparams, options
        (sampling := o.sampling()).check(self.engine.target.n_tokens)
        if o.speculate and self.drafting is None:
            raise ValueError("speculate: the model was loaded without guesses: load it with draft= or speculate=")
        return Request(
            prompt,
            self.tokenizer,
            vocab=hp.vocab,
            ctx=self.engine.cache.ctx,
            max_tokens=o.max_tokens,
            sampling=sampling,
            stop=o.stop,
            ignore_eos=o.ignore_eos,
        )

    def begin(self, request: Request, options: Options, at_once: int = 1) -> Job:
        """A request that whoever asked reads piece by piece, and so runs."""
        with self._changed:
            if self._closed is not None:
                raise self._closed
            return self._put(request, options, Pieces(), at_once)

    def piece(self, job: Job) -> str | None:
        """The next piece of text of a request of `begin`, after as many passes as that takes; None at its end. Raises
        what ended it; NoFreeSlot where others keep the slots or the blocks that it needs."""
        pieces, until = job.pieces, 0.0
        assert pieces is not None
        texts = pieces.texts
        while True:
            with self.engine.lock:
                if not texts and pieces.error is None and pieces.completion is None:
                    self.check()
                    blocked = self._guarded()
                if texts:
                    return texts.popleft()
                if pieces.error is not None:
                    raise pieces.error
                if pieces.completion is not None:
                    return None
            if not blocked:
                until = 0.0
                continue
            until = until or time.monotonic() + BLOCKED
            if time.monotonic() > until:
                raise NoFreeSlot(
                    f"for {BLOCKED:g} s all {self.engine.cache.slots} slots, or too many blocks of the KV cache, have "
                    "been in use by sequences of the engine: end or close what holds them"
                )
            time.sleep(RECHECK)

    def end(self, job: Job) -> None:
        """End a request of `begin`, if it has not ended, and wait for what still runs where it was the last. The caller
        holds the engine's lock."""
        with self._changed:
            self._arrived = [j for j in self._arrived if j is not job]
        if job.stream.held is not None:
            self.scheduler.cancel(job.stream)
        self._end(job)
        try:
            while self._flights and not self._jobs:
                self._take()
            self._wakes.send()
        except BaseException as error:
            self._fail_all(error)
            raise

    def cached(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens the cache holds now."""
        blocks = self.engine.blocks
        return (
            blocks.block
            * blocks.match(blocks.held(), prompt, (len(prompt) - 1) // blocks.block, self.scheduler.number + 1)[0]
        )

    def _put(self, request: Request, options: Options, readers: Readers | Pieces, at_once: int = 1) -> Job:
        job = Job(self._number + 1, request, options, readers, at_once)
        length_at_end(job.stream, self.engine.cache.ctx, self.engine.blocks)  # ContextExceeded where it would never fit
        self._number += 1
        self._jobs[self._number] = job
        self._arrived.append(job)
        self._timed = self._timed or options.deadline is not None
        return job

    def wake(self) -> None:
        """Something has changed that the thread should see before its next pass."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def metrics(self) -> Metrics:
        """Numbers of now; those of a pass that begins meanwhile may be in some and not in others."""
        s, guessed = self.scheduler, Guessed() if self.drafting is None else self.drafting.counts
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
                drafted=counts.drafted,
                accepted=counts.accepted,
                verified=guessed.verified,
                drafted_beside=guessed.ready,
                dropped_beside=guessed.dropped,
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
        if self.drafting is not None:
            self.drafting.close()

    # ---------------------------------------------------------------------------------------------- the device's thread
    def _start(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "this model's requests run in the process that it was loaded in: load it anew in this one"
            )
        if self._thread is None:
            _close_at_exit()
            self._thread = threading.Thread(target=self._run, name="hybrid engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                with self.engine.lock:
                    self.check()
                    blocked = self._round() if self._behind or not self._jobs else False
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
                if self._behind or (self._flights and not self._jobs):
                    return True
                if (left := until - time.monotonic()) <= 0:
                    self._thread = None
                    return False
                self._changed.wait(left)

    def _guarded(self) -> bool:
        """A round in the thread of somebody who may be interrupted, or whom an error reaches at once."""
        try:
            return self._round()
        except Exception as error:
            self._fail_all(error)
            raise
        except BaseException:
            if self.scheduler.in_flight != len(self._flights):  # one was made and not submitted
                self._flights.clear()
                self.scheduler.lose(cache=False)
            self._due = True
            raise

    def _round(self) -> bool:
        """Take the tokens of the oldest pass, submit what the scheduler wants, hand them out. True: nothing can run
        now."""
        if (self._due or self._arrived or self._woken) and self._go_on():
            return False
        if not self._flights:
            self._due = True
            return bool(self._jobs)
        self._take()
        self._go_on()
        return False

    def _go_on(self) -> bool:
        """Submit what the scheduler wants and hand out what was taken; whether anything was."""
        self._due = False
        if self._arrived or self._woken or self._timed:
            self._look()
        if self._chosen and self.scheduler.limits.ahead == 1:  # submitting is running: tokens would come late
            self._due = True
        else:
            self._submit()
        given = bool(self._chosen)
        self._deliver()
        return given

    def _look(self) -> None:
        """Take in what has arrived, end what was cancelled or is late."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            woken, self._woken = self._woken, False
            cancelled = [j for j in self._jobs.values() if j.readers.cancelled] if woken else []
        for job in arrived:
            if job.pieces is not None and self.scheduler.waiting >= self.queue:  # its reader waits, whom nobody refuses
                self._arrived.append(job)
                continue
            try:
                self.scheduler.add(job.stream)
            except Exception as error:  # it would never fit
                self._end(job, error)
        for job in cancelled:
            if self.scheduler.cancel(job.stream):
                self._end(job)
        for stream in self.scheduler.expire():
            self._end(stream.tag)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """Tell the readers of one that the scheduler has let go of."""
        with self._changed:
            if self._jobs.pop(job.stream.id, None) is None:
                return
            self._behind -= job.pieces is None
        if self.drafting is not None:
            job.guessed = self.drafting.end(job.stream)
        if (
            job.options.constraint is not None
        ):  # what it holds may be large, and a job is known for a while after its end
            self.engine.choosing.forget(job.options.constraint)
            job.options = replace(job.options, constraint=None)
        if error is None:
            job.end(self._wakes)
        else:
            job.readers.end(None, error, self._wakes)
        reason = "error" if error is not None else str(job.request.finish)
        with self._changed:
            self._finished[reason] = self._finished.get(reason, 0) + 1
            self._ends.append(time.perf_counter())

    def _fail_all(self, error: BaseException) -> None:
        """End every request, whatever state it is in."""
        with self._changed:
            jobs, self._arrived = list(self._jobs.values()), []
        if not (
            jobs or self._flights or self.scheduler.in_flight
        ):  # one may be made whose requests have ended, and not submitted
            return
        with self.engine.lock:
            self._flights.clear()
            self.runner.work.lost()
            self._chosen.clear()
            for job in jobs:
                if job.stream.held is not None:  # else it was never added
                    self.scheduler.cancel(job.stream, "error")
                self._end(job, error)
            self._wakes.send()
            self.scheduler.lose()

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is likely to be free, by how the last requests ended."""
        ends = self._ends
        return max(1.0, (ends[-1] - ends[0]) / (len(ends) - 1)) if len(ends) > 1 else 1.0


@cache
def _close_at_exit() -> None:
    """End the threads before the devices are closed: what was registered last runs first, and the devices are open by
    now."""

    def close_all() -> None:
        for serving in list(_serving):
            serving.close(RuntimeError("the interpreter ends"))

    atexit.register(close_all)
