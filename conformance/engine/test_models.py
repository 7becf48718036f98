"""Whole models: the demonstration checkpoint against golden values, itself, and float64 equations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import hybrid
from conformance.support.devices import BACKENDS, shared_device
from conformance.support.golden import nats, shifted
from conformance.support.models import BOTH, WINDOW, Models, cut, demo, documents, golden, golden_nats, prompt
from conformance.support.plain_gemma3 import forward
from conformance.support.profile import LONG
from conformance.support.texts import ask, greedy, together, until
from conformance.support.ties import CLEAR, EXACT_NEAR, INT8_NEAR, INT8_RMS, agree, clear, generated, lead, leads
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine

LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)
ON_BOTH = [*product(BACKENDS, LENGTHS)] if LONG else [*product(["cpu"], LENGTHS), ("vulkan", WINDOW + 17)]


@pytest.fixture(scope="module")
def open_models() -> Iterator[Models]:
    opened = Models()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def golden_leads(open_models: Models) -> list[np.ndarray]:
    """Margins of each golden text's tokens over the second-best."""
    return [leads(open_models.get("cpu", "f32"), c.ids, c.greedy) for c in golden()]


@pytest.fixture(scope="module")
def beginning(open_models: Models) -> Callable[[str], list[np.ndarray]]:
    """The logits of a file's first documents on cpu, which several tests use."""
    return functools.cache(
        lambda file: [m.logits(ids) for m in [open_models.get("cpu", file)] for ids in first_documents(m)]
    )


def first_documents(model: hybrid.Model) -> list[list[int]]:
    return list(documents(model))[:3]


@pytest.fixture
def models(open_models: Models) -> Iterator[Models]:
    yield open_models
    open_models.inspect()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "bound"),
    [({}, 2e-3), ({"weights": "f16"}, 2e-2), ({"weights": "f16", "precision": "fast"}, 2e-2)],
    ids=["f32", "f16", "f16-fast"],
)
@pytest.mark.slow
def test_golden_logits(models: Models, backend: str, options: dict, bound: float) -> None:
    """In the short profile Vulkan takes only the first three prompts, and with rounded weights both take two: layers
    past the window are tested below."""
    model = models.get(backend, "f32", **options)
    for case in golden()[: None if LONG else 2 if options else None if backend == "cpu" else 3]:
        logits = model.logits(case.ids)
        assert logits.dtype == np.float32 and logits.shape == (len(case.ids), case.logits.shape[1])
        assert np.abs(logits[case.rows] - case.logits).max() < bound


TEXTS = [
    pytest.param(options, near, backend, id=f"{weights}-{backend}")
    for weights, options, near in (("f32", {}, EXACT_NEAR), ("f16", {"weights": "f16"}, 1e-2))
    for backend in BACKENDS
    if LONG or backend == "cpu" or not options  # Vulkan's logits in f16 are tested above
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "near", "backend"), TEXTS)
def test_golden_text(models: Models, backend: str, options: dict, near: float, golden_leads: list[np.ndarray]) -> None:
    """In the short profile all prompts on cpu in float32, else one or two; a text is then a third as long, on Vulkan a
    quarter."""
    model = models.get(backend, "f32", **options)
    most = None if LONG or (backend == "cpu" and not options) else 1 if backend == "vulkan" else 2
    many = None if LONG else 12 if backend == "vulkan" else 16
    for case, ahead in list(zip(golden(), golden_leads, strict=True))[:most]:
        wanted = case.greedy[:many]
        pieces = list(model.generate(list(case.ids), max_tokens=len(wanted), ignore_eos=True))
        assert model.stats is not None and "".join(pieces) == model.decode(model.stats.ids)
        assert case.text == model.decode(case.greedy)
        agree(model.stats.ids, wanted, ahead[:many], near)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "bound", "backend"),
    [
        (f, e, b)
        for f, e in (("f32", 1e-4), ("q8_0", 0.003), ("q4_0", 0.06))
        for b in BACKENDS
        if LONG or (f, b) == ("q8_0", "cpu")
    ],
)
def test_held_out_loss(models: Models, file: str, bound: float, backend: str) -> None:
    """Nats per token over the 3025 predictions, int8 activations and f16 cache included where weights are quantised. In
    the short profile only the shipped file on cpu: float32's logits are tested above, q4_0 and Vulkan by the two tests
    below."""
    model = models.get(backend, file)
    texts = list(documents(model))
    losses = np.concatenate([nats(model.logits(ids), ids) for ids in texts])
    assert losses.size == 3025
    assert abs(losses.mean() - golden_nats()) < bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "loss", "divergence", "agreement"), [("q8_0", 0.003, 0.003, 0.97), ("q4_0", 0.06, 0.1, 0.82)]
)
def test_quantised_distributions(
    models: Models,
    beginning: Callable[[str], list[np.ndarray]],
    file: str,
    loss: float,
    divergence: float,
    agreement: float,
) -> None:
    """Of three documents: nats per token beside the unquantised model's, KL from its next-token distributions, and how
    often the likeliest token is the same."""
    ids = first_documents(models.get("cpu", file))
    unquantised, found = (
        np.concatenate([nats(z, i) for z, i in zip(beginning(f), ids, strict=True)]) for f in ("f32", file)
    )
    assert abs((found - unquantised).mean()) < loss
    kl, same = [], []
    for both in zip(beginning("f32"), beginning(file), strict=True):
        p, q = (np.exp(z - z.max(-1, keepdims=True)) for z in (z.astype(np.float64) for z in both))
        p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
        kl.append((p * np.log(p / q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    assert np.concatenate(kl).mean() < divergence
    assert np.concatenate(same).mean() > agreement


@pytest.mark.slow
def test_quantised_text_is_the_same_on_both_devices(models: Models) -> None:
    """q8_0 as `make generate` runs it, with a prompt whose first tokens have clear margins."""
    on_cpu, on_vulkan = (models.get(b, "q8_0") for b in BACKENDS)
    ids = on_cpu.encode(CLEAR)
    wanted = generated(on_cpu, ids, 12)
    agree(generated(on_vulkan, ids, 12), wanted, leads(on_cpu, ids, wanted), INT8_NEAR, at_least=8)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["q8_0", "q4_0"])
def test_quantised_weights_with_exact_arithmetic(models: Models, file: str) -> None:
    """Without int8 activations only the order of sums differs."""
    on_cpu, on_vulkan = (models.get(b, file, precision="exact", layers=few_layers()) for b in BACKENDS)
    many = 24 if LONG else 12
    for case in golden()[1 : 4 if LONG else 2]:
        wanted = generated(on_cpu, case.ids, many)
        agree(generated(on_vulkan, case.ids, many), wanted, leads(on_cpu, case.ids, wanted), EXACT_NEAR)
    ids = prompt(200 if LONG else 40)
    assert np.abs(on_cpu.logits(ids) - on_vulkan.logits(ids)).max() < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(("file", "loss"), [("q8_0", 0.003), pytest.param("q4_0", 0.06, marks=pytest.mark.blas)])
def test_int8_activations_agree_on_both_devices(models: Models, file: str, loss: float) -> None:
    """As well as they agree with float32: in nats per token of a document's beginning, row by row, and in the best
    token wherever it is not a near tie."""
    ids = next(documents(models.get("cpu", file)))[: 300 if LONG else WINDOW + 32]
    on_cpu, on_vulkan = (models.get(b, file).logits(ids) for b in BACKENDS)
    assert not shifted(nats(on_cpu, ids), nats(on_vulkan, ids), loss)
    assert np.sqrt(np.square(on_cpu - on_vulkan).mean()) < INT8_RMS
    sure = clear(on_vulkan, on_cpu)
    assert sure.mean() > 0.7
    assert (on_cpu.argmax(-1) == on_vulkan.argmax(-1))[sure].all()


def few_layers() -> tuple[int, ...] | None:
    """In the short profile, models have three layers where three suffice for the test."""
    return None if LONG else BOTH


@functools.cache
def by_equations(length: int, layers: tuple[int, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    """Logits and layers in float64 after prompt(length): the same for every backend."""
    with open_checkpoint(demo()) as checkpoint:
        return forward(checkpoint if layers is None else cut(checkpoint, layers), prompt(length))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "length"), ON_BOTH)
def test_layers_are_those_of_the_equations(models: Models, backend: str, length: int) -> None:
    """Contexts shorter and longer than the sliding window; every layer's residual stream against float64. In the short
    profile of all layers for the longest on cpu, else of three."""
    layers = None if backend == "cpu" and length == LENGTHS[-1] else few_layers()
    model = models.get(backend, "f32", layers=layers)
    logits, hidden = by_equations(length, layers)
    ours = model.hidden_states(prompt(length))
    assert ours.shape == hidden.shape
    worst = np.abs(ours - hidden).max(axis=(1, 2)) / np.abs(hidden).max(axis=(1, 2))
    assert worst.max() < 2e-5, f"relative error by layer: {worst}"
    if LONG or backend == "cpu":  # Vulkan has golden logits
        assert np.abs(model.logits(prompt(length)) - logits).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS if LONG else ["cpu"])  # for a tiny model on both: test_engine_host
def test_prefill_is_one_token_at_a_time(models: Models, backend: str) -> None:
    """All of LENGTHS at once (the long profile), or just past the window: logits depend only on earlier tokens."""
    engine = models.get(backend, "f32", layers=few_layers()).engine
    ids = prompt(LENGTHS[-1] if LONG else WINDOW + 9)
    assert np.abs(engine.logits(ids) - engine.logits(ids, 1)).max() < 2e-4


@pytest.mark.blas
@pytest.mark.parametrize(
    ("backend", "length"),
    [(b, n) for n in (WINDOW - 6, LENGTHS[-1]) for b in BACKENDS if LONG or b == "cpu" or n < WINDOW],
)
@pytest.mark.slow
def test_decoding_follows_the_logits(models: Models, backend: str, length: int) -> None:
    """The decode plan, which feeds itself on the device, over the window's edge and beyond."""
    engine, ids = models.get(backend, "f32", layers=few_layers()).engine, prompt(length)
    then = greedy(engine, ids, 12)
    logits = engine.logits([*ids, *then])[length - 1 : -1]
    agree(logits.argmax(-1).tolist(), then, lead(logits), EXACT_NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("file", "options"),
    [("q8_0", {"weights": "f32"}), ("q8_0", {"precision": "exact"})][: None if LONG else 1],
    ids=["f32", "q8_0"][: None if LONG else 1],
)
def test_rows_of_a_batch_are_independent(
    models: Models, backend: str, file: str, options: dict, golden_leads: list[np.ndarray]
) -> None:
    """Ragged prompts in one batch, in chunks that cut them, give each prompt's own results (in float32: by the
    equations, or on cpu). On Vulkan, except in the long profile, three of them, with the long one and the texts cut
    short."""
    exact, layers, many = (
        "weights" in options,
        few_layers() if backend == "vulkan" else None,
        16 if LONG or backend == "cpu" else 8,
    )
    cases, chunk = golden(), 200
    if layers is not None:
        cases, chunk = (*cases[:2], replace(cases[-1], ids=cases[-1].ids[: WINDOW + 12])), 64
    alone = models.get("cpu" if exact else backend, file, layers=layers, **options)
    if exact and layers is None:
        wanted, gaps = [list(c.greedy[:many]) for c in cases], [g[:many] for g in golden_leads]
    else:
        wanted = [generated(alone, c.ids, many) for c in cases]
        gaps = [leads(alone, c.ids, w) for c, w in zip(cases, wanted, strict=True)]
    device = shared_device(backend)
    try:
        engine = Engine(alone.checkpoint, device, EngineConfig(slots=5, ctx=1024, chunk=chunk, **options))
        found = together(engine, [c.ids for c in cases], many)
        for got, text, gap in zip(found, wanted, gaps, strict=True):
            agree(got, text, gap, EXACT_NEAR)
    finally:
        device.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("file", ["f32", "q4_0"] if LONG else ["q4_0"])
def test_hundredth_submit_gives_the_bits_of_the_first(models: Models, backend: str, file: str) -> None:
    """One recorded command buffer, submitted for 100 positions, twice; in the short profile a hundred in all."""
    engine = models.get(backend, file, layers=few_layers()).engine
    ids = prompt(100 if LONG else 50)
    first = engine.logits(ids, 1)
    before = engine.counters.copy()
    again = engine.logits(ids, 1)
    done = engine.counters.minus(before)
    assert first.tobytes() == again.tobytes()
    assert done.submits >= len(ids) and done.pipelines == done.descriptor_writes == done.allocations == 0
    assert done.recordings == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("file", ["f32", "q4_0"])
def test_a_token_costs_one_submit_and_nothing_else(models: Models, backend: str, file: str) -> None:
    model = models.get(backend, file, layers=few_layers())
    generated(model, golden()[0].ids, 4)
    engine = model.engine
    handle = ask(engine, golden()[0].ids, 25)
    until(handle, 2)
    ahead, before = len(engine._flights), engine.counters.copy()
    handle.result()
    done = engine.counters.minus(before)
    assert done.submits == 25 - 2 - ahead
    assert done.allocations == done.recordings == done.transfers == done.descriptor_writes == done.pipelines == 0
    program = engine.runner.program("decode", 1, 1)
    each = program.dispatches if backend == "vulkan" else len(program.plan.steps)
    assert done.dispatches == done.submits * each
