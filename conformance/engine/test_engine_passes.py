"""How an engine cuts its work into passes, on the NumPy device: rows, buckets, submits, and what is left when it
ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid.engine.GONE import chunks

import hybrid
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import ContextExceeded
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.sampling import Sampling
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.planning.passes import (
    HIDDEN_BYTES,
    LOGITS_BYTES,
    bucket_of,
    buckets,
    capabilities_of,
    chunk_of,
    decode_buckets_of,
    fixed_rows,
    pass_sizes,
)

IDS = [2, *range(20, 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine(open_checkpoint(folder), CpuDevice(), EngineConfig(ctx=64))


def test_prompts_are_cut_into_passes() -> None:
    """Rows of all prompts one after another; a pass has an output row for each prompt that ends in it."""
    prompts, starts = {4: [10, 11, 12], 1: [20], 0: [30, 31, 32, 33]}, {4: 5, 1: 0, 0: 2}
    made = list(chunks(prompts, starts, 3))
    assert [c.tokens.tolist() for c in made] == [[10, 11, 12], [20, 30, 31], [32, 33]]
    assert [c.positions.tolist() for c in made] == [[5, 6, 7], [0, 2, 3], [4, 5]]
    assert [c.slots.tolist() for c in made] == [[4, 4, 4], [1, 0, 0], [0, 0]]
    assert [c.out_rows.tolist() for c in made] == [[2], [0], [1]] and [c.context for c in made] == [8, 4, 6]
    (whole,) = chunks(prompts, starts, 8)
    assert whole.out_rows.tolist() == [2, 3, 7]
    assert all(a.dtype == np.int32 for a in (whole.tokens, whole.positions, whole.slots, whole.out_rows))


def test_buckets_hold_what_they_must() -> None:
    assert (
        buckets(512) == (1, 8, 32, 128, 512) and buckets(8) == (1, 8) and buckets(9) == (1, 8, 9) and buckets(1) == (1,)
    )
    assert [bucket_of(n, (1, 8, 32)) for n in (1, 2, 8, 9, 32)] == [1, 8, 8, 32, 32]
    with pytest.raises(ValueError, match="33 rows do not fit in the largest bucket, 32"):
        bucket_of(33, (1, 8, 32))


def test_passes_that_read_logits_back_fit_in_host_memory() -> None:
    hp = tiny(vocab=1 << 20, hidden=1 << 15)
    sizes = pass_sizes(hp, ctx=256, slots=2, chunk=128)
    assert sizes.rows == (1, 8, 32, 128) and sizes.outs == sizes.decode == (1, 2)
    for can, decode in ((["f16_matrices"], (1, 2, 4, 8, 16, 20)), ([], (1, 8, 20))):
        sizes = pass_sizes(hp, ctx=256, slots=20, chunk=128, decode=decode_buckets_of(can))
        assert sizes.outs == (1, 8, 20) and sizes.decode == decode
    assert sizes.logits == 8 and sizes.logits * 4 * hp.vocab <= LOGITS_BYTES < 32 * 4 * hp.vocab
    assert sizes.hidden == 128 and sizes.hidden * 4 * hp.hidden * (hp.n_layers + 1) <= HIDDEN_BYTES
    assert pass_sizes(tiny(vocab=1 << 30), 256, 1, 128).logits == 1  # one row, whatever it takes
    assert pass_sizes(hp, ctx=20, slots=2, chunk=512).rows == (1, 8, 32, 40)  # no more rows than positions
    assert pass_sizes(hp, ctx=1, slots=4, chunk=2).rows == (1, 4)  # a row for each slot
    assert pass_sizes(hp, 256, 2, 128, fixed=8) == pass_sizes(hp, 256, 1, 512, fixed=8)
    assert [fixed_rows("vulkan", n) for n in (1, 8, 9)] == [8, 8, 9] and fixed_rows("cpu", 1) == 1


def test_passes_are_wider_where_matrix_units_multiply() -> None:
    assert chunk_of({"f16_matrices"}) == 2048 and chunk_of(()) == 512
    assert (
        capabilities_of(lambda name: name == "f16_matrices") == {"f16_matrices"}
        and capabilities_of(lambda name: False) == set()
    )


def test_a_token_has_to_fit_in_the_context(engine: Engine) -> None:
    engine.prefill({0: IDS[:30]})
    engine.submit_decode((0,), 34)  # to the last position
    with pytest.raises(ContextExceeded, match="slot 0 has 64 tokens of 64: no room for 1 more"):
        engine.submit_decode((0,))
    engine.release(0)
    engine.admit(slot=0)
    with pytest.raises(ContextExceeded, match="slot 0 has 0 tokens of 64: no room for 65 more"):
        engine.submit_decode((0,), 65)


def test_no_more_passes_are_run_than_tokens_need(engine: Engine) -> None:
    """The last token is chosen and never run."""
    for most, ran in ((1, 10), (5, 14), (100, 63)):
        slot = engine.admit()
        tokens = list(engine.stream(slot, IDS[:10], most))
        assert len(tokens) == min(most, 54) and engine.positions[slot] == ran
        engine.release(slot)


def test_submits_are_read_in_their_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the next submit is made before a token is read, as on every device but cpu."""
    alone = list(engine.stream(engine.admit(), IDS[:10], 20))
    engine.release(0)
    read: list[tuple[int, int | None]] = []
    token = engine.token
    monkeypatch.setattr(engine, "token", lambda s, at, ticket: (read.append((at, ticket)), token(s, at, ticket))[1])
    monkeypatch.setattr(engine, "target", engine.target.__class__(**{**_fields(engine.target), "device": "another"}))
    for at_once in (1, 3):
        read.clear()
        slot = engine.admit()
        assert list(engine.stream(slot, IDS[:10], 20, at_once)) == alone
        assert [at for at, _ in read] == list(range(10, 30))
        tickets = [ticket for _, ticket in read if ticket is not None]
        assert tickets == sorted(tickets) and len(tickets) == 20
        assert engine.positions[slot] == 29
        engine.release(slot)


def _fields(target: object) -> dict[str, object]:
    return {name: getattr(target, name) for name in target.__dataclass_fields__}  # type: ignore[attr-defined]


def test_nothing_is_written_while_a_pass_may_read_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and parameters are the host's only when every pass is done; messages have places of their own."""
    engine = Engine(open_checkpoint(folder), CpuDevice(), EngineConfig(ctx=64, chunk=8, slots=2))
    seen: list[str] = []

    def noted(owner: object, name: str) -> None:
        run = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            seen.append("message" if args[:1] == ("inbox",) else name)
            return run(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((engine.device, "write"), (engine.device, "wait"), (engine, "_submit")):
        noted(owner, name)
    engine.admit(slot=0)
    engine.submit_prefill({0: IDS[:20]})
    engine.submit_decode((0,), 2)
    engine.admit(slot=1)
    engine.submit_prefill({1: IDS[:9]})
    engine.submit_decode((0, 1))
    engine.set_sampling(1, Sampling())
    busy, writes = False, 0
    for event in seen:
        busy = event == "_submit" or (busy and event != "wait")
        writes += event == "write"
        assert not (busy and event == "write"), seen
    assert writes > 4 and seen.count("_submit") == 3 + 1 + 2 + 1 and seen.count("message") == 3 + 1 + 2 + 1


def test_a_rewound_sequence_goes_on_from_its_new_end(engine: Engine) -> None:
    engine.prefill({0: IDS[:12]})
    first = engine.decode(6)[0]
    for back in (11, 5, 0):
        assert engine.rewind(0, back) and engine.positions == {0: back}
        engine.prefill({0: IDS[back:12]})
        assert engine.positions == {0: 12} and engine.decode(6)[0] == first
    for position in (-1, 19):
        with pytest.raises(ValueError, match=f"slot 0 holds 18 tokens: {position} is not before their end"):
            engine.rewind(0, position)


def test_reading_logits_gives_its_slots_back(engine: Engine) -> None:
    for _ in range(2):
        assert engine.logits(IDS).shape == (len(IDS), 320)
        assert engine.hidden_states(IDS[:5]).shape == (4, 5, 64)
        assert engine.positions == {}
    parts = engine.logits_by_pass(IDS, chunk=8)
    next(parts)
    parts.close()  # dropped in the middle
    assert engine.positions == {}


def test_what_was_held_back_comes_at_the_end(folder: Path) -> None:
    """A stop string that has begun when the last token comes is text after all."""
    with hybrid.load(folder, "cpu", ctx=64) as model:
        text = "".join(model.generate([2, 30, 31], 12, ignore_eos=True))
        assert len(text) > 3
        for stop in (text[-1] + "\0", text[-3:] + "\0", "\ufffd\0"):
            assert "".join(model.generate([2, 30, 31], 12, ignore_eos=True, stop=stop)) == text
            assert model.stats is not None and model.stats.finish == "length"
