"""Conversations: cached tokens of a prompt are not run again, and the text equals that of a prompt run from its first
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
    """Two equal deterministic engines: the number of rows of a pass changes no bit."""
    folder = write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")
    options = {"ctx": 256, "deterministic": True, "memory": "1GiB"}
    with ExitStack() as stack:
        yield [stack.enter_context(hybrid.load(folder, for_model(request.param), **options)) for _ in range(2)]


@pytest.fixture
def models(opened: list[hybrid.Model]) -> Iterator[list[hybrid.Model]]:
    """Engines with an empty cache."""
    for model in opened:
        forget(model)
    yield opened
    for model in opened:
        check_validation(model.engine.device)


IDS = [2, *range(20, 79)]  # a block and most of the next


def forget(model: hybrid.Model) -> None:
    """Empty the cache."""
    model.engine.runner.blocks.clear()


@pytest.mark.slow
def test_a_conversation_that_continues_runs_what_is_new(models: list[hybrid.Model]) -> None:
    """The last token of a generation was sampled but not run: the cache holds one token less than the text, of which
    whole blocks are reused."""
    model, anew = models
    ids, said = list(IDS), 0
    for more in ([], [70, 9], []):  # the first answer ends at a block boundary
        "".join(model.generate([*ids, *more], BLOCK - len(IDS) % BLOCK, ignore_eos=True))
        stats = model.stats
        assert stats.cached_tokens == ((len(ids) - 1) // BLOCK * BLOCK if said else 0)
        assert stats.cached_tokens + stats.prompt_tokens == len(ids) + len(more)
        forget(anew)
        "".join(anew.generate([*ids, *more], BLOCK - len(IDS) % BLOCK, ignore_eos=True))
        assert anew.stats.ids == stats.ids and anew.stats.cached_tokens == 0
        ids, said = [*ids, *more, *stats.ids], said + 5


@pytest.mark.slow
def test_rows_after_a_difference_are_run_again(models: list[hybrid.Model]) -> None:
    """Only a prefix of the new prompt is found, and never the whole prompt."""
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
