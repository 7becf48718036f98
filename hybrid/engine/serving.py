"""Requests that run in the background: one thread owns the device while there are any, `submit` is callable from every thread.

    submit -> waiting -> admitted (a slot of the cache) -> a pass for all that run, token by token -> ended

Between two passes requests are admitted, the greatest priority first, then in the order in which they came; those that were
cancelled or are late end. What goes wrong with one request ends that one; what goes wrong with the device ends all of them.
The thread ends after a while without work.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from hybrid.core.errors import DeviceLost, NoFreeSlot, QueueFull
from hybrid.engine.engine import Engine
from hybrid.engine.faults import NotFinite
from hybrid.engine.handle import Completion, Event, Handle, Stream, Timings, TokenLogprob, Usage
from hybrid.engine.metrics import Metrics
from hybrid.engine.options import Options
from hybrid.engine.request import Request
from hybrid.engine.stats import Finish
from hybrid.text.tokenizer import Tokenizer

QUEUE = 1024
"""Requests that may wait, unless told otherwise."""
IDLE = 5.0  # seconds without work after which the thread ends; the next request begins another
JOIN = 600.0  # seconds that closing waits for the thread's last pass
RECHECK = 0.005  # seconds until a request that found no free slot is looked at again
_serving: weakref.WeakSet[Serving] = weakref.WeakSet()


class Job:
    """A request with its handle's stream, its options, and its place in the cache while it runs."""

    def __init__(self, number: int, request: Request, options: Options) -> None:
        self.number, self.request, self.options, self.stream = number, request, options, Stream()
        self.slot: int | None = None
        self.position = 0
        """Of the next token to read."""
        self.arrived = time.perf_counter()
        self.until = None if options.deadline is None else self.arrived + options.deadline
        self.begun: float | None = None
        self.first: float | None = None
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def order(self) -> tuple[int, int]:
        return -self.options.priority, self.number

    def push(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """The next token: an event, and the end where it is one."""
        if self.first is None:
            self.first = time.perf_counter()
        text = self.request.push(token)
        self.text.append(text)
        of = () if logprob is None else (logprob,)
        self.logprobs += of
        self.stream.push(Event(text, (token,), of or None))

    def end(self, finish: Finish | None = None) -> None:
        """Tell the readers that it has ended, as the request says or, where that has not ended, with `finish`."""
        if finish is not None and (rest := self.request.cancel(finish)):
            self.text.append(rest)
            self.stream.push(Event(rest))
        request = self.request
        assert request.finish is not None
        usage = Usage(len(request.prompt), request.cached, len(request.out))
        times = [None if t is None else t - self.arrived for t in (self.begun, self.first)]
        timings = Timings(times[0], times[1], time.perf_counter() - self.arrived)
        logprobs = tuple(self.logprobs) if self.options.logprobs else None
        self.stream.end(Completion("".join(self.text), tuple(request.out), request.finish, logprobs, usage, timings))


class Serving:
    """The queue and the thread of one engine. check: raises where the model cannot be used (closed, device lost)."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, check: Callable[[], object], queue: int = QUEUE) -> None:
        if not isinstance(queue, int) or queue < 1:
            raise ValueError(f"queue must be a positive integer, the requests that may wait, not {queue!r}")
        self.engine, self.tokenizer, self.check, self.queue = engine, tokenizer, check, queue
        self._changed = threading.Condition()  # guards what follows; a thread that holds it takes no other lock
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._waiting: list[Job] = []
        self._running: dict[int, Job] = {}  # by slot
        self._number = 0
        self._closed: BaseException | None = None
        self._woken = False
        self._totals = Metrics()
        self._finished: Counter[str] = Counter()
        self._took: deque[float] = deque(maxlen=64)  # seconds that the last requests held a slot
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
            if len(self._waiting) >= self.queue:
                self._totals = replace(self._totals, refused=self._totals.refused + 1)
                raise QueueFull(len(self._waiting), self._retry_after())
            self._number += 1
            job = Job(self._number, request, options)
            job.stream.wake = self.wake
            self._waiting.append(job)
            self._start()
            self._changed.notify_all()
        return Handle(job.stream)

    def wake(self) -> None:
        """Something has changed that the thread should see before its next pass."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def metrics(self) -> Metrics:
        with self._changed:
            return replace(self._totals, waiting=len(self._waiting), running=len(self._running), finished=dict(self._finished))

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
        if self._process != os.getpid():  # the thread stayed with the parent, and so did what it ran
            self._process, self._thread, self._running = os.getpid(), None, {}
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
            if blocked:  # the slots are somebody else's, who does not say when one is free
                with self._changed:
                    if not self._woken:
                        self._changed.wait(RECHECK)

    def _wait_for_work(self) -> bool:
        """False: the thread ends."""
        until = time.monotonic() + IDLE
        with self._changed:
            while True:
                self._woken = False
                if self._closed is not None:
                    self._thread = None
                    return False
                if self._waiting or self._running:
                    return True
                if (left := until - time.monotonic()) <= 0:
                    self._thread = None
                    return False
                self._changed.wait(left)

    def _round(self) -> bool:
        """One pass for all that run. True: nothing can run now."""
        self._drop()
        fresh = self._admit()
        if not self._running:
            return True
        engine = self.engine
        if fresh := self._prepared(fresh):
            ticket = engine.submit_prefill({j.slot: j.request.prompt for j in fresh if j.slot is not None})
            self._read(fresh, ticket)
        if jobs := self._prepared([j for j in self._running.values() if j.request.finish is None]):
            ticket = engine.submit_decode(sorted(self._running))
            self._read(jobs, ticket)
        return False

    def _prepared(self, jobs: Sequence[Job]) -> list[Job]:
        """Those whose constraints say what may come next; the others end with what their constraint raised."""
        ready: list[Job] = []
        for job in jobs:
            assert job.slot is not None
            try:
                self.engine.choosing.prepare(job.slot)
            except Exception as error:
                self._end(job, error=error)
            else:
                ready.append(job)
        return ready

    def _read(self, jobs: Sequence[Job], ticket: int) -> None:
        """The next token of each job, chosen by the pass `ticket`."""
        self.engine.wait(ticket)
        ended: list[tuple[Job, Exception | None]] = []
        choosing = self.engine.choosing
        for job in jobs:
            assert job.slot is not None
            try:
                token = self.engine.token(job.slot, job.position, ticket)
            except NotFinite as error:
                ended.append((job, error))
                continue
            found = choosing.reported(job.slot, job.position, ticket)
            job.push(token, None if found is None else TokenLogprob(*found[0], found[1]))
            if job.request.finish is None:
                try:
                    choosing.accept(job.slot, token)
                except Exception as error:  # of somebody's constraint
                    ended.append((job, error))
                    continue
            job.position += 1
            if job.request.finish is not None:
                ended.append((job, None))
        self._count(passes=1, generated_tokens=len(jobs))
        for job, fault in ended:
            self._end(job, error=fault)

    def _drop(self) -> None:
        """End what was cancelled or is late, whether it runs or waits."""
        now = time.perf_counter()
        with self._changed:
            jobs = [*self._waiting, *self._running.values()]
        for job in jobs:
            if job.stream.cancelled:
                self._end(job, "cancelled")
            elif job.until is not None and now > job.until:
                self._end(job, "deadline")

    def _admit(self) -> list[Job]:
        """Give slots to those that wait, as many as there are."""
        admitted: list[Job] = []
        with self._changed:
            self._waiting.sort(key=lambda j: j.order)
            waiting = list(self._waiting)
        for job in waiting:
            request = job.request
            try:
                slot = self.engine.admit(len(request.prompt) + request.limit, request.sampling, prompt=request.prompt,
                                         constraint=job.options.constraint)  # fmt: skip
            except NoFreeSlot:
                break
            job.slot, job.position, job.begun = slot, len(request.prompt), time.perf_counter()
            request.begin(0)
            with self._changed:
                self._waiting.remove(job)
                self._running[slot] = job
            admitted.append(job)
        self._count(prompt_tokens=sum(len(j.request.prompt) for j in admitted))
        return admitted

    def _end(self, job: Job, finish: Finish | None = None, error: BaseException | None = None) -> None:
        """Free its place, then tell its readers."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            if job.slot is not None:
                self._running.pop(job.slot, None)
        if job.slot is not None:
            if job.slot in self.engine.positions and not isinstance(error, DeviceLost):
                self.engine.release(job.slot)
            assert job.begun is not None
            self._took.append(time.perf_counter() - job.begun)
        if error is not None:
            job.stream.end(None, error)
        else:
            job.end(finish)
        with self._changed:
            self._finished["error" if error is not None else str(job.request.finish)] += 1

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            jobs = [*self._waiting, *self._running.values()]
        if not jobs:
            return
        with self.engine.lock:
            for job in jobs:
                try:
                    self._end(job, error=error)
                except Exception:  # its place cannot be freed, for the reason that `error` tells
                    job.stream.end(None, error)

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is likely to be free: what a request takes, over the slots."""
        took = sum(self._took) / len(self._took) if self._took else 1.0
        return max(1.0, took / self.engine.cache.slots)

    def _count(self, **more: int) -> None:
        with self._changed:
            self._totals = replace(self._totals, **{k: getattr(self._totals, k) + n for k, n in more.items()})


@cache
def _close_at_exit() -> None:
    """End the threads before the devices are closed: what was registered last runs first, and the devices are open by now."""

    def close_all() -> None:
        for serving in list(_serving):
            serving.close(RuntimeError("the interpreter ends"))

    atexit.register(close_all)
