"""What a request asks for, as the options of Model.submit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint.base import Generation
from hybrid.serve.errors import bad_request
from hybrid.serve.settings import Settings
from hybrid.serve.wire import Sampled

if TYPE_CHECKING:
    from hybrid.engine.sampling import Constraint


class Seeds:
    """Seeds of requests that name none, from the server's own, so that a server can be run again with the same ones."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def draw(self) -> int:
        return self._random.getrandbits(63)


def sampling(body: Sampled, advice: Generation, seeds: Seeds, vocab: int) -> dict[str, Any]:
    """Options but for those of length, logprobs and constraint. `advice`: what the checkpoint recommends."""
    top_k = advice.top_k if body.top_k is None else body.top_k
    options: dict[str, Any] = {
        "temperature": _first(body.temperature, advice.temperature, 1.0),
        "top_p": _first(body.top_p, advice.top_p, 1.0),
        "top_k": max(top_k or 0, 0),
        "min_p": body.min_p or 0.0,
        "seed": seeds.draw() if body.seed is None else body.seed % 2**64,
        "stop": () if body.stop is None else body.stop,
        "ignore_eos": bool(body.ignore_eos),
        "priority": body.priority or 0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "repetition_penalty": _first(body.repetition_penalty, 1.0),
    }
    if body.stop == "":
        options["stop"] = ()
    if options["top_p"] == 0:
        options |= {"top_p": 1.0, "temperature": 0.0}
    if body.logit_bias:
        options["logit_bias"] = _biases(body.logit_bias, vocab)
    return options


def lengths(asked: int | None, default: int | None, prompt: int, context: int, settings: Settings) -> dict[str, Any]:
    """max_tokens: what was asked for, within what the server allows; `default` where nothing was (None: to the
    context's end). The prompt must be within the server's own limit; whether it fits into the context is the engine's
    to say."""
    if settings.max_prompt and prompt > settings.max_prompt:
        raise bad_request(
            f"the prompt has {prompt} tokens, and this server takes {settings.max_prompt}: shorten it",
            code="context_length_exceeded",
        )
    most = settings.max_tokens or context
    wanted = asked if asked is not None else min(default or context, most)
    if wanted > most and settings.max_tokens:
        raise bad_request(f"this server generates at most {most} tokens, not {wanted}", "max_tokens", "invalid_value")
    return {"max_tokens": min(wanted, context), "deadline": settings.total}


def choice(options: dict[str, Any], index: int, constraint: Constraint | None = None) -> dict[str, Any]:
    """The options of a request's choice: each has a seed of its own, the first the request's. What a constraint ends
    has ended."""
    own = {**options, "seed": (options["seed"] + index) % 2**64}
    return own if constraint is None else {**own, "constraint": constraint, "ignore_eos": False}


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _biases(biases: dict[str, float], vocab: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
            raise bad_request(f"logit_bias: keys are token ids from 0 to {vocab - 1}", "logit_bias", "invalid_value")
        out[int(key)] = value
    return out
