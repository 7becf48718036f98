"""Acceptance: passes are counted as a verification counts them, and pairs of models are measured by their best tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybrid
from conformance.support.synthetic import tiny, write_hf
from hybrid.engine.sampling import Sampling
from hybrid.perf.acceptance import LENGTHS, pairs, passes, summed
from hybrid.perf.acceptance.__main__ import beginnings, main, measure

PROMPTS = [[2, 5, 9, 30], [2, 77, 8, 41, 16]]


def played(agreed: list[bool], length: int) -> int:
    """Passes of a verification, token by token: tokens 0, 1, 2, ..; the draft proposes them where it agrees, else -1."""
    text, done, count = list(range(len(agreed))), 0, 0
    while done < len(text):
        drafts = [t if agreed[t] else -1 for t in text[done : done + length]]
        count += 1
        for draft in drafts:
            if draft != text[done]:
                break
            done += 1
        done += 1  # the token after the last accepted draft
    return count


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8))
def test_passes_are_those_of_a_verification(agreed: list[bool], length: int) -> None:
    assert passes(agreed, length) == played(agreed, length)


def test_figures_by_hand() -> None:
    texts = [[True, True, False, True], [False, True]]
    found = summed(texts)  # k = 1: 2 tokens, 1, 1; then 1, 1. k = 2: 3 and 1; then 1, 1
    assert found.choices == 6 and found.agreed == 4 / 6 and found.tokens[:2] == (6 / 5, 6 / 4)
    assert summed([[True] * 36]).tokens == tuple(36 / -(-36 // (k + 1)) for k in LENGTHS)
    with pytest.raises(ValueError, match="nothing was measured"):
        summed([[]])


def test_measured_acceptance_is_plausible() -> None:
    for pair in pairs():
        assert list(pair.tokens) == sorted(pair.tokens) and pair.tokens[0] <= 2
        assert pair.tokens[0] >= 1 and all(t <= k + 1 for k, t in zip(LENGTHS, pair.tokens, strict=True))
        assert abs(pair.tokens[0] - (1 + pair.agreed)) < 0.15  # one draft a pass: accepted about as often as it agrees


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "drawn"])
def test_a_model_drafts_for_itself_best(tmp_path: Path, sampling: Sampling) -> None:
    folders = [write_hf(tmp_path / str(seed), tiny(), dtype="f32", seed=seed) for seed in (0, 1)]
    with hybrid.load(folders[0], "cpu", ctx=64) as model, hybrid.load(folders[1], "cpu", ctx=64) as other:
        itself, stranger = (measure(model, draft, PROMPTS, 20, sampling) for draft in (model, other))
    assert itself.choices == stranger.choices == 40
    assert itself.agreed >= 0.95 > stranger.agreed and itself.tokens > stranger.tokens  # up to near ties


def test_a_draft_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, tiny(), dtype="f32")
    with hybrid.load(folder, "cpu", ctx=64) as model, hybrid.load(folder, "cpu", ctx=64) as draft:
        draft.engine.target = replace(draft.engine.target, n_tokens=77)
        with pytest.raises(ValueError, match="has another tokenizer than"):
            measure(model, draft, PROMPTS, 4, Sampling())


def test_the_command_says_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = str(write_hf(tmp_path / "m", tiny(), dtype="f32")), tmp_path / "text"
    text.write_text("the cat sat on the mat and the dog on the log " * 9)
    given_ = [folder, folder, "--text", str(text), "--prompts", "2", "--prompt-length", "6", "--tokens", "6"]
    assert main([*given_, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["choices"] == 12 and len(said["tokens"]) == len(LENGTHS)
    assert main(given_) == 0 and "tokens per pass" in capsys.readouterr().out
    assert main([*given_[:3], str(tmp_path / "none")]) == 2 and "--text" in capsys.readouterr().err
    text.write_text("the")
    assert main(given_) == 1 and "shorter than a beginning of 6 tokens" in capsys.readouterr().err


def test_beginnings_are_of_the_whole_text(tmp_path: Path) -> None:
    with hybrid.load(write_hf(tmp_path, tiny(), dtype="f32"), "cpu", ctx=64) as model:
        text = "\n\f\n".join("the cat sat on the mat " * 20 for _ in range(3))
        found = beginnings(text, model, 5, 4)
        assert len(found) == 5 and {len(ids) for ids in found} == {4}
        assert len(beginnings(text, model, 10**6, 4)) > 5
