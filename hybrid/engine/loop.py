"""Engine step loop, its thread and its lock.

A step admits new requests, submits the scheduler's passes, waits for the oldest one, takes its tokens, submits the next
pass, and wakes readers. A thread runs the steps for `submit`; the reader's thread runs them for `generate`. Passes have
rows of all requests in both cases. The thread that runs a step holds the engine's lock, a fair one; Ctrl-C waits for it,
except during device waits. An error of a request ends that request; an error of the device ends all. The thread ends
after some seconds without work.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache

import numpy as np

from hybrid.checkpoint import Checkpoint
from hybrid.core import interrupts
from hybrid.core.device import Counters, Device
from hybrid.core.errors import QueueFull
from hybrid.engine.handle import Handle
from hybrid.engine.loading import EngineConfig, LoadClock
from hybrid.engine.lock import EngineLock
from hybrid.engine.request import Captured, Options, Request, Wakeups, check_prompt
from hybrid.engine.runner import AbortedStep, Flight, Runner, check_finite, fault
from hybrid.engine.scheduler import BatchCap, Pass, Scheduler, length_at_end
from hybrid.engine.speculation import Drafter, Speculator
from hybrid.engine.stats import Metrics, TokenLogprob
from hybrid.planning.passes import MATRIX_BUCKETS
from hybrid.spec.schedule import Schedule

QUEUE = 1024
"""Default limit of waiting requests."""
IDLE = 5.0  # seconds without work after which the thread ends; the next request starts a new one
RECHECK = 0.005  # seconds between looks at constraints that are not ready
JOIN = 600.0  # seconds that closing waits for the thread's last pass
_open: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """One checkpoint on one device, for up to `config.slots` sequences at a time.

    schedule: default: the family's. clock: times loading. queue: most waiting requests. check: raises where the model
    cannot be used (closed, device lost). Closes neither the checkpoint nor the device. Thread-safe.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        config: EngineConfig | None = None,
        *,
        schedule: Schedule | None = None,
        clock: LoadClock | None = None,
        queue: int = QUEUE,
    ) -> None:
        if checkpoint.hparams.backbone:
            raise ValueError(f"{checkpoint.path} is a drafter: load its target, and give it as draft (--draft)")
        self.check: Callable[[], object] = device.check_open
        self.runner = runner = Runner(checkpoint, device, config, schedule, clock, self._refused)
        self.checkpoint, self.device, self.tokenizer = checkpoint, device, checkpoint.tokenizer
        self.config, self.target, self.cache, self.sizes = runner.config, runner.target, runner.cache, runner.sizes
        self.lock = EngineLock()
        cap = BatchCap(self.sizes.decode, MATRIX_BUCKETS)
        steps = device.has("f16_matrices") and len(self.sizes.decode) > 1  # a pass costs as much as its bucket
        self.queue(queue)
        self.scheduler = Scheduler(
            runner.blocks,
            runner.limits(self._queue),
            time.perf_counter,
            cap if steps and device.passes_ahead > 1 and not device.overlaps else None,
            self._ready,
        )
        self.speculator: Speculator | None = None
        """Drafts of every request; None where the model was loaded without speculation."""
        self.drafting = self._speculator(None, None) if self.sizes.wanted > 1 else None
        """The speculator in use: `speculator`, else one with drafts of constraints alone; None where a pass has one row and
        cannot verify."""
        self.waited = 0.0
        """Total seconds of waiting for passes and reading their tokens."""
        # Guards the following; its holder takes no other lock. The engine's lock guards the rest.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._requests: dict[int, Request] = {}  # open requests by number
        self._arrived: list[Request] = []
        self._in_background = 0  # open requests of `submit`
        self._driven: set[int] = set()  # numbers of the requests of `generate`
        self._timed = False  # whether any request had a deadline
        self._number = self._refusals = 0
        self._closed: BaseException | None = None
        self._woken = False
        self._finished: dict[str, int] = {}
        self._ends: deque[float] = deque(maxlen=33)  # times of the last ends

        self._flights: deque[Flight] = deque()
        self._news: list[Request] = []  # requests with new events
        self._wakeups = Wakeups()
        self._read = 0.0  # time of the last read
        self._recorded = self.counters.recordings  # recordings at that time
        _open.add(self)

    def queue(self, most: int) -> None:
        """Set the limit of waiting requests. ValueError."""
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"queue must be a positive integer, the requests that may wait, not {most!r}")
        self._queue = most

    def speculate(self, drafter: Drafter, k: int | None) -> None:
        """Turn speculation on: k drafts per pass, or (None) as many as pay."""
        self.speculator = self.drafting = self._speculator(drafter, k)

    def _speculator(self, drafter: Drafter | None, k: int | None) -> Speculator:
        return Speculator(
            drafter,
            self.sizes.wants[-1],
            k,
            self.runner.sampling,
            self._refused,
            self.faults.append,
            recordings=lambda: self.counters.recordings,
        )

    # --- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], options: Options | None = None) -> Handle:
        """Queue a request for the engine's thread. ValueError, ContextExceeded (the prompt), QueueFull."""
        request = self.request(prompt, options)
        with self._changed:
            self._check_open()
            waiting = len(self._arrived) + self.scheduler.waiting
            if waiting >= self._queue:
                self._refusals += 1
                raise QueueFull(waiting, self._retry_after())
            self._put(request)
            self._in_background += 1
            self._start()
            self._changed.notify_all()
        return Handle(request)

    def generate(self, prompt: Sequence[int], options: Options | None = None) -> Handle:
        """As `submit`, but the reader runs the steps. Waits for a place in the queue."""
        return self.drive(self.request(prompt, options))

    def drive(self, request: Request) -> Handle:
        """Queue a request whose reader runs the steps."""
        with self._changed:
            self._check_open()
            self._put(request)
            self._driven.add(request.id)
        return Handle(request, self.drive_step)

    def request(
        self,
        prompt: Sequence[int],
        options: Options | None = None,
        content: Mapping[int, int] | None = None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> Request:
        """A checked request; content, spans: see Request. ValueError; ContextExceeded for a prompt that fills the context."""
        options = options or Options()
        options.check(self.target.n_tokens)
        if options.speculate and self.speculator is None:
            raise ValueError("speculate: the model was loaded without speculation: load it with draft= or speculate=")
        made = Request(0, prompt, options, tokenizer=self.tokenizer, content=content, spans=spans)
        self._check_prompt(made, 1)
        return made

    def _check_prompt(self, request: Request, more: int) -> None:
        runner = self.runner
        vocab = self.target.hparams.vocab
        check_prompt(request.ids, vocab, self.cache.ctx, more, request.content, runner.rows)
        if request.spans and not runner.spans:
            name = self.target.schedule.schedule.name
            raise ValueError(f"schedule {name} has no step row_views, which bidirectional spans need")

    def _put(self, request: Request) -> None:
        length_at_end(request, self.cache.ctx, self.runner.blocks)  # ContextExceeded
        self._number += 1
        request.id, request.wake = self._number, self.wake
        if request.options.deadline is not None:
            request.deadline, self._timed = request.arrived + request.options.deadline, True
        self._requests[request.id] = request
        self._arrived.append(request)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def wake(self) -> None:
        """Make the loop look at cancellations and captured rows before its next pass."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def cached(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt in the prefix cache."""
        blocks = self.runner.blocks
        most = (len(prompt) - 1) // blocks.block
        return blocks.block * blocks.match(blocks.held(), prompt, most, self.scheduler.number + 1)[0]

    def logits(self, ids: Sequence[int], rows: int = 0) -> np.ndarray:
        """Teacher forcing: logits float32 [len(ids), vocab]. rows: most rows per pass (0: automatic)."""
        return np.concatenate(list(self.logits_of([ids], rows)))

    def logits_of(self, sequences: Sequence[Sequence[int]], rows: int = 0) -> Iterator[np.ndarray]:
        """`logits` of several sequences, in order, pass by pass: needs the memory of a few passes, whatever the length.
        Sequences share passes."""
        with closing(self.forced(sequences, rows)) as parts:
            for part in parts:
                yield part.rows

    def forced(self, sequences: Sequence[Sequence[int]], rows: int = 0) -> Generator[Captured, None, None]:
        """As logits_of, with a mixture's chosen experts."""
        return self.read_back(Request(0, ids, capture="logits", rows=rows) for ids in sequences)

    def decode_logits(self, sequences: Sequence[Sequence[int]]) -> Iterator[Captured]:
        """Teacher forcing by decode passes, one row of each sequence: for each position those of the sequences that have
        it, in order. At most as many sequences as slots."""
        handles: list[Handle] = []
        try:
            for ids in sequences:
                self._check_prompt(request := Request(0, ids, capture="decode", rows=1), 0)
                handles.append(self.drive(request))
            running = [handle.request for handle in handles]
            for at in range(max(map(len, sequences))):
                found = []
                for request in running:
                    while len(request.prompt) > at and not request.captured and request.finish is None:
                        self.drive_step()
                    if request.error is not None:
                        raise request.error
                    found += [request.captured[0]] if len(request.prompt) > at else []
                for request in running:
                    request.captured.clear()
                experts = zip(*(f.experts for f in found), strict=True)
                yield Captured(np.concatenate([f.rows for f in found]), tuple(map(np.concatenate, experts)))
        finally:
            self.finish([handle.request for handle in handles])

    def hidden_states(self, ids: Sequence[int], rows: int = 0, streams: bool = False) -> np.ndarray:
        """Residual stream float32 [layers + 1, len(ids), hidden]: after the scaled embedding and after each layer. Gemma 3n:
        the active stream, or with `streams` all, [layers + 1, len(ids), streams, hidden]."""
        hp = self.target.hparams
        parts = self.read_back([Request(0, ids, capture="hidden", rows=rows)])
        states = np.concatenate([part.rows for part in parts], axis=1)
        states = states.reshape(*states.shape[:2], hp.n_streams, hp.hidden)
        return states if streams else np.ascontiguousarray(states[:, :, hp.altup_active])

    def read_back(self, requests: Iterable[Request]) -> Generator[Captured, None, None]:
        """Captured rows of requests, in order; later requests run beside the first."""
        waiting, running, more = iter(requests), deque[Handle](), True
        try:
            while more or running:
                while more and len(running) < self.cache.slots:
                    if more := (request := next(waiting, None)) is not None:
                        self._check_prompt(request, 0)
                        running.append(self.drive(request))
                if not running:
                    return
                request = running[0].request
                while not request.captured and request.finish is None:
                    self.drive_step()
                if request.captured:
                    yield request.captured.pop(0)
                    continue
                if request.error is not None:
                    raise request.error
                running.popleft()
        finally:
            self.finish([handle.request for handle in running])

    def metrics(self) -> Metrics:
        """A snapshot; not atomic with respect to a pass that starts meanwhile."""
        s, spec = self.scheduler, self.drafting
        blocks, counts = s.blocks, s.counts
        held = {g.name: (blocks.used[g.name], blocks.cached[g.name], blocks.free[g.name]) for g in blocks.groups}
        with self._changed:
            return Metrics(
                waiting=len(self._arrived) + s.waiting,
                running=len(s.running),
                prompt_tokens=counts.prompt,
                cached_tokens=counts.cached,
                generated_tokens=counts.generated,
                finished=dict(self._finished),
                refused=self._refusals,
                passes=counts.passes,
                drafted=counts.drafted,
                accepted=counts.accepted,
                verified=0 if spec is None else spec.verified,
                preemptions=counts.preemptions,
                evictions=blocks.evictions,
                recomputed=counts.recomputed,
                work=self.runner.work.totals,
                blocks={name: dict(zip(("used", "cached", "free"), n, strict=True)) for name, n in held.items()},
            )

    @property
    def counters(self) -> Counters:
        return self.device.counters

    @property
    def faults(self) -> list[str]:
        """Why passes were run again, and how decoding continues since."""
        return self.runner.faults

    def close(self, error: BaseException) -> None:
        """End every request and the thread; later requests raise `error` too."""
        with self._changed:
            if self._closed is None:
                self._closed = error
            thread, self._woken = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread() and self._process == os.getpid():
            thread.join(JOIN)  # it waits for the device only, whose waits are bounded
        self._fail_all(error)
        if self.drafting is not None:
            self.drafting.close()

    # --- the thread --------------------------------------------------------------------------------------------------

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
                with self.lock:
                    self.check()
                    readers_run = self._requests and not self._in_background  # those of `submit` have ended meanwhile
                    worked = bool(readers_run) or self.step()
            except Exception as error:  # of the device, or unforeseen: no reader may wait forever
                self._fail_all(error)
                continue
            if not worked:  # waiting for a constraint
                with self._changed:
                    if not (self._woken or self._arrived):
                        self._changed.wait(RECHECK)

    def _wait_for_work(self) -> bool:
        """Wait for work; False: the thread ends."""
        until = time.monotonic() + IDLE
        with self._changed:
            while True:
                if self._closed is not None:
                    self._thread = None
                    return False
                if self._in_background or (self._flights and not self._requests):
                    return True
                if (left := until - time.monotonic()) <= 0:
                    self._thread = None
                    return False
                self._changed.wait(left)

    # --- a step ------------------------------------------------------------------------------------------------------

    def drive_step(self) -> None:
        """A step in a reader's thread, which may be interrupted and raises errors."""
        with self.lock:
            self.check()
            try:
                self.step()
            except Exception as error:
                self._fail_all(error)
                raise
            except BaseException:
                if self.scheduler.in_flight != len(self._flights):  # a pass was made and not submitted
                    self._flights.clear()
                    self.scheduler.lose(cache=False)
                raise

    def step(self) -> bool:
        """One engine step; whether there was work. The caller holds the lock."""
        self._take_in()
        self._submit()
        if self._flights:
            self._take()
            if self.scheduler.limits.ahead > 1:  # on cpu submitting is running, and readers come first
                self._take_in()
                self._submit()
            worked = True
        else:
            worked = bool(self._news)
        self._deliver()
        return worked

    def _take_in(self) -> None:
        """Queue new requests; end cancelled and late ones."""
        if not (self._arrived or self._woken or self._timed):
            return
        with self._changed:
            arrived, self._arrived = self._arrived, []
            woken, self._woken = self._woken, False
            cancelled = [r for r in self._requests.values() if r.cancelled] if woken else []
        for i, request in enumerate(arrived):
            if request.id in self._driven and self.scheduler.waiting >= self._queue:
                with self._changed:  # requests of `generate` wait instead of QueueFull
                    self._arrived[:0] = arrived[i:]
                break
            try:
                self.scheduler.add(request)
            except Exception as error:  # it never fits
                self._end(request, "error", error)
        for request in cancelled:
            self._end(request, "cancelled")
        for request in self.scheduler.expire():
            self._ended(request)

    def _submit(self) -> None:
        """Submit passes while the scheduler makes any."""
        self.runner.sampling.begin_pass()
        while True:
            may = self.drafting is None or self.drafting.prepare(self.scheduler)
            made = self.scheduler.schedule() if may else None
            if made is None:
                return
            for request in made.params:
                self.runner.assign(request, self._flights)
            with interrupts.allowed():
                self._flights.append(self.runner.start(made))
            if self.scheduler.limits.ahead == 1:  # on cpu the pass has run; take its tokens first
                return

    def _take(self) -> None:
        """Wait for the oldest pass; commit its tokens or captured rows."""
        flight = self._flights[0]
        done = flight.scheduled
        began = time.perf_counter()
        try:
            with interrupts.allowed():
                if done.capture is not None:
                    captured = self.runner.captured(flight)
                    tokens, counts = list[int](), None
                else:
                    drafted = 0.0 if self.drafting is None else self.drafting.drafted(done)
                    tokens, counts = self.runner.tokens(flight)
        except AbortedStep:  # all sequences restart from their known tokens
            self._flights.clear()
            self.scheduler.lose(cache=False)
            return
        now = time.perf_counter()
        self.waited += now - began
        if done.capture is not None:
            self._deliver_rows(done, captured)
        else:
            seconds = now - max(self._read, flight.began, drafted)
            if self._recorded != (recorded := self.counters.recordings):  # a program was recorded meanwhile
                seconds, self._recorded = 0.0, recorded
        self._read = now
        logprobs = self._logprobs(flight, tokens, counts) if done.capture is None else {}
        self._flights.popleft()
        news = self.scheduler.commit(done, tokens, counts, logprobs)
        if done.capture is not None:
            for run in done.runs:
                if run.seq.finish is not None:
                    self._ended(run.seq)
            return
        if self.scheduler.cap is not None and seconds and done.decodes:
            self.scheduler.cap.took(done.rows, seconds)
        if self.drafting is not None:
            self.drafting.committed(done, news, seconds)
        for request, n in news:
            self._news.append(request)
            if request.finish is not None:
                self._ended(request)
            elif request.options.constraint is not None:
                self._accept(request, request.ids[-n:])

    def _logprobs(self, flight: Flight, tokens: Sequence[int], counts: Sequence[int] | None) -> dict[int, TokenLogprob]:
        """Log-probabilities by index of `tokens`. Ends requests whose token is an error word."""
        found, end = {}, 0
        for i, run in enumerate(flight.scheduled.wanting):
            begin, end = end, end + (1 if counts is None else counts[i])
            request = run.seq
            if request.finish is not None or (min(tokens[begin:end]) >= 0 and not request.options.logprobs):
                continue
            first = run.start + (len(run.ids) if run.ids else 1) - run.wants + 1
            for n in range(begin, end):
                at = first + n - begin
                if tokens[n] < 0:
                    self._end(request, "error", fault(tokens[n], self.checkpoint.path, run.slot, at))
                    break
                if (said := self.runner.logprob(run.slot, at, flight.ticket)) is not None:
                    found[n] = said
        return found

    def _deliver_rows(self, done: Pass, captured: Captured) -> None:
        """Hand captured rows to their requests, except rows that ran again after a preemption."""
        at = 0
        for run in done.runs:
            assert run.ids is not None
            n, request = len(run.ids), run.seq
            skip = max(0, request.delivered - run.start)
            part, rows = slice(at + skip, at + n), captured.rows
            own = rows[:, part] if done.capture == "hidden" else rows[part]
            experts = tuple(chosen[part] for chosen in captured.experts)
            at += n
            if request.finish is not None or skip >= n:
                continue
            try:
                if done.capture != "hidden":
                    check_finite(self.checkpoint.path, own, run.start + skip)
            except Exception as error:  # of one request
                self._end(request, "error", error)
                continue
            request.delivered = run.start + n
            request.captured.append(Captured(own, experts))
            self._news.append(request)

    def _ready(self, request: Request) -> bool:
        """Whether a request's constraint has a mask, or its captured rows were taken."""
        if request.capture is not None:
            return not request.captured
        return self.runner.sampling.ready(request.options.constraint)

    def _accept(self, request: Request, tokens: Sequence[int]) -> None:
        """Advance a request's constraint by its new tokens."""
        constraint = request.options.constraint
        assert constraint is not None
        try:
            for token in tokens:
                if request.slot is None:  # preempted
                    constraint.accept(token)
                else:
                    self.runner.sampling.accept(request.slot, token)
        except BaseException as error:  # any error of a user's constraint; Ctrl-C waits for the lock
            self._end(request, "error", error)

    def _deliver(self) -> None:
        """Wake the readers of new events."""
        news, self._news = self._news, []
        for request in news:
            request.notify(self._wakeups)
        self._wakeups.send()

    # --- ends --------------------------------------------------------------------------------------------------------

    def _refused(self, request: Request, error: BaseException) -> None:
        self._end(request, "error", error)

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        if self.scheduler.cancel(request, reason, error):  # type: ignore[arg-type]  # of Finish
            self._ended(request)

    def _ended(self, request: Request) -> None:
        """Clean up after an ended request."""
        with self._changed:
            if self._requests.pop(request.id, None) is None:
                return
            if request.id in self._driven:
                self._driven.remove(request.id)
            else:
                self._in_background -= 1
            reason = str(request.finish)
            self._finished[reason] = self._finished.get(reason, 0) + 1
            self._ends.append(time.perf_counter())
        if self.drafting is not None:
            self.drafting.end(request)
        if request.options.constraint is not None:  # masks may be large, and handles live on
            self.runner.sampling.forget(request.options.constraint)
            request.options = replace(request.options, constraint=None)
        self._news.append(request)

    def finish(self, requests: Sequence[Request]) -> None:
        """End requests whose reader is gone; if they were the last, wait for their passes. Never waits for the lock, because
        the garbage collector may call it anywhere."""

        def end() -> None:
            with self._changed:
                self._arrived = [r for r in self._arrived if r not in requests]
            for request in requests:
                self._end(request, "cancelled")
            try:
                while self._flights and not self._requests:
                    self._take()
                self._deliver()
            except BaseException as error:
                self._fail_all(error)
                raise

        if any(request.id in self._requests for request in requests):
            self.lock.call_soon(end)

    def _fail_all(self, error: BaseException) -> None:
        """End every request with an error."""
        with self._changed:
            requests, self._arrived = list(self._requests.values()), []
        if not (requests or self._flights or self.scheduler.in_flight):
            return
        with self.lock:
            self._flights.clear()
            self.runner.work.lost()
            for request in requests:
                self._end(request, "error", error)
            self._deliver()
            self.scheduler.lose()

    def _retry_after(self) -> float:
        """Estimated seconds until the queue has a free place."""
        ends = self._ends
        return max(1.0, (ends[-1] - ends[0]) / (len(ends) - 1)) if len(ends) > 1 else 1.0


@cache
def _close_at_exit() -> None:
    """Register the end of all threads; atexit runs it before the devices close."""

    def close_all() -> None:
        for engine in list(_open):
            engine.close(RuntimeError("the interpreter ends"))

    atexit.register(close_all)
