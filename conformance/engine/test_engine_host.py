"""The engine's host work: Python calls per token, tokens in batches, and deterministic passes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import hybrid
from conformance.engine.test_engine_cpu import IDS
from conformance.support.devices import BACKENDS, for_model
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import ask, greedy, together
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options, Request

MOST_CALLS = 100  # Python function calls per token and its reader


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
    """Python function calls, and C function calls, while `run` runs."""
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
        engine.runner.warm_up()
        tokens = ask(engine, IDS[:9], 50).events()
        for _ in range(24):  # into the second block, whose table entry was published
            next(tokens)
        before, down = engine.counters.copy(), engine.counters.bytes_down
        found.append(calls(lambda tokens=tokens: [next(tokens) for _ in range(8)]))
        done = engine.counters.minus(before)
        assert (done.submits, done.transfers, done.allocations, done.recordings, done.bytes_up) == (8, 0, 0, 0, 0)
        assert engine.counters.bytes_down - down == 8 * 4
    assert found[0] == found[1]
    assert found[0][0] <= 8 * MOST_CALLS and found[0][1] <= 2 * 8 * MOST_CALLS, found


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_end_of_text_is_seen_while_a_later_pass_runs(folder, backend):
    with hybrid.load(folder, for_model(backend), ctx=64) as model:
        every = "".join(model.generate([2, 5], 12, ignore_eos=True))
        ids = model.stats.ids
        model.checkpoint.tokenizer.eos_ids = frozenset({ids[4]})
        first = ids.index(ids[4])
        text = "".join(model.generate([2, 5], 12))
        assert model.stats.ids == ids[: first + 1] and model.stats.finish == "eos" and every.startswith(text)
        assert "".join(model.generate([2, 5], 12, ignore_eos=True)) == every


@pytest.mark.slow
@pytest.mark.blas
@pytest.mark.parametrize("device", BACKENDS, indirect=True)
@pytest.mark.parametrize("weights", ["q4_0", "f32"])
def test_deterministic_results_do_not_depend_on_how_a_prompt_is_cut(checkpoint, device, weights):
    """Bit for bit: logits by any number of rows, sampled tokens after any chunks, and everything repeated."""
    engine = Engine(checkpoint, device, EngineConfig(ctx=64, weights=weights, deterministic=True))
    logits = [engine.logits(IDS[:29], chunk) for chunk in (None, None, 1, 5, *([3] if LONG else []))]
    assert all((found == logits[0]).all() for found in logits)
    texts = []
    for rows in (0, 0, 7, 3, 1):
        request = Request(0, IDS[:29], Options(max_tokens=21 if LONG else 9, ignore_eos=True), rows=rows)
        request.private = True  # the cache is empty
        texts.append(list(engine.drive(request).result().ids))
        cache = [engine.device.read(f"kv.{i}.k").parts[0].copy() for i in range(2)]
        texts[-1].append(hash(tuple(c.tobytes() for c in cache)))
    assert all(text == texts[0] for text in texts)
    assert texts[0][0] == int(np.argmax(logits[0][-1][: engine.target.n_tokens]))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["vulkan"], indirect=True)
def test_deterministic_sequences_do_not_depend_on_their_neighbours(checkpoint, device):
    engine = Engine(checkpoint, device, EngineConfig(ctx=64, slots=3, deterministic=True))
    prompts = [IDS[:20], IDS[3:10], IDS[5:6]]
    alone = [greedy(engine, ids, 21) for ids in prompts]
    assert together(engine, prompts, 21) == alone


@pytest.mark.blas
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_a_deterministic_model_repeats_its_text(folder, backend):
    with hybrid.load(folder, for_model(backend), ctx=64, weights="q4_0", deterministic=True) as model:
        prompt = list(range(2, 25))
        first, logits = "".join(model.generate(prompt, 12, ignore_eos=True)), model.logits(prompt)
        for _ in range(2):
            assert "".join(model.generate(prompt, 12, ignore_eos=True)) == first
        assert (model.logits(prompt) == logits).all()


def test_deterministic_on_cpu_is_for_one_sequence(checkpoint, devices):
    with pytest.raises(ValueError, match="deterministic on cpu runs one sequence at a time, not 2"):
        Engine(checkpoint, devices.get("cpu"), EngineConfig(slots=2, deterministic=True))
