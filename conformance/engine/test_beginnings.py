"""Text from prompts unlike the training data: the same with and without drafts, greedy and sampled.

`python -m conformance.engine.test_beginnings DEVICE lookup,model,deterministic [COUNT TOKENS]` runs many (200 of 24
tokens) and prints counts; deterministic: with lookup, bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model
from conformance.support.models import GOLDEN, cut
from conformance.support.paths import MODELS
from conformance.support.profile import LONG
from conformance.support.ties import EXACT_NEAR
from hybrid.checkpoint import open_checkpoint
from hybrid.core.places import DEMO
from hybrid.engine.request import Completion
from hybrid.harness.compare import Disagreement
from hybrid.harness.sampling import Params, judge

DRAFTS = {"lookup": "lookup", "model": MODELS / "demo-gemma3-draft-q8_0.gguf"}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 11}}
LENGTHS = (3, 9, 17, 33, 48)
SLOTS, CTX = 8, 128


def beginnings(model: hybrid.Model, count: int) -> list[list[int]]:
    """Beginnings of several lengths, from all parts of the held-out documents."""
    text = [model.encode(d) for d in (GOLDEN / "held-out.txt").read_bytes().decode().split("\n\f\n")]
    found = []
    for i in range(count):
        ids, n = text[i % len(text)], LENGTHS[i % len(LENGTHS)]
        at = 1 + (i * 7919) % max(len(ids) - n - 1, 1)
        found.append([ids[0], *ids[at : at + n]])
    return found


def texts(model: hybrid.Model, prompts: list[list[int]], **options: Any) -> list[Completion]:
    handles = [model.submit(prompt, ignore_eos=True, **options) for prompt in prompts]
    return [handle.result(timeout=3600) for handle in handles]


def run(draft: Any, device: str, count: int, tokens: int, file: Any = DEMO, **options: Any) -> Counter[str]:
    """Asserts that texts are equal up to a token that rounding can change. A deterministic engine's log-probabilities
    must be equal to the last bit. Returns counts."""
    done: Counter[str] = Counter()
    how = {"precision": "exact", "slots": SLOTS, **options}
    logprobs = int("deterministic" in options)
    with hybrid.load(file, for_model(device), ctx=CTX, draft=draft, speculate=3, **how) as model:
        prompts = beginnings(model, count)
        for way, chosen in WAYS.items():
            began = time.perf_counter()
            plain, drafted = (
                texts(model, prompts, max_tokens=tokens, logprobs=logprobs, **chosen, **more)
                for more in ({"speculate": 0}, {})
            )
            for prompt, one, other in zip(prompts, plain, drafted, strict=True):
                same = one.ids == other.ids and one.logprobs == other.logprobs
                if not same:
                    assert "deterministic" not in options, f"bit for bit: {one}, with drafts {other}"
                    close(model, prompt, list(one.ids), list(other.ids), chosen)
                done[f"{way} same" if same else f"{way} from a near tie on"] += 1
                done["drafted"] += other.usage.drafted_tokens
                done["accepted"] += other.usage.accepted_tokens
                assert not one.usage.drafted_tokens
            done[f"{way} seconds"] = round(time.perf_counter() - began)
        assert not model.engine.faults
    return done


def close(model: hybrid.Model, prompt: list[int], one: list[int], other: list[int], chosen: dict[str, Any]) -> None:
    """Assert that at the first difference of two texts, some rounding of the logits allows either token."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    logits = model.logits([*prompt, *one[:at]])[-1][: model.engine.target.n_tokens].astype(float)
    if not chosen:
        assert logits.max() - min(logits[one[at]], logits[other[at]]) < EXACT_NEAR, (prompt, at, one, other)
        return
    for token in (one[at], other[at]):
        judge(
            f"after {len(prompt) + at} tokens", logits, Params(**chosen), len(prompt) + at - 1, token, slack=EXACT_NEAR
        )


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS if LONG else ["model"])
@pytest.mark.parametrize("backend", BACKENDS if LONG else ["cpu"])
def test_texts_are_the_same_with_drafts(backend: str, draft: str) -> None:
    count, tokens = (200, 24) if LONG else (6, 12)
    done = run(DRAFTS[draft], backend, count, tokens)
    assert done["greedy same"] + done["sampled same"] >= 1.9 * count, done
    assert done["accepted"] > 0 and done["drafted"] >= (count if draft == "model" else 1), done


@pytest.mark.slow
def test_deterministic_texts_have_the_same_bits_with_drafts() -> None:
    """Correct and wrong drafts. In the short profile, a model of few layers, drafted by a model of fewer."""
    whole = open_checkpoint(DEMO)
    file, draft = (whole, DRAFTS["model"]) if LONG else (cut(whole, (0, 1, 2, 11)), cut(whole, (0, 1, 11)))
    count, tokens = (20, 24) if LONG else (2, 8)
    done = run(draft, "vulkan", count, tokens, file, slots=2, deterministic=True)
    assert done["greedy same"] + done["sampled same"] == 2 * count and 0 < done["accepted"] < done["drafted"], done


def test_where_texts_diverge_either_token_must_be_allowed() -> None:
    """The comparison accepts a near tie of the two tokens, and no other difference."""
    with hybrid.load(DEMO, "cpu", ctx=CTX, precision="exact") as model:
        (prompt,) = beginnings(model, 1)
        logits = model.logits(prompt)[-1]
        best = int(logits.argmax())
        with pytest.raises(AssertionError):
            close(model, prompt, [best], [int(logits.argmin())], {})
        with pytest.raises(Disagreement):
            close(model, prompt, [best], [int(logits.argmin())], WAYS["sampled"])


if __name__ == "__main__":
    where, wanted, amounts = sys.argv[1], sys.argv[2].split(","), [int(x) for x in sys.argv[3:]] or [200, 24]
    for name in wanted:
        options = {"slots": 4, "deterministic": True} if name == "deterministic" else {}
        print(where, name, dict(run(DRAFTS.get(name, "lookup"), where, *amounts, **options)), flush=True)
