"""One request: a prompt, how its tokens are chosen, when it ends, its text so far and its statistics.

It is host state of one sequence and knows neither device nor slot, nor whether other requests run beside it:

    ids = request.begin(cached)            the part of the prompt that the KV cache does not hold: prefill these
    while request.finish is None:
        piece = request.push(token)        the next token's text, as far as it can be passed on
    request.stats(report)

`cancel` ends it at any time. Whoever runs it (Model, one at a time) reserves a slot and the cache, and frees them at
the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hybrid.core.errors import ContextExceeded
from hybrid.engine.chunks import check_ids
from hybrid.engine.handle import TokenLogprob
from hybrid.engine.sampling import Sampling
from hybrid.engine.stats import EngineReport, Finish, Stats
from hybrid.text.stops import StopFilter
from hybrid.text.tokenizer import StreamDecoder, Tokenizer


class Request:
    """prompt: token ids, at least one. vocab: rows of the model's embedding. ctx: positions that its sequence may have.

    Ends after max_tokens tokens (finish `length`), at an end-of-text token unless ignore_eos (`eos`), before one of the
    strings `stop` (`stop`), or where the context is full (`context`). ValueError for what cannot be; ContextExceeded
    for a prompt that leaves no room for a token.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        vocab: int,
        ctx: int,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> None:
        if not isinstance(max_tokens, (int, np.integer)) or max_tokens < 1:
            raise ValueError(f"max_tokens must be a positive integer, not {max_tokens!r}")
        check_ids(prompt, vocab)
        if len(prompt) >= ctx:
            raise ContextExceeded(
                f"a prompt of {len(prompt)} tokens leaves no room in the context of {ctx}: "
                "shorten it or load the model with a larger ctx"
            )
        self.prompt = tuple(prompt)
        self.sampling = sampling or Sampling()
        self.max_tokens = int(max_tokens)
        self.limit = min(self.max_tokens, ctx - len(self.prompt))
        """Tokens that are generated at most: max_tokens, or fewer where the context ends."""
        self.out: list[int] = []
        """Ids generated so far, the end-of-text token included."""
        self.finish: Finish | None = None
        """Why it ended; None while it has not."""
        self.cached = 0
        """Tokens of the prompt that the KV cache held when it began."""
        self.logprobs: tuple[TokenLogprob, ...] | None = None
        """Of each generated token, where they were asked for; whoever runs it sets them."""
        self.end_ids = frozenset[int]() if ignore_eos else tokenizer.eos_ids
        self._text = StreamDecoder(tokenizer)
        self._stops = StopFilter([stop] if isinstance(stop, str) else stop or ())
        self._began = self._first = self._ended = 0.0  # time.perf_counter()

    @property
    def ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.prompt, *self.out]

    def begin(self, cached: int = 0) -> list[int]:
        """Start the clock; returns the ids to prefill, the prompt's after the first `cached`, which the KV cache holds
        already (fewer than all of them: the last one's logits choose the first token)."""
        if not 0 <= cached < len(self.prompt):
            raise ValueError(f"cached must be 0..{len(self.prompt) - 1}, fewer than the prompt's tokens, not {cached}")
        self.cached = cached
        self._began = self._first = time.perf_counter()
        return list(self.prompt[cached:])

    def push(self, token: int) -> str:
        """Take the next token; returns the text that can be passed on now, often "" (an unfinished character, or the
        beginning of a stop string). Sets `finish` where the token ends the request: the text is then complete. Tokens
        that come after the end, of passes that were submitted ahead, are dropped."""
        if self.finish is not None:
            return ""
        if not self.out:
            self._first = time.perf_counter()
        self.out.append(token)
        if token in self.end_ids:
            self._end("eos")
            return self._rest()
        piece = self._stops.push(self._text.push(token))
        if self._stops.stopped is not None:
            self._end("stop")
        elif len(self.out) == self.limit:
            self._end("length" if len(self.out) == self.max_tokens else "context")
            piece += self._rest()
        return piece

    def cancel(self, finish: Finish = "cancelled") -> str:
        """End it now, if it has not ended; returns text that was held back."""
        if self.finish is not None:
            return ""
        self._end(finish)
        return self._rest()

    def stats(self, report: EngineReport) -> Stats:
        """What it has done, on the engine that `report` describes; of a request that still runs, as if it was cancelled
        now."""
        ended = self._ended if self.finish is not None or not self._began else time.perf_counter()
        return Stats(
            prompt_tokens=len(self.prompt) - self.cached,
            cached_tokens=self.cached,
            tokens=len(self.out),
            ids=tuple(self.out),
            logprobs=self.logprobs,
            finish=self.finish or "cancelled",
            first_token_seconds=self._first - self._began,
            total_seconds=ended - self._began,
            **report.fields(),
        )

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        self._ended = time.perf_counter() if self._began else 0.0

    def _rest(self) -> str:
        """Text that was held back, at the end. A stop string may only show there: beside one that began earlier and did
        not end."""
        rest = self._stops.push(self._text.flush()) + self._stops.flush()
        if self._stops.stopped is not None:
            self.finish = "stop"
        return rest
