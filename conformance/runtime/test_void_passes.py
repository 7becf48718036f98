"""Void passes (hybrid/engine/voids.py): whenever a wait is given up, and whatever is asked of the engine next, every
sequence gets the tokens that it gets undisturbed, and what happened is reported once.

Here the host sets the word that a kernel sets which gives up; test_mailbox.py has kernels that do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hybrid.engine.GONE import voids

import hybrid
from conformance.engine.test_engine_cpu import IDS
from conformance.support.cooperative import HPARAMS, engine, give_up, layers, tuned
from conformance.support.devices import Devices, for_model
from conformance.support.profile import LONG
from conformance.support.synthetic import write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.core.tensor import Tensor
from hybrid.devices.multi import MultiDevice
from hybrid.engine.loop import Engine
from hybrid.engine.sampling import Sampling

pytestmark = pytest.mark.slow
DRAWN = Sampling(temperature=1.2, top_k=50, seed=11)
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
    """An engine for two sequences; to make one takes longer than what it does here."""
    return engine(open_devices.get("vulkan", timeout=300.0), checkpoint, slots=2)


@pytest.fixture
def fresh(kept: Engine) -> Iterator[Callable[[], Engine]]:
    """The kept engine as if it were new: no sequence, no fault, and no token of before in its places."""

    def again() -> Engine:
        for slot in list(kept.positions):
            kept.release(slot)
        kept.cooperative, kept.faults = True, []
        kept.forget_programs("decode")
        kept.device.write("history", Tensor.of(np.full((2, kept.cache.ctx), 9999, np.int32)))
        return kept

    with tuned(kept.device):
        yield again


def undisturbed(made: Engine) -> None:
    """The fault that does not happen."""


def both(run: Callable[[Fault], tuple[Engine, Any]]) -> None:
    """A run's tokens are the same whether a wait is given up in it or not."""
    made, wanted = run(undisturbed)
    assert made.cooperative and made.faults == []
    made, found = run(give_up)
    assert found == wanted
    assert not made.cooperative and len(made.faults) == 1 and "run again by separate steps" in made.faults[0]


# --- one text --------------------------------------------------------------------------------------------------------


def test_a_wait_given_up_at_any_token_costs_none(fresh: Fresh) -> None:
    """In streams of one token and of several in a submit: the rest of those submitted is void, and one more."""
    for at_once, short in ((1, (99, 0, 2, 28)), (4, (99, 0, 3, 4, 11))):
        texts = []
        for at in (99, 0, 1, 2, 3, 4, 11, 28) if LONG else short:
            made = fresh()
            slot, text = made.admit(sampling=DRAWN), []
            for i, token in enumerate(made.stream(slot, IDS[:20], 30, at_once)):
                text.append(token)
                if i == at:
                    give_up(made)
            made.wait()
            assert len(made.faults) == (at < 29) and len(text) == 30
            texts.append(text)
        assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("profile", [False, True])
def test_a_text_goes_on_by_separate_steps(device: Any, checkpoint: Any, profile: bool) -> None:
    made = engine(device, checkpoint, profile=profile)
    made.prefill({0: IDS[:20]})
    made.decode(2)
    assert layers(made.program("decode", 1, 1))
    give_up(made)
    made.decode(2)
    assert not layers(made.program("decode", 1, 1))
    if profile:
        assert (
            sum(".decode." in p.plan for p in made.trace) == 3
        )  # the void ones have taken time too, and run once more


def test_text_up_to_the_end_of_the_context(device: Any, checkpoint: Any) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = engine(device, checkpoint, ctx=32)
        text = []
        for token in made.stream(made.admit(), IDS[:20], 99, 4):
            text.append(token)
            if len(text) == 9:
                fault(made)
        made.wait()
        assert len(text) == 12
        return made, text

    both(run)


@pytest.mark.parametrize("read", ["all", "the last", "the last of a ticket"])
def test_tokens_that_are_read_late(fresh: Fresh, read: str) -> None:
    """No place of a void pass but the first says that it is void."""

    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        made.prefill({0: IDS[:20]})
        made.decode(30)
        assert made.rewind(0, 18, anyway=True)
        made.prefill({0: IDS[20:30]})  # other tokens lie in the places from here on
        made.decode(1)
        fault(made)
        for times in (1, 3, 2):
            ticket = made.submit_decode((0,), times)
        end = made.positions[0]
        if read == "all":
            return made, [made.token(0, at) for at in range(end - 6, end + 1)]
        if read == "the last":
            return made, made.token(0, end)
        made.wait(ticket)
        return made, made.token(0, end, ticket)

    both(run)


# --- what is asked next ----------------------------------------------------------------------------------------------


def rewound(made: Engine) -> Any:
    assert made.rewind(0, made.positions[0] - 2)
    return [made.prefill({0: [7, 9]}), made.decode(4)]


def released(made: Engine) -> Any:
    made.release(0)
    return [made.prefill({0: IDS[:9]}), made.decode(4)]


def another_prompt(made: Engine) -> Any:
    return [made.prefill({1: IDS[3:20]}), made.decode(4, [1]), made.decode(4, [0]), made.decode(4)]


def another_sequence(made: Engine) -> Any:
    made.admit(slot=1)
    at = made.positions[0]
    return [made.token(0, i) for i in range(at - 3, at + 1)], made.decode(3, [0])


def another_choice(made: Engine) -> Any:
    made.set_sampling(0, DRAWN)
    return made.decode(4)


def logits(made: Engine) -> Any:
    return [made.logits(IDS[:20]).tobytes(), made.decode(4)]


@pytest.mark.parametrize(
    "then", [rewound, released, another_prompt, another_sequence, another_choice, logits], ids=lambda f: f.__name__
)
def test_a_stream_is_dropped_while_its_passes_are_void(fresh: Fresh, then: Callable[[Engine], Any]) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        slot = made.admit()
        stream = made.stream(slot, IDS[:20], 30, 2)
        text = [next(stream) for _ in range(4)]
        fault(made)
        text += [next(stream) for _ in range(2)]  # whose passes may have been good; the ones after them are not
        stream.close()
        return made, [text, then(made)]

    both(run)


def test_a_prompt_that_follows_void_passes(fresh: Fresh) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        made.prefill({0: IDS[:20], 1: IDS[:5]})
        made.decode(3)
        fault(made)
        made.submit_decode((0, 1), 2)
        made.submit_prefill({1: [7, 9]})
        return made, [made.token(0, made.positions[0]), made.decode(4)]

    both(run)


def test_sequences_that_decode_together_and_apart(fresh: Fresh) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = fresh()
        slots = [made.admit(sampling=DRAWN), made.admit(sampling=Sampling(temperature=0.9, seed=3))]
        text: list[Any] = [
            made.prefill({slots[0]: IDS[:30], slots[1]: IDS[5:9]}),
            made.decode(3),
            made.decode(2, [slots[1]]),
        ]
        made.submit_decode(slots, 1)
        fault(made)
        for _ in range(2):
            made.submit_decode(slots, 2)
        made.submit_decode(slots[:1], 2)  # rows are set up anew: the void passes of both come first
        text += [[made.token(s, at) for at in range(31, made.positions[s] + 1)] for s in slots]
        return made, [*text, made.decode(5)]

    both(run)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_on_several_devices(device: Any, checkpoint: Any, depth: int) -> None:
    def run(fault: Fault) -> tuple[Engine, Any]:
        made = engine(MultiDevice(device, {}, {}, depth), checkpoint, slots=2)
        text: list[Any] = [made.prefill({0: IDS[:30]}), made.decode(3)]
        fault(made)
        made.submit_decode((0,), 3)
        text += [made.prefill({1: IDS[5:25]}), [made.token(0, at) for at in range(34, 37)]]
        return made, [*text, made.decode(5)]

    both(run)


# --- what is said, and what fails ------------------------------------------------------------------------------------


def test_a_conversation_goes_on_and_says_once_what_happened(checkpoint: Any, caplog: Any) -> None:
    path, found = str(checkpoint.path), []
    for fault in (undisturbed, give_up):
        opened = for_model("vulkan")
        with (
            hybrid.load(path, opened, weights="q8_0", ctx=128) as model,
            tuned(opened.main),
            model.session() as session,
        ):
            ids = IDS[:20]
            for turn in range(3):
                for i, _ in enumerate(model.generate(ids, 12, ignore_eos=True, session=session, tokens_per_submit=2)):
                    if turn == 1 and i == 4:
                        fault(model.engine)
                ids = [*ids, *model.stats.ids, 7, 9]
            found.append(ids)
            assert list(model.stats.passed_over).count(model.engine.faults[0] if model.engine.faults else "") == (
                fault is give_up
            )
    assert found[0] == found[1]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_run_that_is_interrupted_gives_no_wrong_token(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while void passes are run again: the sequence is where the device has it, and can go on from there."""
    made = fresh()
    wanted = [made.prefill({0: IDS[:20]})[0], *made.decode(9)[0]]
    made = fresh()
    made.prefill({0: IDS[:20]})
    made.decode(2)
    give_up(made)
    made.submit_decode((0,), 4)

    def interrupted(*args: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made, "submit_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.wait()
    with pytest.raises(RuntimeError, match="no token was chosen for position 23 of slot 0: its pass was void"):
        made.token(0, 23)
    assert made.positions[0] == 22
    assert made.decode(7)[0] == wanted[3:]


def test_passes_that_do_not_add_up_are_an_error(fresh: Fresh) -> None:
    made = fresh()
    made.prefill({0: IDS[:20]})
    made.decode(2)
    made.positions[0] -= 1
    give_up(made)
    with pytest.raises(
        RuntimeError, match=r"void passes left sequences at positions \{0: 22\}, submitted were \{0: 21\}"
    ):
        voids.run_again(made, (0,))
    made.positions[0] += 1


# --- waits that are given up by themselves ---------------------------------------------------------------------------


def test_workgroups_that_are_not_all_running_cost_no_token(
    device: Any, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound kernels, of more workgroups than a CPU driver runs at once, and on a GPU with a bound of one poll: passes
    may be void, no token is wrong."""
    texts = []
    for sound in (True, False):
        if not sound:
            monkeypatch.setattr(device, "cores", max(device.cores, 8))
            monkeypatch.setattr(device, "polls", device.polls if device.info.kind == "cpu" else 0)
        made = engine(device, checkpoint)
        texts.append([made.prefill({0: IDS[:40]})[0], *made.decode(20)[0]])
        assert len(made.faults) == (not made.cooperative)
    assert texts[0] == texts[1]
