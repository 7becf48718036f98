"""A scripted model for tests of the server alone: a real tokenizer, with texts, delays and failures from the test. It
has the attributes of hybrid.model.Model that the server uses, and the engine's own handles."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np

from conformance.support.paths import DEMO
from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import ContextExceeded, QueueFull
from hybrid.engine.handle import Handle
from hybrid.engine.request import Event, Options, Request, Wakeups
from hybrid.engine.sampling import Constraint, mask_without
from hybrid.engine.stats import Metrics, TokenLogprob, Total
from hybrid.text.tokenizer import StreamDecoder, Tokenizer


@dataclass
class Script:
    """Behaviour of each request. text: the text, token by token; ids: these tokens instead, also under a constraint,
    which must allow them; pause: seconds before each token; error: raised after `after` tokens; queue: most open
    requests."""

    text: str = "some text."
    ids: Sequence[int] | None = None
    pause: float = 0.0
    error: Callable[[], Exception] | None = None
    after: int = 0
    queue: int = 1000
    finish: str = "eos"
    submitted: list[dict[str, Any]] = field(default_factory=list)
    gate: threading.Event | None = None
    """If set, tokens wait for it."""


class ScriptedModel:
    def __init__(self, script: Script, ctx: int = 512) -> None:
        self.script, self.checkpoint = script, open_checkpoint(DEMO)
        self.device, self.closed, self._open = "scripted", False, 0
        self.engine = SimpleNamespace(
            cache=SimpleNamespace(ctx=ctx), runner=SimpleNamespace(precision={}), device=SimpleNamespace(backend="cpu")
        )
        self.hparams = self.checkpoint.hparams
        self.eos_ids = self.checkpoint.tokenizer.eos_ids
        self._lock = threading.Lock()

    def encode(self, text: str, bos: bool = True, parse_special: bool = False) -> list[int]:
        return self.checkpoint.tokenizer.encode(text, bos=bos, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        return self.checkpoint.tokenizer.decode(ids)

    def metrics(self) -> Metrics:
        return Metrics(
            running=self._open,
            blocks={"all": {"used": 1, "cached": 2, "free": 3}},
            finished={"eos": 1},
            work=lambda: {"decode": Total(3, 5, 0.25, 1e6, 2e9)},
        )

    def close(self) -> None:
        self.closed = True

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return self._open

    def submit(self, prompt: Sequence[int], **options: Any) -> Handle:
        if len(prompt) >= self.engine.cache.ctx:
            raise ContextExceeded(f"a prompt of {len(prompt)} tokens leaves no room")
        with self._lock:
            if self._open >= self.script.queue:
                raise QueueFull(self._open, 7.2)
            self._open += 1
        self.script.submitted.append({"prompt": list(prompt), **options})
        known = {name: value for name, value in options.items() if name in {f.name for f in fields(Options)}}
        request = Request(0, prompt, Options.of(known))
        threading.Thread(target=self._run, args=(request, list(prompt), options), daemon=True).start()
        return Handle(request)

    def _run(self, request: Request, prompt: list[int], options: dict[str, Any]) -> None:
        script = self.script
        constraint = options.get("constraint")
        if script.ids is not None:
            ids = list(script.ids)
            if constraint is not None:
                list(islice(walk(constraint, self.checkpoint.tokenizer, 0, ids), len(ids)))
        elif constraint is None:
            ids = self.encode(script.text, bos=False)[: options["max_tokens"]]
        else:
            ids = list(islice(walk(constraint, self.checkpoint.tokenizer, options["seed"]), options["max_tokens"]))
        wakeups = Wakeups()
        text = StreamDecoder(self.checkpoint.tokenizer)
        error: Exception | None = None
        until = time.monotonic() + 60
        while (
            script.gate is not None
            and not script.gate.wait(0.01)
            and not request.cancelled
            and time.monotonic() < until
        ):
            pass

        def tell(event: Event) -> None:
            request.events.append(event)
            request.notify(wakeups)
            wakeups.send()

        request.begun, request.cached = request.arrived, 3
        for n, token in enumerate(ids):
            if script.error is not None and n == script.after:
                error = script.error()
                break
            if request.cancelled:
                break
            if script.pause:
                time.sleep(script.pause)
            request.ids.append(token)
            request.first = request.first or time.perf_counter()
            logprobs = (TokenLogprob(token, -0.5, ((token, -0.5), (5, -1.0))),) if options.get("logprobs") else None
            tell(Event(text.push(token), (token,), logprobs))
        tell(Event(text.flush()))
        with self._lock:
            self._open -= 1
        finish: Any = "cancelled" if request.cancelled else script.finish
        if constraint is not None and script.ids is None and len(ids) == options["max_tokens"]:
            finish = "length"
        request.end(finish, error)
        request.notify(wakeups)
        wakeups.send()


CLOSING = ('"', "]", "}", "0", "<tool_call|>", '<|"|>', "<end_function_call>", "<escape>", "<channel|>")
"""Pieces that bring structured text nearer to its end."""


def walk(constraint: Constraint, tokenizer: Tokenizer, seed: int, begin: Sequence[int] = ()) -> Iterator[int]:
    """Token ids that a constraint allows, drawn at random with a bias towards the end, until an allowed end of text is
    drawn. `begin`: the first ids. AssertionError where the constraint does not allow one of these."""
    draw = random.Random(seed)
    nearer = [i for c in CLOSING if (i := tokenizer.token_id(c)) is not None]
    ends = np.array(sorted(tokenizer.eos_ids))
    for n in range(1 << 20):
        mask = constraint.mask()
        mask = mask_without((), tokenizer.n_tokens, tokenizer.n_rows) if mask is None else mask
        allowed = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little").astype(bool)
        closing = [i for i in nearer if allowed[i]]
        may_end = allowed[ends].any()
        allowed[ends] = False
        if n < len(begin):
            token = begin[n]
            assert allowed[token], f"{tokenizer.decode([token])!r} is not allowed after {tokenizer.decode(begin[:n])!r}"
        elif may_end and (draw.random() < 0.4 or not allowed.any()):
            return
        elif closing and draw.random() < 0.4:
            token = draw.choice(closing)
        else:
            token = int(draw.choice(np.flatnonzero(allowed)))
        constraint.accept(token)
        yield token
