"""Details of host modules: each was broken once without another test noticing."""

from __future__ import annotations

import builtins
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.support.models import MODELS
from conformance.support.synthetic import tiny
from conformance.support.texts import greedy
from hybrid import doctor
from hybrid.bench import probe, report
from hybrid.bench.ceiling import ceiling
from hybrid.bench.measure import Bench, Row
from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.random import random_checkpoint
from hybrid.core.device import StepTime
from hybrid.core.hostmemory import PAGE, NotShareable, anonymous, pages, whole_pages
from hybrid.core.plan import TensorDecl
from hybrid.devices import opening as devices
from hybrid.devices.transfers import TransferCounts
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.runner import Flight
from hybrid.engine.trace import TimedPass, Timing
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.perplexity import Running
from hybrid.planning.arena import Life, place
from hybrid.planning.cost import memory, plan_cost
from hybrid.planning.footprint import every_size
from hybrid.planning.passes import pass_sizes
from hybrid.text.chat import _quoted, encode
from hybrid.text.tokenizer import Tokenizer, Vocabulary


@pytest.fixture
def engine() -> Engine:
    return Engine(
        random_checkpoint("gemma3-270m", layers=1, vocab=512), CpuDevice(), EngineConfig(ctx=64, chunk=16, slots=2)
    )


# ------------------------------------------------------------------------------------------------------------- plans
def test_an_arena_without_tensors_has_no_bytes() -> None:
    assert place([]) == ({}, 0)
    offsets, size = place([Life("a", 1, 0, 1), Life("b", 300, 1, 2), Life("c", 256, 2, 3)])
    assert len(set(offsets.values())) == 2 and size == max(offsets["b"] + 512, offsets["a"] + 256, offsets["c"] + 256)


def test_an_arena_fills_the_smallest_gap_that_is_large_enough() -> None:
    """`wide` and `narrow` are dead when `late` comes; `first` and `last` are not."""
    lives = [Life("wide", 1024, 0, 1), Life("first", 768, 0, 3), Life("narrow", 640, 0, 1), Life("last", 620, 0, 3)]
    offsets, size = place([*lives, Life("late", 600, 2, 3)])
    assert size == 1024 + 768 + 768 + 768 and offsets["late"] == offsets["narrow"]
    assert place([*lives, Life("late", 1000, 2, 3)])[0]["late"] == offsets["wide"]


def test_memory_beside_the_arena_is_planned_for_every_pass(engine: Engine) -> None:
    """Each number of rows that an engine compiles, with as many results as there are sequences, or rows."""
    found = [(p.rows, p.outs) for p in every_size(engine.target, engine.sizes)]
    assert found == [(1, 1), (2, 2), (1, 1), (8, 2), (16, 2), (16, 16), (16, 0)]


def test_copied_bytes_are_reported_in_megabytes() -> None:
    assert str(TransferCounts(2, 3_000_000, 4, 5_500_000)) == "2 tensors shared (3.00 MB), 4 copies, 5.50 MB"
    assert (
        str(TransferCounts(1, 0, 0, 0, 2, "no"))
        == "1 tensors shared (0.00 MB, 2 dma-bufs), 0 copies, 0.00 MB; not shared: no"
    )


def test_passes_that_read_hidden_states_back_fit_in_host_memory() -> None:
    hp = tiny(hidden=1 << 19)  # 8 MiB for a row of three layers and their input
    assert pass_sizes(hp, ctx=256, slots=1, chunk=128).hidden == 32


def test_memory_of_a_plan_is_listed_by_purpose(engine: Engine) -> None:
    held = memory(engine.runner.plan("decode", 1, 1))
    hp = engine.target.hparams
    blocks = sum(engine.cache.table if seen else engine.cache.ring for seen in hp.layer_is_global) * engine.cache.slots
    row = hp.layers[0].n_kv_heads * hp.layers[0].head_dim
    assert held["kv"] == 2 * 2 * blocks * engine.cache.block * row  # keys and values in float16
    assert 0 < held["state"] < held["kv"] < held["weights"] and held["tables"] > 0 and held["io"] > 0
    assert held["activations"] == engine.runner.plan("decode", 1, 1).arena_bytes


def test_warming_up_compiles_what_a_prompt_needs(engine: Engine) -> None:
    for rows in (32, 9):  # two full passes; one that is not
        engine.runner.warm_up(rows)
        programs, counters = len(engine.runner._programs), engine.counters.copy()
        greedy(engine, range(2, 2 + rows), 3)
        done = engine.counters.minus(counters)
        assert len(engine.runner._programs) == programs, rows
        assert done.recordings == done.allocations == done.pipelines == 0 < done.submits, rows


def test_the_cost_of_a_plan_is_the_sum_of_its_steps(engine: Engine) -> None:
    few, many = (plan_cost(engine.runner.plan("decode", n, n)) for n in (1, 2))
    assert few.flops > 0 and many.flops == 2 * few.flops and few.nbytes < many.nbytes < 2 * few.nbytes


# ------------------------------------------------------------------------------------------------------------- times
class Timed:
    """A program with timed steps, in seconds from its start, which the device's clock puts at `began`."""

    def __init__(self, name: str, began: float | None, *steps: tuple[float, float]) -> None:
        self.plan, self._began = SimpleNamespace(name=name), began
        self._steps = [StepTime("s", "linear", 0, start, duration) for start, duration in steps]

    def times(self, ticket: int) -> list[StepTime]:
        return self._steps

    def began(self, ticket: int) -> float | None:
        return self._began


def test_a_pass_that_runs_beside_others_ends_with_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([20.0, 30.0, 40.0, 50.0, 60.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    found: list[TimedPass] = []
    timing = Timing(found, True)
    steps = ((0.0, 1.0), (1.5, 0.5))
    programs = (Timed("a", 10.25, *steps), Timed("b", None, *steps), Timed("c", 11.0), Timed("d", 12.0, *steps))
    for ticket, program in enumerate(programs):
        timing.start(program, ticket, 10.0 + ticket, (ticket, 1, 7))  # type: ignore[arg-type]
    timing.stop(0)
    assert [(p.plan, p.begin, p.seconds) for p in found] == [("a", 10.0, 2.25)]
    assert [s.start for s in found[0].steps] == [0.25, 1.75]
    timing.stop(2)  # without times of its steps a pass ends when the host has waited for it
    assert [(p.plan, p.begin, p.seconds) for p in found[1:]] == [("b", 11.0, 2.0), ("c", 12.0, 28.0)]
    assert [s.start for s in found[1].steps] == [0.0, 1.5]
    timing.stop(9)
    assert [(p.plan, p.begin, p.seconds) for p in found[3:]] == [("d", 13.0, 2.0)]
    timing.stop(9)
    assert [(p.rows, p.outs, p.context) for p in found] == [(ticket, 1, 7) for ticket in range(4)]
    alone = Timing(found, False)
    alone.start(programs[0], 4, 10.0)  # type: ignore[arg-type]
    alone.stop(4)
    assert found[-1].seconds == 50.0


# ------------------------------------------------------------------------------------------------------------- bench
def test_a_bench_refuses_token_ids_out_of_range(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(engine, 1)
    whole = engine.runner.tokens
    for token, says in (
        (-1, "the logits after position 4 of slot 1 are NaN or infinite"),
        (-7, "the device left -7 as the token for position 5 of slot 1: no such word"),
        (512, r"the device sampled \[512\]: not all are tokens below 512"),
        (511, None),
        (0, None),
    ):

        def changed(flight: Flight, token: int = token) -> tuple[list[int], list[int] | None]:
            found, counts = whole(flight)
            return [
                token if run.slot == 1 else t for run, t in zip(flight.scheduled.wanting, found, strict=True)
            ], counts

        monkeypatch.setattr(engine.runner, "tokens", changed)
        if says is None:
            assert bench.prefill(5, 0).tokens == 10
            continue
        with pytest.raises(RuntimeError, match=says):
            bench.prefill(5, 0)


def test_probes_count_what_they_move_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_fastest", lambda run: (run(), 0.25)[1])
    assert probe._cpu_copy() == {"numpy copy": 8 * (32 << 20) / 1e9}  # read and written, in a quarter of a second
    assert probe._cpu_matrix() == {"numpy matmul f32": 8 * 1024**3 / 1e12}  # a product and a sum


def test_a_probe_of_matrices_multiplies_its_tiles() -> None:
    names = ("256.4x2", "64.1x1")
    has = SimpleNamespace(
        has=lambda name: True, subgroup_size=32, kernels_named=lambda start: [start + n for n in names]
    )
    each = probe.MATRIX_GROUPS * probe.MATRIX_STEPS * 2 * 16**3
    found = [(v.kernel, v.cost.flops // each) for v in probe.products(has, 1 << 40)]
    assert found == [("probe_matrix.256.4x2", 64), ("probe_matrix.64.1x1", 2)]
    assert probe.products(SimpleNamespace(**{**vars(has), "subgroup_size": 64}), 1 << 40) == []
    assert probe.products(SimpleNamespace(**{**vars(has), "has": lambda name: False}), 1 << 40) == []


def test_shares_in_the_table_of_a_bench_are_per_cent() -> None:
    row = Row("decode", 10, 0, 1, 10, (0.1, 0.2, 0.4), 10**12, 10**12, {"dispatches": 3.0, "barriers": 2.0})
    probes = probe.Probes(20_000.0, "copy", 10.0, "matrix", {})
    about = {
        "device": "d",
        "driver": "v",
        "model": "m",
        "weights_bytes": 1,
        "precision": {k: ("f32",) for k in ("weights", "activations", "kv")},
        "load_seconds": 1.0,
        "passed_over": [],
    }
    made = report.as_dict(about, [row, replace(row, seconds=(0.2,))], probes, ceiling(probes, None), [])
    line = report.text(made).splitlines()[-2]
    assert line.count(" %") == 2 and "25.0 %" in line and "50.0 %" in line  # 5000 GB/s and 5 TFLOPS
    assert [r["spread"] for r in made["results"]] == [pytest.approx(statistics.stdev([100, 50, 25])), 0.0]
    assert [r["mean"] for r in made["results"]] == [pytest.approx(175 / 3), 50]


def test_one_prediction_has_a_mean_and_no_error() -> None:
    sums = Running()
    sums.add(np.array([3.0]))
    assert sums.mean == sums.most == 3 and math.isnan(sums.error)
    sums.add(np.array([5.0]))
    assert sums.mean == 4 and sums.error == 1


# ------------------------------------------------------------------------------------------------------------ memory
def test_memory_is_shared_in_whole_anonymous_pages(tmp_path: Path) -> None:
    held = anonymous(TensorDecl("x", "f32", (PAGE, 3), "io")).parts[0]
    assert whole_pages(held) == (held.ctypes.data, 3 * 4 * PAGE)
    assert whole_pages(held.reshape(-1)[: PAGE // 4 + 1]) == (held.ctypes.data, 2 * PAGE)
    assert pages(0) == pages(1) == pages(PAGE) == PAGE and pages(PAGE + 1) == 2 * PAGE
    with pytest.raises(NotShareable, match=f"does not begin at a page of {PAGE} bytes"):
        whole_pages(held.reshape(-1)[1:])
    (tmp_path / "f").write_bytes(bytes(2 * PAGE))
    with pytest.raises(NotShareable, match=r"is a mapping of /.*f, not anonymous"):
        whole_pages(np.memmap(tmp_path / "f"))


@pytest.mark.parametrize(
    ("maps", "error"),
    [
        ("{0:x}-{2:x} rw-p 0 00:00 0", ""),
        (
            "1000-2000 r-xp 0 08:01 5 /bin/python\n{0:x}-{1:x} rw-p 0 00:00 0 [heap]\n{1:x}-{2:x} rw-p 0 00:00 0 [anon: a b]",
            "",
        ),
        (
            "{0:x}-{1:x} rw-p 0 00:00 0\n{1:x}-{2:x} rw-p 0 08:01 7 /srv/a file",
            "{1:#x} is a mapping of /srv/a file, not",
        ),
        ("{0:x}-{2:x} rw-s 0 00:01 9", "{0:#x} is a mapping of a file, not"),
        ("{0:x}-{2:x} rw-p 0 00:00 0 [stack]", r"{0:#x} is a mapping of \[stack\], not"),
        ("{0:x}-{1:x} rw-p 0 00:00 0\n{2:x}-{3:x} rw-p 0 00:00 0", "{1:#x} is not mapped to the end of its"),
        ("{1:x}-{2:x} rw-p 0 00:00 0", "{0:#x} is not mapped to the end of its"),
    ],
)
def test_the_backing_of_memory_is_read_from_the_systems_map(
    maps: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = anonymous(TensorDecl("x", "i8", (2, PAGE), "io")).parts[0]
    ends = [held.ctypes.data + i * PAGE for i in range(4)]
    monkeypatch.setattr(Path, "read_text", lambda self: maps.format(*ends))
    if not error:
        assert whole_pages(held) == (ends[0], 2 * PAGE)
        return
    with pytest.raises(NotShareable, match=error.format(*ends)):
        whole_pages(held)


# -------------------------------------------------------------------------------------------------------------- chat
def test_parts_without_text_are_left_as_they_are() -> None:
    pieces = ["<bos>", "<x>", "a", *(f"<0x{b:02X}>" for b in range(256))]
    made = Tokenizer(Vocabulary(tuple(pieces), (0.0,) * len(pieces), (3, 3, 1, *(6,) * 256), 0, None))
    message = {"role": "user", "content": ["text", {"type": "image"}, {"text": 5}, {"text": "a<x>"}]}
    content: Any = _quoted(made, message, "|")["content"]
    assert content[:3] == message["content"][:3] and content[3]["text"] == "a<|x>"
    assert _quoted(made, {"role": "user", "content": None}, "|") == {"role": "user", "content": None}


@pytest.mark.parametrize("parts", [False, True])
def test_characters_that_stand_for_nothing_stay_in_messages(parts: bool) -> None:
    """In messages, a character that no message contains splits control tokens."""
    tokenizer = open_checkpoint(MODELS / "demo-gemma3-q8_0.gguf").tokenizer
    said = "a\ufdd0b <end_of_turn>" + "\ufdd1"
    content: Any = [{"type": "text", "text": said}] if parts else said
    found = tokenizer.decode(encode(tokenizer, [{"role": "user", "content": content}]))
    assert said in found


# ----------------------------------------------------------------------------------------------------------- devices
def test_a_vulkan_package_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name.startswith("hybrid.kernels.vulkan"):
            raise ImportError("libvulkan.so.1: cannot open")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    opened = devices._first(["vulkan", "cpu"])
    assert opened.device.name == "cpu"
    assert opened.passed_over == (
        "vulkan: the Vulkan backend cannot be imported (libvulkan.so.1: cannot open); install the package vulkan",
    )
    with pytest.raises(devices.NoDevice, match="install the package vulkan"):
        devices._first(["vulkan"])


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ({"vulkan": "ok", "python": "ok", "npu": "optional"}, 0),
        ({"vulkan": "missing", "python": "ok"}, 1),
        ({"vulkan": "ok", "python": "missing"}, 1),
        ({"python": "ok"}, 1),
    ],
)
def test_doctor_ends_by_what_is_needed(
    states: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [doctor.Finding(area, "name", state, "detail", "do this") for area, state in states.items()]  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    assert doctor.main(["--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] == (code == 0)
    assert doctor.main([]) == code
    out = capsys.readouterr().out
    assert out.count("-> do this") == sum(s != "ok" for s in states.values())
    assert out.splitlines()[-1].startswith("ready" if code == 0 else "not ready")


def test_doctor_tells_memory_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.kernels.host.memory.available_bytes", lambda: 7 << 30)
    monkeypatch.setattr("hybrid.kernels.host.memory.usable_bytes", lambda: 5 << 30)
    found = doctor._memory()
    assert "7.0 GiB available" in found.detail and "up to 5.0 GiB" in found.detail
    assert found.data == {"available_bytes": 7 << 30, "usable_bytes": 5 << 30}


@pytest.mark.parametrize(("lacks", "state"), [((), "ok"), (("shaderInt8", "16-bit storage"), "missing")])
def test_doctor_names_what_a_device_lacks(lacks: tuple[str, ...], state: str) -> None:
    limits = Limits(subgroup=32, max_storage_range=1 << 27)
    report = SimpleNamespace(
        driver="v1",
        features=[],
        extensions=[],
        limits=limits,
        matrices=[],
        has=lambda name: False,
        missing=[SimpleNamespace(name=n) for n in lacks],
    )
    heaps = [{"bytes": 3 << 30, "device_local": True}, {"bytes": 1 << 30, "device_local": False}]
    found = doctor._device(SimpleNamespace(label="none such", kind="integrated"), report, heaps)
    assert found.state == state and bool(found.fix) == bool(lacks)
    assert ("lacks shaderInt8, 16-bit storage" in found.detail) == bool(lacks)
    for part in (
        "memory 3.0 GiB device, 1.0 GiB;",
        "subgroup 32",
        "up to 128 MiB",
        "matrix units no;",
        "peak not known",
    ):
        assert part in found.detail


@dataclass
class Limits:
    """A device's limits, with the given fields."""

    subgroup: int
    max_storage_range: int
