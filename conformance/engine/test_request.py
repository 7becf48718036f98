"""A single request: how it turns tokens into text, independent of its runner and of other requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import ContextExceeded
from hybrid.core.places import DEMO
from hybrid.engine.request import Options, Request, check_prompt
from hybrid.engine.sampling import Sampling
from hybrid.engine.stats import EngineReport
from hybrid.text.tokenizer import Tokenizer

REPORT = EngineReport("none", (), {"weights": ("f32",)}, 4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_checkpoint(DEMO) as checkpoint:
        return checkpoint.tokenizer


def request(tokenizer: Tokenizer, ctx: int = 64, prompt: Sequence[int] = (2, 5, 6), **options: Any) -> Request:
    check_prompt(prompt, tokenizer.n_tokens, ctx)
    made = Request(1, prompt, Options(**options), tokenizer=tokenizer)
    made.last = min(made.n_prompt + made.limit, ctx)  # as the scheduler stores it
    return made


def test_options_are_those_of_the_sampler_and_its_own() -> None:
    """A sampling parameter is declared once."""
    declared = {f.name: (f.type, f.default) for f in fields(Options)}
    assert {f.name: (f.type, f.default) for f in fields(Sampling)}.items() <= declared.items()
    assert Options.of({"top_k": 3, "logprobs": 2}) == Options(top_k=3, logprobs=2)
    with pytest.raises(TypeError, match="unknown option 'top_kk'; did you mean 'top_k'"):
        Options.of({"top_kk": 3})


def run(one: Request, ids: Sequence[int]) -> str:
    """The text of these tokens."""
    before = len(one.events)
    for token in ids:
        if one.finish is None:
            one.push(token)
    return "".join(e.text for e in one.events[before:])


def test_requests_share_nothing(tokenizer: Tokenizer) -> None:
    """Tokens of two requests alternate: split characters and partial stop strings stay with their own request."""
    texts = ("naïve café ☕ end", "über 中文 STOP here")
    ids = [tokenizer.encode(text, bos=False) for text in texts]
    a, b = (request(tokenizer, max_tokens=len(i), stop="STOP") for i in ids)
    out = ["", ""]
    for at in range(max(map(len, ids))):
        for n, one in enumerate((a, b)):
            if at < len(ids[n]) and one.finish is None:
                out[n] += run(one, ids[n][at : at + 1])
    assert out[0] == tokenizer.decode(ids[0]) and a.finish == "length"
    assert out[1] == tokenizer.decode(ids[1]).partition("STOP")[0] and b.finish == "stop"


def test_a_stop_string_that_shows_at_the_end_is_why_it_ended(tokenizer: Tokenizer) -> None:
    """`car` could still have become `carpet`, so `ar` was held back."""
    ids = tokenizer.encode("a car", bos=False)
    for end in ([], [min(tokenizer.eos_ids)]):
        one = request(tokenizer, max_tokens=len(ids) + len(end), stop=["carpet", "ar"])
        assert run(one, ids + end) == tokenizer.decode(ids).partition("ar")[0] and one.finish == "stop"


def test_finish_reasons_and_tokens_after_the_end(tokenizer: Tokenizer) -> None:
    eos, ids = min(tokenizer.eos_ids), tokenizer.encode("one two three four", bos=False)
    ended = request(tokenizer)
    assert run(ended, [*ids[:2], eos, *ids]) == tokenizer.decode(ids[:2]), "tokens of later passes are dropped"
    assert (ended.finish, ended.ids) == ("eos", [2, 5, 6, *ids[:2], eos])
    ignored = request(tokenizer, ignore_eos=True, max_tokens=3)
    run(ignored, [ids[0], eos, ids[1]])
    assert ignored.finish == "length"
    full = request(tokenizer, ctx=5)
    assert run(full, ids[:2]) == tokenizer.decode(ids[:2]) and full.finish == "context"
    dropped = request(tokenizer)
    run(dropped, ids[:1])
    assert dropped.end("cancelled") and not dropped.end("deadline"), "it ends once"
    assert dropped.finish == "cancelled" and dropped.generated == ids[:1]
    assert not ended.end("cancelled") and ended.finish == "eos", "an ended request cannot be cancelled"


def test_its_statistics_count_what_the_cache_did_not_hold(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    one = request(tokenizer, max_tokens=2)
    one.begun, one.cached = 11.0, 2
    run(one, [7, 8])
    found = one.stats(REPORT)
    assert (found.prompt_tokens, found.cached_tokens, found.tokens, found.ids) == (1, 2, 2, (7, 8))
    assert (found.first_token_seconds, found.total_seconds, found.device) == (1.0, 4.0, "none")
    assert one.completion.timings.total == 5.0 and one.completion.usage.cached_tokens == 2


def test_a_request_that_never_began_has_no_first_token(tokenizer: Tokenizer) -> None:
    one = request(tokenizer)
    one.end("cancelled")
    found = one.stats(REPORT)
    assert (found.finish, found.tokens, found.first_token_seconds) == ("cancelled", 0, 0.0)
    assert one.completion.timings.queued is None and one.completion.timings.first_token is None


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
def test_impossible_options_are_refused_at_construction(
    options: dict[str, Any], said: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=said):
        request(tokenizer, **options)


def test_a_prompt_must_be_shorter_than_the_context(tokenizer: Tokenizer) -> None:
    assert run(request(tokenizer, ctx=4), [7, 8]) == tokenizer.decode([7])
    with pytest.raises(ContextExceeded, match="a prompt of 3 tokens leaves no room in the context of 3"):
        request(tokenizer, ctx=3)
