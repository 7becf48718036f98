"""Drafters: prompt lookup, known texts, a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import hybrid
from conformance.engine.test_speculation import PROMPT, few
from conformance.support.devices import BACKENDS, for_model
from conformance.support.fake_runner import request
from conformance.support.profile import LONG
from hybrid.checkpoint import open_checkpoint
from hybrid.core.places import DEMO
from hybrid.core.plan import FAULTED
from hybrid.engine.blocks import Blocks, Group
from hybrid.engine.request import Request
from hybrid.engine.runner import Flight
from hybrid.engine.scheduler import Limits, Pass
from hybrid.engine.speculation import DraftModel, Lookup, Replay
from hybrid.kernels.oracle.device import CpuDevice


def after(found: Any, ids: Sequence[int], most: int) -> list[int]:
    """Drafts for one sequence, a new one for each call."""
    return next(iter(found.propose({request(0, ids, 99): most}).values()))


def test_lookup_finds_continuations_and_repeats() -> None:
    found, one = Lookup(), request(0, [1, 2, 3, 4, 5, 1, 2], 99)
    assert found.propose({one: 3}) == {one: [3, 4, 5]}, "after two tokens"
    one.ids += [9]
    assert found.propose({one: 3}) == {one: []}, "no earlier token"
    one.ids += [1, 2]
    assert found.propose({one: 3}) == {one: [9, 1, 2]}, "the latest place"
    assert after(found, [7, 1, 2, 3, 4, 8, 6, 3, 4, 9, 1, 2, 3, 4], 2) == [8, 6], "four tokens go before two"
    assert after(found, [5, 6, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "repeatedly"
    assert after(found, [4, 4], 3) == [] == after(found, [4], 2)
    found.end(one)
    assert one not in found._places


def test_replay_is_right_as_often_as_asked() -> None:
    text = list(range(100, 1100))
    for rate in (0.0, 0.6, 1.0):
        drafted = after(Replay({(1,): text}, rate), [1], 1000)
        assert abs(sum(a == b for a, b in zip(drafted, text, strict=True)) / len(text) - rate) <= 0.05
    one = request(0, [1], 9)
    one.ids += text
    assert Replay({(1,): text}, 1.0).propose({one: 3}) == {one: []}, "no drafts after its end"
    assert after(Replay({(1,): text}, 1.0), [2], 3) == [], "nor of another prompt"
    with pytest.raises(ValueError, match="rate must be a probability"):
        Replay({(1,): text}, 1.5)


def draft(ctx: int, passes: list[Pass | None] | None = None) -> DraftModel:
    """A draft model on a runner without a device, whose passes sample no tokens. passes: records them; None: an abort."""
    noted = [] if passes is None else passes
    runner: Any = SimpleNamespace(
        device=SimpleNamespace(shares=lambda name: True, passes_ahead=2, peek=lambda *place: FAULTED),
        cache=SimpleNamespace(ctx=ctx, slots=1),
        blocks=Blocks([Group("local", 80, 2)], 4),
        limits=lambda queue: Limits(1, ctx, rows=8),
        assign=lambda own: None,
        start=lambda made: (noted.append(made), Flight(made, 1, 0.0))[1],
        abort=lambda: noted.append(None),
    )
    return DraftModel(runner, "null", lambda: None)


def verified_on(one: Request) -> Request:
    """Verify as the larger model would."""
    one.slot, one.last = 0, one.n_prompt + one.limit
    return one


def test_a_draft_stops_at_the_context() -> None:
    for n, follows in ((33, True), (34, False)):
        one, small = verified_on(request(0, [1] * n, 40 - n)), draft(40)
        assert len(small.propose({one: 3})[one]) == 3
        assert small.queue_after({one: 3}, 3) == follows, "three verified, three queued after them"


def test_a_draft_expects_rows_after_the_last_verification() -> None:
    """If all drafts were accepted, its first pass runs the last of them, and drafts no token."""
    for right, expected in ((3, 2), (1, 3)):
        one, small = verified_on(request(0, [1] * 10, 30)), draft(40)
        small.propose({one: 3})
        assert small.expects(one) == 0 and small.queue_after({one: 3}, 3)
        one.ids += [1] * (right + 1)
        small.verified(one, right)
        assert small.expects(one) == expected
        small.propose({one: expected})
        one.ids += [1]
        assert small.expects(one) == 0, "no pass was queued after that one"


def test_a_draft_recomputes_rejected_tokens() -> None:
    """Also where tokens came without drafts since then."""
    passes = list[Pass | None]()
    one, small = verified_on(request(0, [1] * 10, 30)), draft(40, passes)
    small.propose({one: 3})
    one.ids += [2]
    small.verified(one, 0)
    one.ids += [3, 3, 3]
    passes.clear()
    small.propose({one: 1})
    assert [(run.start, run.ids) for done in passes if done for run in done.runs] == [(10, (2, 3, 3, 3))]


def test_an_aborted_step_of_a_draft_is_run_again() -> None:
    passes = list[Pass | None]()
    one, small = verified_on(request(0, [1] * 6, 30)), draft(40, passes)
    small.propose({one: 2})
    small.wait()
    assert passes[-1] is None, "aborted"
    small.propose({one: 2})
    again = passes[passes.index(None) + 1]
    assert again is not None and again.runs[0].start == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gone", "backend"),
    [
        pytest.param(gone, backend, id=f"{name}-{backend}")
        for name, gone in (("passes", ("start",)), ("all", ("start", "assign")))
        for backend in BACKENDS
        if LONG or backend == "cpu" or name == "all"
    ],
)
def test_a_draft_that_fails_while_it_runs_is_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, backend: str, gone: tuple[str, ...]
) -> None:
    """Its device, with its memory, and its file are released while the text continues; not only when the model is
    closed or collected."""
    files = [few(open_checkpoint(DEMO)) for _ in range(2)]
    with hybrid.load(files[0], for_model(backend), ctx=64, precision="exact", draft=files[1], speculate=3) as model:
        assert model.speculator is not None
        draft = model.speculator.drafter
        assert isinstance(draft, DraftModel) and draft.runner.device is not model.engine.device
        model.speculator.drafter = None
        wanted = "".join(model.generate(PROMPT, max_tokens=12, ignore_eos=True))
        model.speculator.drafter = draft

        def fail(*given: Any, **named: Any) -> None:
            raise RuntimeError("the draft's device is gone")

        for name in gone:
            monkeypatch.setattr(draft.runner, name, fail)
        for _ in range(2):
            assert "".join(model.generate(PROMPT, max_tokens=12, ignore_eos=True)) == wanted
        assert (
            model.speculator.drafter is None
            and len(model.engine.faults) == 1
            and "device is gone" in model.engine.faults[0]
        )
        with pytest.raises(RuntimeError, match="closed"):
            draft.runner.device.check_open()
        with pytest.raises(ValueError, match="closed"):
            files[1].packed("token_embd")


@pytest.mark.slow
def test_a_draft_that_cannot_be_made_ready_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's device and file, and those of the model."""
    closed = []

    def fail(self: DraftModel, *given: Any) -> None:
        raise RuntimeError("no memory for its programs")

    def close(self: CpuDevice) -> None:
        closed.append(self)

    monkeypatch.setattr(DraftModel, "__init__", fail)
    monkeypatch.setattr(CpuDevice, "close", close)
    files = [few(open_checkpoint(DEMO)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="no memory for its programs"):
        hybrid.load(files[0], "cpu", ctx=32, draft=files[1])
    assert len(set(map(id, closed))) == 2
    for file in files:
        with pytest.raises(ValueError, match="closed"):
            file.packed("token_embd")
