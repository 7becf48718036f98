"""The shipped models of Gemma 3n and Gemma 4, and the draft: golden values, quantised losses, batches, prefix reuse."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from conformance.support import plain_gemma3n, plain_gemma4
from conformance.support.devices import BACKENDS
from conformance.support.models import Models, demo, documents, golden, golden_nats, nats
from conformance.support.profile import LONG
from conformance.support.ties import EXACT_NEAR, agree, generated, leads
from hybrid.checkpoint import open_checkpoint

FAMILIES = ("demo-gemma3n", "demo-gemma4")
NAMES = (*FAMILIES, "demo-gemma3-draft")


@pytest.fixture(scope="module")
def open_models() -> Iterator[Models]:
    opened = Models()
    yield opened
    opened.close()


@pytest.fixture
def models(open_models: Models) -> Iterator[Models]:
    yield open_models
    open_models.inspect()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_logits(models: Models, backend: str, name: str) -> None:
    model = models.get(backend, "f32", name)
    for case in golden(name)[None if LONG else -2 :]:
        rows = case.rows if LONG else case.rows[:2]  # of the long prompt the first half
        logits = model.logits(case.ids[: rows[-1] + 1])
        assert np.abs(logits[rows] - case.logits[: len(rows)]).max() < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_text(models: Models, backend: str, name: str) -> None:
    model, exact = models.get(backend, "f32", name), models.get("cpu", "f32", name)
    for case in golden(name)[: None if LONG else 3 if backend == "cpu" else 1]:
        many = len(case.greedy) if LONG else 24
        ahead = leads(exact, case.ids, case.greedy)
        agree(generated(model, case.ids, many), case.greedy[:many], ahead[:many], EXACT_NEAR)
        assert case.text == model.decode(case.greedy)


QUANTISED = [*((name, "q8_0", 0.003) for name in NAMES), *((name, "q4_0", 0.06) for name in FAMILIES)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file", "bound"), QUANTISED)
def test_held_out_loss(models: Models, name: str, file: str, bound: float) -> None:
    """Nats per token with int8 activations and an f16 cache; in the short profile of two documents, whose mean varies more,
    against float32's."""
    model = models.get("cpu", file, name)
    texts = list(documents(model))[: None if LONG else 2]
    losses = np.concatenate([nats(model.logits(ids), ids) for ids in texts])
    if LONG:
        assert losses.size == 3025 and abs(losses.mean() - golden_nats(name)) < bound
    else:
        exact = models.get("cpu", "f32", name)
        assert abs((losses - np.concatenate([nats(exact.logits(ids), ids) for ids in texts])).mean()) < 3 * bound


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="the long profile's: every prediction on a CPU driver")
@pytest.mark.parametrize(("name", "file", "bound"), QUANTISED)
def test_held_out_loss_on_vulkan(models: Models, name: str, file: str, bound: float) -> None:
    model = models.get("vulkan", file, name)
    losses = np.concatenate([nats(model.logits(ids), ids) for ids in documents(model)])
    assert losses.size == 3025 and abs(losses.mean() - golden_nats(name)) < bound


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_those_of_the_equations(models: Models, backend: str, name: str) -> None:
    """Every layer's residual stream (of several the active one) against float64, past the sliding window."""
    ids = golden(name)[-1].ids[:141]
    with open_checkpoint(demo("q8_0", name)) as checkpoint:
        _, hidden = (plain_gemma3n if name == "demo-gemma3n" else plain_gemma4).forward(checkpoint, ids)
    wanted = hidden[:, :, 0] if hidden.ndim == 4 else hidden
    ours = models.get(backend, "f32", name).hidden_states(ids)
    assert ours.shape == wanted.shape
    worst = np.abs(ours - wanted).max(axis=(1, 2)) / np.abs(wanted).max(axis=(1, 2))
    assert worst.max() < 2e-5, f"relative error by layer: {worst}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_requests_together_are_requests_alone(models: Models, backend: str, name: str) -> None:
    """Ragged prompts that share passes, and a prompt again, whose beginning the cache may still hold."""
    model, exact, many = models.get(backend, "f32", name, slots=3), models.get("cpu", "f32", name), 12
    cases = golden(name)[: 5 if LONG or backend == "cpu" else 4]
    handles = [model.submit(list(c.ids), max_tokens=many, ignore_eos=True) for c in (*cases, cases[3])]
    for case, handle in zip((*cases, cases[3]), handles, strict=True):
        ahead = leads(exact, case.ids, case.greedy)[:many]
        agree(list(handle.result(timeout=300).ids), list(case.greedy[:many]), ahead, EXACT_NEAR)
