"""Penalties, biases, constraints and log-probabilities through the public interface. Each sampled token is the best of
the model's own logits, adjusted by the formulas written here. Requests without options are unaffected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model
from conformance.support.synthetic import tiny, write_hf
from conformance.support.ties import EXACT_NEAR
from hybrid.core.tensor import Tensor
from hybrid.engine.sampling import DRAFT_MASKS, Allowed, Sampling, SamplingState, ids_of, mask_of
from hybrid.model import Model

PATIENCE = 60.0  # test timeouts in seconds; no test takes one
PROMPT = [2, 282, 8, 9, 9, 282, 12, 13, 14, 7]  # with the token that this model prefers
BIASES = {282: -50, 20: 0.5}
STRONG: dict[str, Any] = {
    "repetition_penalty": 1.8,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "logit_bias": BIASES,
}


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder: Path = write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")
    with hybrid.load(folder, for_model(request.param), ctx=96, slots=3) as made:
        yield made


def run(model: Model, ids: Sequence[int], count: int, **options: Any) -> list[int]:
    return list(model.submit(ids, max_tokens=count, ignore_eos=True, **options).result(PATIENCE).ids)


def judge(
    model: Model, prompt: Sequence[int], said: Sequence[int], s: Sampling, allowed: Sequence[set[int] | None] = ()
) -> None:
    """Check that every greedy token of `said` is the best of the adjusted logits, up to a near tie."""
    rows = model.logits([*prompt, *said])[len(prompt) - 1 : -1].astype(np.float64)
    for i, (z, token) in enumerate(zip(rows, said, strict=True)):
        for seen in {*prompt, *said[:i]}:
            z[seen] = z[seen] / s.repetition_penalty if z[seen] > 0 else z[seen] * s.repetition_penalty
        for seen in said[:i]:
            z[seen] -= s.frequency_penalty
        for seen in set(said[:i]):
            z[seen] -= s.presence_penalty
        for biased, by in (s.logit_bias or {}).items():
            z[biased] += by
        if allowed and (of := allowed[i]) is not None:
            z[[t for t in range(len(z)) if t not in of]] = -math.inf
        z = z[: model.engine.target.n_tokens]
        assert z[token] >= z.max() - EXACT_NEAR, f"token {i} is {token} ({z[token]}), the best {z.argmax()} ({z.max()})"


@pytest.mark.parametrize("options", [{k: v} for k, v in STRONG.items()] + [STRONG], ids=lambda o: ",".join(o))
def test_greedy_tokens_are_the_best_of_the_adjusted_logits(model: Model, options: dict[str, Any]) -> None:
    said = run(model, PROMPT, 16, **options)
    judge(model, PROMPT, said, Sampling(**options))
    assert said != run(model, PROMPT, 16), "the options change nothing here: choose stronger ones"


def test_a_generation_and_a_conversation_count_the_same_tokens(model: Model) -> None:
    """The second turn's prompt holds the first turn's tokens, most of them also cached. They do not count as generated."""
    "".join(model.generate(PROMPT, max_tokens=12, ignore_eos=True, **STRONG))
    assert model.stats is not None and list(model.stats.ids) == run(model, PROMPT, 12, **STRONG)
    first, s = list(model.stats.ids), Sampling(**STRONG)
    "".join(model.generate(PROMPT, max_tokens=40, ignore_eos=True))  # without penalties: no tokens are counted
    second = [*PROMPT, *model.stats.ids, 30]
    "".join(model.generate(second, max_tokens=12, ignore_eos=True, **STRONG))
    assert model.stats.cached_tokens > len(PROMPT)
    judge(model, second, list(model.stats.ids), s)
    assert first


def test_tokens_that_the_cache_holds_count_too(model: Model) -> None:
    """Cached tokens of a prompt are not run again, and are penalised all the same."""
    prompt = [2, *(20 + i % 30 for i in range(40)), 282, 282, 9]
    first, again = (model.submit(prompt, max_tokens=12, ignore_eos=True, **STRONG).result(PATIENCE) for _ in range(2))
    assert again.usage.cached_tokens > 0 == first.usage.cached_tokens
    for found in (first, again):
        judge(model, prompt, list(found.ids), Sampling(**STRONG))


def test_requests_without_options_are_unaffected(model: Model) -> None:
    plain = [run(model, [2, i, 5], 10, temperature=t, seed=3) for i in (4, 6) for t in (0.0, 0.9)]
    some = Allowed(range(200), model.hparams.vocab)
    beside = model.submit(PROMPT, max_tokens=40, ignore_eos=True, logprobs=2, constraint=some, **STRONG)
    assert [run(model, [2, i, 5], 10, temperature=t, seed=3) for i in (4, 6) for t in (0.0, 0.9)] == plain
    assert set(beside.result(PATIENCE).ids) <= set(range(200))


def test_neutral_options_use_the_same_plan(model: Model) -> None:
    before = dict(model.engine.runner._programs)
    model.submit(PROMPT, max_tokens=3, repetition_penalty=1, presence_penalty=0.0, logit_bias={}, logprobs=0).result(
        PATIENCE
    )
    assert not [key for key in model.engine.runner._programs.keys() - before.keys() if key[-1]]


def test_log_probabilities_are_those_of_the_models_own_logits(model: Model) -> None:
    options: dict[str, Any] = {"logprobs": 5, "temperature": 1.5, "seed": 1, "logit_bias": {40: 9}}
    done = model.submit(PROMPT, max_tokens=8, ignore_eos=True, **options).result(PATIENCE)
    rows = model.logits([*PROMPT, *done.ids])[len(PROMPT) - 1 : -1, : model.engine.target.n_tokens].astype(np.float64)
    wanted = (
        rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
    )
    assert done.logprobs is not None and [p.id for p in done.logprobs] == list(done.ids)
    for found, row in zip(done.logprobs, wanted, strict=True):
        assert abs(found.logprob - row[found.id]) < EXACT_NEAR and len(found.top) == 5
        assert [p for _, p in found.top] == sorted((p for _, p in found.top), reverse=True)
        for i, p in found.top:
            assert abs(p - row[i]) < EXACT_NEAR
        assert found.top[-1][1] >= np.sort(row)[-5] - EXACT_NEAR and len({i for i, _ in found.top}) == 5
    assert any(40 in [i for i, _ in p.top] or p.id == 40 for p in done.logprobs), (
        "the bias chose nothing: the test proves nothing"
    )


def test_events_bring_the_log_probabilities_of_their_tokens(model: Model) -> None:
    handle = model.submit(PROMPT, max_tokens=5, ignore_eos=True, logprobs=1)
    events = [e for e in handle.events() if e.ids]
    assert all(e.logprobs is not None and [p.id for p in e.logprobs] == list(e.ids) for e in events)
    assert handle.result(PATIENCE).logprobs == tuple(p for e in events for p in e.logprobs or ())
    assert model.submit(PROMPT, max_tokens=2).result(PATIENCE).logprobs is None


class Steps:
    """Allows the next set of a list after each token; records the accepted tokens."""

    def __init__(self, steps: Sequence[set[int] | None], vocab: int) -> None:
        self.steps, self.vocab, self.accepted = list(steps), vocab, list[int]()

    def mask(self) -> np.ndarray | None:
        of = self.steps[len(self.accepted)]
        return None if of is None else mask_of(of, self.vocab)

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def copy(self) -> Steps:
        other = Steps(self.steps, self.vocab)
        other.accepted = list(self.accepted)
        return other


def test_a_constraint_masks_every_token(model: Model) -> None:
    steps: list[set[int] | None] = [{3, 5, 90}, {8}, None, set(range(40, 50)), {11, 12}, None]
    constraints = [Steps(steps[i:] + steps[:i], model.hparams.vocab) for i in range(4)]  # more than there are slots
    handles = [model.submit(PROMPT, max_tokens=6, ignore_eos=True, constraint=c) for c in constraints]
    for handle, constraint in zip(handles, constraints, strict=True):
        said = list(handle.result(PATIENCE).ids)
        judge(model, PROMPT, said, Sampling(), constraint.steps)
        assert constraint.accepted == said[:-1]


class Failing(Steps):
    def accept(self, token: int) -> None:
        raise LookupError("the grammar has no such rule")


def test_a_constraint_that_fails_ends_its_own_request_alone(model: Model) -> None:
    vocab, wanted = model.hparams.vocab, run(model, PROMPT, 8)
    beside = model.submit(PROMPT, max_tokens=8, ignore_eos=True)
    nothing = model.submit(PROMPT, max_tokens=8, ignore_eos=True, constraint=Steps([None, {5}, set()], vocab))
    failing = model.submit(PROMPT, max_tokens=8, ignore_eos=True, constraint=Failing([None, None], vocab))
    wrong = model.submit(PROMPT, max_tokens=8, ignore_eos=True, constraint=Steps([{5}], vocab + 640))
    with pytest.raises(ValueError, match="the constraint allows no token here"):
        nothing.result(PATIENCE)
    with pytest.raises(LookupError, match="no such rule"):
        failing.result(PATIENCE)
    with pytest.raises(ValueError, match=r"a constraint's mask must be uint32"):
        wrong.result(PATIENCE)
    assert list(beside.result(PATIENCE).ids) == wanted and model.engine.scheduler.idle


class Written:
    """A device that records only the masks."""

    def __init__(self) -> None:
        self.masks: dict[int, np.ndarray] = {}

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        if name == "masks":
            self.masks[row] = value.array[0]


class OneAfterTheOther(Steps):
    """Records wrongly accepted tokens; allows no token at the end."""

    def accept(self, token: int) -> None:
        if (of := self.steps[len(self.accepted)]) is not None and token not in of:
            raise LookupError(f"{token} is not allowed")
        super().accept(token)


def test_draft_rows_have_the_masks_of_their_drafts(model: Model) -> None:
    device, target = Written(), model.engine.target
    state, vocab, slots = SamplingState(device, target), target.hparams.vocab, target.cache.slots  # type: ignore[arg-type]
    steps: list[set[int] | None] = [{3, 5}, None, {8}, {8}, {9}]
    for slot in (0, 1):
        state.assign(slot, Sampling(), constraint=OneAfterTheOther(steps, vocab))
    state.assign(2, Sampling())
    assert state.allowed(2, [1, 2, 3]) == (1, 2, 3)
    assert state.allowed(1, [4, 7]) == ()  # forbidden at once
    assert state.allowed(0, [5, 70, 9, 8]) == (5, 70)  # 9 is forbidden after them
    rows = state.mask_rows([0, 0, 0, 1, 2, 2]).tolist()
    assert rows[0] == 0 and rows[1] == -1 and rows[2] >= slots and rows[3:] == [1, -1, -1]
    assert [ids_of(device.masks[rows[i]]).tolist() for i in (0, 2, 3)] == [[3, 5], [8], [3, 5]]
    state.accept(0, 5)
    state.accept(0, 70)  # both drafts were accepted
    assert state.allowed(0, [8, 8, 9, 9]) == (8, 8)  # no step is left: that row could not sample
    assert ids_of(device.masks[state.mask_rows([0, 0, 0]).tolist()[0]]).tolist() == [8]


def test_rows_for_drafts_are_returned_and_bounded(model: Model) -> None:
    target = model.engine.target
    state = SamplingState(Written(), target)  # type: ignore[arg-type]
    for slot in range(2):
        state.assign(slot, Sampling(), constraint=Allowed([7], target.hparams.vocab))
    for _ in range(3):
        assert len(state.allowed(0, [7] * 10)) == 10 and len(state.allowed(1, [7] * 10)) == DRAFT_MASKS - 10
        assert len(set(state.mask_rows([0] * 11 + [1] * (DRAFT_MASKS - 9)).tolist())) == DRAFT_MASKS + 2
        state.accept(0, 7)
    state.release(1)
    state.release(0)
    state.assign(1, Sampling(), constraint=Allowed([7], target.hparams.vocab))
    assert len(state.allowed(1, [7] * 99)) == DRAFT_MASKS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {10**6: 1}}, "logit_bias: the model has no token 1000000"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be between"),
        ({"logprobs": 21}, "logprobs must be between 0"),
        ({"constraint": lambda: None}, r"constraint must have mask\(\), accept\(token\) and copy\(\)"),
    ],
)
def test_impossible_requests_are_refused_at_submit(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.submit(PROMPT, **options)
    if options.keys() & {"constraint", "logprobs"}:
        return
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPT, **options)
