"""A request: a prompt, how its tokens are chosen, and what becomes of it, from submission to result.

One object throughout. The scheduler moves it (slot, blocks, positions), `push` takes each token and decides whether it
was the last, readers follow `events` from any thread or event loop.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np

from hybrid.core.errors import ContextExceeded, nearest
from hybrid.engine.blocks import Held
from hybrid.engine.loading import check_guesses
from hybrid.engine.sampling import Constraint, Sampling
from hybrid.engine.stats import EngineReport, Finish, Stats, TokenLogprob
from hybrid.text.stops import StopFilter
from hybrid.text.tokenizer import StreamDecoder, Tokenizer

Capture = Literal["logits", "hidden"]
"""What a request reads back of every row in place of choosing tokens: logits, or the residual stream after each layer."""


@dataclass(frozen=True, slots=True)
class Options(Sampling):
    """What a request asks for beside its prompt: the sampling parameters, and these. Checked when made: ValueError names
    the option and what it may be.

    max_tokens: tokens to generate at most. stop: strings before which the text ends. ignore_eos: go on after an
    end-of-text token. priority: greater ones are begun first. deadline: seconds from submission after which it ends.
    constraint: says before each token which may come (hybrid.engine.sampling.Constraint). speculate: guesses of a pass;
    None: as the model was loaded.
    """

    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    priority: int = 0
    deadline: float | None = None
    constraint: Constraint | None = None
    speculate: int | None = None

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        if not isinstance(self.max_tokens, (int, np.integer)) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be a positive integer, not {self.max_tokens!r}")
        if not isinstance(self.priority, Integral):
            raise ValueError(f"priority must be an integer (0; greater ones go first), not {self.priority!r}")
        if self.deadline is not None and not (isinstance(self.deadline, Real) and 0 < self.deadline < math.inf):
            raise ValueError(f"deadline must be seconds from now, above 0, or None, not {self.deadline!r}")
        if self.speculate is not None:
            check_guesses(self.speculate)
        verbs = (getattr(self.constraint, name, None) for name in ("mask", "accept", "copy"))
        if self.constraint is not None and not all(map(callable, verbs)):
            raise ValueError(
                "constraint must have mask(), accept(token) and copy() (see hybrid.engine.sampling), not be "
                f"{self.constraint!r}"
            )

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Options:
        """From values by option name. TypeError for a name that is no option."""
        known = [f.name for f in fields(cls)]
        for name in named:
            if name not in known:
                raise TypeError(f"unknown option {name!r}{nearest(name, known)}")
        return cls(**named)


class Event(NamedTuple):
    """Text that can be passed on, often "" (an unfinished character, the beginning of a stop string), and the tokens since
    the event before."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `ids`, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. cached: those of the prompt that were not computed, because the KV cache held them;
    completion: generated, the end-of-text token included; drafted: guesses that passes verified, and of these the
    accepted ones."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the host's clock since the request was submitted; None for what never came."""

    queued: float | None
    """Until its first pass was prepared."""
    first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that has ended without an error."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage
    timings: Timings


class Wakeups:
    """Event loops that have readers with news: each loop is woken once for all of them."""

    def __init__(self) -> None:
        self._marks: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, mark: asyncio.Event) -> None:
        self._marks.setdefault(loop, []).append(mark)

    def send(self) -> None:
        while self._marks:
            loop, marks = self._marks.popitem()
            try:
                loop.call_soon_threadsafe(_set_all, marks)
            except RuntimeError:  # that loop is closed, its readers are gone
                continue


def _set_all(marks: list[asyncio.Event]) -> None:
    for mark in marks:
        mark.set()


class Request:
    """prompt: token ids, at least one. tokenizer: makes text and ends at its end-of-text tokens (None: no text, `ends`
    end it). capture: read back every row instead of generating; `captured` gets the rows of each pass, and nothing more
    runs until it is empty again. rows: most rows of it in a pass (0: the pass's). start: positions that count as
    computed, whatever the cache holds there; for measuring. deadline: on the scheduler's clock. ahead: whether a row may
    run before its token is known on the host. content: ids of the prompt that name no token but a row of the plan's
    `rows` -> a 64-bit number for what it holds, by which the prefix cache finds it. spans: (begin, end) of positions of
    the prompt that see one another whole, in order; the schedule's attention takes `sees` for that."""

    __slots__ = (
        "_changed",
        "_marks",
        "_sleeping",
        "_stops",
        "_text",
        "accepted",
        "ahead",
        "arrived",
        "begun",
        "cached",
        "cancelled",
        "capture",
        "captured",
        "content",
        "deadline",
        "delivered",
        "drafted",
        "drafts",
        "ended",
        "ends",
        "entered",
        "error",
        "events",
        "finish",
        "first",
        "found",
        "held",
        "id",
        "ids",
        "last",
        "limit",
        "logprobs",
        "n_prompt",
        "number",
        "options",
        "order",
        "overtaken",
        "passes",
        "pending",
        "position",
        "preemptions",
        "private",
        "reached",
        "rollback",
        "rows",
        "slot",
        "spans",
        "start",
        "steady",
        "stop",
        "until",
        "verified",
        "wake",
        "widest",
    )

    def __init__(
        self,
        id: Any,
        prompt: Sequence[int],
        options: Options | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        ends: Iterable[int] = (),
        capture: Capture | None = None,
        rows: int = 0,
        start: int = 0,
        deadline: float | None = None,
        ahead: bool | None = None,
        content: Mapping[int, int] | None = None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        if not len(prompt):
            raise ValueError("the prompt is empty: it needs at least one token")
        if not 0 <= start < len(prompt):
            raise ValueError(f"start must be 0..{len(prompt) - 1}, fewer than the prompt's tokens, not {start}")
        edges = [0, *(edge for span in spans for edge in span), len(prompt)]
        if edges != sorted(edges) or any(a == b for a, b in spans):
            raise ValueError(f"spans must be parts of the prompt of {len(prompt)} tokens, in order, not {list(spans)}")
        self.content, self.spans = dict(content or {}), tuple(spans)
        self.widest = max((b - a for a, b in spans), default=1)
        """Rows of one pass that it needs at least."""
        options = options or Options()
        self.id, self.options, self.capture, self.rows, self.start = id, options, capture, rows, start
        self.ids: list[int] = list(prompt)
        """The prompt and the tokens that are known."""
        self.n_prompt = len(self.ids)
        self.limit = 0 if capture else int(options.max_tokens)
        self.ends = frozenset(ends)
        if tokenizer is not None and not options.ignore_eos:
            self.ends |= tokenizer.eos_ids
        self.deadline = deadline
        self.ahead = (options.constraint is None) if ahead is None else ahead
        self._text = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stops = StopFilter([options.stop] if isinstance(options.stop, str) else options.stop or ())

        self.finish: Finish | None = None
        """Why it ended; None while it has not."""
        self.error: BaseException | None = None
        self.events: list[Event] = []
        self.captured: list[np.ndarray] = []
        self.delivered = 0
        """Rows that were captured so far."""
        self.logprobs: list[TokenLogprob] = []
        self.cached = 0
        """Tokens of the prompt that were not computed for it, because the cache held them."""
        self.drafted = self.accepted = self.verified = self.passes = 0
        """Guesses that were verified, those of them that were right, passes with guesses, passes that chose tokens."""
        self.arrived = time.perf_counter()
        self.begun: float | None = None
        self.first: float | None = None
        self.ended: float | None = None

        # The scheduler's own:
        self.slot: int | None = None
        """While it runs."""
        self.held: Held | None = None
        """Its blocks, from `Scheduler.add` on."""
        self.last = 0
        """Length of `ids` at which it ends."""
        self.position = 0
        """Of its next row. Rows up to it have been scheduled."""
        self.until = 0
        """Rows before this position have their blocks."""
        self.stop = 0
        """The same, or where its last row is, whichever comes first."""
        self.steady = False
        """Whether it decodes, and each row may run before its token is known."""
        self.found = 0
        """Up to here its blocks came from the cache."""
        self.reached = 0
        """The furthest position of any row so far."""
        self.pending = 0
        """Tokens that passes in flight choose."""
        self.drafts: tuple[int, ...] = ()
        """Guesses that its next row verifies."""
        self.rollback = 0
        """Positions by which it may be taken back; their windows are kept."""
        self.private = bool(capture or start)
        """Whether its blocks are neither looked up nor found by others."""
        self.entered = False
        """Whether it has ever had a slot."""
        self.preemptions = self.number = self.overtaken = 0
        self.order: tuple[int, int, int] = (1, 0, 0)
        """Less goes first: (0 if it was overtaken often enough, -priority, number of its arrival)."""

        # Readers:
        self.cancelled = False
        """Somebody wants it to end; seen between two passes."""
        self.wake: Callable[[], object] = lambda: None
        """Tells the engine loop that `cancelled` was set, or `captured` emptied."""
        self._changed = threading.Condition()
        self._sleeping = 0  # threads that wait
        self._marks: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    # --- tokens ------------------------------------------------------------------------------------------------------

    @property
    def rest(self) -> int:
        """Rows that are left to schedule: 1 where it decodes, more within its prompt."""
        return len(self.ids) + self.pending - self.position

    def together(self, position: int) -> int:
        """The end of the rows that run in one pass with the row at `position`."""
        return next((b for a, b in self.spans if a <= position < b), position + 1)

    def uncut(self, n: int, most: int) -> int:
        """Rows of the next pass, n or fewer, that cut no span; or the whole of the next span, if that is at most `most`."""
        for a, b in self.spans:
            if a < self.position + n < b:
                return a - self.position if a > self.position else b - self.position if b - self.position <= most else 0
        return n

    @property
    def decodes(self) -> bool:
        """Whether it runs and its next row is that of its last token, known or not yet, and another may come."""
        return self.slot is not None and self.rest == 1 and self.position < self.last - 1 and not self.capture

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.n_prompt]

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]

    def push(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Take the next token: an event, and `end` where it was the last."""
        if self.first is None:
            self.first = time.perf_counter()
        self.ids.append(token)
        text = ""
        if self._text is not None and token not in self.ends:
            text = self._stops.push(self._text.push(token))
        if logprob is None:
            self.events.append(Event(text, (token,)))
        else:
            self.logprobs.append(logprob)
            self.events.append(Event(text, (token,), (logprob,)))
        if len(self.ids) >= self.last or token in self.ends or self._stops.stopped is not None:
            self.end()

    def end(self, reason: Finish | None = None, error: BaseException | None = None) -> bool:
        """End it, if it has not ended: for a reason, with an error, or by its tokens. The only place that sets `finish`."""
        if self.finish is not None:
            return False
        if self._text is not None:  # a stop string may show at the very end, beside one that began earlier
            rest = self._stops.push(self._text.flush()) + self._stops.flush()
            if rest:
                self.events.append(Event(rest))
        if error is not None:
            self.finish = "error"
        elif self._stops.stopped is not None:
            self.finish = "stop"
        elif reason is not None:
            self.finish = reason
        elif self.ids[-1] in self.ends:
            self.finish = "eos"
        else:
            self.finish = "length" if len(self.ids) >= self.n_prompt + self.limit else "context"
        self.error, self.ended = error, time.perf_counter()
        return True

    # --- results -----------------------------------------------------------------------------------------------------

    @property
    def completion(self) -> Completion:
        """Of a request that has ended without an error."""
        assert self.finish is not None and self.error is None and self.ended is not None
        out = self.generated
        usage = Usage(self.n_prompt, self.cached, len(out), self.drafted, self.accepted)
        queued, first = (None if t is None else t - self.arrived for t in (self.begun, self.first))
        logprobs = tuple(self.logprobs) if self.options.logprobs else None
        text = "".join([e.text for e in self.events])
        return Completion(
            text, tuple(out), self.finish, logprobs, usage, Timings(queued, first, self.ended - self.arrived)
        )

    def stats(self, report: EngineReport) -> Stats:
        """What it has done, on the engine that `report` describes; of a request that still runs, as if it was cancelled
        now."""
        began = self.arrived if self.begun is None else self.begun
        ended = time.perf_counter() if self.ended is None else self.ended
        return Stats(
            prompt_tokens=self.n_prompt - self.cached,
            cached_tokens=self.cached,
            tokens=len(self.ids) - self.n_prompt,
            ids=tuple(self.generated),
            logprobs=tuple(self.logprobs) if self.options.logprobs else None,
            finish=self.finish or "cancelled",
            first_token_seconds=0.0 if self.first is None else self.first - began,
            total_seconds=ended - began,
            **report.fields(),
        )

    # --- readers -----------------------------------------------------------------------------------------------------

    def news(self, at: int) -> tuple[list[Event], bool]:
        """Events from the `at`-th on, and whether no more will come."""
        ended = self.finish is not None  # before the events: an end comes after all of them
        return self.events[at:], ended

    def watch(self, mark: asyncio.Event) -> None:
        """Set a mark of the running event loop at whatever happens from now on."""
        with self._changed:
            self._marks.add((asyncio.get_running_loop(), mark))

    def unwatch(self, mark: asyncio.Event) -> None:
        with self._changed:
            self._marks = {m for m in self._marks if m[1] is not mark}

    def wait(self, at: int, timeout: float) -> None:
        """Until there is an event after the `at`-th, or something captured, or it has ended; `timeout` seconds at most."""
        with self._changed:
            if self.finish is None and len(self.events) <= at and not self.captured:
                self._sleeping += 1
                try:
                    self._changed.wait(timeout)
                finally:
                    self._sleeping -= 1

    def notify(self, wakeups: Wakeups) -> None:
        """Wake the readers: threads now, event loops when `wakeups` are sent."""
        with self._changed:
            if self._sleeping:
                self._changed.notify_all()
            for mark in self._marks:
                wakeups.add(*mark)

    def cancel(self) -> None:
        """End it before its next pass."""
        self.cancelled = True
        self.wake()


def token_ids(ids: Sequence[int]) -> list[int]:
    """Token ids as Python's integers; ValueError for what is none, such as text."""
    found: list[Any] = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)) else [None]
    if not all(isinstance(i, (int, np.integer)) for i in found):
        raise ValueError("token ids must be integers: encode(text) makes them")
    return list(map(int, found))


def check_prompt(
    ids: Sequence[int], vocab: int, ctx: int, more: int = 1, content: Mapping[int, int] | None = None, rows: int = 0
) -> None:
    """ValueError for an empty prompt or an id that the embedding has no row for, and that is none of the `rows` after
    them that `content` names; ContextExceeded where it leaves no room for `more` tokens in the context of `ctx`."""
    if not len(ids):
        raise ValueError("the prompt is empty: it needs at least one token")
    bad = next(
        (i for i in ids if not 0 <= i < vocab and not (content and i in content and 0 <= i < vocab + rows)), None
    )
    if bad is not None:
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab}")
    if len(ids) + more > ctx:
        does = "leaves no room in" if more else "does not fit in"
        raise ContextExceeded(
            f"a prompt of {len(ids)} tokens {does} the context of {ctx}: shorten it or load the model with a larger ctx"
        )
