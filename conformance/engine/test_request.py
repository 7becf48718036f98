"""A request by itself: what tokens make of it, whoever runs it and whatever runs beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import ContextExceeded
from hybrid.core.places import DEMO
from hybrid.engine.request import Options, Request
from hybrid.engine.sampling import Sampling
from hybrid.engine.stats import EngineReport
from hybrid.model import Model
from hybrid.text.tokenizer import Tokenizer

REPORT = EngineReport("none", (), {"weights": ("f32",)}, 4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_checkpoint(DEMO) as checkpoint:
        return checkpoint.tokenizer


def request(tokenizer: Tokenizer, **options: Any) -> Request:
    return Request(**{"prompt": [2, 5, 6], "tokenizer": tokenizer, "vocab": tokenizer.n_tokens, "ctx": 64, **options})


@pytest.mark.parametrize(
    ("method", "others", "without"),
    [
        (Model.submit, {"prompt"}, set()),
        (Model.generate, {"prompt", "session", "tokens_per_submit"}, {"priority", "deadline", "constraint"}),
    ],
)
def test_options_are_what_a_model_takes(method: Callable[..., Any], others: set[str], without: set[str]) -> None:
    """By the same names, types and defaults, so that none is lost on the way or means something else here and there."""
    taken = {p.name: (p.annotation, p.default) for p in list(inspect.signature(method).parameters.values())[1:]}
    declared = {f.name: (f.type, f.default) for f in fields(Options)}
    assert {name: taken[name] for name in taken.keys() - others} == {
        name: declared[name] for name in declared.keys() - without
    }
    assert {f.name: (f.type, f.default) for f in fields(Sampling)}.items() <= declared.items()
    found = Options.among(
        {"top_k": 3, "constraint": None, "prompt": "text", "logprobs": 2, "seed": 5, "temperature": 0.5}
    )
    assert found == Options(top_k=3, logprobs=2, seed=5, temperature=0.5)
    assert found.sampling() == Sampling(top_k=3, logprobs=2, seed=5, temperature=0.5)


def run(one: Request, ids: list[int]) -> str:
    return "".join(one.push(token) for token in ids)


def test_requests_share_nothing(tokenizer: Tokenizer) -> None:
    """Tokens of two alternate: characters cut in the middle and stop strings half seen are each one's own."""
    texts = ("naïve café ☕ end", "über 中文 STOP here")
    ids = [tokenizer.encode(text, bos=False) for text in texts]
    a, b = (request(tokenizer, max_tokens=len(i), stop="STOP") for i in ids)
    out = ["", ""]
    for at in range(max(map(len, ids))):
        for n, one in enumerate((a, b)):
            if at < len(ids[n]) and one.finish is None:
                out[n] += one.push(ids[n][at])
    assert out[0] == tokenizer.decode(ids[0]) and a.finish == "length"
    assert out[1] == tokenizer.decode(ids[1]).partition("STOP")[0] and b.finish == "stop"


def test_a_stop_string_that_shows_at_the_end_is_why_it_ended(tokenizer: Tokenizer) -> None:
    """`car` could still have become `carpet`, so `ar` waited for it."""
    ids = tokenizer.encode("a car", bos=False)
    for end in ([], [min(tokenizer.eos_ids)]):
        one = request(tokenizer, max_tokens=len(ids) + len(end), stop=["carpet", "ar"])
        assert run(one, ids + end) == tokenizer.decode(ids).partition("ar")[0] and one.finish == "stop"


def test_why_it_ends_and_what_comes_afterwards(tokenizer: Tokenizer) -> None:
    eos, ids = min(tokenizer.eos_ids), tokenizer.encode("one two three four", bos=False)
    ended = request(tokenizer)
    assert run(ended, [*ids[:2], eos, *ids]) == tokenizer.decode(ids[:2]), "of passes ahead nothing is taken"
    assert (ended.finish, ended.out, ended.ids) == ("eos", [*ids[:2], eos], [2, 5, 6, *ids[:2], eos])
    ignored = request(tokenizer, ignore_eos=True, max_tokens=3)
    run(ignored, [ids[0], eos, ids[1]])
    assert ignored.finish == "length"
    full = request(tokenizer, ctx=5)
    assert full.limit == 2 and run(full, ids[:2]) == tokenizer.decode(ids[:2]) and full.finish == "context"
    dropped = request(tokenizer)
    run(dropped, ids[:1])
    dropped.cancel()
    assert dropped.push(ids[1]) == "" and dropped.finish == "cancelled" and dropped.out == ids[:1]
    ended.cancel()
    assert ended.finish == "eos", "what has ended cannot be cancelled"


def test_a_prompt_begins_after_what_the_cache_holds(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    one = request(tokenizer, max_tokens=2)
    assert one.begin(2) == [6]
    run(one, [7, 8])
    found = one.stats(REPORT)
    assert (found.prompt_tokens, found.cached_tokens, found.tokens, found.ids) == (1, 2, 2, (7, 8))
    assert (found.first_token_seconds, found.total_seconds, found.device) == (2.0, 5.0, "none")
    for cached in (-1, 3):
        with pytest.raises(ValueError, match=r"cached must be 0\.\.2, fewer than the prompt's tokens"):
            request(tokenizer).begin(cached)


def test_a_request_that_never_began_took_no_time(tokenizer: Tokenizer) -> None:
    one = request(tokenizer)
    one.cancel()
    found = one.stats(REPORT)
    assert (found.finish, found.tokens, found.first_token_seconds, found.total_seconds) == ("cancelled", 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be a positive integer, not 0"),
        ({"max_tokens": "9"}, "max_tokens must be a positive integer, not '9'"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [2, 1 << 30]}, "outside the vocabulary"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(options: dict[str, Any], said: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=said):
        request(tokenizer, **options)


def test_a_prompt_must_leave_room_for_a_token(tokenizer: Tokenizer) -> None:
    assert request(tokenizer, ctx=4, sampling=Sampling(temperature=1.0)).limit == 1
    with pytest.raises(ContextExceeded, match="a prompt of 3 tokens leaves no room in the context of 3"):
        request(tokenizer, ctx=3)
