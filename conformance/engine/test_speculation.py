"""Guessed tokens: a text does not depend on who guesses, how many, and how well; how many are guessed does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import hybrid
from conformance.support.devices import BACKENDS, open_backend
from conformance.support.models import BOTH, cut
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.core.places import DEMO
from hybrid.engine.draft_model import DraftModel
from hybrid.engine.drafts import Lookup, Replay
from hybrid.engine.sampling import Sampling
from hybrid.engine.speculation import AHEAD, MOST, Costs, Counts, Pace, expected, most_guesses

CTX, TOKENS = 96, 24
PROMPT = "def area(width, height):\n    return width * height\n\n\ndef area_of_square(width):\n"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "adjusted": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {268: -3.0}, "temperature": 0.5, "seed": 1},
}


class Drafts:
    """Guesses by whatever `now` is."""

    name = "by hand"

    def __init__(self) -> None:
        self.now: Any = Lookup()

    def fork(self) -> Drafts:
        return self

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return self.now.propose(ids, most)

    def close(self) -> None:
        pass


class Failing(Replay):
    """Right, until it fails."""

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        if len(ids) > 50:
            raise RuntimeError("the draft's device is gone")
        return super().propose(ids, most)


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Iterator[hybrid.Model]:
    """In float32, where a choice that rounding could change is as good as never met."""
    if request.param == "vulkan":
        open_backend("vulkan").close()
    few = request.param == "vulkan" and not LONG  # its CPU driver is slow, and no test is about what a text says
    file = cut(open_checkpoint(DEMO), BOTH) if few else DEMO
    with hybrid.load(file, request.param, ctx=CTX, precision="exact", draft=Drafts(), speculate=3) as made:
        yield made


@pytest.fixture(scope="module")
def plain(model: hybrid.Model) -> dict[str, list[int]]:
    """What each way gives without guesses."""
    return {way: run(model, None, **options) for way, options in WAYS.items()}


def run(model: hybrid.Model, drafts: Any, **options: Any) -> list[int]:
    """The ids of a text with these guesses (None: without)."""
    guessing = model.speculation
    assert guessing is not None and guessing.drafter is not None
    kept = guessing.drafter
    if drafts is None:
        model.speculation = None
    else:
        kept.now = drafts
    try:
        for _ in model.generate(options.pop("ids", PROMPT), **{"max_tokens": TOKENS, "ignore_eos": True, **options}):
            pass
    finally:
        model.speculation, guessing.drafter = guessing, kept
    assert model.stats is not None
    return list(model.stats.ids)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_the_same_whatever_is_guessed(model: hybrid.Model, plain: dict[str, list[int]], way: str) -> None:
    ids = [*model.encode(PROMPT), *plain[way]]
    every = ((Replay(ids, 1.0), 1.0, 1.0), (Replay(ids, 0.5), 0.1, 0.9), (Replay(ids, 0.0), 0.0, 0.0))
    for drafts, low, high in every if LONG or way == "greedy" else every[1:2]:
        assert run(model, drafts, **WAYS[way]) == plain[way]
        stats = model.stats
        assert stats is not None and stats.drafted >= TOKENS / 2 and low <= stats.accepted / stats.drafted <= high
    assert run(model, Lookup(), **WAYS[way]) == plain[way]
    assert not model.engine.faults


@pytest.mark.slow
def test_right_guesses_take_fewer_passes(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    ids = [*model.encode(PROMPT), *plain["greedy"]]
    run(model, Replay(ids, 1.0))
    stats = model.stats
    assert stats is not None and "tokens per pass" in stats.guessed and stats.guessed in stats.details()
    assert (stats.drafted, stats.accepted) == (17, 17), "5 passes of 3 guesses, of 1 + 4 * 5 tokens; then 2 guesses and a token"
    assert stats.per_pass["submits"] == 1 and stats.per_pass["allocations"] == stats.per_pass["recordings"] == 0


@pytest.mark.slow
def test_a_text_ends_among_guesses_where_it_would_have(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    prompt, text = model.encode(PROMPT), plain["greedy"]
    drafts = Replay([*prompt, *text], 1.0)
    assert run(model, drafts, max_tokens=7) == text[:7]
    stop = model.decode(text[5:7])
    full = model.decode(text)
    cut = "".join(model.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, stop=stop))
    assert cut == full[: full.find(stop)] and model.stats is not None and model.stats.finish == "stop"
    long = [*prompt, *text, *text][: CTX - 5]
    wanted = run(model, None, ids=long, max_tokens=50)
    assert run(model, Replay([*long, *wanted], 1.0), ids=long, max_tokens=50) == wanted and model.stats.finish == "context"


@pytest.mark.slow
def test_a_session_with_guesses_runs_what_it_does_not_hold(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    prompt, text = model.encode(PROMPT), plain["greedy"]
    with model.session() as session:
        for _ in range(2):  # the second goes on from what the first left, guesses that it did not take among it
            said = "".join(model.generate(prompt, max_tokens=6, ignore_eos=True, session=session))
            assert said == model.decode(text[:6])


@pytest.mark.slow
def test_a_draft_that_fails_ends_guessing_and_not_the_text(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    ids = [*model.encode(PROMPT), *plain["sampled"]]
    assert run(model, Failing(ids, 1.0), **WAYS["sampled"]) == plain["sampled"]
    found = list(model.engine.faults)
    model.engine.faults.clear()
    assert len(found) == 1 and "by hand: RuntimeError: the draft's device is gone; no more tokens are guessed" in found[0]
    assert model.stats is not None and model.stats.accepted > 0 and any(found[0] == p for p in model.stats.passed_over)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_guesses_for_itself(backend: str) -> None:
    """As a draft of itself, with the same noise: nearly every guess is right (its passes have other rows)."""
    if backend == "vulkan":
        open_backend("vulkan").close()
    with hybrid.load(DEMO, backend, ctx=CTX, precision="exact", draft=DEMO, speculate=3) as model:
        for options in (WAYS["greedy"], WAYS["sampled"])[: None if LONG or backend == "cpu" else 1]:
            wanted = run_plain(model, options)
            for _ in range(2):  # another sequence, and one that begins as the draft's last did
                assert run_as_it_is(model, options) == wanted
            stats = model.stats
            assert stats is not None and stats.accepted >= 0.8 * stats.drafted > 0
            assert f"guesses (draft {DEMO} on " in stats.guessed


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_follows_several_sequences_in_the_same_passes(backend: str) -> None:
    """Each gets the guesses that it gets alone, also after some were wrong and where they have different numbers of new tokens."""
    if backend == "vulkan":
        open_backend("vulkan").close()
    with hybrid.load(DEMO, backend, ctx=64, slots=2, precision="exact") as small:
        ids = [small.encode(PROMPT), small.encode("class Reader:\n")]
        wanted = [run_as_it_is(small, {"ids": i, "max_tokens": 12}) for i in ids]
        draft = DraftModel(small.engine, "small", lambda: None)
        assert draft.begin(Sampling(), "a") and draft.begin(Sampling(), "b") and not draft.begin(Sampling(), "c")
        a, b = ids
        assert draft.propose_all({"a": (a, 4), "b": (b, 2)}) == {"a": wanted[0][:4], "b": wanted[1][:2]}
        before = small.engine.counters.copy()
        a, b = [*a, *wanted[0][:2]], [*b, wanted[1][0]]  # as if the third and the second had been wrong
        assert draft.propose_all({"a": (a, 3), "b": (b, 3), "c": (b, 3)}) == {"a": wanted[0][2:5], "b": wanted[1][1:4]}
        assert small.engine.counters.minus(before).submits == 3, "a pass for each guess, of both"
        a = [*a, *wanted[0][2:6]]  # one more than it has guessed
        assert draft.propose_all({"a": (a, 1)}) == {"a": wanted[0][6:7]}
        assert draft.propose_all({"a": (a[:1] * 64, 3)}) == {}, "no room is left"
        draft.close()
        assert not small.engine.positions


def run_as_it_is(model: hybrid.Model, options: dict[str, Any]) -> list[int]:
    for _ in model.generate(options.get("ids", PROMPT), **{"max_tokens": TOKENS, "ignore_eos": True, **_but_ids(options)}):
        pass
    assert model.stats is not None
    return list(model.stats.ids)


def _but_ids(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "ids"}


def run_plain(model: hybrid.Model, options: dict[str, Any]) -> list[int]:
    guessing, model.speculation = model.speculation, None
    found = run_as_it_is(model, options)
    model.speculation = guessing
    return found


def test_what_cannot_guess_is_said(tmp_path: Any) -> None:
    other = write_hf(tmp_path / "hf", tiny())
    for options, said in (
        ({"draft": other}, "it needs the model's tokenizer"),
        ({"speculate": 17}, "speculate must be auto, or a number of tokens to guess, 0 to 16, not 17"),
        ({"speculate": "often"}, "speculate must be auto"),
        ({"speculate": 2, "deterministic": True}, "deterministic on cpu runs one row a pass"),
        ({"draft": tmp_path / "nothing.gguf"}, "nothing.gguf"),
    ):
        with pytest.raises((ValueError, OSError), match=said):
            hybrid.load(DEMO, "cpu", ctx=CTX, **options)
    assert most_guesses(None, None) == most_guesses("lookup", 0) == 0 and most_guesses("lookup", None) == MOST
    assert most_guesses(None, "auto") == MOST and most_guesses(None, 5) == 5


# ------------------------------------------------------------------------------------------------------ who guesses, how many
def test_lookup_finds_what_followed_and_repeats_what_repeats() -> None:
    found = Lookup()
    assert found.propose([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5], "after two tokens"
    assert found.propose([1, 2, 3, 4, 5, 1, 2, 9], 3) == [], "nothing stood there before"
    assert found.propose([1, 2, 3, 4, 5, 1, 2, 9, 1, 2], 3) == [9, 1, 2], "the latest place"
    assert Lookup().propose([7, 1, 2, 3, 4, 8, 6, 3, 4, 9, 1, 2, 3, 4], 2) == [8, 6], "four tokens go before two"
    assert Lookup().propose([5, 6, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "on and on"
    assert found.propose([4, 4], 3) == [] == found.propose([4], 2), "another sequence"


def test_replay_is_right_as_often_as_asked() -> None:
    text = list(range(100, 1100))
    for rate in (0.0, 0.6, 1.0):
        guessed = [Replay(text, rate, seed=2).propose(text[:i], 1)[0] for i in range(1, 1000)]
        right = sum(a == b for a, b in zip(guessed, text[1:], strict=False)) / len(guessed)
        assert abs(right - rate) <= 0.05
    assert Replay(text, 1.0).propose(text, 3) == [], "nothing is known behind its end"
    with pytest.raises(ValueError, match="rate must be a probability"):
        Replay(text, 1.5)


def spent(rate: float, costs: dict[int, float], guess: float, tokens: int = 2000) -> tuple[float, Counts]:
    """Seconds that a text of so many tokens takes where every guess is right with this rate, and what was guessed."""
    pace, counts, seconds, done = Pace(known := Costs()), Counts(), 0.0, 0
    right = Replay([0] * (tokens + 20), rate, seed=5)
    while done < tokens:
        k = pace.guesses()
        if not k:
            burst = max(AHEAD, pace.plain())
            known.took(1, costs[1])
            pace.chosen(burst)
            seconds, done = seconds + burst * costs[1], done + burst
            continue
        guesses = right.propose([0] * (done + 1), k)
        accepted = next((i for i, g in enumerate(guesses) if g), k)
        known.took(k + 1, costs[k + 1])
        known.guessed(k, k * guess)
        pace.verified(k, accepted)
        counts.chose(accepted + 1, k)
        seconds, done = seconds + costs[k + 1] + k * guess, done + accepted + 1
    return seconds / done * tokens, counts


FLAT = {n: 1.0 + 0.03 * n for n in range(1, MOST + 2)}  # a device that reads weights
STEEP = {n: float(n) for n in range(1, MOST + 2)}  # one that computes


@pytest.mark.parametrize(("rate", "costs", "guess", "most"), [
    (0.0, FLAT, 0.0, 1.03), (0.0, STEEP, 0.0, 1.03), (0.0, FLAT, 0.3, 1.03), (0.9, STEEP, 0.1, 1.03),
    (0.9, FLAT, 0.0, 0.3), (0.8, FLAT, 0.05, 0.5), (1.0, FLAT, 0.0, 0.2),
])  # fmt: skip
def test_guesses_never_cost_more_than_three_percent(rate: float, costs: dict[int, float], guess: float, most: float) -> None:
    seconds, counts = spent(rate, costs, guess)
    assert seconds <= most * 2000 * costs[1], counts


def test_more_is_guessed_where_more_is_right() -> None:
    assert [round(expected(0.5, k), 3) for k in range(4)] == [1.0, 1.5, 1.75, 1.875]
    mean = [c.drafted / c.verified for _, c in (spent(rate, FLAT, 0.05) for rate in (0.5, 0.7, 0.95))]
    assert mean[0] < mean[1] < mean[2]
    pace = Pace(Costs(), 5, fixed=True)
    pace.verified(5, 0)
    assert pace.guesses() == 5
