"""Who guesses: what was looked up, a known text, a smaller model; what they would have guessed of a text that came
without."""

from __future__ import annotations

from typing import Any

import pytest
from hybrid.engine.GONE import WATCHED

import hybrid
from conformance.engine.test_speculation import PROMPT, few
from conformance.support.devices import BACKENDS, for_model
from conformance.support.profile import LONG
from hybrid.checkpoint import open_checkpoint
from hybrid.core.places import DEMO
from hybrid.engine.loading import EngineConfig
from hybrid.engine.sampling import Sampling
from hybrid.engine.speculation import DraftModel, Lookup, Replay
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.ready import ready


def test_lookup_finds_what_followed_and_repeats_what_repeats() -> None:
    found = Lookup()
    assert found.propose([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5], "after two tokens"
    assert found.propose([1, 2, 3, 4, 5, 1, 2, 9], 3) == [], "nothing stood there before"
    assert found.propose([1, 2, 3, 4, 5, 1, 2, 9, 1, 2], 3) == [9, 1, 2], "the latest place"
    assert Lookup().propose([7, 1, 2, 3, 4, 8, 6, 3, 4, 9, 1, 2, 3, 4], 2) == [8, 6], "four tokens go before two"
    assert Lookup().propose([5, 6, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "on and on"
    assert found.propose([4, 4], 3) == [] == found.propose([4], 2), "another sequence"
    text = [5, 6, 7, 5, 6, 7, 5, 8]
    assert found.agreed(text, 1) == (2, 3) and found.agreed(text, 6) == (1, 2), (
        "7 and 5 after 5, 6 and 6, 7; not 8 after 7, 5"
    )
    assert Replay(text, 1.0).agreed(text, 3) == (5, 5) and Replay(text, 0.0).agreed(text[:4], 3) == (0, 1)


def test_replay_is_right_as_often_as_asked() -> None:
    text = list(range(100, 1100))
    for rate in (0.0, 0.6, 1.0):
        guessed = [Replay(text, rate, seed=2).propose(text[:i], 1)[0] for i in range(1, 1000)]
        right = sum(a == b for a, b in zip(guessed, text[1:], strict=False)) / len(guessed)
        assert abs(right - rate) <= 0.05
    assert Replay(text, 1.0).propose(text, 3) == [], "nothing is known behind its end"
    with pytest.raises(ValueError, match="rate must be a probability"):
        Replay(text, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_says_what_it_would_have_guessed(backend: str) -> None:
    """Of the last tokens of a text, each after those that came before it; and goes on from there."""
    config = EngineConfig(ctx=64, slots=1, precision="exact", guesses=WATCHED - 1)
    file = few(open_checkpoint(DEMO))
    found = ready(file, for_model(backend), None, config)
    try:
        draft = DraftModel(found.engine, "small", lambda: None)
        ids = file.tokenizer.encode(PROMPT)[:24]
        draft.begin(Sampling(), "a")
        text = [*ids, *draft.propose_all({"a": (ids, 8)})["a"]]
        assert not draft.watch("a", text) and draft.agreed("a") == (0, 0), "its own choices are not new"
        draft.begin(Sampling(), "a")
        assert draft.watch("a", text) and draft.watching("a") and not draft.watch("a", text), "it has run them"
        assert draft.agreed("a")[0] >= 8 and not draft.watching("a"), "of the last 16 tokens it has chosen 8 itself"
        right = []
        for at in (len(ids), len(ids) + 4):
            other = [*text[:at], (text[at] + 1) % 200, *text[at + 1 :]]
            draft.begin(Sampling(), "a")
            assert draft.watch("a", other)
            right.append(draft.agreed("a"))
            assert draft.propose_all({"a": (text[: at + 1], 2)})["a"] == text[at + 1 : at + 3], (
                "it goes back to where texts part"
            )
        assert all(n == WATCHED for _, n in right) and all(agreed < WATCHED for agreed, _ in right)
        draft.close()
        assert draft.watches and not found.engine.positions
    finally:
        found.close()
        file.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gone", "backend"),
    [
        pytest.param(gone, backend, id=f"{name}-{backend}")
        for name, gone in (("passes", ("submit_scheduled",)), ("all", ("submit_scheduled", "release")))
        for backend in BACKENDS
        if LONG or backend == "cpu" or name == "all"
    ],
)
def test_a_draft_that_fails_while_it_runs_is_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, backend: str, gone: tuple[str, ...]
) -> None:
    """Its device, with all that lies there, and its file, while the text goes on; not when the model is closed, or
    collected."""
    files = [few(open_checkpoint(DEMO)) for _ in range(2)]
    with hybrid.load(files[0], for_model(backend), ctx=64, precision="exact", draft=files[1], speculate=3) as model:
        assert model.drafting is not None
        draft = model.drafting.drafter
        assert isinstance(draft, DraftModel) and draft.engine.device is not model.engine.device
        model.drafting.drafter = None
        wanted = "".join(model.generate(PROMPT, max_tokens=12, ignore_eos=True))
        model.drafting.drafter = draft

        def fail(*given: Any, **named: Any) -> None:
            raise RuntimeError("the draft's device is gone")

        for name in gone:
            monkeypatch.setattr(draft.engine, name, fail)
        for _ in range(2):
            assert "".join(model.generate(PROMPT, max_tokens=12, ignore_eos=True)) == wanted
        assert (
            model.drafting.drafter is None
            and len(model.engine.faults) == 1
            and "device is gone" in model.engine.faults[0]
        )
        with pytest.raises(RuntimeError, match="closed"):
            draft.engine.device.check_open()
        with pytest.raises(ValueError, match="closed"):
            files[1].packed("token_embd")


@pytest.mark.slow
def test_a_draft_that_cannot_be_made_ready_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device and its file, and those of the model."""
    closed = []

    def fail(self: DraftModel, *given: Any) -> None:
        raise RuntimeError("no memory for its programs")

    def close(self: CpuDevice) -> None:
        closed.append(self)

    monkeypatch.setattr(DraftModel, "__init__", fail)
    monkeypatch.setattr(CpuDevice, "close", close)
    files = [few(open_checkpoint(DEMO)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="no memory for its programs"):
        hybrid.load(files[0], "cpu", ctx=32, draft=files[1], draft_device="cpu")
    assert len(set(map(id, closed))) == 2
    for file in files:
        with pytest.raises(ValueError, match="closed"):
            file.packed("token_embd")
