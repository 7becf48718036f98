"""Steps on the host beside a device: per-layer embeddings when memory is too small, experts as a schedule asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model, own_memory
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny_gemma3n, tiny_gemma4, write_hf
from hybrid.checkpoint.families import is_exact, tensors
from hybrid.core.hparams import HParams
from hybrid.devices.transfers import Transfers
from hybrid.engine.loading import OverBudget
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.planning.cache import CacheShape
from hybrid.planning.expand import WeightInfo
from hybrid.planning.pipeline import outlasting
from hybrid.planning.planner import Target, plan
from hybrid.planning.segments import segments
from hybrid.spec.schedule import Schedule, load_schedule, named_schedule

TABLE = "per_layer_token_embd.weight"
MANY = 6 if LONG else 4
PROMPTS = [[2, *range(20 + i, 31 + i)] for i in range(3)]
FAMILIES: dict[str, Callable[..., HParams]] = {"gemma3n": tiny_gemma3n, "gemma4": tiny_gemma4}
TURN = list(FAMILIES)[int(kernels_digest(), 16) % 2]  # on Vulkan, in the short profile


def load(path: Path, backend: str, **options: Any) -> hybrid.Model:
    schedule = options.get("schedule")
    device = for_model(backend, named_schedule(schedule) if isinstance(schedule, str) else schedule)
    return hybrid.load(path, device, ctx=64, chunk=16, slots=3, precision="exact", prove=False, **options)


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


def with_experts_on_the_host(folder: Path) -> Schedule:
    """Gemma 4 with experts on cpu, whose live rows another step counts."""
    path = folder / "hosted.toml"
    path.write_text(
        'schema = 1\nextends = "gemma4"\n[schedule]\nname = "hosted"\nsummary = "experts on cpu"\n'
        '[[placement]]\nsteps = ["*.experts"]\ndevice = "cpu"\n'
    )
    return load_schedule(path)


def mixture(folder: Path) -> Path:
    return write_hf(folder, tiny_gemma4(inputs=False, experts=(8, 2, 32)))


@pytest.mark.parametrize("shared", [True, False])
def test_experts_of_the_host_give_the_same_text(tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows, the number of these and their results are shared with the device, or copied."""
    folder = mixture(tmp_path)
    if not shared:
        monkeypatch.setattr(Transfers, "_share", lambda self, decl: False)
    with load(folder, "vulkan") as model:
        wanted, before = texts(model), model.engine.device.memory()
    with load(folder, "vulkan", schedule=with_experts_on_the_host(tmp_path)) as model:
        assert texts(model) == wanted
        memory, device = model.engine.device.memory(), model.engine.device
        left = memory["cpu.left_in_files"]
        assert left > 0 and memory["weights"] <= before["weights"] - left and "cpu.weights" not in memory
        plan = model.engine.runner.program("decode", 1, 1).plan
        assert len(segments(plan)) == 2 * model.hparams.n_layers + 1
        counts = device.transfers.counts
        assert counts.shared > 0 if not own_memory(device) and shared else counts.shared == 0 < counts.copies
        names = {n for s in plan.steps if s.device == "cpu" for n in (*s.args.values(), s.counts)}
        rows = sum(plan.tensors[n].data_bytes for n in names if plan.tensors[n].kind == "io")
        text = model.generate(PROMPTS[0], MANY, ignore_eos=True)
        next(text)
        before_decode, passes = counts.copied_bytes, len(list(text)) + 1
        copied = counts.copied_bytes - before_decode
        assert copied <= passes * model.hparams.n_layers * rows, "rows of the pass, not all that are stored"


def test_tensors_between_devices_have_one_type_each(tmp_path: Path) -> None:
    """On a device with f16 matrix units, prefill and decode plans would otherwise pass the experts different dtypes."""
    hp = tiny_gemma4(inputs=False, experts=(8, 2, 32))
    schedule, cache = with_experts_on_the_host(tmp_path), CacheShape.of(hp, 64, 2, 16)
    weights = {n: WeightInfo("f32" if is_exact(n, s) else "q8_0", s) for n, s in tensors(hp).items()}
    target = Target(schedule, hp, weights, cache, hp.vocab, device="vulkan", capabilities=frozenset({"f16_matrices"}))
    plans = [plan(target, 2, 2, "decode"), plan(target, 16, 2, "prefill")]
    stored, rows = outlasting(plans), set()
    for step, made in ((s, p) for p in plans for s in p.steps if s.op == "expert_ffn"):
        assert step.device == "cpu" and {made.tensors[step.args[k]].kind for k in ("x", "h", "y", "spans")} == {"io"}
        assert made.tensors[step.counts].kind == "io"
        rows.add(made.tensors[step.args["x"]].dtype)
        assert all(stored[n].dtype == made.tensors[n].dtype for n in step.args.values())
    assert rows == {"q8_act", "f16"}


@pytest.mark.slow
def test_the_host_table_is_selected_where_memory_is_short(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, tiny_gemma4())
    with pytest.raises(OverBudget) as refused:
        load(folder, "vulkan", memory="1MiB", schedule="gemma4")
    enough = refused.value.needs
    with load(folder, "vulkan", memory=enough) as model:
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
