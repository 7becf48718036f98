"""A request between its readers and the scheduler."""

from __future__ import annotations

import time

from hybrid.engine.handle import Completion, Event, Pieces, Timings, TokenLogprob, Usage, Wakes
from hybrid.engine.handle import Stream as Readers
from hybrid.engine.options import Options
from hybrid.engine.pace import Counts
from hybrid.engine.request import Request
from hybrid.engine.sequence import Stream


class Job:
    """A request with its options, its readers, and what the scheduler knows of it. at_once: passes of one submit, where
    it runs alone."""

    def __init__(
        self, number: int, request: Request, options: Options, readers: Readers | Pieces, at_once: int = 1
    ) -> None:
        self.request, self.options, self.readers, self.at_once = request, options, readers, at_once
        self.pieces = readers if isinstance(readers, Pieces) else None
        """Where its reader runs its passes."""
        self.arrived = time.perf_counter()
        self.begun: float | None = None
        self.first: float | None = None
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.guessed = Counts()
        """Set at its end."""
        self.stream = Stream(
            number,
            request.prompt,
            request.limit,
            ends=request.end_ids,
            priority=options.priority,
            tag=self,
            deadline=None if options.deadline is None else self.arrived + options.deadline,
            ahead=options.constraint is None,
        )

    def push(self, token: int, logprob: TokenLogprob | None, wakes: Wakes) -> None:
        """The next token: an event, and the end where it is one."""
        if self.first is None:
            self.first = time.perf_counter()
        text = self.request.push(token)
        self.text.append(text)
        if self.pieces is not None:
            if text:
                self.pieces.texts.append(text)
            if logprob is not None:
                self.logprobs.append(logprob)
            return
        if logprob is None:
            self.readers.push(Event(text, (token,)), wakes)
            return
        self.logprobs.append(logprob)
        self.readers.push(Event(text, (token,), (logprob,)), wakes)

    def end(self, wakes: Wakes) -> None:
        """Tell the readers that it has ended, as the request says or, where that has not ended, the scheduler."""
        request, stream = self.request, self.stream
        if request.finish is None and (
            rest := request.cancel("deadline" if stream.finish == "deadline" else "cancelled")
        ):
            self.text.append(rest)
            self.readers.push(Event(rest), wakes)
        assert request.finish is not None
        usage = Usage(len(request.prompt), stream.cached, len(request.out), self.guessed.drafted, self.guessed.accepted)
        times = [None if t is None else t - self.arrived for t in (self.begun, self.first)]
        timings = Timings(times[0], times[1], time.perf_counter() - self.arrived)
        logprobs = tuple(self.logprobs) if self.options.logprobs else None
        done = Completion("".join(self.text), tuple(request.out), request.finish, logprobs, usage, timings)
        self.readers.end(done, None, wakes)
