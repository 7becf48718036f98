"""Aborted steps (hybrid.engine.runner.AbortedStep): whenever a wait times out, and whatever the engine runs next, every
request gets the same tokens as without the timeout, and the abort is reported once.

Here the host sets the word that a kernel sets on a timeout; test_workgroup_flags.py has kernels that do so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.engine.test_engine_cpu import IDS
from conformance.support.cooperative import HPARAMS, engine, give_up, layers, set_control, tuned
from conformance.support.devices import Devices, for_model
from conformance.support.profile import LONG
from conformance.support.synthetic import write_hf
from conformance.support.texts import ask, greedy, take
from hybrid.checkpoint import open_checkpoint
from hybrid.core.plan import FAULT_WORD
from hybrid.core.tensor import Tensor
from hybrid.devices.multi import MultiDevice
from hybrid.engine.handle import Handle
from hybrid.engine.loop import Engine
from hybrid.engine.request import Event, Options

pytestmark = pytest.mark.slow
DRAWN: dict[str, Any] = {"temperature": 1.2, "top_k": 50, "seed": 11}
Fault = Callable[[Engine], None]
Fresh = Callable[[], Engine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_checkpoint(write_hf(tmp_path_factory.mktemp("faults"), HPARAMS, dtype="f32"))


@pytest.fixture
def device(devices: Devices) -> Any:
    found = devices.get("vulkan")
    with tuned(found):
        yield found
    found.reset()


@pytest.fixture(scope="module")
def kept(open_devices: Devices, checkpoint: Any) -> Any:
    """An engine for two sequences, kept, because opening one takes longer than the tests."""
    return engine(open_devices.get("vulkan", timeout=300.0), checkpoint, slots=2)


@pytest.fixture
def fresh(kept: Engine) -> Iterator[Callable[[], Engine]]:
    """The kept engine in its initial state: no request, no cached prefix, no fault, and no earlier token in its
    history."""

    def again() -> Engine:
        runner = kept.runner
        while kept.step():  # dropped requests
            pass
        assert kept.scheduler.idle
        set_control(kept, {FAULT_WORD: 0})
        runner.blocks.clear()
        runner.cooperative, runner._last = True, None
        runner.faults.clear()
        runner._programs = {key: program for key, program in runner._programs.items() if key[0] != "decode"}
        runner.device.write("history", Tensor.of(np.full((2, kept.cache.ctx), 9999, np.int32)))
        return kept

    with tuned(kept.device):
        yield again


def undisturbed(made: Engine) -> None:
    """A run without the fault."""


def both(run: Callable[[Fault], tuple[Engine, Any]]) -> None:
    """A run's tokens are the same whether a wait times out in it or not."""
    made, wanted = run(undisturbed)
    assert made.runner.cooperative and made.faults == []
    made, found = run(give_up)
    assert found == wanted
    assert not made.runner.cooperative and len(made.faults) == 1 and "the pass was run again unfused" in made.faults[0]


def rest(*running: Iterator[Event]) -> list[list[int]]:
    """The remaining text of several requests."""
    return [[token for event in events for token in event.ids] for events in running]


# --- one text --------------------------------------------------------------------------------------------------------


def test_a_timed_out_wait_at_any_token_loses_none(fresh: Fresh) -> None:
    """At the last step of this text, the next request's steps are aborted."""
    texts = []
    for at in (99, *range(30)) if LONG else (99, 0, 1, 2, 11, 26, 27, 28):
        made, text = fresh(), list[int]()
        for i, event in enumerate(ask(made, IDS[:20], 30, **DRAWN).events()):
            text += event.ids
            if i == at:
                give_up(made)
                passes = made.scheduler.counts.passes
        assert len(made.faults) == (at < 29 and made.scheduler.counts.passes > passes) and len(text) == 30
        assert at > 26 or made.faults, "two steps are queued after the token that is read"
        texts.append([*text, *greedy(made, IDS[:9], 3)])
        assert len(made.faults) == (at < 30)
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("profile", [False, True])
def test_a_text_continues_unfused(device: Any, checkpoint: Any, profile: bool) -> None:
    made = engine(device, checkpoint, profile=profile)
    events = ask(made, IDS[:20], 6).events()
    take(events, 3)
    assert layers(made.runner.program("decode", 1, 1))
    give_up(made)
    assert len(rest(events)[0]) == 3
    assert not layers(made.runner.program("decode", 1, 1))
    if profile:
        names = [p.plan.split(".")[1] for p in made.runner.trace]
        # The aborted step has taken time too; its sequence is run again as a prompt.
        prompt = ["prefill", "prefill"]
        assert names == [*prompt, "decode", "decode", "decode", *prompt, "decode", "decode"]


def test_a_pass_behind_an_aborted_one_is_no_work(fresh: Fresh) -> None:
    """The aborted one is: it has taken time."""

    def submitted_and_ended() -> tuple[int, int]:
        return made.scheduler.counts.passes, sum(total.passes for total in made.runner.work.totals().values())

    made = fresh()
    submitted, ended = submitted_and_ended()
    events = ask(made, IDS[:20], 12).events()
    take(events, 3)
    give_up(made)
    rest(events)
    more, done = submitted_and_ended()
    assert len(made.faults) == 1 and (more - submitted) - (done - ended) == 1


def test_text_up_to_the_end_of_the_context(device: Any, checkpoint: Any) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = engine(device, checkpoint, ctx=32)
        handle = ask(made, IDS[:20], 99)
        events = handle.events()
        text = take(events, 9)
        fault(made)
        text += rest(events)[0]
        assert len(text) == 12 and handle.result().finish == "context"
        return made, text

    both(run)


@pytest.mark.parametrize("read", ["as they come", "at the end", "from a thread"])
def test_an_aborted_step_leaves_no_token_of_before(fresh: Fresh, read: str) -> None:
    """Other tokens occupy the positions that the aborted step should have sampled."""

    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        greedy(made, IDS[:20], 30)
        ids = [*IDS[:18], *IDS[20:30]]
        if read == "from a thread":
            fault(made)
            return made, made.submit(ids, Options(max_tokens=7, ignore_eos=True)).result(60).ids
        handle = ask(made, ids, 7)
        events = handle.events()
        text = take(events, 2)
        fault(made)
        return made, [text, rest(events)] if read == "as they come" else handle.result().ids

    both(run)


# --- the next request ------------------------------------------------------------------------------------------------


def continued(made: Engine, ids: Sequence[int]) -> Any:
    return greedy(made, ids, 4)


def rewound(made: Engine, ids: Sequence[int]) -> Any:
    return greedy(made, [*ids[:-2], 7, 9], 5)


def another_text(made: Engine, ids: Sequence[int]) -> Any:
    return greedy(made, IDS[:9], 5)


def another_prompt_beside(made: Engine, ids: Sequence[int]) -> Any:
    running = [ask(made, prompt, 5).events() for prompt in (IDS[3:20], ids)]
    return [*(take(events, 2) for events in running), rest(*running)]


def another_choice(made: Engine, ids: Sequence[int]) -> Any:
    return greedy(made, ids, 4, **DRAWN)


def logits(made: Engine, ids: Sequence[int]) -> Any:
    return [made.logits(IDS[:20]).tobytes(), greedy(made, ids, 4)]


@pytest.mark.parametrize("drop", ["ended", "forgotten"])
@pytest.mark.parametrize(
    "then", [continued, rewound, another_text, another_prompt_beside, another_choice, logits], ids=lambda f: f.__name__
)
def test_a_request_is_dropped_while_its_steps_are_aborted(
    fresh: Fresh, then: Callable[[Engine, Sequence[int]], Any], drop: str
) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        handle: Handle | None = ask(made, IDS[:20], 30)
        assert handle is not None
        events = handle.events()
        text = take(events, 4)
        fault(made)
        text += take(events, 2)  # steps submitted before; those queued after them are aborted
        assert made.scheduler.in_flight == 2
        if drop == "ended":
            made.finish([handle.request])
        events.close()  # type: ignore[attr-defined]  # a generator
        handle = None
        return made, [text, then(made, [*IDS[:20], *text])]

    both(run)


def test_a_prompt_after_aborted_steps(fresh: Fresh) -> None:
    """Of a conversation with its cache in the second slot, beside a text that decodes."""

    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        first, second = ask(made, IDS[:20], 12).events(), ask(made, IDS[:5], 3).events()
        text = [take(first, 3), rest(second)]
        fault(made)
        text.append(take(first, 2))
        third = ask(made, [*IDS[:5], *text[1][0], 7, 9], 4).events()
        return made, [text, rest(third, first)]

    both(run)


def test_sequences_that_decode_together_and_alone(fresh: Fresh) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        first = ask(made, IDS[:30], 16, **DRAWN).events()
        text: list[Any] = [take(first, 3)]
        second = ask(made, IDS[5:9], 7, temperature=0.9, seed=3).events()
        text.append(take(second, 2))
        fault(made)
        text += rest(second)  # the first is alone afterwards
        return made, [*text, rest(first), greedy(made, IDS[:30], 5)]

    both(run)


@pytest.mark.parametrize("what", ["logits", "hidden_states"])
def test_rows_that_are_read_back_beside_aborted_steps(fresh: Fresh, what: str) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        events = ask(made, IDS[:20], 12).events()
        text = take(events, 3)
        fault(made)
        text += take(events, 1)
        rows = getattr(made, what)(IDS[:40], 8)
        return made, [text, rows.tobytes(), rest(events)]

    both(run)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_on_several_devices(device: Any, checkpoint: Any, depth: int) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = engine(MultiDevice(device, {}, {}, depth), checkpoint, slots=2)
        first = ask(made, IDS[:30], 12).events()
        text: list[Any] = [take(first, 4)]
        fault(made)
        second = ask(made, IDS[5:25], 6).events()
        return made, [*text, take(first, 2), rest(second, first)]

    both(run)


# --- reports and failures --------------------------------------------------------------------------------------------


def test_a_conversation_continues_after_an_abort_and_reports_it_once(checkpoint: Any, caplog: Any) -> None:
    path, found = str(checkpoint.path), []
    for fault in (undisturbed, give_up):
        opened = for_model("vulkan")
        with hybrid.load(path, opened, weights="q8_0", ctx=128) as model, tuned(opened.main):
            ids = IDS[:40]
            for turn in range(3):
                for i, _ in enumerate(model.generate(ids, 12, ignore_eos=True)):
                    if turn == 1 and i == 4:
                        fault(model.engine)
                assert model.stats is not None and (model.stats.cached_tokens > 0) == (turn > 0)
                ids = [*ids, *model.stats.ids, 7, 9]
            found.append(ids)
            said = model.engine.faults
            assert len(said) == (fault is give_up) and [s for s in model.stats.passed_over if s in said] == said
    assert found[0] == found[1]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("where", ["abort", "start"])
def test_a_run_that_is_interrupted_gives_no_wrong_token(
    fresh: Fresh, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while aborted steps are waited for, or run again: a reader that continues gets every token."""
    wanted = greedy(fresh(), IDS[:20], 10)
    made = fresh()
    handle = ask(made, IDS[:20], 10)
    assert take(handle.events(), 3) == wanted[:3]
    give_up(made)
    whole = getattr(made.runner, where)

    def interrupted(*args: Any) -> Any:
        if where == "start" and made.runner.cooperative:
            return whole(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made.runner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.result()
    assert not handle.done and len(made.faults) == (where == "start")
    assert handle.request.generated == wanted[: len(handle.request.generated)]
    assert list(handle.result().ids) == wanted and len(made.faults) == 1


# --- real timeouts ---------------------------------------------------------------------------------------------------


def test_workgroups_that_are_not_all_running_cost_no_token(
    device: Any, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound kernels, of more workgroups than a CPU driver runs at once, and on a GPU with a bound of one poll: steps
    may be aborted, no token is wrong."""
    texts = []
    for sound in (True, False):
        if not sound:
            monkeypatch.setattr(device, "cores", max(device.cores, 8))
            monkeypatch.setattr(device, "polls", device.polls if device.info.kind == "cpu" else 0)
        made = engine(device, checkpoint)
        texts.append(greedy(made, IDS[:40], 21))
        assert len(made.faults) == (not made.runner.cooperative)
    assert texts[0] == texts[1]
