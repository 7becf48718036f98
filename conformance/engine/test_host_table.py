"""The table of per-layer embeddings stays in its file where it does not fit in memory, and the host reads its rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny_gemma3n, tiny_gemma4, write_hf
from hybrid.core.hparams import HParams
from hybrid.core.units import parse_bytes
from hybrid.engine.loading import OverBudget
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.spec.schedule import named_schedule

TABLE = "per_layer_token_embd.weight"
MANY = 6 if LONG else 4
PROMPTS = [[2, *range(20 + i, 31 + i)] for i in range(3)]
FAMILIES: dict[str, Callable[..., HParams]] = {"gemma3n": tiny_gemma3n, "gemma4": tiny_gemma4}
TURN = list(FAMILIES)[int(kernels_digest(), 16) % 2]  # on Vulkan, in the short profile


def load(path: Path, backend: str, **options: Any) -> hybrid.Model:
    device = for_model(backend, named_schedule(options["schedule"]) if "schedule" in options else None)
    return hybrid.load(path, device, ctx=64, chunk=16, slots=3, precision="exact", **options)


def texts(model: hybrid.Model) -> list[list[str]]:
    """Texts of one sequence at a time, and of all together."""
    alone = ["".join(model.generate(p, MANY, ignore_eos=True)) for p in PROMPTS]
    return [alone, model.generate_batch(PROMPTS, max_tokens=MANY, ignore_eos=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"), [(f, b) for f in FAMILIES for b in BACKENDS if LONG or b == "cpu" or f == TURN]
)
def test_the_text_is_the_same_and_the_table_is_not_on_the_device(tmp_path: Path, family: str, backend: str) -> None:
    folder = write_hf(tmp_path, FAMILIES[family]())
    with load(folder, backend) as model:
        wanted, table, before = (
            texts(model),
            model.engine.runner.plan("decode", 1, 1).tensors[TABLE],
            model.engine.device.memory(),
        )
        lone = model.engine.counters.submits
        model.generate_batch(PROMPTS[:1], max_tokens=4, ignore_eos=True)
        lone = model.engine.counters.submits - lone
    with load(folder, backend, schedule=f"{family}-host-table") as model:
        assert texts(model) == wanted
        memory, device = model.engine.device.memory(), model.engine.device
        if backend == "cpu":
            assert device.name == "cpu" and memory == before  # the main device is the host
            return
        assert memory["weights"] <= before["weights"] - table.data_bytes
        assert memory["cpu.left_in_files"] >= table.data_bytes and memory.get("cpu.weights", 0) < table.data_bytes
        submits = device.counters.submits
        model.generate_batch(PROMPTS[:1], max_tokens=4, ignore_eos=True)
        assert device.counters.submits - submits == 3 * lone  # each pass: up to the table, the host's step, the rest
        assert "shared" in device.copies
        long = [2, *range(10, 50)]
        first, second = (model.submit(long, max_tokens=1, ignore_eos=True).result() for _ in range(2))
        assert first.usage.cached_tokens == 0 and second.usage.cached_tokens > 0 and first.text == second.text


@pytest.mark.slow
def test_the_host_table_is_selected_where_memory_is_short(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, tiny_gemma4())
    with pytest.raises(OverBudget) as refused:
        load(folder, "vulkan", memory="1MiB", schedule="gemma4")
    together = re.search(r"together ([\d.]+ \w+)", str(refused.value))
    assert together is not None
    enough = parse_bytes(together[1])
    with load(folder, "vulkan", memory=enough + (1 << 20)) as model:
        assert model.passed_over == () and "cpu" not in model.device
    short = enough - (16 << 10)
    with load(folder, "vulkan", memory=short) as model:
        assert model.device.endswith("+ cpu")
        assert "schedule gemma4: memory" in model.passed_over[0] and model.passed_over[0].endswith(
            "so gemma4-host-table"
        )
        assert model.engine.runner.budget is not None and model.engine.runner.budget.memory == short
    with pytest.raises(OverBudget, match="too little"):  # even that does not fit
        load(folder, "vulkan", memory="1MiB")
    with pytest.raises(OverBudget, match="too little"):  # a requested schedule is kept
        load(folder, "vulkan", memory=short, schedule="gemma4")
