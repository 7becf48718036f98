"""Experts in host memory: where the device's memory is too small, it reads them from there with the same kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.devices import for_model, open_another
from conformance.support.paths import DEMO
from hybrid.core.plan import IN_HOST_MEMORY, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.engine.loading import HEADROOM, OverBudget, budget_for, placed
from hybrid.kernels.vulkan.api import OutOfDeviceMemory
from hybrid.kernels.vulkan.device import VulkanDevice
from hybrid.kernels.vulkan.memory import MIB, best_type
from hybrid.planning.cache import CacheShape
from hybrid.planning.footprint import Footprint

MIXTURE = DEMO.parent / "demo-gemma4-moe-q8_0.gguf"
PROMPTS = ["def f(x):", "import os"]


def load(**options: Any) -> hybrid.Model:
    return hybrid.load(MIXTURE, for_model("vulkan"), ctx=64, chunk=16, slots=2, prove=False, **options)


def texts(model: hybrid.Model) -> list[str]:
    """The texts of the prompts in one batch, then that of the first prompt alone."""
    return [*model.generate_batch(PROMPTS, max_tokens=8), "".join(model.generate(PROMPTS[0], 8))]


def pools(model: hybrid.Model) -> dict[str, set[str]]:
    """The pools of each weight's memory."""
    device: Any = model.engine.device
    names = [n for n, d in model.engine.runner.plan("decode", 1, 1).tensors.items() if d.kind == "weight"]
    return {n: {part.buffer.pool for chunk in device.tensor(n).chunks for part in chunk.parts} for n in names}


@pytest.fixture(scope="module")
def wanted() -> tuple[list[str], int, float]:
    """Texts, bytes of weights, and submits of a token, with all in device memory."""
    with load() as model:
        found = texts(model)
        assert model.stats is not None and model.engine.runner.memory_lines() == []
        assert {pool for of in pools(model).values() for pool in of} == {"device"}
        assert model.engine.device.memory()[IN_HOST_MEMORY] == 0 and model.stats.bytes_elsewhere == {}
        return found, model.engine.device.memory()["weights"], model.stats.per_pass["submits"]


@pytest.fixture(scope="module")
def least() -> int:
    """Bytes of device memory that the model needs beside its experts."""
    with pytest.raises(OverBudget, match=r"weights take .* beside .* in host memory") as refused:
        load(memory="1MiB")
    return refused.value.needs


def test_text_is_the_same_with_all_experts_in_host_memory(wanted: tuple[list[str], int, float], least: int) -> None:
    with load(memory=least) as model:
        assert texts(model) == wanted[0] and model.device.startswith("vulkan") and "cpu" not in model.device
        found, experts = pools(model), {n for n in pools(model) if n.endswith("_exps.weight")}
        assert len(experts) == 2 * model.hparams.n_layers
        assert all(of == ({"host"} if n in experts else {"device"}) for n, of in found.items())
        memory = model.engine.device.memory()
        assert memory[IN_HOST_MEMORY] > 0 and memory[IN_HOST_MEMORY] + memory["weights"] == wanted[1]
        stats, layer = model.stats, model.hparams.layers[0]
        assert stats is not None and stats.per_pass["submits"] == wanted[2]
        each = 3 * layer.expert_ffn * model.hparams.hidden * 34 // 32  # bytes of an expert in q8_0
        read = model.hparams.n_layers * layer.experts_used * each
        assert stats.bytes_elsewhere == {"cpu": read}
        assert stats.details()[1].endswith(f", {read / 1e6:.2f} of it from host memory")
        budget, line = model.engine.runner.memory_lines()
        assert budget.startswith("memory ") and f"a token reads {read / 1e6:.1f} MB of it" in line
        assert ("over PCIe" in line) != ("here the device's own" in line) == model.engine.device.unified


def test_only_what_does_not_fit_is_in_host_memory(wanted: tuple[list[str], int, float], least: int) -> None:
    with load(memory=least + 2 * MIB) as model:
        assert texts(model) == wanted[0]
        held = [next(iter(of)) for n, of in pools(model).items() if n.endswith("_exps.weight")]
        assert held == sorted(held) and set(held) == {"device", "host"}, "the last layers' are in host memory"
        memory = model.engine.device.memory()
        assert memory["weights"] <= wanted[1] - model.engine.runner.budget.spill  # type: ignore[union-attr]


def test_free_memory_is_the_budget_where_none_is_given(
    wanted: tuple[list[str], int, float], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VulkanDevice, "available", least + MIB)
    monkeypatch.setattr(VulkanDevice, "host_room", lambda self, memory: 1 << 30)
    with load() as model:
        assert texts(model) == wanted[0] and model.engine.runner.spilled
    monkeypatch.setattr(VulkanDevice, "host_room", lambda self, memory: MIB)
    with pytest.raises(OverBudget, match=r"beside 1\.00 MiB in host memory"):
        load(memory=least)
    with pytest.raises(OverBudget, match="too little"):  # its memory is the host's
        hybrid.load(MIXTURE, "cpu", memory=least, ctx=64)


def test_the_budget_spills_what_is_missing() -> None:
    cache = CacheShape(ctx=320, window=33, chunk=64, slots=1)  # 10 blocks, rings of 4
    held = Footprint(1000, tables=0, kv_global=1000, kv_local=200, state=0, io=0, scratch=0, spill=700)
    fixed = 1000 + 1200 + HEADROOM
    for memory, spill in ((fixed, 0), (fixed - 1, 1), (fixed - 700, 700)):
        found = budget_for(memory, held, cache, room=1 << 20)
        assert (found.spill, found.weights) == (spill, 1000 - spill) and found.sequences == 1.0
    with pytest.raises(OverBudget, match="weights take 300 B beside 700 B in host memory") as refused:
        budget_for(fixed - 701, held, cache, room=1 << 20)
    assert refused.value.needs == fixed - 700
    with pytest.raises(OverBudget, match="weights take 501 B beside 499 B in host memory"):
        budget_for(fixed - 500, held, cache, room=499)


def test_whole_tensors_are_placed_from_the_last() -> None:
    expert = TensorDecl("0", "f32", (64,), "weight", pool="any")
    decls = {str(i): replace(expert, name=str(i)) for i in range(3)} | {
        "norm": replace(expert, name="n", pool="device")
    }
    for spill, host in ((0, ""), (1, "2"), (256, "2"), (257, "12"), (9999, "012")):
        found = placed(decls, spill)
        assert list(found) == list(decls)
        assert {name: d.pool for name, d in found.items()} == {n: "host" if n in host else "device" for n in decls}


def test_host_memory_is_outside_the_devices_budget() -> None:
    with for_model("vulkan").device as one, open_another(one, budget=4 * MIB) as device:
        large = TensorDecl("w", "f32", (2048, 1024), "weight")
        with pytest.raises(OutOfDeviceMemory, match="out of device memory"):
            device.store(large)
        before = device.available
        device.store(replace(large, pool="host"), Tensor.of(np.ones((2048, 1024), np.float32)))
        assert device.available == before and device.memory()[IN_HOST_MEMORY] == 8 * MIB
        assert (device.read("w").array == 1).all()
        device.drop("w")
        assert device.memory()[IN_HOST_MEMORY] == 0
        room = device.host_room(4 * MIB)
        same = device.memory_pool.heap("host") == device.memory_pool.heap("device")
        assert device.host_room(5 * MIB) == room - MIB * same


@pytest.mark.parametrize(
    ("flags", "types"),
    [
        (
            [0, 1, 6, 14, 7],
            {"device": 1, "host": 2, "shared": 4, "read": 3},
        ),  # a discrete GPU that maps some of its own
        ([1, 6, 14], {"device": 0, "host": 1, "shared": 1, "read": 2}),
        ([15], dict.fromkeys(("device", "host", "shared", "read"), 0)),  # one memory
    ],
)
def test_pools_take_the_memory_type_that_suits_them(flags: list[int], types: dict[str, int]) -> None:
    assert {pool: best_type(pool, flags) for pool in types} == types
