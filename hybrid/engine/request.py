"""A request, one object from submission to result.

The scheduler sets its slot, blocks and positions. `push` appends a token, `end` sets `finish`. Readers wait for `events`
from any thread or event loop.
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
from hybrid.engine.loading import check_drafts
from hybrid.engine.sampling import Constraint, Sampling
from hybrid.engine.stats import EngineReport, Finish, Stats, TokenLogprob
from hybrid.text.marks import Channel
from hybrid.text.stops import StopFilter
from hybrid.text.tokenizer import StreamDecoder, Tokenizer

Capture = Literal["logits", "decode", "hidden"]
"""What a request reads back of every row instead of sampling: logits, those of decode passes, or the residual stream after
each layer."""


class Captured(NamedTuple):
    """Result rows of a capturing pass."""

    rows: np.ndarray
    """Logits float32 [rows, vocab], or hidden states float32 [layers + 1, rows, width]."""
    experts: tuple[np.ndarray, ...] = ()
    """Beside logits of a mixture: the experts of each of its layers, i32 [rows, experts_used]."""


@dataclass(frozen=True, slots=True)
class Options(Sampling):
    """Options of a request: sampling parameters, and these. ValueError names the option and its range.

    max_tokens: most tokens to generate. stop: strings before which the text ends. thought: ids of the tokens that begin
    and end a thought, in which stop strings do not count. ignore_eos: continue after an end-of-text token. priority:
    greater first. deadline: seconds from submission. constraint: masks the next token
    (hybrid.engine.sampling.Constraint). speculate: drafts per pass (0: none, not of the constraint either); None: as the
    model was loaded.
    """

    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    thought: tuple[int, int] | None = None
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
            check_drafts(self.speculate)
        verbs = (getattr(self.constraint, name, None) for name in ("mask", "accept", "copy"))
        if self.constraint is not None and not all(map(callable, verbs)):
            raise ValueError(
                "constraint must have mask(), accept(token) and copy() (see hybrid.engine.sampling), not be "
                f"{self.constraint!r}"
            )

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Options:
        """Options by name. TypeError for an unknown name."""
        known = [f.name for f in fields(cls)]
        for name in named:
            if name not in known:
                raise TypeError(f"unknown option {name!r}{nearest(name, known)}")
        return cls(**named)


class Event(NamedTuple):
    """New text, "" while a character or a stop string is incomplete, and the tokens since the event before."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per id, if requested."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. cached: prompt tokens found in the prefix cache. completion: generated, end-of-text included. drafted:
    verified drafts, `accepted` of them right."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since submission; None where the event never happened."""

    queued: float | None
    """Until it got a slot."""
    first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of a request without an error."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage
    timings: Timings
    stopped: str | None = None
    """The stop string that ended it."""


class Wakeups:
    """Collects wake-ups of asyncio readers, one call per event loop."""

    def __init__(self) -> None:
        self._marks: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, mark: asyncio.Event) -> None:
        self._marks.setdefault(loop, []).append(mark)

    def send(self) -> None:
        while self._marks:
            loop, marks = self._marks.popitem()
            try:
                loop.call_soon_threadsafe(_set_all, marks)
            except RuntimeError:  # the loop is closed
                continue


def _set_all(marks: list[asyncio.Event]) -> None:
    for mark in marks:
        mark.set()


class Request:
    """prompt: token ids, at least one. tokenizer: decodes text and gives the end-of-text ids (None: no text, `ends` are the
    ids). capture: read back every row instead of generating; `captured` gets the rows of each pass, and no more rows run
    until it is empty. rows: most rows per pass (0: no limit). start: positions taken as computed, for benchmarks.
    deadline: on the scheduler's clock. ahead: whether a row may run before its token is known on the host. content: ids of
    the prompt that name rows of the tensor `rows` -> a 64-bit key of their content, for the prefix cache. spans: (begin,
    end) of prompt positions with bidirectional attention, in order."""

    __slots__ = (
        "_changed",
        "_channel",
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
        """Length of the longest span: rows that must share a pass."""
        options = options or Options()
        self.id, self.options, self.capture, self.rows, self.start = id, options, capture, rows, start
        self.ids: list[int] = list(prompt)
        """The prompt and the known tokens."""
        self.n_prompt = len(self.ids)
        self.limit = 0 if capture else int(options.max_tokens)
        self.ends = frozenset(ends)
        if tokenizer is not None and not options.ignore_eos:
            self.ends |= tokenizer.eos_ids
        self.deadline = deadline
        self.ahead = (options.constraint is None) if ahead is None else ahead
        self._text = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stops = StopFilter([options.stop] if isinstance(options.stop, str) else options.stop or ())
        self._channel = None if options.thought is None else Channel.after(options.thought, prompt)

        self.finish: Finish | None = None
        """Why it ended; None while it is open."""
        self.error: BaseException | None = None
        self.events: list[Event] = []
        self.captured: list[Captured] = []
        self.delivered = 0
        """Captured rows so far."""
        self.logprobs: list[TokenLogprob] = []
        self.cached = 0
        """Prompt tokens found in the prefix cache."""
        self.drafted = self.accepted = self.verified = self.passes = 0
        """Verified drafts, accepted drafts, passes with drafts, passes with a token."""
        self.arrived = time.perf_counter()
        self.begun: float | None = None
        self.first: float | None = None
        self.ended: float | None = None

        # Of the scheduler:
        self.slot: int | None = None
        """While it runs."""
        self.held: Held | None = None
        """Its blocks; set by `Scheduler.add`."""
        self.last = 0
        """Maximal length of `ids`."""
        self.position = 0
        """Position of its next row."""
        self.until = 0
        """It has blocks for positions below."""
        self.stop = 0
        """min(until, position of its last row)."""
        self.steady = False
        """Whether it decodes ahead of the host."""
        self.found = 0
        """End of its cached prefix."""
        self.reached = 0
        """The greatest position so far."""
        self.pending = 0
        """Tokens that passes in flight sample."""
        self.drafts: tuple[int, ...] = ()
        """Drafts for its next row."""
        self.rollback = 0
        """Positions by which `position` may go back; windowed layers keep blocks for them."""
        self.private = bool(capture or start)
        """Whether it stays out of the prefix cache."""
        self.entered = False
        """Whether it has had a slot."""
        self.preemptions = self.number = self.overtaken = 0
        self.order: tuple[int, int, int] = (1, 0, 0)
        """Sort key: (0 if overtaken too often else 1, -priority, arrival)."""

        # Of readers:
        self.cancelled = False
        """Cancellation requested; honoured between passes."""
        self.wake: Callable[[], object] = lambda: None
        """Notifies the engine loop of `cancelled`, or of emptied `captured`."""
        self._changed = threading.Condition()
        self._sleeping = 0  # threads that wait
        self._marks: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    # --- tokens ------------------------------------------------------------------------------------------------------

    @property
    def rest(self) -> int:
        """Rows left to schedule: 1 in decode, more within the prompt."""
        return len(self.ids) + self.pending - self.position

    def together(self, position: int) -> int:
        """End of the span that contains `position`, else position + 1."""
        return next((b for a, b in self.spans if a <= position < b), position + 1)

    def uncut(self, n: int, most: int) -> int:
        """At most n next rows, ended where no span is cut; or the whole span at `position` if `most` allows it, else 0."""
        for a, b in self.spans:
            if a < self.position + n < b:
                return a - self.position if a > self.position else b - self.position if b - self.position <= most else 0
        return n

    @property
    def decodes(self) -> bool:
        """Whether it is in decode and not at its end."""
        return self.slot is not None and self.rest == 1 and self.position < self.last - 1 and not self.capture

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.n_prompt]

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]

    def push(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Append a token and its event; `end` at the last one."""
        if self.first is None:
            self.first = time.perf_counter()
        self.ids.append(token)
        text = ""
        if self._text is not None and token not in self.ends:
            text = self._released(self._text.push(token), token)
        if logprob is None:
            self.events.append(Event(text, (token,)))
        else:
            self.logprobs.append(logprob)
            self.events.append(Event(text, (token,), (logprob,)))
        if len(self.ids) >= self.last or token in self.ends or self._stops.stopped is not None:
            self.end()

    def _released(self, text: str, token: int) -> str:
        """What can be shown after a token and its text: a thought whole, else what no stop string can begin with."""
        if self._channel is None or not self._channel.take(token):
            return self._stops.push(text)
        held = self._stops.flush()
        return held if self._stops.stopped is not None else held + text

    def end(self, reason: Finish | None = None, error: BaseException | None = None) -> bool:
        """Set `finish`: to a reason, an error, or what its tokens say. The only place that does. False: it had ended, or its
        tokens do not end it."""
        if self.finish is not None:
            return False
        if self._text is not None:  # a held-back stop string may complete here
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
        """The result of an ended request without an error."""
        assert self.finish is not None and self.error is None and self.ended is not None
        out = self.generated
        usage = Usage(self.n_prompt, self.cached, len(out), self.drafted, self.accepted)
        queued, first = (None if t is None else t - self.arrived for t in (self.begun, self.first))
        logprobs = tuple(self.logprobs) if self.options.logprobs else None
        text = "".join([e.text for e in self.events])
        timings = Timings(queued, first, self.ended - self.arrived)
        return Completion(text, tuple(out), self.finish, logprobs, usage, timings, self._stops.stopped)

    def stats(self, report: EngineReport) -> Stats:
        """Its statistics; of an open request, as if cancelled now. report: the engine's."""
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
        """Events from the `at`-th on, and whether they are all."""
        ended = self.finish is not None  # read before the events: `finish` is set after the last one
        return self.events[at:], ended

    def watch(self, mark: asyncio.Event) -> None:
        """Set `mark` on every later event, in the running event loop."""
        with self._changed:
            self._marks.add((asyncio.get_running_loop(), mark))

    def unwatch(self, mark: asyncio.Event) -> None:
        with self._changed:
            self._marks = {m for m in self._marks if m[1] is not mark}

    def wait(self, at: int, timeout: float) -> None:
        """Wait for an event after the `at`-th, captured rows, or the end; at most `timeout` seconds."""
        with self._changed:
            if self.finish is None and len(self.events) <= at and not self.captured:
                self._sleeping += 1
                try:
                    self._changed.wait(timeout)
                finally:
                    self._sleeping -= 1

    def notify(self, wakeups: Wakeups) -> None:
        """Wake reading threads now, event loops with `wakeups`."""
        with self._changed:
            if self._sleeping:
                self._changed.notify_all()
            for mark in self._marks:
                wakeups.add(*mark)

    def cancel(self) -> None:
        """Request its end before its next pass."""
        self.cancelled = True
        self.wake()


def token_ids(ids: Sequence[int]) -> list[int]:
    """Token ids as Python integers. ValueError for other types."""
    found: list[Any] = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)) else [None]
    if not all(isinstance(i, (int, np.integer)) for i in found):
        raise ValueError("token ids must be integers: encode(text) makes them")
    return list(map(int, found))


def check_prompt(
    ids: Sequence[int], vocab: int, ctx: int, more: int = 1, content: Mapping[int, int] | None = None, rows: int = 0
) -> None:
    """ValueError for an empty prompt or an id beyond the vocabulary, except ids of `content` within the `rows` after it.
    ContextExceeded where the context of `ctx` leaves no space for `more` tokens."""
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
