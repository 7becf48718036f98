"""Memory budgets: the number of cache blocks is derived, and a model that does not fit is refused with numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

import hybrid
from conformance.support.devices import open_backend
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint.families import tensors
from hybrid.checkpoint.random import random_checkpoint, random_types
from hybrid.core.plan import Plan
from hybrid.core.units import parse_bytes
from hybrid.devices.opening import Opened
from hybrid.engine.loading import HEADROOM, LEAST_KEPT, OverBudget, budget_for
from hybrid.kernels.vulkan import dry
from hybrid.kernels.vulkan.device import VulkanDevice
from hybrid.planning.cache import DEFAULT_CTX, CacheShape
from hybrid.planning.expand import WeightInfo
from hybrid.planning.footprint import Footprint, footprint
from hybrid.spec.model import find_model

CACHE = CacheShape(ctx=320, window=33, chunk=64, slots=4)  # 10 blocks, rings of 4
HELD = Footprint(weights=1000, tables=10, kv_global=40 * 100, kv_local=16 * 50, state=5, io=5, scratch=80)
ONE = 10 * 100 + 4 * 50
FIXED = 1000 + 100 + HEADROOM


def test_blocks_take_what_is_left() -> None:
    assert (CACHE.table, CACHE.ring, CACHE.global_blocks, CACHE.local_blocks) == (10, 4, 40, 16)
    for times, blocks in (
        (1.0, (10, 4)),
        (2.5, (25, 10)),
        (4.0, (40, 16)),
        (1000.0, (10 * LEAST_KEPT, 4 * LEAST_KEPT)),
    ):
        room = budget_for(FIXED + int(times * ONE), HELD, CACHE)
        assert room.blocks == blocks and room.sequences == min(times, LEAST_KEPT)
        assert room.weights + room.rest + room.kv <= room.memory
    assert "2.5 sequences of 320 tokens" in budget_for(FIXED + int(2.5 * ONE), HELD, CACHE).line()


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(OverBudget, match=r"one sequence of 320 tokens 1.17 KiB.*ctx=288 would fit, or give it more"):
        budget_for(FIXED + ONE - 1, HELD, CACHE)
    with pytest.raises(OverBudget, match="use a smaller weight type"):
        budget_for(1000, HELD, CACHE)


def test_a_model_loads_into_its_memory(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, tiny(), dtype="f32")
    with pytest.raises(OverBudget) as refused:
        hybrid.load(folder, "cpu", ctx=128, memory="1MiB")
    found = re.search(r"together ([\d.]+ \w+)", str(refused.value))
    assert found is not None
    enough = parse_bytes(found[1]) + (1 << 20)
    with hybrid.load(folder, "cpu", ctx=128, slots=4, memory=enough) as model:
        room, cache = model.engine.runner.budget, model.engine.cache
        assert room is not None and (cache.global_blocks, cache.local_blocks) == room.blocks
        assert cache.table <= cache.global_blocks and room.sequences < 2 * LEAST_KEPT
        prompts = [[2, *range(20 + i, 60 + i)] for i in range(5)]
        texts = model.generate_batch(prompts, max_tokens=40, ignore_eos=True)
        assert texts == ["".join(model.generate(p, 40, ignore_eos=True)) for p in prompts]
    with pytest.raises(ValueError, match="no size"):
        hybrid.load(folder, "cpu", memory="much")


CAP = 512 << 20
"""Largest allocation of a driver with little memory."""


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma3n-e2b"])
def test_no_tensor_of_a_model_with_a_large_table_needs_more_at_a_time(name: str) -> None:
    """Checks every part of every chunk of every tensor, shared activations and kernel scratch, of each pass."""
    hp, device, plans, chunks = find_model(name).hparams(), dry.DryDevice(max_range=CAP), list[Plan](), {}
    types, shapes = random_types(hp, "q4_0"), tensors(hp)
    infos = {n: WeightInfo(types[n], shape) for n, shape in shapes.items()}
    footprint(hp, infos, context=DEFAULT_CTX, beside=lambda plan: plans.append(plan) or 0)
    for plan in plans:
        assert max(plan.arena_bytes, dry.scratch_bytes(plan, device)) <= CAP
        for decl in plan.tensors.values():
            chunks[decl.name] = dry._tensor(decl, CAP).chunks
            assert all(piece.size <= CAP for chunk in chunks[decl.name] for piece in chunk.parts), decl.name
            assert sum(chunk.rows for chunk in chunks[decl.name]) == (decl.shape[0] if decl.shape else 1), decl.name
    table = "per_layer_token_embd.weight"
    assert plans and len(chunks[table]) > 1 and hp.context_length >= DEFAULT_CTX


@pytest.mark.skipif(not LONG, reason="a gigabyte of weights; the long profile does, the short one plans them")
def test_a_model_with_a_large_table_runs_where_one_allocation_is_half_a_gigabyte() -> None:
    """Eight layers of E2B with every row of both tables: rows of each chunk equal those on cpu."""
    device = cast(VulkanDevice, open_backend("vulkan", max_range=CAP))
    device.memory_pool.limits = replace(device.memory_pool.limits, max_allocation=CAP)  # larger allocations are refused
    prompt = [2, 262143, 131071, 131072, 5]
    with hybrid.load(
        random_checkpoint("gemma4-e2b", "q4_0", layers=8), Opened(device, device), ctx=64, chunk=8, precision="exact"
    ) as model:
        chunks = device.tensor("per_layer_token_embd.weight").chunks
        assert len(chunks) > 1 and chunks[-1].row + chunks[-1].rows == 262144
        sizes = [b.size for pool in device.memory_pool.blocks.values() for b in pool]
        assert max(sizes) <= CAP < sum(sizes)
        found = model.logits(prompt)
    with hybrid.load(
        random_checkpoint("gemma4-e2b", "q4_0", layers=8), "cpu", ctx=64, chunk=8, precision="exact"
    ) as model:
        wanted = model.logits(prompt)
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max() and np.abs(wanted).max() > 0
