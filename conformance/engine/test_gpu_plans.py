"""Whole models with the plans, the table and the kernels of a GPU with matrix units, interpreted where there is none:
few-row products on these units, split-K partials added by the consumer, layers in one dispatch whose workgroups wait
for one another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.devices import INTERPRETED, Devices, has_matrix_units, open_backend
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.devices.opening import Opened
from hybrid.kernels.vulkan.kernel import kernels_digest

pytestmark = pytest.mark.slow

PROMPTS = ([2, 4, 5, 4, 5, 6], [2, 7, 8, 9, 7, 8, 9, 7], [2, *range(20, 40)], [2] * 9, [2, 9])[: 5 if LONG else 2]
DRAWN: dict[str, Any] = {"max_tokens": 10 if LONG else 3, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 128, "ffn": 192, "head_dim": 32, "window": 16, "n_layers": 2}
    return write_hf(tmp_path_factory.mktemp("wide"), tiny(**sizes), dtype="f32")


@pytest.fixture
def gpu(devices: Devices) -> Callable[..., Opened]:
    """Opens a device; the loader of a model closes it."""
    kind = "vulkan" if has_matrix_units(devices.get("vulkan")) else INTERPRETED

    def opened(**options: Any) -> Opened:
        device = open_backend(kind, **options)
        return Opened(device, device)  # type: ignore[arg-type]

    return opened


def kernels(model: Any) -> set[str]:
    return {d.kernel.name for p in model.engine.device.programs for d in p.recording.dispatches}


RADEON: dict[str, Any] = {"tuning": "radv", "without": ("matrix_lanes", "fused_halves")}


@pytest.mark.parametrize(
    ("options", "kernel"), [({}, "q4_0.f16.24x256"), (RADEON, ".gemm.q4_0.f16.")], ids=["nvidia", "radv"]
)
def test_logits_are_those_of_cpu(
    folder: Path, gpu: Callable[..., Opened], options: dict[str, Any], kernel: str
) -> None:
    """By NVIDIA's table and by that of the Radeon 780M, whose matrix fragments differ: of a prompt in two passes."""
    ids = [2, *range(30, 30 + 44)]
    found = []
    for device in ("cpu", gpu(**options)):
        with hybrid.load(folder, device, ctx=96, weights="q4_0", chunk=24) as model:
            found.append(model.logits(ids))
            if device != "cpu":
                assert any(kernel in name for name in kernels(model)), kernels(model)
    wanted, ours = found
    assert np.abs(ours - wanted).max() < 0.2 * wanted.std()  # f16 activations for int8's: 0.07; a wrong number: above 1
    assert (ours.argmax(-1) == wanted.argmax(-1)).mean() > 0.9


@pytest.mark.parametrize("speculate", (0, 2) if LONG else [(0, 2)[int(kernels_digest(), 16) % 2]])  # alternating
def test_texts_are_the_same_alone_and_together(folder: Path, gpu: Callable[..., Opened], speculate: int) -> None:
    """Sampled texts, bit for bit, with drafts and without. Without `deterministic`, layers of one sequence are one
    dispatch."""
    load: dict[str, Any] = {"ctx": 96, "slots": len(PROMPTS), "weights": "q4_0"} | (
        {"speculate": speculate} if speculate else {}
    )
    with hybrid.load(folder, gpu(), deterministic=True, **load) as model:
        alone = [model.submit(p, **DRAWN).result().ids for p in PROMPTS]
        with model.engine.lock:
            handles = [model.submit(p, **DRAWN) for p in PROMPTS]
        assert [h.result().ids for h in handles] == alone and len(set(alone)) == len(alone)
        assert not model.engine.faults
    with hybrid.load(folder, gpu(), **load) as model:
        handles = [model.submit(p, **DRAWN) for p in PROMPTS]
        assert all(len(h.result().ids) == DRAWN["max_tokens"] for h in handles) and not model.engine.faults
        model.submit(PROMPTS[0], **DRAWN).result()
        assert any(name.startswith("layer.") for name in kernels(model)) or speculate
