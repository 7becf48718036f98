"""The shipped models of Gemma 3n and Gemma 4, and the draft: golden values, quantised losses, batches, prefix reuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.support import plain_gemma3n, plain_gemma4
from conformance.support.devices import BACKENDS
from conformance.support.models import WINDOW, Models, demo, documents, golden, golden_nats, nats
from conformance.support.profile import LONG
from conformance.support.ties import EXACT_NEAR, INT8_RMS, agree, generated, leads
from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import FieldError, SpecError
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.spec.expr import Expr
from hybrid.spec.placement import Placement, placed
from hybrid.spec.schedule import load_schedule
from hybrid.spec.step import StepSpec

FAMILIES = ("demo-gemma3n", "demo-gemma4", "demo-gemma4-moe")
NAMES = (*FAMILIES, "demo-gemma3-draft")
TURN = int(kernels_digest(), 16) % 3


def on(names: Sequence[str], turn: int) -> list[tuple[str, str]]:
    """Models and devices. On Vulkan the short profile takes one of the families, which changes with the kernels: one
    family's golden values, another's layers and requests."""
    return [
        (n, b) for n in names for b in BACKENDS if LONG or b == "cpu" or n not in FAMILIES or n == FAMILIES[turn % 3]
    ]


@pytest.fixture(scope="module")
def open_models() -> Iterator[Models]:
    opened = Models()
    yield opened
    opened.close()


@pytest.fixture
def models(open_models: Models) -> Iterator[Models]:
    yield open_models
    open_models.inspect()


@functools.cache
def by_equations(name: str) -> np.ndarray:
    """Layers in float64 past the sliding window: the same for every backend."""
    with open_checkpoint(demo("q8_0", name)) as checkpoint:
        _, hidden = (plain_gemma3n if name == "demo-gemma3n" else plain_gemma4).forward(
            checkpoint, past_the_window(name)
        )
    return hidden[:, :, 0] if hidden.ndim == 4 else hidden


def past_the_window(name: str) -> tuple[int, ...]:
    return golden(name)[-1].ids[: WINDOW + 5]


@pytest.fixture(scope="module")
def ahead(open_models: Models) -> Callable[[str, int], np.ndarray]:
    """Margins of a golden text's tokens over the second-best, in float32 on cpu."""

    @functools.cache
    def found(name: str, case: int) -> np.ndarray:
        text = golden(name)[case]
        return leads(several(open_models, "cpu", name), text.ids, text.greedy)

    return found


def losses_of(model: hybrid.Model, count: int | None) -> np.ndarray:
    """Nats per token of the first held-out documents."""
    return np.concatenate([nats(model.logits(ids), ids) for ids in list(documents(model))[:count]])


@pytest.fixture(scope="module")
def unquantised(open_models: Models) -> Callable[[str], np.ndarray]:
    """A model's losses in float32 of two documents."""
    return functools.cache(lambda name: losses_of(several(open_models, "cpu", name), 2))


def several(models: Models, backend: str, name: str) -> hybrid.Model:
    """The model in float32 with three slots, opened once for all tests."""
    return models.get(backend, "f32", name, slots=3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), on(NAMES, TURN))
def test_golden_logits(models: Models, backend: str, name: str) -> None:
    """On Vulkan's CPU driver the long prompt runs in the long profile; layers past the window are tested below."""
    model = several(models, backend, name)
    for case in golden(name)[None if LONG else -2 : None if LONG or backend == "cpu" else -1]:
        rows = case.rows if LONG else case.rows[:2]  # of the long prompt the first half
        logits = model.logits(case.ids[: rows[-1] + 1])
        assert np.abs(logits[rows] - case.logits[: len(rows)]).max() < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), on(NAMES, TURN))
def test_golden_text(models: Models, backend: str, name: str, ahead: Callable[[str, int], np.ndarray]) -> None:
    model = several(models, backend, name)
    for i, case in enumerate(golden(name)[: None if LONG else 2 if backend == "cpu" else 1]):
        many = len(case.greedy) if LONG else 16 if backend == "cpu" else 8
        agree(generated(model, case.ids, many), case.greedy[:many], ahead(name, i)[:many], EXACT_NEAR)
        assert case.text == model.decode(case.greedy)


QUANTISED = [*((name, "q8_0", 0.003) for name in NAMES), *((name, "q4_0", 0.06) for name in FAMILIES)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file", "bound"), [q for q in QUANTISED if LONG or q[:2] != (FAMILIES[TURN], "q4_0")])
def test_held_out_loss(
    models: Models, name: str, file: str, bound: float, unquantised: Callable[[str], np.ndarray]
) -> None:
    """Nats per token with int8 activations and an f16 cache. In the short profile of two documents, whose mean varies
    more, against float32's."""
    model = models.get("cpu", file, name)
    losses = losses_of(model, None if LONG else 2)
    if LONG:
        assert losses.size == 3025 and abs(losses.mean() - golden_nats(name)) < bound
    else:
        assert abs((losses - unquantised(name)).mean()) < 3 * bound


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="the long profile's: every prediction on a CPU driver")
@pytest.mark.parametrize(("name", "file", "bound"), QUANTISED)
def test_held_out_loss_on_vulkan(models: Models, name: str, file: str, bound: float) -> None:
    losses = losses_of(models.get("vulkan", file, name), None)
    assert losses.size == 3025 and abs(losses.mean() - golden_nats(name)) < bound


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), on(FAMILIES, TURN + 1))
def test_layers_are_those_of_the_equations(models: Models, backend: str, name: str) -> None:
    """Every layer's residual stream (with AltUp the active one) against float64, past the sliding window."""
    wanted, ours = by_equations(name), several(models, backend, name).hidden_states(past_the_window(name))
    assert ours.shape == wanted.shape
    worst = np.abs(ours - wanted).max(axis=(1, 2)) / np.abs(wanted).max(axis=(1, 2))
    assert worst.max() < 2e-5, f"relative error by layer: {worst}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), on(FAMILIES, TURN + 1))
def test_requests_together_are_requests_alone(
    models: Models, backend: str, name: str, ahead: Callable[[str, int], np.ndarray]
) -> None:
    """Ragged prompts that share passes, and a repeated prompt, whose beginning may still be cached."""
    model = several(models, backend, name)
    which, many = ([0, 1, 2, 3, 4, 3], 12) if LONG else ([0, 2, 3, 3], 8) if backend == "cpu" else ([0, 3, 3], 5)
    cases = golden(name)
    handles = [model.submit(list(cases[i].ids), max_tokens=many, ignore_eos=True) for i in which]
    for i, handle in zip(which, handles, strict=True):
        agree(list(handle.result(timeout=300).ids), list(cases[i].greedy[:many]), ahead(name, i)[:many], EXACT_NEAR)


@pytest.mark.parametrize("name", [f for f in FAMILIES if f != "demo-gemma4-moe"])  # whose layers share no cache
def test_shared_layers_take_the_wanted_rows_of_a_prompt(models: Models, name: str) -> None:
    """Prefill: of 32 rows the one whose logits are wanted. Decode: every row, without a gather."""
    model = several(models, "cpu", name)
    engine, first = model.engine, model.hparams.n_kv_layers
    for phase, rows in (("prefill", 32), ("decode", 1)):
        steps = [(s, s.layer) for s in engine.runner.program(phase, rows, 1).plan.steps if s.layer is not None]  # type: ignore[arg-type]
        assert {s.bind["T"] for s, layer in steps if layer < first} == {rows}
        assert {s.bind["T"] for s, layer in steps if layer >= first and "T" in s.bind} == {1}
        assert any(s.op == "take_rows" for s, _ in steps) == (phase == "prefill")


PLACED = """
schema = 1
extends = "{family}"

[schedule]
name = "placed"
summary = "for a test"
pipeline = 2

[fallback]
npu = "main"

[[placement]]
steps = ["*.attn_output", "*.ffn"]
phase = "prefill"
device = "npu"
form = "linear_rows"
"""


@pytest.mark.slow
@pytest.mark.usefixtures("sim_machine")
@pytest.mark.parametrize("name", FAMILIES if LONG else FAMILIES[TURN : TURN + 1])
def test_a_placement_extends_either_family(models: Models, name: str, tmp_path: Path) -> None:
    """Prefill's products on the simulated NPU, sparse layers and wanted rows included: the integers of the main device.
    In the short profile one family, and only the logits after the prompt: the simulator takes 4 s for a pass."""
    (tmp_path / "placed.toml").write_text(PLACED.format(family=name.removeprefix("demo-")))
    exact, ids = several(models, "cpu", name).logits(golden(name)[1].ids), golden(name)[1].ids
    with hybrid.load(demo("q8_0", name), "cpu", tmp_path / "placed.toml", ctx=64, npu="sim") as model:
        said = model.submit(list(ids), max_tokens=4, ignore_eos=True, logprobs=20).result(timeout=300)
        assert model.device.endswith("+ sim-npu1") and len(said.ids) == 4 and said.logprobs is not None
        wanted = exact[-1].astype(np.float64) - np.logaddexp.reduce(exact[-1].astype(np.float64))
        error = np.array([logprob - wanted[token] for token, logprob in said.logprobs[0].top])
        assert (
            len(error) == 20 and np.sqrt(np.square(error).mean()) < 4 * INT8_RMS
        )  # one scale for a whole row, not for 32 elements
        if LONG:
            assert np.sqrt(np.square(model.logits(ids) - exact).mean()) < 4 * INT8_RMS


def test_a_form_refuses_what_it_does_not_compute(tmp_path: Path) -> None:
    text = PLACED.format(family="gemma4").replace('"*.attn_output", "*.ffn"', '"logits"')
    (tmp_path / "placed.toml").write_text(text)
    with pytest.raises(SpecError, match="linear_rows has nothing in place of logits"):
        load_schedule(tmp_path / "placed.toml")
    step = StepSpec(name="s", op="linear", attrs={"x": Expr(1)})
    with pytest.raises(FieldError, match="linear_rows computes linear without x, which s has"):
        placed({"layer": [step]}, [Placement(steps=("s",), device="npu", form="linear_rows")])
