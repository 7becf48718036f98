"""Sessions: a sequence that stays in the cache goes on as one that is run from its first token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import hybrid
from conformance.support.devices import BACKENDS, Devices
from conformance.support.synthetic import tiny, write_hf


@pytest.fixture(params=BACKENDS)
def models(request: pytest.FixtureRequest, devices: Devices, tmp_path: Path) -> Iterator[list[hybrid.Model]]:
    """Two of the same, deterministic: how many rows a pass has changes no bit."""
    devices.get(request.param)  # skips where there is no Vulkan
    folder = write_hf(tmp_path, tiny(), dtype="f32")
    with ExitStack() as stack:
        yield [stack.enter_context(hybrid.load(folder, request.param, ctx=128, deterministic=True)) for _ in range(2)]


IDS = [2, *range(20, 40)]


def test_a_conversation_that_goes_on_exactly_runs_the_last_token_first(models: list[hybrid.Model]) -> None:
    """The last token of a generation has been chosen but not run: the cache holds one token less than was said."""
    model, anew = models
    with model.session() as session:
        ids, said = list(IDS), 0
        for more in ([], [], [70, 9]):
            "".join(model.generate([*ids, *more], 5, ignore_eos=True, session=session))
            stats = model.stats
            assert stats.cached_tokens == (len(ids) - 1 if said else 0)
            assert stats.cached_tokens + stats.prompt_tokens == len(ids) + len(more)
            "".join(anew.generate([*ids, *more], 5, ignore_eos=True))
            assert anew.stats.ids == stats.ids and anew.stats.cached_tokens == 0
            ids, said = [*ids, *more, *stats.ids], said + 5


def test_what_differs_is_run_again(models: list[hybrid.Model]) -> None:
    """Of what a session holds only what the new prompt begins with is kept, and never the whole prompt."""
    model, anew = models
    with model.session() as session:
        "".join(model.generate(IDS, 4, ignore_eos=True, session=session))
        held = [*IDS, *model.stats.ids]
        for ids, same in ((IDS, len(IDS) - 1), ([*IDS[:9], 77, 78], 9), ([5, *held], 0)):
            "".join(model.generate(ids, 4, ignore_eos=True, session=session))
            found = model.stats
            assert found.cached_tokens == same and found.prompt_tokens == len(ids) - same
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
    assert not model.engine.positions, "the slot is given back"
    "".join(model.generate(IDS, 2, session=session))
    assert model.stats.cached_tokens == 0
    session.close()
