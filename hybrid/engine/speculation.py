"""Speculative decoding: a pass verifies several draft tokens at once. A draft is accepted where it equals the token that
the model samples, so the text is the same with and without drafts.

    Lookup       n-grams of the sequence itself
    DraftModel   a smaller model with the same tokenizer, on the same queue
    Assistant    one that reads the model's cache (hybrid/engine/assistant.py)
    Replay       known texts with a set acceptance rate, for benchmarks
    Speculator   chooses the number of drafts per sequence from measured acceptance and measured cost

Tokens that a request's constraint expects (sampling.likely_by) come before a drafter's, and are verified like them.

The host never reads a draft model's tokens. Its passes leave them in device memory for the verifying pass (DRAFTED). The
passes of its next drafts are queued after that verification; the device tells them where the sequence continues (FOLLOWS).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from hybrid.core.plan import DRAFTS_TENSOR, FAULTED, UNTIL_TENSOR
from hybrid.engine.loading import check_drafts
from hybrid.engine.request import Request
from hybrid.engine.runner import CONTINUES, DRAFTED, FOLLOWS, Flight, Runner, Stack
from hybrid.engine.sampling import SamplingState
from hybrid.engine.scheduler import Pass, Scheduler
from hybrid.planning.passes import DRAFT_ROWS

T = TypeVar("T")
MOST = 7
"""Default limit of drafts per sequence and pass: with the last token they fill the smallest batch bucket."""
PROBES = (8, 128)  # tokens between two probes while drafts do not pay; doubled after each probe
PROBE, TRIES = 2, 2  # drafts of a probe; sequences that probe in one pass
NGRAMS = (4, 2)  # lengths of n-grams, longest first
LENT = {"history": DRAFTS_TENSOR, DRAFTS_TENSOR: "history", UNTIL_TENSOR: "next_position"}
"""Tensors of a draft model -> tensors of the target model that it uses in their place (Device.sibling)."""
_DECAY, _DECAY_OF_ALL = 0.9, 0.98  # per verification: of one sequence, of all
_PRIOR = 8.0  # weight, in drafts, of the shared acceptance rate in that of one sequence


class Drafter(Protocol):
    """Proposes drafts for many sequences. An exception ends speculation, not the requests."""

    name: str

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """Drafts that continue each request's `ids`, at most so many; none is allowed."""
        ...

    def verified(self, request: Request, accepted: int) -> None:
        """So many of a request's last drafts were accepted."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request."""
        ...

    def close(self) -> None: ...


class Lookup:
    """What followed the last few tokens where they stood before, the latest such place; needs no model. Where that place
    is so near that it ends before the drafts do, the text is taken to repeat itself."""

    name = "lookup"

    def __init__(self) -> None:
        self._places: dict[Request, tuple[int, dict[tuple[int, ...], int]]] = {}  # tokens noted, n-gram -> what follows

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: self._after(request, most) for request, most in wanted.items()}

    def _after(self, request: Request, most: int) -> list[int]:
        ids = request.ids
        seen, places = self._places.get(request, (1, {}))
        for end in range(seen, len(ids)):
            for n in NGRAMS:
                if end >= n:
                    places[tuple(ids[end - n : end])] = end
        self._places[request] = len(ids), places
        at = (places.get(tuple(ids[-n:])) for n in NGRAMS if len(ids) > n)
        begin = next((place for place in at if place is not None), None)
        found: list[int] = []
        for i in range(begin, begin + most) if begin is not None else ():
            found.append(ids[i] if i < len(ids) else found[i - len(ids)])
        return found

    def verified(self, request: Request, accepted: int) -> None:
        pass

    def end(self, request: Request) -> None:
        self._places.pop(request, None)

    def close(self) -> None:
        self._places.clear()


class Replay:
    """Drafts from known texts. Each is right with probability `rate`, drawn from the text's number and the position.
    draft: a model that runs its passes for every draft, so that drafting takes its time."""

    name = "replay"

    def __init__(
        self, texts: Mapping[tuple[int, ...], Sequence[int]], rate: float, draft: DeviceDrafter | None = None
    ) -> None:
        """texts: prompt -> continuation. ValueError for a rate outside 0 to 1."""
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be a probability, 0 to 1, not {rate!r}")
        self.draft = draft
        self._drafts: dict[tuple[int, ...], list[int]] = {}
        for number, (prompt, text) in enumerate(texts.items()):
            drawn = (
                np.random.Generator(np.random.Philox(key=[number, len(prompt) + at])).random()
                for at in range(len(text))
            )
            self._drafts[prompt] = [token if x < rate else token ^ 1 for token, x in zip(text, drawn, strict=True)]
        self._of: dict[Request, list[int]] = {}

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """No drafts for an unknown prompt."""
        if self.draft is not None:
            wanted = {request: len(words) for request, words in self.draft.propose(wanted).items()}
        found = {}
        for request, most in wanted.items():
            if request not in self._of:
                self._of[request] = self._drafts.get(tuple(request.prompt), [])
            at = len(request.ids) - request.n_prompt
            found[request] = self._of[request][at : at + most]
        return found

    def verified(self, request: Request, accepted: int) -> None:
        if self.draft is not None:
            self.draft.verified(request, accepted)

    def end(self, request: Request) -> None:
        self._of.pop(request, None)
        if self.draft is not None:
            self.draft.end(request)

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()


class DeviceDrafter(ABC):
    """A drafter whose passes run on the target's queue and leave their tokens on the device."""

    name: str
    runner: Runner
    queues: bool
    """Whether submitting returns before the pass has run; on cpu it does not."""
    _flight: Flight | None = None
    """The last pass."""
    _proposed: Flight | None = None
    """The last pass of the drafts that are verified now."""

    @abstractmethod
    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """See Drafter."""

    @abstractmethod
    def queue_after(self, verified: Mapping[Request, int], most: int) -> bool:
        """Queue the passes of the next drafts, `most` per request, after the pass that verifies the last ones. They begin
        where that pass finds the end of the accepted drafts. Does not wait. False where nothing was queued."""

    @abstractmethod
    def expects(self, request: Request) -> int:
        """Drafts that `queue_after` has queued beyond the request's tokens."""

    @abstractmethod
    def verified(self, request: Request, accepted: int) -> None:
        """See Drafter."""

    @property
    def recordings(self) -> int:
        """Programs made so far."""
        return self.runner.counters.recordings

    def wait(self) -> None:
        """Wait for the passes of the last drafts. After an aborted step, later drafts start again."""
        flight, self._proposed = self._proposed, None
        if flight is None:
            return
        _, slot, start, ids, *_ = flight.scheduled.runs[0]
        word = self.runner.device.peek("history", slot, start + len(ids or (CONTINUES,)), flight.ticket)
        if word == FAULTED:
            self.runner.abort()
            self._lose()

    @abstractmethod
    def _lose(self) -> None:
        """Forget the drafts of an aborted step, and those queued after it."""

    @abstractmethod
    def end(self, request: Request) -> None:
        """Forget a request."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(slots=True)
class _Copy:
    """The draft model's copy of a sequence."""

    own: Request
    known: int = 0
    """Length of the sequence at the last proposal."""
    drafts: int = 0
    """Drafts of that proposal."""
    valid: int = 0
    """Leading positions of its KV cache that hold the sequence's tokens."""
    queued: int = 0
    """Passes queued after the verification of these drafts; `end`: the copy's position before them."""
    end: int = 0


class DraftModel(Stack, DeviceDrafter):
    """A smaller model on the target model's queue, with a copy of each sequence that has a slot and blocks there. Both
    models sample with the request's parameters and noise, so they agree more often than two independent samples would.
    ValueError where it cannot share the target model's memory."""

    def __init__(self, runner: Runner, name: str, close: Callable[[], object]) -> None:
        super().__init__(runner)
        self.name, self._close = name, close
        missing = [name for name in LENT if not runner.device.shares(name)]
        if missing:
            raise ValueError(
                f"{name}: its context of {runner.cache.ctx} tokens or its {runner.cache.slots} slots are not the larger "
                "model's, so neither finds the other's tokens: load that one with the same ctx and slots"
            )
        self.queues = runner.device.passes_ahead > 1
        self._copies: dict[Request, _Copy] = {}

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Token words by which a verifying pass finds the drafts (DRAFTED). Appends the new tokens of each sequence, then
        continues from its own tokens, all sequences in the same passes. Does not wait."""
        self.scheduler.forget_tokens()
        ctx = self.runner.cache.ctx
        for request, most in wanted.items():
            copy = self._copy(request)
            ids, ready = request.ids, self.expects(request)
            last = min(len(ids) + most, ctx)
            if ready:
                self.scheduler.resume(copy.own, ids, last, len(ids) - 1 + ready, ready)
            else:
                self.scheduler.resume(copy.own, ids, last, copy.valid)
        for copy in self._copies.values():
            copy.queued = 0
        if flights := self.run():
            self._flight = flights[-1]
        found = {}
        for request, most in wanted.items():
            copy, own = self._copies[request], self._copies[request].own
            count = min(own.pending, most)
            copy.known, copy.drafts = len(request.ids), count
            copy.valid = min(own.position, copy.known) if own.slot is not None else 0
            if count and own.slot is not None:
                found[request] = [DRAFTED - own.slot] * count
            own.last = 0  # paused until the next proposal
        self._proposed = self._flight
        return found

    def verified(self, request: Request, accepted: int) -> None:
        copy = self._copies.get(request)
        if copy is not None and copy.drafts:
            copy.valid = min(copy.valid, copy.known) + min(accepted, copy.drafts - 1)

    def queue_after(self, verified: Mapping[Request, int], most: int) -> bool:
        self.scheduler.forget_tokens()
        copies = []
        for request, count in verified.items():
            copy = self._copies.get(request)
            if copy is None or copy.own.slot is None or request.slot is None or copy.drafts != count:
                continue
            if copy.known + count + most < self.runner.cache.ctx:
                copy.own.position = copy.end = copy.known - 1 + count
                copies.append((request, copy))
        if not copies or not most:
            return False
        for i in range(most):
            rows: list[tuple[Request, int | None, int | None]] = []
            for request, copy in copies:
                word = FOLLOWS - (request.slot or 0)
                # Where all drafts are accepted, the first runs the last draft and the second the target's token.
                place = (word, FOLLOWS) if i == 0 else (word, CONTINUES) if i == 1 else (None, None)
                rows.append((copy.own, *place))
            made = self.scheduler.schedule_rows(rows)
            if made is None:
                break
            self._flight = self.start(made)
            for _, copy in copies:
                copy.queued = i + 1
        return any(copy.queued for _, copy in copies)

    def expects(self, request: Request) -> int:
        copy = self._copies.get(request)
        if copy is None or not copy.queued or not 0 < len(request.ids) - copy.known <= copy.drafts + 1:
            return 0
        return max(0, copy.queued - max(0, len(request.ids) - 1 - copy.end))

    def _lose(self) -> None:
        self.scheduler.lose()
        for copy in self._copies.values():
            copy.valid = copy.drafts = copy.queued = 0

    def end(self, request: Request) -> None:
        copy = self._copies.pop(request, None)
        if copy is not None:
            self.scheduler.cancel(copy.own)

    def close(self) -> None:
        """Close its device, also after an error."""
        self._copies.clear()
        self._close()

    def _copy(self, request: Request) -> _Copy:
        if request not in self._copies:
            options = replace(
                request.options,
                max_tokens=max(1, request.last - request.n_prompt),
                constraint=None,
                logprobs=0,
                stop=(),
            )
            own = Request(request.id, request.ids, options)
            own.rollback = 4 * (MOST + 1)
            self.scheduler.add(own)
            self._copies[request] = _Copy(own)
        return self._copies[request]


# --- how many --------------------------------------------------------------------------------------------------------


def most_drafts(draft: object, speculate: object) -> int:
    """The limit of drafts per pass for the options of hybrid.load; 0: no speculation. ValueError."""
    if speculate is None:
        speculate = 0 if draft is None else "auto"
    return MOST if speculate == "auto" else check_drafts(speculate)


class Acceptance:
    """Decaying acceptance rate of a draft whose predecessors were accepted. rate: the prior."""

    def __init__(self, rate: float = 0.75, decay: float = _DECAY_OF_ALL) -> None:
        self.right, self.tried, self._decay = 2 * rate, 2.0, decay

    @property
    def rate(self) -> float:
        return self.right / self.tried

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the accepted drafts of a pass."""
        self.right = self._decay * self.right + accepted
        self.tried = self._decay * self.tried + accepted + (accepted < drafted)


class SpecState:
    """Speculation state of a request, with a drafter or with its constraint. limit: most drafts per pass; fixed: always
    that many. among: acceptance of all requests, the prior of its own."""

    def __init__(self, request: Request, limit: int, fixed: bool, among: Acceptance) -> None:
        self.request, self.limit, self.fixed, self.among = request, limit, fixed, among
        self.likely: Sequence[int] | None = None
        """The tokens that its constraint expects now; None: with a drafter."""
        self.steady: int | None = None
        """Tokens for which the mask of its constraint stays, where only the device knows drafts; None: no bound."""
        self._own = Acceptance(among.rate, _DECAY)
        self.rest = 0
        """Tokens until the next attempt."""
        self.known = False
        """Whether the drafter has run its prompt."""
        self.asked = 0
        """Drafts requested for the next pass."""
        self._wait, self._probed = PROBES[0], False

    @property
    def most(self) -> int:
        """Most drafts of the next pass."""
        bound = len(self.likely) if self.likely is not None else self.steady
        return self.limit if bound is None else min(self.limit, bound)

    @property
    def rate(self) -> float:
        return (self._own.right + _PRIOR * self.among.rate) / (self._own.tried + _PRIOR)

    def verified(self, drafted: int, accepted: int) -> None:
        self._own.verified(drafted, accepted)

    def offer(self, drafts: int, probe: int) -> int:
        """Drafts for the next pass: as many as pay (`drafts`), or where none do, `probe` of them at growing intervals."""
        if drafts or self.fixed:
            self._wait, self._probed = PROBES[0], False
            return drafts
        self._probed = not self._probed and probe > 0
        if self._probed:
            return min(probe, self.most)
        self.rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])
        return 0


@dataclass(slots=True)
class Costs:
    """Measured seconds of a pass by its rows (none of prompts) and of drafting by the most drafts of one sequence: the
    mean of the last readings without the slowest. Other sizes are interpolated. Beyond the largest measured size a pass
    is assumed to cost the same, so that it is tried once; from DRAFT_ROWS on, its cost grows with the rows."""

    _read: dict[tuple[str, int], deque[float]] = field(default_factory=dict)

    def took(self, rows: int, seconds: float) -> None:
        self._note("pass", rows, seconds)

    def drafted(self, drafts: int, seconds: float) -> None:
        self._note("draft", drafts, seconds)

    def _note(self, what: str, n: int, seconds: float) -> None:
        self._read.setdefault((what, n), deque(maxlen=8)).append(seconds)

    def known(self, what: str) -> dict[int, float]:
        """Mean seconds by size: rows of a `pass`, or drafts of a `draft`."""
        found = {}
        for (of, n), readings in self._read.items():
            if of == what:
                kept = sorted(readings)[: max(1, len(readings) - 1 - len(readings) // 4)]
                found[n] = sum(kept) / len(kept)
        return found

    def table(self, rows: int) -> CostTable:
        return CostTable(self.known("pass"), self.known("draft"), rows)


class CostTable:
    """A snapshot of Costs for passes of `rows` rows and more. Outliers of a busy device are bounded: one row more costs
    at most one plain pass more, and so does one draft."""

    def __init__(self, passes: dict[int, float], drafts: dict[int, float], rows: int) -> None:
        self.passes, self.drafts, self.rows = passes, drafts, rows
        self.plain = 0.0
        """Seconds of a pass without drafts; 0: not measured."""
        if any(n <= rows for n in passes):
            self.plain = self._pass(rows)

    def _pass(self, rows: int) -> float:
        return _between(self.passes, rows) * max(1.0, rows / max(DRAFT_ROWS, *self.passes))

    def of(self, rows: int, drafts: int) -> float:
        """Seconds of drafting and verifying; 0 where `plain` is not known."""
        if not self.plain:
            return 0.0
        verify = min(max(self._pass(rows), self.plain), self.plain * (1 + rows - self.rows))
        return verify + min(self._draft(drafts), self.plain * drafts)

    def _draft(self, drafts: int) -> float:
        if not self.drafts or not drafts:
            return 0.0
        least, most = min(self.drafts), max(self.drafts)
        if drafts <= least:
            return self.drafts[least] * drafts / least
        each = (self.drafts[most] - self.drafts[least]) / (most - least) if most > least else self.drafts[most] / most
        return _between(self.drafts, drafts) + max(0.0, each) * max(0, drafts - most)


def _between(table: Mapping[int, float], n: int) -> float:
    """Linear interpolation; constant beyond the greatest key. Some key must be <= n."""
    below, above = max(k for k in table if k <= n), min((k for k in table if k >= n), default=0)
    if above <= below:
        return table[below]
    return table[below] + (n - below) / (above - below) * (table[above] - table[below])


def expected(rate: float, drafts: int) -> float:
    """Expected tokens of a verification: each draft is accepted with `rate` if its predecessors are."""
    return sum(rate**i for i in range(drafts + 1))


def share(wanted: Sequence[tuple[float, int, bool]], max_rows: int, costs: CostTable) -> list[int]:
    """Drafts of each sequence that maximise expected tokens per second of the whole pass, likeliest drafts first. The
    pass has `costs.rows` rows without drafts and at most `max_rows` with them. wanted: (acceptance rate, limit, whether
    the limit is fixed) of each sequence."""
    rows = costs.rows
    counts, tokens = [0] * len(wanted), float(rows)
    max_rows = min(
        max_rows, max(rows + PROBE, 2 * max(costs.passes, default=max_rows))
    )  # grow beyond measured sizes in small steps
    for i, (rate, most, fixed) in enumerate(wanted):
        if fixed:
            counts[i] = min(most, max(0, max_rows - rows))
            tokens, rows = tokens + expected(rate, counts[i]) - 1, rows + counts[i]

    def speed() -> float:
        seconds = costs.of(rows, max(counts, default=0))
        return tokens / seconds if seconds else 0.0

    best, fastest = list(counts), speed()
    gains = [
        (-(rate**j), i, j) for i, (rate, most, fixed) in enumerate(wanted) if not fixed for j in range(1, most + 1)
    ]
    for loss, i, j in sorted(gains)[: max(0, max_rows - rows)]:
        counts[i], tokens, rows = j, tokens - loss, rows + 1
        if (now := speed()) > fastest:
            best, fastest = list(counts), now
    return best


class Speculator:
    """Chooses drafts before each pass of a scheduler. A sequence with drafts does not run ahead of the host, because its
    last token must be known first. So all such sequences share one pass, made after the passes in flight were read.

    drafter: None: only constraints give drafts. max_rows: most rows of a pass whose tokens are sampled. k: drafts per
    pass (None: from their worth). refused: called for a request whose constraint fails. failed: called once where a
    drafter fails. clock: seconds. recordings: number of programs recorded so far for verifying passes.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        max_rows: int,
        k: int | None,
        sampling: SamplingState | None,
        refused: Callable[[Request, Exception], object],
        failed: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
        recordings: Callable[[], int] = lambda: 0,
    ) -> None:
        self.drafter = drafter
        self.name = "grammar" if drafter is None else drafter.name
        self.max_rows, self.k, self.verified = max_rows, k, 0
        self._sampling, self._refused, self._failed, self._clock = sampling, refused, failed, clock
        self._recordings = recordings
        self._of: dict[Request, SpecState] = {}
        self._guided: dict[Request, SpecState] = {}  # with constraints; `_of`: with the drafter
        self._gave: dict[Request, SpecState] = {}  # of the drafts that the next pass verifies
        self.forget()

    def forget(self) -> None:
        """Forget measured costs and acceptance."""
        self.costs, self.acceptance, self.guidance = Costs(), Acceptance(), Acceptance(0.98)
        # Drafting in flight: begin, most drafts of a sequence, programs recorded until then (-1: not timed).
        self._drafting: tuple[float, int, int] | None = None
        self._verifying: tuple[int, dict[Request, int]] = 0, {}  # the last verifying pass, and its drafts
        self._queued_after = 0  # the verifying pass after which `queue_after` queued drafts
        self._rest, self._wait = 0, PROBES[0]  # passes until a probe while no drafts pay; then
        self._seen = 0.0  # time at which the last pass was read

    @property
    def draft(self) -> DeviceDrafter | None:
        """The draft model, if there is one."""
        drafter = self.drafter.draft if isinstance(self.drafter, Replay) else self.drafter
        return drafter if isinstance(drafter, DeviceDrafter) else None

    def prepare(self, scheduler: Scheduler) -> bool:
        """Give the scheduler drafts for its next pass. False: passes in flight must be read first."""
        running, sampling = scheduler.running, self._sampling
        if self.drafter is None and not (
            sampling and sampling.constrained(r.slot for r in running if r.slot is not None)
        ):
            return True
        if scheduler.in_flight == 1 and self._verifying[0] == scheduler.number:
            self._queue_next_drafts()
        decoding = [r for r in running if r.decodes]
        states = [f for r in decoding if (f := self._state(r)) is not None]
        due = [f for f in states if f.most > 0 and f.rest <= 0]
        asked = self._ask(scheduler, due, len(decoding)) if due else []
        if asked and scheduler.in_flight:
            for f in asked:
                _run_ahead(f.request, False)
            return False
        if not asked or not self._propose(scheduler, asked):
            for f in states:
                _run_ahead(f.request, True)
        return True

    def drafted(self, done: Pass) -> float:
        """Called before waiting for a pass: waits for the drafting before it on the queue. Returns its end, or 0."""
        begun, self._drafting = self._drafting, None
        model = self.draft
        if begun is None or model is None or done.outs == len(done.wanting):
            return 0.0
        try:
            model.wait()
        except Exception as error:  # as in `_propose`
            self._fail(error)
            return 0.0
        now = self._clock()
        if self._programs() == begun[2]:  # else the host recorded a program meanwhile
            self.costs.drafted(begun[1], now - begun[0])
        return now

    def committed(self, done: Pass, news: Sequence[tuple[Request, int]], seconds: float) -> None:
        """Note a committed pass: (request, new tokens), and its seconds (0: not representative)."""
        self._seen = self._clock()
        self._rest -= done.outs == len(done.wanting)
        wants = {run.seq: run.wants for run in done.runs}
        if seconds and all(run.wants == (len(run.ids) if run.ids else 1) for run in done.runs):  # no rows of prompts
            self.costs.took(done.rows, seconds)
        for request, n in news:
            drafts, gave = wants[request] - 1, self._gave.pop(request, None)
            if drafts:
                self.verified += 1
                (self.acceptance if gave is None else gave.among).verified(drafts, n - 1)
                if gave is not None:
                    gave.verified(drafts, n - 1)
                if self.drafter is not None and (gave is None or gave.likely is None):
                    self.drafter.verified(request, n - 1)
                continue
            for found in (self._of.get(request), self._guided.get(request)):
                if found is not None:
                    found.rest = max(0, found.rest - n)

    def end(self, request: Request) -> None:
        """Forget a request that has ended."""
        for of in (self._of, self._guided, self._gave):
            of.pop(request, None)
        if self.drafter is not None:
            try:
                self.drafter.end(request)
            except Exception as error:  # such as a lost device
                self._fail(error)

    def close(self) -> None:
        drafter, self.drafter = self.drafter, None
        for of in (self._of, self._guided, self._gave):
            of.clear()
        if drafter is not None:
            drafter.close()

    # --- internals ---------------------------------------------------------------------------------------------------

    def _programs(self) -> int:
        """Programs recorded so far for either model."""
        return self._recordings() + (0 if self.draft is None else self.draft.recordings)

    def _state(self, request: Request) -> SpecState | None:
        """With the request's constraint where that expects tokens, else with the drafter; None without one."""
        likely = self._likely(request)
        if request.finish is not None or (not likely and self.drafter is None):
            return None
        of, among = (self._guided, self.guidance) if likely else (self._of, self.acceptance)
        found = of.get(request)
        if found is None:
            k = self.k if request.options.speculate is None else request.options.speculate
            found = of[request] = SpecState(request, MOST if k is None else k, k is not None, among)
        found.likely = likely or None
        # A constraint must check drafts, unless its mask does not depend on them: the host does not read a draft model's.
        unread = request.options.constraint is not None and self.draft is not None
        found.steady = self._asked_of(request, lambda s, slot: s.steady(slot), 0) if unread else None
        return found

    def _likely(self, request: Request) -> Sequence[int]:
        """Tokens that the request's constraint expects."""
        nothing: Sequence[int] = ()
        return self._asked_of(request, lambda s, slot: s.likely(slot), nothing)

    def _asked_of(self, request: Request, ask: Callable[[SamplingState, int], T], otherwise: T) -> T:
        """What the request's constraint says; `otherwise` without one, and before its last token is known."""
        if request.options.constraint is None or self._sampling is None or request.pending or request.slot is None:
            return otherwise
        try:
            return ask(self._sampling, request.slot)
        except Exception as error:  # any error of a user's constraint
            self._refused(request, error)
            return otherwise

    def _ask(self, scheduler: Scheduler, due: list[SpecState], rows: int) -> list[SpecState]:
        """Requests that get drafts in a pass that has so many rows without drafts."""
        costs, model = self.costs.table(rows), self.draft
        shares = share([(f.rate, f.most, f.fixed) for f in due], self.max_rows, costs)
        behind = self._queued_after == scheduler.number and model is not None
        quiet = not any(shares)  # a probe then costs a pass of its own
        tries = TRIES if rows < DRAFT_ROWS and not (quiet and self._rest > 0) else 0
        for f, k in zip(due, shares, strict=True):
            if not costs.plain and not f.fixed:  # the cost of a plain pass must be known first
                f.asked = 0
                continue
            f.asked = f.offer(k, PROBE if tries else 0)
            tries -= f.asked > k
            if behind and k and model is not None and not f.fixed:
                f.asked = max(f.asked, model.expects(f.request))
            f.asked = min(f.asked, f.request.last - len(f.request.ids) - f.request.pending - 1)
        asked = [f for f in due if f.asked > 0]
        if not quiet:
            self._wait = PROBES[0]
        elif asked:
            self._rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])
        return asked

    def _propose(self, scheduler: Scheduler, asked: list[SpecState]) -> bool:
        """Take the tokens that constraints expect, ask the drafter for the others'; whether there are any drafts."""
        began = self._seen if self._queued_after == scheduler.number else self._clock()
        made, found = self._programs(), dict[Request, Sequence[int]]()
        own = [f for f in asked if f.likely is None]
        if own and self.drafter is not None:
            try:
                found.update(self.drafter.propose({f.request: f.asked for f in own}))
            except Exception as error:  # any failure of the drafter: the text does not depend on drafts
                self._fail(error)
                asked = [f for f in asked if f.likely is not None]
        most = max(map(len, found.values()), default=0)
        timed = self._programs() == made and all(f.known for f in own)  # else it ran prompts too
        if self.draft is not None and self.draft.queues:
            self._drafting, timed = (began, most, made if timed else -1) if most else None, False
        given: dict[Request, int] = {}
        for f in asked:
            f.known = True
            drafts = found.get(f.request, ()) if f.likely is None else f.likely
            if allowed := self._allowed(f.request, list(drafts)[: f.asked]):
                _run_ahead(f.request, False)
                scheduler.draft(f.request, allowed)
                given[f.request], self._gave[f.request] = len(allowed), f
            else:
                f.rest, f.request.drafts = max(f.rest, PROBE), ()
        if given and timed:  # with the time of constraints' masks
            self.costs.drafted(max(given.values()), self._clock() - began)
        self._verifying = scheduler.number + 1, given
        return bool(given)

    def _queue_next_drafts(self) -> None:
        """Queue the draft model's next passes after the verification in flight, so that the device works while the host
        reads. Skips requests that may end by their length."""
        model, (number, given) = self.draft, self._verifying
        self._verifying = 0, {}  # once
        if model is None or not model.queues:
            return
        found = [
            self._of[request]
            for request, drafts in given.items()
            if request in self._of and request.slot is not None and request.last - len(request.ids) - drafts > 2
        ]
        shares = share([(f.rate, f.most, f.fixed) for f in found], self.max_rows, self.costs.table(len(found)))
        try:
            if model.queue_after({f.request: given[f.request] for f in found}, max(shares, default=0)):
                self._queued_after = number
        except Exception as error:  # as in `_propose`
            self._fail(error)

    def _allowed(self, request: Request, drafts: Sequence[int]) -> tuple[int, ...]:
        """The leading drafts that the request's constraint allows."""
        if request.options.constraint is None or self._sampling is None or not drafts:
            return tuple(drafts)
        assert request.slot is not None
        try:
            return self._sampling.allowed(request.slot, drafts)
        except Exception as error:  # any error of a user's constraint
            self._refused(request, error)
            return ()

    def _fail(self, error: Exception) -> None:
        """Stop speculation and close the drafter."""
        drafter, self.drafter = self.drafter, None
        said = f"{self.name}: {type(error).__name__}: {error}; speculation has ended"
        try:
            if drafter is not None:
                drafter.close()
        except Exception as second:  # such as a lost device
            said += "" if str(second) == str(error) else f" (closing it: {type(second).__name__}: {second})"
        self._failed(said)
        for request in self._of:
            _run_ahead(request, True)


def _run_ahead(request: Request, may: bool) -> None:
    """Set whether the request's next row may run before its last token is known on the host."""
    may = may and request.options.constraint is None
    if request.ahead != may:
        request.ahead, request.steady, request.drafts = may, False, ()
