"""Conversations: what the cache holds of a prompt is not run again, and the text is that of a prompt run from its first
token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import hybrid
from conformance.support.devices import BACKENDS, check_validation, for_model
from conformance.support.synthetic import tiny, write_hf
from hybrid.planning.cache import BLOCK


@pytest.fixture(scope="module", params=BACKENDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[hybrid.Model]]:
    """Two of the same, deterministic: how many rows a pass has changes no bit."""
    folder = write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")
    options = {"ctx": 256, "deterministic": True, "memory": "1GiB"}
    with ExitStack() as stack:
        yield [stack.enter_context(hybrid.load(folder, for_model(request.param), **options)) for _ in range(2)]


@pytest.fixture
def models(opened: list[hybrid.Model]) -> Iterator[list[hybrid.Model]]:
    """They hold nothing of an earlier test's."""
    for model in opened:
        forget(model)
    yield opened
    for model in opened:
        check_validation(model.engine.device)


IDS = [2, *range(20, 79)]  # a block and most of the next


def forget(model: hybrid.Model) -> None:
    """Let the next prompt find nothing."""
    model.engine.blocks.clear()


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True])
def test_a_conversation_that_goes_on_exactly_runs_the_last_token_first(models: list[hybrid.Model], held: bool) -> None:
    """The last token of a generation has been chosen but not run: the cache holds one token less than was said, of
    which whole blocks are found again; in a session or without."""
    model, anew = models
    with model.session() as session:
        ids, said = list(IDS), 0
        for more in ([], [70, 9], []):  # the first answer ends where a block does
            "".join(
                model.generate(
                    [*ids, *more], BLOCK - len(IDS) % BLOCK, ignore_eos=True, session=session if held else None
                )
            )
            stats = model.stats
            assert stats.cached_tokens == ((len(ids) - 1) // BLOCK * BLOCK if said else 0)
            assert stats.cached_tokens + stats.prompt_tokens == len(ids) + len(more)
            forget(anew)
            "".join(anew.generate([*ids, *more], BLOCK - len(IDS) % BLOCK, ignore_eos=True))
            assert anew.stats.ids == stats.ids and anew.stats.cached_tokens == 0
            ids, said = [*ids, *more, *stats.ids], said + 5


@pytest.mark.slow
def test_what_differs_is_run_again(models: list[hybrid.Model]) -> None:
    """Only blocks that the new prompt begins with are found, and never the whole prompt."""
    model, anew = models
    "".join(model.generate(IDS, 4, ignore_eos=True))
    held = [*IDS, *model.stats.ids]
    changed, other = [*IDS[:40], 77, 78], [*IDS[:9], 77, *IDS[10:]]
    for ids, same in ((IDS, BLOCK), (IDS[:BLOCK], 0), (changed, BLOCK), (other, 0), ([5, *held], 0)):
        "".join(model.generate(ids, 4, ignore_eos=True))
        found = model.stats
        assert found.cached_tokens == same and found.prompt_tokens == len(ids) - same
        forget(anew)
        "".join(anew.generate(ids, 4, ignore_eos=True))
        assert anew.stats.ids == found.ids


def test_a_session_is_for_one_generation_at_a_time(models: list[hybrid.Model]) -> None:
    model = models[0]
    session = model.session()
    first = model.generate(IDS, 4, ignore_eos=True, session=session)
    next(first)
    with pytest.raises(ValueError, match="in use by a generation that has not ended"):
        next(model.generate(IDS, 4, session=session))
    session.close()
    with pytest.raises(ValueError, match="the session was closed while this generation ran"):
        list(first)
    "".join(model.generate(IDS, 2, session=session))
    assert set(model.engine.blocks.used.values()) == {0}, "blocks are given back"
    session.close()


def test_in_a_slot_of_its_own_a_session_runs_what_it_does_not_hold(
    models: list[hybrid.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on schedules whose passes several devices run: all but the last token is held, whatever a block holds."""
    model, anew = models
    "".join(anew.generate(IDS, 6, ignore_eos=True))
    wanted = anew.stats.ids
    monkeypatch.setattr(model, "_apart", True)
    with model.session() as session:
        for ids, cached in ((IDS, 0), (IDS, len(IDS) - 1), ([*IDS, *wanted[:3]], len(IDS) + 2)):
            text = list(wanted)[len(ids) - len(IDS) :]
            "".join(model.generate(ids, len(text), ignore_eos=True, session=session))
            assert list(model.stats.ids) == text and model.stats.cached_tokens == cached
        said = [*IDS, *wanted]
        "".join(model.generate(said, 1, ignore_eos=True, session=session))
        assert model.stats.cached_tokens == len(said) - 1, "the last token was chosen and not run"
        said += model.stats.ids
        run = min(model.engine.positions[session._slot], len(said))  # a device may have gone on with its choice
        "".join(model.generate([*said, 7], 2, ignore_eos=True, session=session))
        assert model.stats.cached_tokens == run < len(said) + (model.device != "cpu")
        text = list(model.stats.ids)
        "".join(anew.generate([*said, 7], 2, ignore_eos=True))
        assert list(anew.stats.ids) == text
