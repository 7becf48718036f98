"""What the engine itself does: work per token as a count of calls, tokens in batches, and deterministic passes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import hybrid
from conformance.engine.test_engine_cpu import IDS
from conformance.support.devices import BACKENDS, for_model
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine

MOST_CALLS = 20  # of Python functions, per token


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")


@pytest.fixture
def device(devices, request):
    opened = devices.get(request.param)
    opened.reset()
    yield opened
    opened.reset()


def calls(run):
    """Python functions, and C functions beside them, called while `run` runs."""
    python, native = 0, 0

    def count(frame, event, arg):
        nonlocal python, native
        python += event == "call"
        native += event == "c_call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return python, native


@pytest.mark.slow
@pytest.mark.parametrize("device", ["vulkan"], indirect=True)
def test_a_token_takes_few_calls_whatever_the_context(checkpoint, device):
    found = []
    for ctx in (64, 256):
        device.reset()
        engine = Engine(checkpoint, device, EngineConfig(ctx=ctx))
        engine.warm_up()
        tokens = engine.stream(engine.admit(), IDS[:9], 50)
        for _ in range(4):
            next(tokens)
        before, down = engine.counters.copy(), engine.counters.bytes_down
        found.append(calls(lambda tokens=tokens: [next(tokens) for _ in range(32)]))
        done = engine.counters.minus(before)
        assert (done.submits, done.transfers, done.allocations, done.recordings, done.bytes_up) == (32, 0, 0, 0, 0)
        assert engine.counters.bytes_down - down == 32 * 4
    assert found[0] == found[1]
    assert found[0][0] <= 32 * MOST_CALLS and found[0][1] <= 2 * 32 * MOST_CALLS, found


@pytest.mark.blas
@pytest.mark.parametrize("device", BACKENDS, indirect=True)
def test_several_tokens_in_a_submit_are_the_same_tokens(checkpoint, device):
    engine, found = Engine(checkpoint, device, EngineConfig(ctx=64)), []
    for at_once in (1, 3, 100):
        slot = engine.admit()
        submits = engine.counters.submits
        found.append(list(engine.stream(slot, IDS[:9], 32, at_once)))
        assert (
            engine.counters.submits - submits <= 1 + -(-31 // at_once) + 2
        )  # a prompt, its tokens, and the host's writes
        engine.wait()
        engine.release(slot)
    assert found[0] == found[1] == found[2] and len(found[0]) == 32
    with pytest.raises(ValueError, match="tokens per submit must be 1 or more, not 0"):
        next(engine.stream(engine.admit(), IDS[:2], 3, 0))


@pytest.mark.parametrize("device", BACKENDS, indirect=True)
def test_a_batch_of_tokens_ends_with_the_context(checkpoint, device):
    engine = Engine(checkpoint, device, EngineConfig(ctx=40))
    assert len(list(engine.stream(engine.admit(), IDS[:33], 100, 4))) == 7
    assert max(engine.positions.values()) < 40


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_end_of_text_inside_a_batch_is_seen_late_but_seen(folder, backend):
    with hybrid.load(folder, for_model(backend), ctx=64) as model:
        every = "".join(model.generate([2, 5], 12, ignore_eos=True))
        ids = model.stats.ids
        model.checkpoint.tokenizer.eos_ids = frozenset({ids[4]})
        first = ids.index(ids[4])
        for at_once in (1, 4, 9):
            text = "".join(model.generate([2, 5], 12, tokens_per_submit=at_once))
            assert model.stats.ids == ids[: first + 1] and model.stats.finish == "eos" and every.startswith(text)
        with model.session() as session:
            "".join(model.generate([2, 5], 12, tokens_per_submit=5, session=session))
            assert "".join(model.generate([2, 5], 12, ignore_eos=True, session=session)) == every
        with pytest.raises(ValueError, match="tokens_per_submit must be a positive integer, not 0"):
            model.generate([2], tokens_per_submit=0)


@pytest.mark.slow
@pytest.mark.blas
@pytest.mark.parametrize("device", BACKENDS, indirect=True)
@pytest.mark.parametrize("weights", ["q4_0", "f32"])
def test_deterministic_results_do_not_depend_on_how_a_prompt_is_cut(checkpoint, device, weights):
    """Bit for bit: logits by any number of rows, what is chosen after any chunks, and everything once more."""
    engine = Engine(checkpoint, device, EngineConfig(ctx=64, weights=weights, deterministic=True))
    logits = [engine.logits(IDS[:29], chunk) for chunk in (None, None, 1, 5, *([3] if LONG else []))]
    assert all((found == logits[0]).all() for found in logits)
    texts = []
    for cuts in ((29,), (29,), (7, 29), (1, 2, 16, 29)):
        slot, done = engine.admit(), 0
        for cut in cuts:
            engine.wait(engine.submit_prefill({slot: IDS[done:cut]}))
            done = cut
        texts.append([engine.token(slot, 29), *engine.decode(20 if LONG else 8, [slot])[slot]])
        cache = [engine.device.read(f"kv.{i}.k").parts[0].copy() for i in range(2)]
        texts[-1].append(hash(tuple(c.tobytes() for c in cache)))
        engine.release(slot)
    assert all(text == texts[0] for text in texts)
    assert texts[0][0] == int(np.argmax(logits[0][-1][: engine.target.n_tokens]))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["vulkan"], indirect=True)
def test_deterministic_sequences_do_not_depend_on_their_neighbours(checkpoint, device):
    engine = Engine(checkpoint, device, EngineConfig(ctx=64, slots=3, deterministic=True))
    prompts, alone = {0: IDS[:20], 1: IDS[3:10], 2: IDS[5:6]}, {}
    for slot, ids in prompts.items():
        first = engine.prefill({slot: ids})[slot]
        alone[slot] = [first, *engine.decode(20, [slot])[slot]]
        engine.release(slot)
    firsts, later = engine.prefill(prompts), engine.decode(20)
    assert {s: [firsts[s], *later[s]] for s in prompts} == alone


@pytest.mark.blas
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_a_deterministic_model_says_the_same_again(folder, backend):
    with hybrid.load(folder, for_model(backend), ctx=64, weights="q4_0", deterministic=True) as model:
        prompt = list(range(2, 25))
        first, logits = "".join(model.generate(prompt, 12, ignore_eos=True)), model.logits(prompt)
        with model.session() as session:  # the second run finds the first one's tokens in the cache
            for _ in range(2):
                assert "".join(model.generate(prompt, 12, ignore_eos=True, session=session)) == first
        assert (model.logits(prompt) == logits).all()


def test_deterministic_on_cpu_is_for_one_sequence(checkpoint, devices):
    with pytest.raises(ValueError, match="deterministic on cpu runs one sequence at a time, not 2"):
        Engine(checkpoint, devices.get("cpu"), EngineConfig(slots=2, deterministic=True))
