"""The KV cache in q8_0: its cost in nats, its memory, and the agreement of batches, windows and both devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support.devices import BACKENDS, shared_device
from conformance.support.golden import nats, shifted
from conformance.support.models import BOTH, WINDOW, Models, documents
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import greedy, together
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.checkpoint.random import random_checkpoint
from hybrid.core.errors import SpecError
from hybrid.engine.loading import EngineConfig, stored_types
from hybrid.engine.loop import Engine
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.planning.footprint import footprint

IDS = [2, *range(20, 60), 7, 9, 300, 31]  # longer than the window and than a block
MANY = 20 if LONG else 6


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    opened = Models()
    yield opened
    opened.close()


@pytest.fixture(params=BACKENDS)
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    opened = shared_device(request.param)
    yield opened
    opened.close()


@pytest.fixture
def vulkan() -> Iterator[Any]:
    opened = shared_device("vulkan")
    yield opened
    opened.close()


def model(folder: Path, **changes: Any) -> Checkpoint:
    return open_checkpoint(write_hf(folder, tiny(**{"head_dim": 32, **changes}), dtype="f32"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_nats_with_q8_0_are_those_with_f16(models: Models, backend: str) -> None:
    """Over the 3025 predictions. In the short profile four documents; on Vulkan the beginning of one, past the window,
    with three layers, whose nats move as much."""
    some, most = (None, None) if LONG else {"cpu": (4, None), "vulkan": (1, WINDOW + 22)}[backend]
    found = []
    for kv in ("f16", "q8_0"):
        opened = models.get(backend, "q8_0", kv=kv, layers=None if LONG or backend == "cpu" else BOTH)
        texts = [ids[:most] for ids in list(documents(opened))[:some]]
        found.append(np.concatenate([nats(opened.logits(ids), ids) for ids in texts]))
    assert found[0].shape == found[1].shape and (found[0] != found[1]).any()
    assert not shifted(*found, 0.002)


@pytest.mark.slow
def test_every_position_counts(tmp_path: Path, device: Any) -> None:
    """Teacher-forced logits are near those of an exact cache, at every position, over blocks and the window's edge."""
    checkpoint = model(tmp_path)
    exact = Engine(checkpoint, CpuDevice(), EngineConfig(chunk=16, kv="f32")).logits(IDS)
    got = Engine(checkpoint, device, EngineConfig(chunk=16, kv="q8_0")).logits(IDS)
    error = np.abs(got - exact).max(axis=1)
    assert error.max() < 0.05 * np.abs(exact).max() and error.max() > 0


@pytest.mark.slow
def test_a_batch_decodes_as_each_sequence_alone(tmp_path: Path, vulkan: Any) -> None:
    checkpoint, prompts = model(tmp_path), [IDS[:30], IDS[:1], IDS[5:18]]
    single = Engine(checkpoint, vulkan, EngineConfig(chunk=16, kv="q8_0"))
    alone = [greedy(single, ids, MANY + 1) for ids in prompts]
    vulkan.reset()
    made = Engine(checkpoint, vulkan, EngineConfig(chunk=16, slots=4, kv="q8_0"))
    assert together(made, prompts, MANY + 1) == alone


def test_heads_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"q8_0 needs rows of a multiple of 32 elements"):
        Engine(model(tmp_path, head_dim=48), CpuDevice(), EngineConfig(kv="q8_0"))


def test_27b_holds_nearly_twice_the_sequences() -> None:
    """8192 positions each: 17/32 of f16's bytes, scales included, for global and local layers alike."""
    held = {}
    for kv, batch in (("f16", 8), ("q8_0", 15), ("q8_0", 16)):
        with random_checkpoint("gemma3-27b", kind="q4_0") as checkpoint:
            types = stored_types(checkpoint, None)
            found = footprint(checkpoint.hparams, types, batch=batch, context=8192, kv=kv)
        held[kv, batch] = found.kv_global + found.kv_local
    assert held["q8_0", 15] < held["f16", 8] < held["q8_0", 16]
