"""Continuous-batching scheduler: chooses the rows of the next pass.

    scheduler.add(request)                at any time, like `cancel`
    p = scheduler.schedule()              None where nothing can run now; may be called while earlier passes run
    ...                                   the device applies p.writes and p.params, then runs p.runs
    for request, n in scheduler.commit(p, tokens): ...

Order: higher priority first, then arrival. No request is overtaken more than `Limits.overtakes` times. Each decoding
request has a row in every pass, unless a smaller batch gives more tokens per second (`BatchCap`). Prompts share the
remaining rows in order; a part is kept for the second one. Where blocks run out, the last request in order is preempted:
it frees its blocks, waits, and starts again from the prefix cache. The first in order always makes progress.

Passes run in the order of `schedule`, each after the writes of the one before. So a block can be reused as soon as no
later pass needs it. A pass is of one kind: it samples tokens, or reads back logits, or hidden states (`Request.capture`);
kinds alternate. Plain host code for one thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import numpy as np

from hybrid.core.errors import ContextExceeded, QueueFull
from hybrid.engine.blocks import Blocks, Write
from hybrid.engine.request import Capture, Request
from hybrid.engine.stats import Finish, TokenLogprob

SHARE = 4  # one in so many of the rows for prompts is kept for the second prompt
CAPTURES: tuple[Capture | None, ...] = (None, "logits", "decode", "hidden")


@dataclass(frozen=True, slots=True)
class Limits:
    """slots: sequences that run at once. ctx: positions of a sequence. rows: most rows of a pass. mixed: the same where a
    request decodes, which bounds its latency (None: rows). outs: most rows with logits (None: slots). logits, decode,
    hidden: most rows of a pass that reads those back (0: rows). ahead: most passes in flight. overlap: whether passes overlap on the
    device; a freed slot is then reused only after them. queue: most waiting requests. overtakes: how often a waiting
    request may be overtaken."""

    slots: int
    ctx: int
    rows: int
    mixed: int | None = None
    outs: int | None = None
    logits: int = 0
    decode: int = 0
    hidden: int = 0
    ahead: int = 2
    overlap: bool = False
    queue: int = 1024
    overtakes: int = 64

    def __post_init__(self) -> None:
        for key in ("slots", "ctx", "ahead", "queue"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be positive, not {getattr(self, key)}")
        for key in ("rows", "mixed", "outs"):  # every request can have a row in every pass
            found = getattr(self, key)
            if found is not None and found < self.slots:
                raise ValueError(f"{key} must be at least the number of slots, {self.slots}, not {found}")
        if self.overtakes < 0:
            raise ValueError(f"overtakes must be 0 or more, not {self.overtakes}")


class Run(NamedTuple):
    """Consecutive rows of one sequence in a pass: `ids` from position `start`, or (ids None) one row whose token the device
    has sampled. wants: trailing rows with logits: 0 within a prompt, 1, or k + 1 for k drafts. at: a position word that
    the device resolves (runner.FOLLOWS); `start` is then its upper bound."""

    seq: Request
    slot: int
    start: int
    ids: tuple[int, ...] | None
    wants: int
    at: int | None = None


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over the model. runs: decoding ones first. writes: block-table entries, applied before its rows. params:
    requests that got a slot with this pass. released: slots freed since the pass before. capture: what it reads back
    instead of sampling."""

    number: int
    runs: list[Run]
    writes: list[Write] = field(default_factory=list)
    params: list[Request] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    rows: int = 0
    outs: int = 0
    capture: Capture | None = None

    @property
    def decodes(self) -> bool:
        """Whether it has one row per sequence, each with logits."""
        return self.rows == self.outs == len(self.runs)

    @property
    def continues(self) -> bool:
        """Whether the device has the token of every row."""
        return all([run[3] is None for run in self.runs])

    @property
    def context(self) -> int:
        """Positions of the longest sequence."""
        return max(run.start + (1 if run.ids is None else len(run.ids)) for run in self.runs)

    @property
    def wanting(self) -> list[Run]:
        """The runs with logits."""
        return self.runs if self.outs == len(self.runs) == self.rows else [run for run in self.runs if run.wants]

    def check(self, tokens: int, counts: Sequence[int] | None) -> None:
        """ValueError unless the pass can have so many tokens. counts: tokens of each run with logits (None: one each)."""
        wants = [run[4] for run in self.runs if run[4]]
        if counts is not None and (
            len(counts) != len(wants) or any(not 1 <= n <= w for n, w in zip(counts, wants, strict=True))
        ):
            raise ValueError(f"pass {self.number}: its runs take 1 to {wants} tokens, not {list(counts)}")
        if tokens != (len(wants) if counts is None else sum(counts)):
            raise ValueError(f"pass {self.number}: {tokens} tokens are not what its runs want")

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """int32: tokens [rows] (-1: sampled on the device), positions [rows], slots [rows], out_rows [outs]."""
        rows, outs, first = np.empty((3, self.rows), np.int32), list[int](), 0
        for _, slot, start, ids, wants, at in self.runs:
            end = first + (1 if ids is None else len(ids))
            if ids is None or len(ids) == 1:
                rows[:, first] = -1 if ids is None else ids[0], start if at is None else at, slot
            else:
                rows[0, first:end], rows[2, first:end] = ids, slot
                rows[1, first:end] = np.arange(start, start + end - first)
            outs.extend(range(end - wants, end))
            first = end
        return rows[0], rows[1], rows[2], np.array(outs, np.int32)


@dataclass(slots=True)
class Counts:
    """Totals of a scheduler."""

    passes: int = 0
    rows: int = 0
    prompt: int = 0
    """Prompt tokens of admitted requests."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    generated: int = 0
    drafted: int = 0
    """Verified drafts; `accepted` of them were right."""
    accepted: int = 0
    preemptions: int = 0
    recomputed: int = 0
    """Rows computed again after a preemption or a lost device."""
    finished: dict[str, int] = field(default_factory=dict)


in_order = attrgetter("order")
KEPT = 64
"""Ended requests whose deadlines may stay in the heap."""


def remove(requests: list[Request], request: Request) -> None:
    """Remove a request from an ordered list."""
    index = bisect_left(requests, request.order, key=in_order)
    assert requests[index] is request
    del requests[index]


def length_at_end(request: Request, ctx: int, blocks: Blocks) -> int:
    """Maximal length of a sequence, prompt included. ContextExceeded where the cache can never hold it."""
    if request.n_prompt + bool(request.limit) > ctx:
        raise ContextExceeded(
            f"a prompt of {request.n_prompt} tokens leaves no room in the context of {ctx}: "
            "shorten it or load the model with a larger ctx"
        )
    last = min(request.n_prompt + request.limit, ctx)
    for group in blocks.groups:
        need = group.need(last - bool(request.limit), blocks.block, request.widest)  # the last token is not run
        if need > group.blocks:
            raise ContextExceeded(
                f"{request.n_prompt} tokens and {last - request.n_prompt} to generate need {need} blocks of {blocks.block} "
                f"positions in {group.name} layers, and the cache has {group.blocks}: ask for fewer tokens or give the model "
                "more memory"
            )
    return last


def has_blocks(blocks: Blocks, running: Sequence[Request], prompts: Sequence[Request], request: Request) -> bool:
    """Whether free blocks suffice for a request's known tokens beside the running ones: all known tokens of those within
    their prompts, the next block of the others. A request alone always fits (`length_at_end`)."""
    if not running:
        return True
    whole = {request, *prompts}
    for g, pool in enumerate(blocks.pools):
        want = 0
        for s in (*running, request):
            assert s.held is not None
            most = max(len(s.ids), s.last - 1)  # the last generated token is never run
            positions, rows = (min(len(s.ids) + 1, most), s.widest) if s in whole else (most, 1)
            need = pool.group.need(positions, blocks.block, rows)
            missing = max(0, need - (s.held.size - s.held.first[g]))
            want += missing if s in whole else min(1, missing)
        if want > pool.available:
            return False
    return True


class Queue:
    """Waiting requests. limits: `queue` (preempted requests do not count) and `overtakes`. clock: seconds, of
    deadlines."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.requests: list[Request] = []
        """In order."""
        self._limits, self._clock = limits, clock
        self._arrivals = self._back = 0  # _back: preempted ones
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; may hold ended requests
        self._stale = 0  # ended requests in the heap
        self._ends: deque[float] = deque(maxlen=33)  # when requests ended

    def put(self, request: Request) -> None:
        """Add a new request. QueueFull."""
        if (fresh := len(self.requests) - self._back) >= self._limits.queue:
            raise QueueFull(fresh, self._until_one_ends())
        self._arrivals += 1
        request.number = self._arrivals
        request.order = (
            (1, -request.options.priority, request.number) if self._limits.overtakes else (0, 0, request.number)
        )
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.number, request))
        insort(self.requests, request, key=in_order)

    def put_back(self, request: Request) -> None:
        """Add a preempted request at its old place."""
        insort(self.requests, request, key=in_order)
        self._back += 1

    def remove(self, request: Request) -> None:
        remove(self.requests, request)
        self._back -= request.entered

    def take(self, request: Request) -> None:
        """Remove a request that starts; counts overtaking."""
        remove(self.requests, request)
        waiting, late = self.requests, False
        self._back -= request.entered
        if not waiting or request.entered or request.order[:2] == waiting[0].order[:2] == waiting[-1].order[:2]:
            return  # all in order of arrival
        for other in waiting:
            if other.number < request.number and not other.captured:  # otherwise it waits for its own reader
                other.overtaken += 1
                if other.overtaken >= self._limits.overtakes and other.order[0]:
                    other.order, late = (0, 0, other.number), True
        if late:
            waiting.sort(key=in_order)

    def late(self) -> list[Request]:
        """Requests past their deadline, each once, waiting or running; may include ended ones."""
        found: list[Request] = []
        now = self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            found.append(heappop(self._deadlines)[2])
        return found

    def ended(self, request: Request) -> None:
        """Note the end of a request, for estimates of waiting time. Drops ended requests from the heap once they are half
        of it."""
        self._ends.append(self._clock())
        self._stale += request.deadline is not None
        if self._stale > KEPT and 2 * self._stale > len(self._deadlines):
            self._deadlines = [d for d in self._deadlines if d[2].finish is None]
            heapify(self._deadlines)
            self._stale = 0

    def _until_one_ends(self) -> float:
        """Estimated seconds, from the last ends."""
        ends = self._ends
        return min(60.0, max(0.1, (ends[-1] - ends[0]) / (len(ends) - 1))) if len(ends) > 1 else 1.0


GAIN = 0.02  # least relative gain in tokens per second for which sequences sit out
SOON, OFTEN, RARELY = 16, 256, 4096
"""Passes until the other mode is probed: at first, then, and at most (doubled after each probe without a change)."""
TRY = 5  # passes of a probe, and readings kept per size
ENOUGH = 3  # readings that make a measurement
# relative change of the step time after which the other mode is probed soon
MOVED = 0.1


@dataclass(slots=True)
class _Pair:
    """State for two neighbouring batch buckets."""

    left: int = SOON
    """Passes until the next probe."""
    period: int = OFTEN // 2
    trying: int = 0
    was_capped: bool = False
    """Whether the batch was capped when the last probe began."""
    capped: bool | None = None
    """Whether it is capped now; `took`: seconds of a pass at the last change or probe."""
    took: float = 0.0


class BatchCap:
    """Caps the decode batch where the step time jumps. sizes: row counts of decode plans, ascending. full: those that fill
    the device's tiles; others cost nearly as much as the next larger one."""

    def __init__(self, sizes: Sequence[int], full: Sequence[int]) -> None:
        self.sizes, self._full = tuple(sizes), frozenset(full)
        self._readings = {size: deque[float](maxlen=TRY) for size in sizes}
        self._pairs = [_Pair() for _ in sizes]
        self._next = 0

    def took(self, rows: int, seconds: float) -> None:
        """Note the seconds of a decode pass."""
        self._readings[self.sizes[bisect_left(self.sizes, rows)]].append(seconds)

    def fewer(self, n: int) -> int:
        """The next smaller bucket for n sequences; 0: no capping."""
        i = bisect_left(self.sizes, n)
        return 0 if n in self._full or not 0 < i < len(self.sizes) else self.sizes[i - 1]

    def pays(self, n: int) -> bool:
        """Whether capping pays for n decoding sequences. Called once per pass."""
        i = bisect_left(self.sizes, n)
        pair, whole, part = self._pairs[i], self._readings[self.sizes[i]], self._readings[self.sizes[i - 1]]
        known = min(len(whole), len(part)) >= ENOUGH
        capped = known and self.sizes[i - 1] * median(whole) > (1 + GAIN) * n * median(part)
        used = part if capped else whole
        now, pair.left = median(used) if used else 0.0, pair.left - 1
        if pair.capped is not capped:
            pair.capped, pair.took = capped, now
        elif abs(now - pair.took) > MOVED * pair.took > 0:
            pair.left, pair.period, pair.took = min(pair.left, SOON), OFTEN // 2, now
        if pair.left <= 0:
            pair.period = OFTEN if capped != pair.was_capped else min(2 * pair.period, RARELY)
            pair.left, pair.trying, pair.was_capped, pair.took = pair.period, TRY, capped, now
        if pair.trying:
            pair.trying -= 1
            return not pair.was_capped
        return capped

    def resting(self, running: Sequence[Request]) -> frozenset[Request]:
        """Decoding sequences that sit the next pass out: round-robin among the lowest priority, at most half of them,
        never the first in order."""
        none = frozenset[Request]()
        if not (most := self.fewer(len(running))):
            return none
        able = [s for s in running if s.decodes]
        rest = len(able) - most
        some = [s for s in able[1:] if s.options.priority == able[-1].options.priority]
        if not 0 < 2 * rest <= len(some) or not all(s.ahead for s in able) or not self.pays(len(running)):
            return none
        first, self._next = self._next % len(some), self._next + rest
        return frozenset(some[(first + i) % len(some)] for i in range(rest))


class Scheduler:
    """clock: seconds, of deadlines. cap: caps decode batches. ready: whether the host is ready for a request's next rows:
    its constraint's mask is there, or its captured rows were taken."""

    def __init__(
        self,
        blocks: Blocks,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        cap: BatchCap | None = None,
        ready: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        self.ready = ready
        self.blocks, self.limits, self.counts, self.cap = blocks, limits, Counts(), cap
        self.max_writes = len(blocks.pools) * (
            limits.slots + limits.rows // blocks.block + 1 - (-limits.ctx // blocks.block)
        )
        """Most block-table entries of a pass."""
        self.number = 0  # of the last pass
        self.running: list[Request] = []
        """In order."""
        self._queue = Queue(limits, clock)
        self._prompts: list[Request] = []  # running requests within their prompts
        self._flights: deque[Pass] = deque()
        self._slots = list(range(limits.slots - 1, -1, -1))  # free ones
        self._cooling: deque[tuple[int, int]] = deque()  # (pass, slot): free once that pass is committed
        self._stuck: tuple[Request, int] | None = None  # the request that did not fit, and blocks.given then
        self._captures = 0  # open requests that read rows back
        self._kind: Capture | None = None  # of the last pass
        self._writes: list[Write] = []  # of the next pass, like the following
        self._params: list[Request] = []
        self._released: list[int] = []
        self._adopted = 0  # blocks taken from the prefix cache

    # --- requests ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._queue.requests)

    @property
    def in_flight(self) -> int:
        """Uncommitted passes."""
        return len(self._flights)

    @property
    def idle(self) -> bool:
        """Whether there is neither work nor a pass in flight."""
        return not (self._queue.requests or self.running or self._flights)

    def add(self, request: Request) -> None:
        """Queue a new request. QueueFull; ContextExceeded, ValueError (spans) for one that never fits."""
        if request.held is not None:
            raise ValueError(f"request {request.id} has been added before")
        self._check_spans(request)
        last = length_at_end(request, self.limits.ctx, self.blocks)
        self._queue.put(request)
        request.last, request.held = last, self.blocks.held(request.content, request.spans)
        self._captures += request.capture is not None

    def _check_spans(self, request: Request) -> None:
        """ValueError for a span that may never fit into a pass beside a row of every other slot."""
        if not request.spans:
            return
        limits, kind = self.limits, request.capture
        most = getattr(limits, kind) or limits.rows if kind else (limits.mixed or limits.rows) - limits.slots + 1
        most = min(most, request.rows or most)
        if request.widest > most:
            raise ValueError(
                f"{request.widest} positions that see one another do not fit into a pass, which has {most} for them"
            )

    def cancel(self, request: Request, reason: Finish = "cancelled", error: BaseException | None = None) -> bool:
        """End a request now; its passes in flight are ignored. False where it has ended already."""
        if not request.end(reason, error):
            return False
        if request.held is not None:
            self._ended(request)
        return True

    def expire(self) -> list[Request]:
        """End requests past their deadline."""
        return [request for request in self._queue.late() if self.cancel(request, "deadline")]

    def draft(self, request: Request, ids: Sequence[int]) -> None:
        """Verify these drafts with the request's next row; only as many as rows and blocks allow."""
        if request.ahead or request.pending:
            raise ValueError("drafts need a request with ahead=False and no token in flight")
        request.drafts = tuple(ids)

    def resume(self, request: Request, ids: Sequence[int], last: int, position: int, pending: int = 0) -> None:
        """Continue a request from these tokens up to length `last`. Its KV cache holds `position` positions, those of the
        `pending` tokens on the device included."""
        request.ids, request.last = list(ids), last
        if request.slot is None:
            return
        request.pending, request.position = pending, position if pending else min(position, len(request.ids) - 1)
        request.steady, request.stop = bool(pending), min(request.until, last - 1)
        prompt = request in self._prompts
        if request.rest > 1 and not prompt:
            insort(self._prompts, request, key=in_order)
        elif request.rest == 1 and prompt:
            self._prompts.remove(request)

    # --- a pass ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Pass | None:
        """The next pass; None where nothing can run before a commit or a new request."""
        if len(self._flights) >= self.limits.ahead or not (self.running or self._queue.requests):
            return None
        for kind in self._kinds() if self._captures else (None,):
            if (made := self._make(kind)) is not None:
                self._kind = kind
                return made
        return None

    def schedule_rows(self, rows: Sequence[tuple[Request, int | None, int | None]]) -> Pass | None:
        """A pass with one row per request whose token and position the device resolves: (request, token word, position
        word), see runner.FOLLOWS; (request, None, None): the token sampled last. None where blocks are missing."""
        if not all(self._grow(request, request.position + 1) for request, _, _ in rows):
            return None
        runs = []
        for request, token, at in rows:
            assert request.slot is not None
            runs.append(Run(request, request.slot, request.position, None if token is None else (token,), 1, at))
            request.position, request.pending = request.position + 1, request.pending + 1
            request.steady = True
        return self._made(runs, len(runs), None)

    def _kinds(self) -> list[Capture | None]:
        """Kinds in order of trial, the last pass's kind last. One capture is in flight at a time, unless overlapping passes
        have separate result tensors."""
        at = CAPTURES.index(self._kind) + 1
        kinds = [*CAPTURES[at:], *CAPTURES[:at]]
        busy = not self.limits.overlap and any(p.capture for p in self._flights)
        return [None] if busy else kinds

    def _make(self, kind: Capture | None) -> Pass | None:
        runs, now, rows = list[Run](), self.number + 1, 0
        limit = self.limits.rows if kind is None else getattr(self.limits, kind) or self.limits.rows
        if self._prompts and self._prompts[0] is self.running[0] and self._prompts[0].capture == kind:
            self._reserve_for_first(self._prompts[0], now)
        if kind is None:
            rows = self._decode(runs)
            if runs:
                limit = self.limits.mixed or limit
        if self._queue.requests:
            self._admit(limit - rows, now)
        if self._prompts:
            rows += self._prefill(runs, limit - rows, now, kind)
        return self._made(runs, rows, kind) if runs else None

    def _made(self, runs: list[Run], rows: int, kind: Capture | None) -> Pass:
        outs = sum([run[4] for run in runs])
        self.number += 1
        made = Pass(self.number, runs, self._writes, self._params, self._released, rows, outs, kind)
        self._writes, self._params, self._released, self._adopted = [], [], [], 0
        self._flights.append(made)
        self.counts.passes += 1
        self.counts.rows += rows
        return made

    def commit(
        self,
        done: Pass,
        tokens: Sequence[int],
        counts: Sequence[int] | None = None,
        logprobs: Mapping[int, TokenLogprob] | None = None,
    ) -> list[tuple[Request, int]]:
        """Take the tokens of the oldest pass in flight: for each run with logits `counts` of them (default one; after a
        verification the accepted drafts and one more). logprobs: by index of `tokens`. Returns (request, new tokens) for
        each open request; one that ends here has freed its slot and blocks. A capture pass has no tokens."""
        if not self._flights or self._flights[0] is not done:
            raise ValueError(
                f"pass {done.number} is not the oldest in flight: commit passes in order, and none that was lost"
            )
        if done.capture is None:
            done.check(len(tokens), counts)
        self._flights.popleft()
        while self._cooling and self._cooling[0][0] <= done.number:
            self._slots.append(self._cooling.popleft()[1])
        if done.capture is not None:
            for request, _, start, fresh, _, _ in done.runs:
                if request.finish is None and fresh is not None and start + len(fresh) == request.n_prompt:
                    request.end("length")
                    self._ended(request)
            return []
        tokens = tokens if isinstance(tokens, list) else [int(t) for t in tokens]
        said = logprobs or {}
        block, at, news, total = self.blocks.block, 0, [], self.counts.generated
        given = iter(counts or ())
        for request, _, _, _, wants, _ in done.runs:
            if not wants:
                continue
            n = 1 if counts is None else next(given)
            first, at = at, at + n
            if request.finish is not None:
                continue
            request.pending -= 1
            request.passes += 1
            request.push(tokens[first], said.get(first))
            ids = request.ids
            if wants > 1:
                before = len(ids) - 1
                for i in range(first + 1, at):
                    if request.finish is not None:
                        break
                    request.push(tokens[i], said.get(i))
                n = self._verified(request, len(ids) - before, wants)
            elif not (len(ids) - 1) % block and request.slot is not None:  # else no block has been filled
                self._seal(request, len(ids) - 1, done.number)
            if request.finish is not None:
                self._ended(request)
            total += n
            news.append((request, n))
        self.counts.generated = total
        return news

    def _verified(self, request: Request, n: int, wants: int) -> int:
        """Account for n tokens of a verification; returns n."""
        request.verified += 1
        request.drafted += wants - 1
        request.accepted += n - 1
        self.counts.drafted += wants - 1
        self.counts.accepted += n - 1
        if request.slot is not None:
            request.position = len(request.ids) - 1  # rows of rejected drafts run again with other tokens
            self._seal(request, len(request.ids) - 1, self.number)
        return n

    def lose(self, cache: bool = True) -> None:
        """The passes in flight were aborted or lost. Drop them and the blocks that they were to fill, or (cache) all blocks;
        every request restarts from its known tokens."""
        since = self._flights[0].number if self._flights else self.number + 1
        self._flights.clear()
        for request in reversed(list(self.running)):
            self._park(request)
        for request in self._queue.requests:
            request.pending = 0
        self._slots.extend(slot for _, slot in self._cooling)
        self._cooling.clear()
        self.blocks.clear(0 if cache else since)

    def forget_tokens(self) -> None:
        """Forget the passes in flight without reading their tokens."""
        self._flights.clear()
        self._slots.extend(slot for _, slot in self._cooling)
        self._cooling.clear()
        for request in (*self.running, *self._queue.requests):
            request.pending = 0

    # --- rows --------------------------------------------------------------------------------------------------------

    def _decode(self, runs: list[Run]) -> int:
        """Add a row of each decoding sequence, and its drafts; returns the rows."""
        rows, limits, spare = 0, self.limits, -1
        resting = self.cap.resting(self.running) if self.cap and not (self._prompts or self._queue.requests) else ()
        for request in self.running:  # preemption shortens the list
            if resting and request in resting:
                continue
            position, pending = request.position, request.pending
            if request.steady and position < request.stop:
                runs.append(
                    tuple.__new__(Run, (request, request.slot, position, None, 1, None))
                )  # twice as fast as Run(...)
                request.position, request.pending = position + 1, pending + 1
                rows += 1
                continue
            total = len(request.ids) + pending
            if position != total - 1 or total >= request.last or not self._may_choose(request):
                continue
            if spare < 0:  # rows for drafts, beside one per request
                most = min(limits.mixed or limits.rows, limits.outs or limits.slots)
                spare = most - min(len(self.running) + self.waiting, limits.slots)
                spare = 0 if any(s.spans for s in self._prompts) else spare  # a span needs them
            drafts, request.drafts = (
                request.drafts[: max(0, min(spare, request.last - total - 1))] if request.drafts else (),
                (),
            )
            if (
                drafts
                and position + len(drafts) >= request.until
                and not self._grow(request, position + len(drafts) + 1)
            ):
                drafts = ()
            if position >= request.until and not self._extend(request, position + 1):
                continue
            ids: tuple[int, ...] | None = None if pending else (request.ids[-1], *drafts)
            n = 1 + len(drafts)
            assert request.slot is not None
            runs.append(Run(request, request.slot, position, ids, n))
            request.position, request.pending, request.steady = position + n, pending + 1, request.ahead
            spare -= n - 1
            rows += n
        if self._prompts:
            self._prompts = [s for s in self._prompts if s.position < len(s.ids)]
        return rows

    def _prefill(self, runs: list[Run], budget: int, now: int, kind: Capture | None) -> int:
        """Add rows of prompts in order, up to `budget`; returns the rows."""
        blocks, rows = self.blocks, 0
        prompts = [s for s in self._prompts if s.capture == kind] if self._captures else self._prompts
        for i, request in enumerate(prompts):
            if rows == budget:
                break
            if not self._may_choose(request) or self._adopt_shared(request, now):
                continue
            position, rest, held = request.position, request.rest, request.held
            assert request.slot is not None and held is not None
            behind = prompts[i + 1].rest if i + 1 < len(prompts) else 0
            n = min(rest, budget - rows - min((budget - rows) // SHARE, behind), request.rows or rest)
            if n < rest and not request.private and n > (cut := (position + n) % blocks.block):
                n -= cut  # whole blocks, which other prompts may share
            if request.spans and not (n := request.uncut(n, budget - rows)):
                continue
            if position + n > request.until:
                blocks.slide(held, position - request.rollback)
                self._grow(request, min(position + n, (held.size + blocks.available()) * blocks.block))
                n = min(n, request.until - position)
                if request.spans:
                    n = request.uncut(n, n)
                if n < 1:
                    continue
            if request.found == position:
                blocks.anchor(held, position // blocks.block)
            wants = int(n == rest) if kind is None else 0 if kind == "hidden" else n
            runs.append(Run(request, request.slot, position, tuple(request.ids[position : position + n]), wants))
            rows += n
            request.position = position + n
            self.counts.recomputed += max(0, min(request.reached, position + n) - position)
            self._seal(request, position + n, now)
            if n == rest and kind is None:
                request.pending, request.steady = 1, request.ahead
                for end in (len(request.ids) - 1, len(request.ids)):  # found by the same prompt; by its continuation
                    blocks.anchor(held, end // blocks.block)
        self._prompts = [s for s in self._prompts if s.position < len(s.ids)]
        return rows

    def _may_choose(self, request: Request) -> bool:
        """Whether the host is ready for the request's next rows."""
        if request.capture is not None:
            return self.ready(request)
        return request.ahead or (not request.pending and self.ready(request))

    def _adopt_shared(self, request: Request, now: int) -> bool:
        """Adopt blocks that another sequence has computed meanwhile. Returns whether its next block is being computed."""
        held, block = request.held, self.blocks.block
        assert held is not None and request.slot is not None
        if request.private or held.size * block != request.position:
            return False
        n, coming = self.blocks.match(held, request.ids, (len(request.ids) - 1) // block, now)
        if n > held.size:
            before = request.position
            if not self._adopt(request, n):
                return True
            if not request.reached:
                request.cached += request.position - before
                self.counts.cached += request.position - before
        return coming

    def _adopt(self, request: Request, n: int) -> bool:
        """Adopt n cached blocks; False where the pass has no space for their block-table entries."""
        held = request.held
        assert held is not None and request.slot is not None
        new = n - held.size
        if self._adopted + new > -(-self.limits.ctx // self.blocks.block):
            return False
        self._adopted += new
        self.blocks.adopt(held, n, request.slot, self._writes)
        request.position = request.until = request.found = n * self.blocks.block
        return True

    # --- admission and preemption ------------------------------------------------------------------------------------

    def _admit(self, budget: int, now: int) -> None:
        """Admit waiting requests in order while slots, blocks and rows last."""
        waiting = self._queue.requests
        while waiting:
            request = waiting[0] if not self._captures else next(filter(self._may_begin, waiting), None)
            if request is None or not (self._slots or (self._preempt_idle() and self._slots)):
                return
            before = [s.rest for s in self._prompts if s.capture == request.capture]
            if sum(before) >= budget and len(before) != 1:
                return
            if request.pending or not self._enter(request, now):
                return

    def _may_begin(self, request: Request) -> bool:
        return request.capture is None or self.ready(request)

    def _preempt_idle(self) -> bool:
        """Preempt a capture request whose reader is idle; False where there is none."""
        for request in reversed(self.running) if self._captures else ():
            if not self._may_begin(request) and not any(r.seq is request for p in self._flights for r in p.runs):
                self._preempt(request)
                return True
        return False

    def _enter(self, request: Request, now: int) -> bool:
        """Give a waiting request a slot and its cached prefix; False, and nothing changed, where it does not fit."""
        blocks, held = self.blocks, request.held
        assert held is not None
        if self._stuck == (request, blocks.given):
            return False
        n = 0
        if not request.private:
            n, _ = blocks.match(held, request.ids, (len(request.ids) - 1) // blocks.block, now)
        request.slot, mark = self._slots[-1], len(self._writes)
        fits = self._begin(request) if request.start else self._adopt(request, n)
        if not fits or not has_blocks(self.blocks, self.running, self._prompts, request):
            blocks.release(held)
            if fits:
                self._adopted -= n
                self._stuck = (request, blocks.given)
            del self._writes[mark:]
            request.slot, request.position, request.until = None, 0, 0
            return False
        self._slots.pop()
        self._queue.take(request)
        insort(self.running, request, key=in_order)
        insort(self._prompts, request, key=in_order)
        self._params.append(request)
        if not request.entered:
            request.entered, request.cached = True, request.position
            request.begun = time.perf_counter()
            self.counts.prompt += request.n_prompt
            self.counts.cached += request.cached
        return True

    def _begin(self, request: Request) -> bool:
        """Blocks for positions that count as computed (`Request.start`); in windowed layers only those in sight."""
        held = request.held
        assert held is not None and request.slot is not None
        n = request.start // self.blocks.block + 1
        if self._writes and len(self._writes) + n * len(self.blocks.pools) > self.max_writes:
            return False  # a message holds the tables of a whole context once: the others come with the next passes
        if not self.blocks.begin(held, n, request.start, request.slot, self._writes):
            return False
        request.position, request.until = request.start, n * self.blocks.block
        return True

    def _seal(self, request: Request, positions: int, born: int) -> None:
        if not request.private:
            assert request.held is not None
            self.blocks.seal(request.held, request.ids, positions, born)

    def _reserve_for_first(self, request: Request, now: int) -> None:
        """Give the first request in order, a prompt, blocks for its next row or span before the decoding ones, preempting
        others if need be."""
        if not self._adopt_shared(request, now) and (end := request.together(request.position)) > request.until:
            self._extend(request, end)

    def _extend(self, request: Request, positions: int) -> bool:
        """Blocks for so many positions, preempting later requests; False where it is the last one itself."""
        while not self._grow(request, positions):
            last = self.running[-1]
            if last is request:
                return False
            self._preempt(last)
        return True

    def _grow(self, request: Request, positions: int) -> bool:
        """Blocks for so many positions, if enough are free."""
        held, block = request.held, self.blocks.block
        assert held is not None and request.slot is not None
        self.blocks.slide(held, request.position - request.rollback)
        if not self.blocks.grow(held, -(-positions // block), request.slot, self._writes):
            return False
        request.until = held.size * block
        request.stop = min(request.until, request.last - 1)
        return True

    def _preempt(self, request: Request) -> None:
        self.counts.preemptions += 1
        request.preemptions += 1
        self._park(request)

    def _park(self, request: Request) -> None:
        """Put a running request back into the queue without slot and blocks."""
        self._leave(request, bool(request.pending and self._flights) or self._overlapped)
        if not self._flights:
            request.pending = 0
        request.position = request.until = request.stop = request.found = 0
        request.steady, request.drafts = False, ()
        self._queue.put_back(request)

    def _leave(self, request: Request, cool: bool) -> None:
        """Free a running request's slot and blocks. cool: only after the passes in flight, which still use the slot."""
        assert request.slot is not None and request.held is not None
        request.reached = max(request.reached, request.position)
        self.blocks.release(request.held)
        remove(self.running, request)
        if request in self._prompts:
            self._prompts.remove(request)
        if cool:
            self._cooling.append((self._flights[-1].number, request.slot))
        else:
            self._slots.append(request.slot)
        self._released.append(request.slot)
        if self._writes:  # of the next pass
            self._writes = [w for w in self._writes if w[1] != request.slot]
        if request in self._params:
            self._params.remove(request)
        request.slot = None

    @property
    def _overlapped(self) -> bool:
        """Whether a pass in flight may still read the block table of a slot freed now."""
        return self.limits.overlap and bool(self._flights)

    def _ended(self, request: Request) -> None:
        """Free what an ended request holds."""
        reason = str(request.finish)
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        self._captures -= request.capture is not None
        self._queue.ended(request)
        if request.slot is None:
            self._queue.remove(request)
        else:
            self._leave(request, self._overlapped)
