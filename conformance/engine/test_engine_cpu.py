"""The engine on the NumPy device against plainly written equations, with small random models of many shapes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from conformance.support.plain_gemma3 import forward
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import ask, greedy, together, until
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core.errors import ContextExceeded, SpecError
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.host import nbits
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.spec.schedule import find_schedule

IDS = [2, *range(20, 60), 7, 9, 300, 31]  # longer than the window and than a block
SHAPES = {
    "plain": {},
    "capped": {"softcap": 5.0},
    "scaled rope": {"rope_factor": 8.0, "rope_theta_global": 1e4},
    "untied": {"tied": False},
    "one kv head, wide heads": {"n_kv_heads": 1, "head_dim": 48},
    "all local": {"layer_is_global": (False, False, False), "window": 33},
    "all global": {"layer_is_global": (True, True, True), "window": 0},
    "deep": {"n_layers": 7},
    "window of one": {"window": 1},
}


def engine(folder: Path, dtype: str = "f32", **options) -> Engine:
    return Engine(model(folder, dtype), CpuDevice(), EngineConfig(**{"precision": "exact", **options}))


def model(folder: Path, dtype: str = "f32", **changes) -> Checkpoint:
    return open_checkpoint(write_hf(folder, tiny(**changes), dtype=dtype))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_hidden_states_are_those_of_the_equations(tmp_path, name):
    checkpoint = model(tmp_path, **SHAPES[name])
    made = Engine(checkpoint, CpuDevice(), EngineConfig(chunk=16))
    logits, hidden = forward(checkpoint, IDS)
    assert np.abs(made.logits(IDS) - logits).max() < 1e-4 * np.abs(logits).max()
    got = made.hidden_states(IDS)
    assert got.shape == hidden.shape and got.dtype == np.float32
    assert np.abs(got - hidden).max() < 1e-4 * np.abs(hidden).max()


@pytest.mark.blas
def test_chunks_of_any_size_give_the_same_logits(tmp_path):
    made = engine(tmp_path)
    whole = made.logits(IDS)
    for chunk in (1, 3, 8):
        assert np.abs(made.logits(IDS, chunk) - whole).max() < 1e-4


@pytest.mark.blas
def test_greedy_decoding_follows_the_logits(tmp_path):
    made = engine(tmp_path, slots=1)
    out = greedy(made, IDS[:9], 30)
    best = made_logits(made, tmp_path, [*IDS[:9], *out])[8:-1].argmax(1)
    assert out == best.tolist()


def made_logits(made: Engine, folder: Path, ids: list[int]) -> np.ndarray:
    logits = Engine(made.checkpoint, CpuDevice(), EngineConfig(precision="exact")).logits(ids)
    logits[:, made.target.n_tokens :] = -np.inf  # rows beyond the tokenizer are never sampled
    return logits


@pytest.mark.blas
def test_sequences_of_a_ragged_batch_do_not_touch_each_other(tmp_path):
    prompts = [IDS[:30], IDS[:1], IDS[5:18]]
    alone = [greedy(engine(tmp_path / str(i), chunk=16), ids, 21) for i, ids in enumerate(prompts)]
    made = engine(tmp_path / "all", chunk=16, slots=3)
    assert together(made, [*prompts, IDS[:3]], 21)[:3] == alone, "the fourth waits for a slot, and takes its blocks"


def test_after_warm_up_nothing_is_allocated_or_recorded(tmp_path):
    made = engine(tmp_path)
    made.runner.warm_up()
    handle = ask(made, IDS[:1], 60)
    until(handle, 1)
    before = made.counters.copy()
    handle.result()
    done = made.counters.minus(before)
    assert done.submits == 59
    assert (done.allocations, done.recordings, done.pipelines, done.descriptor_writes) == (0, 0, 0, 0)


def test_a_step_of_decoding_costs_few_calls(tmp_path):
    """A token is matrix times vector at memory speed; the rest is interpreter overhead."""
    made = engine(tmp_path, weights="q8_0", precision="auto")
    handle = ask(made, IDS, 9)
    until(handle, 3)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        made.drive_step()
    finally:
        sys.setprofile(None)
    each = 26 if nbits.unusable() == "" else 38  # a product of onnxruntime's checks what it is given
    assert 0 < calls <= each * len(made.runner.plan("decode", 1, 1).steps) + 100, calls


def test_the_same_seed_gives_the_same_text_and_another_another(tmp_path):
    made = engine(tmp_path, slots=1)

    def sample(seed: int) -> list[int]:
        return greedy(made, IDS[:5], 24, temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=seed)

    assert sample(1) == sample(1) != sample(2**40 + 1)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "f16", "bf16"])
def test_weights_are_converted_when_asked(tmp_path, dtype):
    made = engine(tmp_path, weights=dtype, precision="auto")
    kinds = {
        d.dtype for d in made.runner.program("decode", 1, 1).plan.tensors.values() if d.name.endswith("_down.weight")
    }
    assert kinds == {dtype}
    reference, _ = forward(made.checkpoint, IDS)
    error = np.abs(made.logits(IDS) - reference).max() / np.abs(reference).max()
    assert 1e-9 < error < {"q8_0": 0.1, "q4_0": 0.8, "f16": 0.01, "bf16": 0.05}[dtype]


def test_a_schedule_that_needs_two_devices_is_refused(tmp_path):
    schedule = find_schedule("gemma3")
    steps = tuple(s.model_copy(update={"device": "vulkan"} if s.op == "fused_ffn" else {}) for s in schedule.layer)
    with pytest.raises(SpecError, match=r"placed on \['cpu', 'vulkan'\].*use device = \"main\""):
        Engine(model(tmp_path), CpuDevice(), schedule=schedule.model_copy(update={"layer": steps}))


def test_the_context_is_a_limit(tmp_path):
    made = engine(tmp_path, ctx=40)
    with pytest.raises(ContextExceeded, match="45 tokens does not fit in the context of 40"):
        made.logits(IDS)
    handle = ask(made, IDS[:38], 100)
    assert len(handle.result().ids) == 2 and handle.result().finish == "context"
    assert made.logits(IDS[:40]).shape == (40, 320)
    with pytest.raises(ContextExceeded, match="40 tokens leaves no room in the context of 40"):
        ask(made, IDS[:40], 1)
    with pytest.raises(ValueError, match="token id 320 is outside the vocabulary"):
        made.logits([2, 320])
    with pytest.raises(ValueError, match="ctx 1000 is outside"):
        engine(tmp_path / "b", ctx=1000)
