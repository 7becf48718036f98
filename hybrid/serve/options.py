"""Convert a request's fields to options of Model.submit."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from hybrid.serve.errors import bad_request
from hybrid.serve.settings import Settings
from hybrid.serve.wire import Sampled, SamplingFields

if TYPE_CHECKING:
    from hybrid.engine.sampling import Constraint
    from hybrid.model import Model


def shared(
    body: Sampled,
    model: Model,
    settings: Settings,
    seeds: Random,
    asked: int | None,
    top: int | None,
    default: int | None = None,
) -> dict[str, Any]:
    """Options that all choices of a request share. seeds: for requests without one. asked: tokens of an answer, within
    the server's limit; without it `default`, or to the end of the context. top: of top_logprobs, None without
    logprobs."""
    context = model.engine.cache.ctx
    most = settings.max_tokens or context
    wanted = asked if asked is not None else min(default or context, most)
    if wanted > most and settings.max_tokens:
        raise bad_request(f"this server generates at most {most} tokens, not {wanted}", "max_tokens", "invalid_value")
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for said in (model.checkpoint.generation, body):  # what the checkpoint recommends, and the request
        given = {name: getattr(said, name, None) for name in SamplingFields.model_fields}
        options |= {name: value for name, value in given.items() if value is not None}
    options["top_k"] = max(options["top_k"], 0)
    options["seed"] = seeds.getrandbits(63) if body.seed is None else body.seed % 2**64
    options["stop"] = body.stop or ()
    if options["top_p"] == 0:
        options |= {"top_p": 1.0, "temperature": 0.0}
    if body.logit_bias:
        options["logit_bias"] = _biases(body.logit_bias, model.hparams.vocab)
    if top is not None:
        options["logprobs"] = max(top, 1)
    return {**options, "max_tokens": min(wanted, context), "deadline": settings.total}


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
