"""Speculation: a text does not depend on the drafter, the number of drafts and their acceptance; the number of passes
does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.audit import audit
from conformance.support.devices import BACKENDS, for_model
from conformance.support.models import BOTH, cut
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core.places import DEMO
from hybrid.engine.request import Options, Request
from hybrid.engine.runner import DRAFTED, Runner
from hybrid.engine.speculation import LENT, MOST, DraftModel, Lookup, Replay, most_drafts
from hybrid.kernels.vulkan.kernel import kernels_digest

CTX, TOKENS = 96, 24 if LONG else 16
TURN = int(kernels_digest(), 16) % 2
PROMPT = "def area(width, height):\n    return width * height\n\n\ndef area_of_square(width):\n"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "adjusted": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {268: -3.0},
        "temperature": 0.5,
        "seed": 1,
    },
}


class Drafts:
    """Drafts by the current drafter `now`."""

    name = "by hand"

    def __init__(self) -> None:
        self.now: Any = Lookup()

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        return self.now.propose(wanted)

    def verified(self, request: Request, accepted: int) -> None:
        self.now.verified(request, accepted)

    def end(self, request: Request) -> None:
        self.now.end(request)

    def close(self) -> None:
        pass


class Failing(Replay):
    """Correct until it fails."""

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        if any(len(request.ids) > 40 for request in wanted):
            raise RuntimeError("the draft's device is gone")
        return super().propose(wanted)


class Known(Lookup):
    """Drafts from the one of these texts that begins as the sequence does; most of them correct."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.texts, self.draw = texts, random.Random(1)

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        found = {}
        for request, most in wanted.items():
            at = len(request.ids)
            text = next((text for text in self.texts if text[:at] == request.ids), [])
            found[request] = [t if self.draw.random() < 0.8 else t ^ 1 for t in text[at : at + most]]
        return found


class Alternating:
    """Tokens of even ids, then of odd ones, and so on."""

    def __init__(self, model: hybrid.Model, said: int = 0) -> None:
        self.model, self.said = model, said

    def mask(self) -> np.ndarray:
        vocab = self.model.engine.target.hparams.vocab
        words = np.full(-(-vocab // 32), 0xAAAAAAAA if self.said % 2 else 0x55555555, np.uint32)
        return words

    def accept(self, token: int) -> None:
        assert token % 2 == self.said % 2
        self.said += 1

    def copy(self) -> Alternating:
        return Alternating(self.model, self.said)


class Guiding(Alternating):
    """Alternating, and expects some of these tokens, which need not be right."""

    def __init__(self, model: hybrid.Model, expects: Sequence[int], said: int = 0) -> None:
        super().__init__(model, said)
        self.expects = expects

    def likely(self) -> Sequence[int]:
        return self.expects[self.said : self.said + self.said % 6]

    def copy(self) -> Guiding:
        return Guiding(self.model, self.expects, self.said)


class Hearing:
    """Allows everything, and records accepted tokens."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        self.heard.append(token)

    def copy(self) -> Hearing:
        return self


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Iterator[hybrid.Model]:
    """In float32, where near ties are practically absent."""
    file = few(open_checkpoint(DEMO))
    with hybrid.load(
        file, for_model(request.param), ctx=CTX, slots=4, precision="exact", draft=Drafts(), speculate=3
    ) as made:
        yield made


@pytest.fixture(scope="module")
def plain(model: hybrid.Model) -> dict[str, list[int]]:
    """Each way's text without drafts."""
    return {way: run(model, None, **options) for way, options in WAYS.items()}


def few(checkpoint: Checkpoint) -> Checkpoint:
    """In the short profile a model of few layers: no test here depends on the text itself (the whole model:
    test_beginnings)."""
    return checkpoint if LONG else cut(checkpoint, BOTH)


def set_drafter(model: hybrid.Model, drafts: Any) -> dict[str, int]:
    """Set the drafter from now on (None: no drafts); returns options of a request."""
    assert model.speculator is not None and isinstance(model.speculator.drafter, Drafts)
    model.speculator.drafter.now = Lookup() if drafts is None else drafts
    return {"speculate": 0} if drafts is None else {}


def run(model: hybrid.Model, drafts: Any, **options: Any) -> list[int]:
    """The ids of a text with these drafts (None: without)."""
    ids, asked = options.pop("ids", PROMPT), set_drafter(model, drafts)
    for _ in model.generate(ids, **{"max_tokens": TOKENS, "ignore_eos": True, **asked, **options}):
        pass
    assert model.stats is not None
    return list(model.stats.ids)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for i, way in enumerate(WAYS) if LONG or i in (0, 1 + TURN)])
def test_a_text_is_the_same_with_any_drafts(model: hybrid.Model, plain: dict[str, list[int]], way: str) -> None:
    """In the short profile one rate a way and prompt lookup; greedy text with wrong drafts too, and below with correct
    ones. Greedy text and one of the other ways, alternating: below all of them run together."""
    known = {tuple(model.encode(PROMPT)): plain[way]}
    every = ((Replay(known, 1.0), 1.0, 1.0), (Replay(known, 0.5), 0.1, 0.9), (Replay(known, 0.0), 0.0, 0.0))
    for drafts, low, high in every if LONG else every[1:] if way == "greedy" else every[1:2]:
        assert run(model, drafts, **WAYS[way]) == plain[way]
        stats = model.stats
        assert stats is not None and stats.drafted >= TOKENS / 2 and low <= stats.accepted / stats.drafted <= high
    assert run(model, Lookup(), **WAYS[way]) == plain[way]
    assert not model.engine.faults


@pytest.mark.slow
def test_accepted_drafts_take_fewer_passes(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    known = {tuple(model.encode(PROMPT)): plain["greedy"]}
    assert run(model, Replay(known, 1.0)) == plain["greedy"]
    stats = model.stats
    assert stats is not None and "tokens per pass" in stats.speculation and stats.speculation in stats.details()
    whole = (TOKENS - 1) // 4  # passes of 3 drafts, of 4 tokens each after the first one; then 2 drafts and a token
    assert 1 + 4 * whole + 3 == TOKENS and (stats.drafted, stats.accepted) == (3 * whole + 2, 3 * whole + 2)
    assert stats.per_pass["submits"] == 1 and stats.per_pass["allocations"] == stats.per_pass["recordings"] == 0


@pytest.mark.slow
def test_a_text_ends_within_drafts_at_the_same_token(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    prompt, text = model.encode(PROMPT), plain["greedy"]
    drafts = Replay({tuple(prompt): text}, 1.0)
    assert run(model, drafts, max_tokens=7) == text[:7]
    stop = model.decode(text[5:7])
    full = model.decode(text)
    cut = "".join(model.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, stop=stop))
    assert cut == full[: full.find(stop)] and model.stats is not None and model.stats.finish == "stop"
    long = [*prompt, *text * 4][: CTX - 5]
    wanted = run(model, None, ids=long, max_tokens=50)
    assert (
        run(model, Replay({tuple(long): wanted}, 1.0), ids=long, max_tokens=50) == wanted
        and model.stats.finish == "context"
    )


@pytest.mark.slow
def test_a_failing_drafter_ends_speculation_only(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    known = {tuple(model.encode(PROMPT)): plain["sampled"]}
    assert model.speculator is not None
    drafter = model.speculator.drafter
    assert run(model, Failing(known, 1.0), **WAYS["sampled"]) == plain["sampled"]
    found, stats = list(model.engine.faults), model.stats
    model.engine.faults.clear()
    assert model.speculator.drafter is None
    assert run_as_it_is(model, WAYS["sampled"]) == plain["sampled"] and not model.engine.faults, "reported once"
    model.speculator.drafter = drafter
    assert len(found) == 1 and "by hand: RuntimeError: the draft's device is gone; speculation has ended" in found[0]
    assert stats is not None and stats.accepted > 0 and any(found[0] == p for p in stats.passed_over)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_its_own_draft(backend: str) -> None:
    """The model as its own draft, with the same noise: nearly every draft is accepted (its passes have other rows). On
    one queue the host does not wait between drafts and their verification."""
    files = [few(open_checkpoint(DEMO)) for _ in range(2)]
    with hybrid.load(files[0], for_model(backend), ctx=CTX, precision="exact", draft=files[1], speculate=3) as model:
        assert model.speculator is not None and isinstance(model.speculator.drafter, DraftModel)
        varied = {"temperature": 4.0, "seed": 5}  # a model of few layers would repeat itself
        for options in [*WAYS.values(), varied] if LONG else [{**varied, "max_tokens": TOKENS // 2}]:
            wanted = run_plain(model, options)
            for _ in range(2):  # another sequence, and one that begins as the draft's last did
                assert run_as_it_is(model, options) == wanted
            stats = model.stats
            assert stats is not None and stats.accepted >= 0.8 * stats.drafted > 0
            assert f"speculation (draft {DEMO} on " in stats.speculation


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_model_batches_several_sequences(backend: str) -> None:
    """Each gets the drafts of its sequence alone, also after some were wrong and with different numbers of new tokens."""
    checkpoint = few(open_checkpoint(DEMO))
    with hybrid.load(checkpoint, for_model(backend), ctx=64, slots=2, precision="exact") as model:
        ids = [model.encode(PROMPT), model.encode("class Reader:\n")]
        wanted = [run_as_it_is(model, {"ids": i, "max_tokens": 12}) for i in ids]
        runner = Runner(checkpoint, model.engine.device.sibling(LENT), model.engine.config)
        draft, submits = DraftModel(runner, "small", lambda: None), runner.counters
        a, b, c = (Request(i, text, Options(max_tokens=20)) for i, text in enumerate((*ids, ids[0][:1] * 63)))
        for one in (a, b, c):
            one.last = min(64, one.n_prompt + 20)

        def drafted(of: dict[Request, int]) -> list[list[int]]:
            """The draft tokens that the device words encode."""
            found = draft.propose(of)
            runner.device.wait()
            slots = {r: DRAFTED - words[0] for r, words in found.items()}
            history = runner.device.read("history").array
            return [history[slots[r], len(r.ids) : len(r.ids) + len(w)].tolist() for r, w in found.items()]

        assert drafted({a: 4, b: 2}) == [wanted[0][:4], wanted[1][:2]]
        before = submits.copy()
        for one, text, right in ((a, wanted[0], 2), (b, wanted[1], 1)):  # as if the third and the second had been wrong
            one.ids += text[:right]
            draft.verified(one, right - 1)
        assert drafted({a: 3, b: 3}) == [wanted[0][2:5], wanted[1][1:4]]
        assert submits.minus(before).submits == 3, "a pass for each draft token, of both"
        a.ids += wanted[0][2:6]  # all were accepted, and one more came
        draft.verified(a, 3)
        before = submits.copy()
        assert drafted({a: 2}) == [wanted[0][6:8]]
        assert submits.minus(before).submits == 2, "the last draft token, the token after it, and one more"
        a.ids += [(wanted[0][6] + 1) % 200, *wanted[0][7:9]]  # tokens that came without drafts
        assert len(drafted({a: 1})[0]) == 1
        for one in (a, b):
            draft.end(one)
        assert drafted({c: 3}) == [drafted({c: 1})[0]], "the context ends"
        draft.end(c)
        draft.close()
        assert not draft.scheduler.running and not draft.scheduler.waiting


@pytest.mark.slow
def test_drafts_queued_after_a_verification_equal_synchronous_ones() -> None:
    """With a draft model that is sometimes wrong, texts equal those without drafts, also of two sequences in the same
    passes and a third that starts when one ends. As many drafts are accepted as where the host reads each verification
    first."""
    how = {"temperature": 2.0, "seed": 5, "max_tokens": 16, "ignore_eos": True}
    options = {"ctx": 64, "slots": 2, "precision": "exact", "draft": cut(open_checkpoint(DEMO), (4, 6)), "speculate": 3}
    with hybrid.load(cut(open_checkpoint(DEMO), BOTH), for_model("vulkan"), **options) as model:
        prompts = [model.encode(text) for text in (PROMPT[:40], "class Reader:\n", "import os\n")]
        draft, taken, found = model.speculator.draft, list[int](), []
        assert draft is not None and draft.queues
        expects = draft.expects
        draft.expects = lambda request: (taken.append(n := expects(request)), n)[1]  # type: ignore[method-assign]
        wanted = [model.submit(ids, **how, speculate=0).result(timeout=300).ids for ids in prompts]
        for follows in (True, False):
            draft.queues = follows
            taken.clear()
            handles = [model.submit(ids, **how) for ids in prompts]
            done = [handle.result(timeout=300) for handle in handles]
            assert [d.ids for d in done] == wanted
            assert all(d.usage.accepted_tokens > 0 for d in done)
            right, drafted = (sum(getattr(d.usage, n) for d in done) for n in ("accepted_tokens", "drafted_tokens"))
            assert right < drafted, "some are wrong"
            assert (sum(taken) > 5) == follows
            alone = [model.submit(ids, **how).result(timeout=300) for ids in prompts]
            assert [d.ids for d in alone] == wanted
            found.append([(d.usage.drafted_tokens, d.usage.accepted_tokens) for d in alone])
            assert not model.engine.faults and not draft._copies
        assert found[0] == found[1], "drafted as where the host reads first"


def run_as_it_is(model: hybrid.Model, options: dict[str, Any]) -> list[int]:
    for _ in model.generate(
        options.get("ids", PROMPT), **{"max_tokens": TOKENS, "ignore_eos": True, **_but_ids(options)}
    ):
        pass
    assert model.stats is not None
    return list(model.stats.ids)


def _but_ids(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "ids"}


def run_plain(model: hybrid.Model, options: dict[str, Any]) -> list[int]:
    return run_as_it_is(model, {**options, "speculate": 0})


@pytest.mark.slow
def test_concurrent_requests_share_their_drafting(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    """Several kinds of requests, one without drafts; each text equals that of its request alone, and its usage counts
    its drafts."""
    prompt = model.encode(PROMPT)
    known = Known([[*prompt, *ids] for ids in plain.values()])
    options = set_drafter(model, known)
    for _ in range(2 if LONG else 1):  # the prompt is cached from earlier texts
        handles = [model.submit(prompt, max_tokens=TOKENS, ignore_eos=True, **how, **options) for how in WAYS.values()]
        handles.append(model.submit(prompt, max_tokens=TOKENS, ignore_eos=True, speculate=0))
        done = [handle.result(timeout=300) for handle in handles]
        assert [list(d.ids) for d in done] == [*plain.values(), plain["greedy"]]
        assert all(d.usage.accepted_tokens >= d.usage.drafted_tokens // 3 > 0 for d in done[:-1])
        assert done[-1].usage.drafted_tokens == done[-1].usage.accepted_tokens == 0
    found = model.metrics()
    assert found.drafted >= found.accepted > 0 and found.verified > 0
    assert not model.engine.faults
    audit(model.engine.scheduler)


@pytest.mark.slow
def test_drafts_obey_constraints_and_report_every_token(model: hybrid.Model, plain: dict[str, list[int]]) -> None:
    prompt = model.encode(PROMPT)
    options = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    wanted = model.submit(prompt, **options, constraint=Alternating(model), speculate=0).result(timeout=300)
    lines = [*prompt, *wanted.ids]
    for drafts in (
        Known([lines]),
        Known([[*prompt, *plain["greedy"]]]),
    ):  # drafts that it allows, and some that it forbids
        set_drafter(model, drafts)
        found = model.submit(prompt, **options, constraint=Alternating(model)).result(timeout=300)
        assert found.ids == wanted.ids and found.logprobs is not None and wanted.logprobs is not None
        assert [p.id for p in found.logprobs] == list(found.ids)
        assert all(abs(a.logprob - b.logprob) < 1e-3 for a, b in zip(found.logprobs, wanted.logprobs, strict=True))
    set_drafter(model, Known([lines]))
    assert model.submit(prompt, **options, constraint=Alternating(model)).result(timeout=300).usage.accepted_tokens >= 6
    handle = model.submit(prompt, max_tokens=TOKENS, ignore_eos=True)
    next(iter(handle.events()))
    handle.cancel()
    assert handle.result(timeout=300).finish in ("cancelled", "length"), "between drafts and their verification"


@pytest.mark.slow
def test_tokens_that_a_constraint_expects_are_verified(model: hybrid.Model) -> None:
    """Right guesses, wrong ones and forbidden ones leave the text as it is. The drafter is not asked meanwhile."""
    set_drafter(model, Replay({}, 1.0))
    asked = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 1, **WAYS["sampled"]}
    wanted = model.submit(PROMPT, **asked, constraint=Alternating(model), speculate=0).result(timeout=300)
    right = list(wanted.ids)
    for expects, low, high in (
        (right, 1.0, 1.0),
        ([t ^ 2 * (i % 3 == 0) for i, t in enumerate(right)], 0.2, 0.9),
        ([t ^ 2 for t in right], 0.0, 0.0),
    ):
        found = model.submit(PROMPT, **asked, constraint=Guiding(model, expects)).result(timeout=300)
        assert found.ids == wanted.ids and [p.id for p in found.logprobs or ()] == right
        assert found.usage.drafted_tokens and low <= found.usage.accepted_tokens / found.usage.drafted_tokens <= high
    forbidden = Guiding(model, [t ^ 1 for t in right])
    assert model.submit(PROMPT, **asked, constraint=forbidden).result(timeout=300).ids == wanted.ids
    unasked = model.submit(PROMPT, **asked, constraint=Guiding(model, right), speculate=0).result(timeout=300)
    assert unasked.ids == wanted.ids and not unasked.usage.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_constraints_give_drafts_without_a_drafter(backend: str) -> None:
    """On a model that was loaded without speculation: beside other requests, with a stop string, with an end among the
    drafts, and with preemptions. No request without a constraint gets drafts."""
    with hybrid.load(few(open_checkpoint(DEMO)), for_model(backend), ctx=64, precision="exact") as model:
        assert model.speculator is None
        plain = {"max_tokens": 40, "ignore_eos": True}
        prompts = [model.encode(text)[:12] for text in (PROMPT, "class Reader:\n")]
        ways = [WAYS["sampled"], {"max_tokens": 25}]

        def run(drafts: bool) -> list[Any]:
            """The ends of constrained requests, and of one without a constraint."""
            handles = [
                model.submit(
                    ids, **{**plain, **way}, constraint=Guiding(model, expects), speculate=None if drafts else 0
                )
                for ids, way, expects in zip(prompts, ways, texts, strict=True)
            ]
            return [h.result(timeout=300) for h in (*handles, model.submit(prompts[0], **plain))]

        texts: list[Sequence[int]] = [(), ()]
        wanted = run(False)
        texts = [done.ids for done in wanted[:2]]
        model.engine.drafting.k = 3
        found = run(True)
        assert [done.ids for done in found] == [done.ids for done in wanted] and not found[2].usage.drafted_tokens
        model.engine.drafting.k = None
        assert all(done.usage.accepted_tokens == done.usage.drafted_tokens > 0 for done in found[:2])
        assert model.metrics().preemptions > 0 and model.metrics().verified > 0
        stop = model.decode(texts[0][7:9])
        ends = [
            model.submit(
                prompts[0], **plain, **ways[0], stop=[stop], constraint=Guiding(model, texts[0]), speculate=k
            ).result(timeout=300)
            for k in (0, None)
        ]
        assert ends[0].text == ends[1].text and ends[0].finish == ends[1].finish == "stop"
        assert not model.engine.faults and not model.engine.runner.blocks.used["global"]
        audit(model.engine.scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_model_drafts_for_concurrent_requests(backend: str) -> None:
    """Two of three requests at a time, as there are slots; blocks of the cache are given back."""
    files = [few(open_checkpoint(DEMO)) for _ in range(2)]
    with hybrid.load(
        files[0], for_model(backend), ctx=64, slots=2, precision="exact", draft=files[1], speculate=2
    ) as model:
        prompts = [model.encode(text) for text in (PROMPT[:40], "class Reader:\n", "import os\n")]
        wanted = [run_plain(model, {"ids": ids, "max_tokens": 10}) for ids in prompts]
        done = [h.result(timeout=300) for h in [model.submit(ids, max_tokens=10, ignore_eos=True) for ids in prompts]]
        assert [list(d.ids) for d in done] == wanted
        assert all(d.usage.accepted_tokens >= 0.5 * d.usage.drafted_tokens > 0 for d in done)
        hearing = Hearing()
        heard = model.submit(prompts[0], max_tokens=6, ignore_eos=True, constraint=hearing).result(timeout=300)
        assert list(heard.ids) == wanted[0][:6] and not heard.usage.drafted_tokens, "the host does not read drafts"
        assert set(hearing.heard) <= set(heard.ids), "nor notifies a constraint of them"
        assert (
            not model.engine.faults and model.speculator is not None and not model.engine.runner.blocks.used["global"]
        )
        audit(model.engine.scheduler)


@pytest.mark.slow
def test_invalid_drafters_are_errors(tmp_path: Any) -> None:
    other = write_hf(tmp_path / "hf", tiny())
    for options, said in (
        ({"draft": other}, "it needs the model's tokenizer"),
        ({"speculate": 17}, "speculate must be auto, or a number of draft tokens, 0 to 16, not 17"),
        ({"speculate": "often"}, "speculate must be auto"),
        ({"speculate": 2, "deterministic": True}, "deterministic on cpu runs one row a pass"),
        ({"draft": tmp_path / "nothing.gguf"}, "nothing.gguf"),
    ):
        with pytest.raises((ValueError, OSError), match=said):
            hybrid.load(DEMO, "cpu", ctx=CTX, **options)
    assert most_drafts(None, None) == most_drafts("lookup", 0) == 0 and most_drafts("lookup", None) == MOST
    assert most_drafts(None, "auto") == MOST and most_drafts(None, 5) == 5


@pytest.mark.slow
def test_a_request_may_choose_auto_where_the_model_allows_it(tmp_path: Any) -> None:
    """If the model was loaded for it; otherwise the error names the allowed options."""
    file, asked = write_hf(tmp_path / "hf", tiny()), {"max_tokens": 4, "ignore_eos": True}
    for loaded, said in (
        ("auto", ""),
        (2, "loaded with 2 draft tokens a pass: give a number, 0 to 16, or load it with speculate='auto'"),
        (0, "loaded without speculation: load it with draft= or speculate="),
    ):
        with hybrid.load(file, "cpu", ctx=32, speculate=loaded) as model:
            ways: list[Any] = [
                lambda m=model, **how: "".join(m.generate("the bee", **asked, **how)),
                lambda m=model, **how: m.submit("the bee", **asked, **how).result(timeout=60).text,
            ]
            wanted = ways[0]()
            for ask in ways:
                with pytest.raises(ValueError, match=said) if said else nullcontext():
                    assert ask(speculate="auto") == wanted
                with pytest.raises(ValueError, match="must be auto, or a number of draft tokens, 0 to 16, not 'often'"):
                    ask(speculate="often")
