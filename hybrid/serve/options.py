"""Convert a request's fields to options of Model.submit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint.base import Generation
from hybrid.serve.errors import bad_request
from hybrid.serve.settings import Settings
from hybrid.serve.wire import Sampled, SamplingFields

if TYPE_CHECKING:
    from hybrid.engine.sampling import Constraint


class Seeds:
    """Seeds for requests without one, drawn from the server's base seed for reproducibility."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def draw(self) -> int:
        return self._random.getrandbits(63)


def sampling(body: Sampled, advice: Generation, seeds: Seeds, vocab: int) -> dict[str, Any]:
    """Sampling options, without length, logprobs and constraint. advice: the checkpoint's recommended values."""
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for said in (advice, body):
        given = {name: getattr(said, name, None) for name in SamplingFields.model_fields}
        options |= {name: value for name, value in given.items() if value is not None}
    options["top_k"] = max(options["top_k"], 0)
    options["seed"] = seeds.draw() if body.seed is None else body.seed % 2**64
    options["stop"] = () if body.stop is None else body.stop
    if body.stop == "":
        options["stop"] = ()
    if options["top_p"] == 0:
        options |= {"top_p": 1.0, "temperature": 0.0}
    if body.logit_bias:
        options["logit_bias"] = _biases(body.logit_bias, vocab)
    return options


def lengths(asked: int | None, default: int | None, prompt: int, context: int, settings: Settings) -> dict[str, Any]:
    """The max_tokens option: the requested number within the server's limit, or `default` (None: to the end of the
    context). Checks the prompt against the server's limit; the engine checks it against the context."""
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
    """The options of one choice. Each choice has its own seed, the first the request's. A constraint may end the
    text."""
    own = {**options, "seed": (options["seed"] + index) % 2**64}
    return own if constraint is None else {**own, "constraint": constraint, "ignore_eos": False}


def _biases(biases: dict[str, float], vocab: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
            raise bad_request(f"logit_bias: keys are token ids from 0 to {vocab - 1}", "logit_bias", "invalid_value")
        out[int(key)] = value
    return out
