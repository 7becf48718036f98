"""Prefill chunks that overlap on two devices: the same bits as in sequence, both devices busy at the same time,
dependencies between chunks kept, and a device that fails in one pass replaced for both."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engine.test_hybrid import drivers_memory
from conformance.support.devices import BACKENDS, for_model, open_backend, own_memory
from conformance.support.models import BOTH, MODELS, cut
from conformance.support.paths import ATTENTION, PROJECTIONS
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import ask, together, until
from hybrid.checkpoint import open_checkpoint
from hybrid.convert import convert
from hybrid.devices import transfers
from hybrid.devices.inflight import InFlight
from hybrid.devices.multi import MultiDevice
from hybrid.engine.loading import EngineConfig, stored_types
from hybrid.engine.loop import Engine
from hybrid.generate import main
from hybrid.kernels.npu import xrt_sim
from hybrid.kernels.npu.device import NpuDevice
from hybrid.kernels.npu.views import KeyView
from hybrid.planning.footprint import footprint
from hybrid.planning.pipeline import for_pipeline_slot, needs
from hybrid.planning.segments import segments
from hybrid.spec.schedule import Schedule, named_schedule

SCHEDULES = (ATTENTION, PROJECTIONS)
CHUNK, CTX = 32, 256
PROMPTS = (70, 40)  # rows of two sequences: three and a half chunks, one of them with rows of both
DEMO = MODELS / "demo-gemma3-q8_0.gguf"


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sim_machine")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hp = tiny(n_layers=3, head_dim=32, layer_is_global=(False, True, False), context_length=CTX)
    return write_hf(tmp_path_factory.mktemp("hf"), hp)


def schedule_of(name: Path, depth: int, **changes: Any) -> Schedule:
    found = named_schedule(name)
    return found.model_copy(update={"schedule": found.schedule.model_copy(update={"pipeline": depth}), **changes})


class Opened:
    """An engine on a main device and sim-npu1, as hybrid.load would make it."""

    def __init__(self, path: Path, backend: str, schedule: Schedule, **options: Any) -> None:
        self.checkpoint = open_checkpoint(path)
        self.device: Any = for_model(backend, schedule).device
        assert isinstance(self.device, MultiDevice)
        config = EngineConfig(**({"ctx": CTX, "chunk": CHUNK, "slots": 2} | options))
        self.engine = Engine(self.checkpoint, self.device, config, schedule=schedule)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.device.close()
        self.checkpoint.close()

    def run(self) -> tuple[np.ndarray, list[list[int]]]:
        """Logits of one sequence, then tokens of two that were prompted together."""
        rng = np.random.default_rng(1)
        ids = [rng.integers(6, 300, n).tolist() for n in PROMPTS]
        logits = self.engine.logits(ids[0])
        texts = together(self.engine, ids, 3)
        return logits, texts


def same(a: Any, b: Any) -> bool:
    return np.array_equal(a[0], b[0]) and a[1:] == b[1:]


@pytest.fixture(scope="module")
def unpipelined(folder: Path) -> dict[tuple[Path, str], Any]:
    """A schedule's result with chunks in sequence, computed on first use."""

    class Made(dict[tuple[Path, str], Any]):
        def __missing__(self, key: tuple[Path, str]) -> Any:
            name, backend = key
            with Opened(folder, backend, schedule_of(name, 1)) as one:
                assert not one.device.overlaps and not any("@" in n for n in one.device.transfers._decls)
                self[key] = one.run()
            return self[key]

    return Made()


# --- properties of the plans


@pytest.fixture(scope="module")
def plans(folder: Path) -> Any:
    """(schedule, plan) of a prefill pass with attention elsewhere, as one device alone would have it."""
    schedule = schedule_of(ATTENTION, 1)
    with Opened(folder, "cpu", schedule) as one:
        return schedule, one.engine.runner.plan("prefill", CHUNK, 0)


def test_a_chunk_waits_for_what_the_one_before_does_with_the_same_caches(plans: Any) -> None:
    _, plan = plans
    parts = [segments(for_pipeline_slot(plan, pipeline_slot, plan.arena_bytes)) for pipeline_slot in (0, 1)]
    found = needs(*parts)
    assert len(found) == len(parts[0]) == 2 * 3 + 1
    for i, wanted in enumerate(found):
        if parts[0][i].device == "npu":
            assert wanted == (i - 1,), "the segment in which the previous chunk appended this layer's keys and values"
        elif i < len(found) - 1:
            assert wanted == (i, i + 1), "this layer's cache is appended to in order, and after it was read"
        else:
            assert not wanted, "no token is sampled"
    assert needs(*parts) == needs(*parts[::-1]), "no slot is special"


def test_a_tensor_that_is_read_is_not_overwritten_before(folder: Path) -> None:
    """Block tables alone are exempt, because a pass enters its own positions; other state of sequences is not."""
    with Opened(folder, "cpu", schedule_of(ATTENTION, 1)) as one:
        plan = one.engine.runner.plan("prefill", CHUNK, 1)
    first, second = (segments(for_pipeline_slot(plan, pipeline_slot, plan.arena_bytes)) for pipeline_slot in (0, 1))
    assert len(first) - 1 in needs(first, second)[0], "a pass that may continue a sequence waits for its token"
    reader = replace(first[1].steps[0], args={**first[1].steps[0].args, "slots": "next_token"})
    first = (*first[:1], replace(first[1], steps=(reader,)), *first[2:])
    assert 1 in needs(first, second)[-1], "sample writes what that step reads"
    shared = {**first[1].steps[0].args, "q": "x", "o": "y"}
    alone = replace(first[1], steps=(replace(first[1].steps[0], args=shared),))
    assert needs((alone,), (alone,)) == ((0,),), "two slots that used one tensor would wait for each other"


def test_pipeline_slots_share_what_belongs_to_sequences_and_nothing_else(plans: Any) -> None:
    _, plan = plans
    one_pass = {"control", "tokens", "positions", "slots", "out_rows", "mask_rows"}
    zero, one = (for_pipeline_slot(plan, pipeline_slot, plan.arena_bytes + 256) for pipeline_slot in (0, 1))
    own = {n for n, d in plan.tensors.items() if d.per_pass}
    assert {n for n in own if plan.tensors[n].kind == "io"} == {*one_pass, "q.0", "o.0"}
    assert {n for n, d in plan.tensors.items() if d.kind == "activation"} < own
    assert zero.tensors.keys() == plan.tensors.keys() and (zero.control, one.control) == ("control", "control@1")
    assert one.tensors.keys() - zero.tensors.keys() == {f"{n}@1" for n in own}
    spans = [
        [(d.offset, d.offset + d.nbytes) for d in p.tensors.values() if d.kind == "activation"] for p in (zero, one)
    ]
    assert max(end for _, end in spans[0]) <= min(start for start, _ in spans[1]) and spans[1]
    assert max(end for _, end in spans[1]) <= one.arena_bytes == 2 * zero.arena_bytes
    assert "history" in one.tensors
    with pytest.raises(ValueError, match="a pipeline slot 0"):
        for_pipeline_slot(plan, 0, 0)


def test_activations_between_devices_share_few_tensors(plans: Any) -> None:
    """Layer by layer the same two: their lifetimes are separate."""
    _, plan = plans
    crossing = {n for s in plan.steps for n in s.args.values() if n.startswith(("q.", "o."))}
    assert crossing == {"q.0", "o.0"}
    for i, segment in enumerate(segments(plan)):
        if segment.device == "npu":
            (step,) = segment.steps
            assert (step.layer, step.args["q"], step.args["o"], step.args["k_cache"]) == (
                i // 2,
                "q.0",
                "o.0",
                f"kv.{i // 2}.k",
            )


# --- the same bits


@pytest.mark.parametrize(
    ("name", "backend"), [*product(SCHEDULES, BACKENDS)] if LONG else [*zip(SCHEDULES, BACKENDS[::-1], strict=True)]
)
def test_overlapping_passes_give_the_bits_of_one_after_another(
    name: Path, backend: str, folder: Path, unpipelined: Any
) -> None:
    with Opened(folder, backend, schedule_of(name, 2)) as one:
        assert one.device.overlaps and "positions@1" in one.device.transfers._decls
        assert same(one.run(), unpipelined[name, backend])
        assert not one.device.failures and not one.device.in_flight
        if not own_memory(one.device):
            weights = 0 if name == ATTENTION else 3 * 4
            assert one.device.transfers.counts.copies == weights, "only these are copied, and once"


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NPU begins its work only when the host waits for it: as slow as a device can be."""
    gates: dict[tuple[int, int], threading.Event] = defaultdict(threading.Event)
    enqueue, wait, rest = NpuDevice.enqueue, NpuDevice.wait, NpuDevice._rest

    def gated(self: NpuDevice, work: Any) -> int:
        gate = gates[id(self), self._tickets + 1]
        return enqueue(self, lambda: (gate.wait(), work()))

    def opened(self: NpuDevice, ticket: int | None = None) -> None:
        for one in range(1, (self._tickets if ticket is None else ticket) + 1):
            gates[id(self), one].set()
        wait(self, ticket)

    def resting(self: NpuDevice) -> None:
        for one in range(1, self._tickets + 1):
            gates[id(self), one].set()
        rest(self)

    monkeypatch.setattr(NpuDevice, "enqueue", gated)
    monkeypatch.setattr(NpuDevice, "wait", opened)
    monkeypatch.setattr(NpuDevice, "_rest", resting)


def test_a_slow_device_sees_the_same_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk does not append before the previous chunk has read: blocks past its window may be reused. (An NPU whose
    view includes every pass reads only its own rows; a new view reads all rows in sight.)"""
    late(monkeypatch)
    update = KeyView.update
    monkeypatch.setattr(KeyView, "update", lambda self, *args: (self.forget(), update(self, *args)))
    ids = np.random.default_rng(2).integers(6, 300, CTX).tolist()  # four chunks of 64

    def logits(depth: int) -> np.ndarray:
        with Opened(folder, "cpu", schedule_of(ATTENTION, depth), chunk=64) as one:
            return one.engine.logits(ids)

    assert np.array_equal(logits(2), logits(1))


def test_order_is_kept_by_what_a_segment_needs_not_by_which_pass_is_stepped_first(
    folder: Path, unpipelined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the youngest chunk first in line the older ones must run first; without the wait, keys would be missing."""
    enqueue = NpuDevice.enqueue

    def quick(self: NpuDevice, work: Any) -> int:
        ticket = enqueue(self, work)
        self._rest()
        return ticket

    monkeypatch.setattr(NpuDevice, "enqueue", quick)  # it begins and ends its work at once
    monkeypatch.setattr(MultiDevice, "_order", lambda self: self.in_flight[::-1])
    wanted = unpipelined[ATTENTION, "cpu"]
    with Opened(folder, "cpu", schedule_of(ATTENTION, 2)) as one:
        assert same(one.run(), wanted)
    monkeypatch.setattr(InFlight, "_wait_for_earlier", lambda self, where: None)
    with Opened(folder, "cpu", schedule_of(ATTENTION, 2)) as one:
        assert not same(one.run(), wanted)


def test_a_second_device_that_sees_no_common_memory_gets_copies_in_order(
    folder: Path, unpipelined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes of one chunk's copies wait for the previous passes."""
    late(monkeypatch)
    monkeypatch.setattr(transfers, "anonymous", drivers_memory)
    with Opened(folder, "vulkan", schedule_of(ATTENTION, 2)) as one:
        assert same(one.run(), unpipelined[ATTENTION, "vulkan"])
        assert one.device.transfers.counts.shared == 0 < one.device.transfers.counts.copies


# --- both devices busy


def test_the_trace_shows_both_devices_at_work_on_different_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user runs it, with pipeline = 1 and 2 in the schedule: equal text, different spans. Every NPU run is long
    beside the GPU's segments, so that the overlap depends on the order of work and not on the machine's load."""
    execute = xrt_sim.run._execute
    monkeypatch.setattr(xrt_sim.run, "_execute", lambda self: (time.sleep(0.02), execute(self)))
    device: Any = open_backend("vulkan")
    with device:
        separate = own_memory(device)  # then copies between the two wait for all work queued on the main device
    prompt = "def read_file(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write_file(path"
    shipped, found, said, model = ATTENTION.read_text(), {}, set(), tmp_path / "few.gguf"
    convert(cut(open_checkpoint(DEMO), BOTH), model, "q8_0")
    for depth in (1, 2):
        schedule, trace = tmp_path / f"{depth}.toml", tmp_path / f"{depth}.json"
        schedule.write_text(shipped.replace("\npipeline = 2", f"\npipeline = {depth}"))
        args = [
            "--schedule",
            str(schedule),
            "--npu",
            "sim",
            "--device",
            "vulkan",
            "--ctx",
            "128",
            "--chunk",
            "8",
            "-n",
            "3",
        ]
        assert main([str(model), "--prompt", prompt, "--ignore-eos", "--trace", str(trace), *args]) == 0
        said.add(capsys.readouterr().out)
        spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
        found[depth] = [e for e in spans if ".prefill." in e["args"].get("plan", "")]
    assert len(said) == 1 and prompt in said.pop()
    slack = 0.01  # microseconds: rounding of sums of floats of this size
    for depth, trace_of in found.items():
        rows = {
            r: sorted((e["ts"], e["ts"] + e["dur"], e["args"]["pass"]) for e in trace_of if e["tid"] == r)
            for r in (1, 2)
        }
        chunks = len({number for *_, number in rows[1]})
        assert chunks >= 4 and len(rows[2]) == len(BOTH) * chunks and len(rows[1]) > 4 * len(rows[2])
        for row in rows.values():
            assert all(b[0] > a[1] - slack for a, b in pairwise(row)), "a device runs one step at a time"
        both = [(p, q) for a, b, p in rows[1] for c, d, q in rows[2] if min(b, d) > max(a, c) + slack]
        if depth == 1:
            assert not both, "one chunk after another: while one device works the other waits"
            continue
        assert all(p != q for p, q in both), "within a chunk they run one after another"
        if separate:
            continue
        assert {tuple(sorted(pair)) for pair in both} >= {(i, i + 1) for i in range(chunks - 1)}, (
            "every two neighbours overlap"
        )
        beside = {c for a, b, _ in rows[1] for c, d, _ in rows[2] if min(b, d) > max(a, c) + slack}
        assert len(beside) > len(rows[2]) / 2, "most of the NPU's steps overlap with the GPU's"


# --- failures


FAULTS = [
    pytest.param("timeout_after", 0, marks=pytest.mark.blas),
    ("timeout_after", 7),
    ("silent_after", 3),
    ("vanish_after", 3),
    ("vanish_after", 4),
]


@pytest.mark.parametrize(("fault", "nth"), FAULTS if LONG else FAULTS[::2])  # each fault
def test_a_failure_in_one_pass_ends_the_device_for_both(fault: str, nth: int, folder: Path, unpipelined: Any) -> None:
    """The other pass's work is drained, and both continue on the main device. The result is the main device's: with
    int8 by rows the same integers, so the same tokens, and logits up to the order of the other sums."""
    wanted = unpipelined[PROJECTIONS, "cpu"]
    with Opened(folder, "cpu", schedule_of(PROJECTIONS, 2)) as one:
        npu, dropped = one.device.others["npu"], []
        fail_over = one.device.fail_over

        def noted(where: str, error: RuntimeError) -> None:
            dropped.append(sum(f._elsewhere is not None for f in one.device.in_flight))
            fail_over(where, error)

        one.device.fail_over = noted
        setattr(xrt_sim.faults, fault, nth)
        logits, texts = one.run()
        assert np.abs(logits - wanted[0]).max() <= 1e-4 * np.abs(wanted[0]).max()
        assert texts == wanted[1]
        assert len(one.device.failures) == len(dropped) == 1 and one.device.failures[0].startswith("npu: sim-npu1")
        assert dropped == [1], "the other pass ran there too"
        assert not one.device.others and not one.device.in_flight
        assert not npu._begun and npu._worker._shutdown, "no step of it still runs"


def test_a_failure_without_a_fallback_ends_both_passes(folder: Path, unpipelined: Any) -> None:
    """The engine stays usable: passes in flight are dropped."""
    wanted = unpipelined[ATTENTION, "cpu"]
    with Opened(folder, "cpu", schedule_of(ATTENTION, 2, fallback={})) as one:
        with pytest.raises(ValueError, match="no such ticket"):
            one.device.wait(1)
        xrt_sim.faults.timeout_after = 3
        with pytest.raises(RuntimeError, match="ERT_CMD_STATE_TIMEOUT"):
            one.run()
        assert not one.device.in_flight and one.engine.scheduler.idle
        assert same(one.run(), wanted)


# --- memory, and one chunk


def test_every_pipeline_slot_is_in_the_plan_of_memory(folder: Path) -> None:
    for name in SCHEDULES:
        totals = []
        for depth in (1, 2):
            schedule = schedule_of(name, depth)
            with Opened(folder, "cpu", schedule, slots=1) as one:
                kinds = stored_types(one.checkpoint, None)
                planned = footprint(one.checkpoint.hparams, kinds, context=CTX, chunk=CHUNK, schedule=schedule)
                decls = list(one.device.transfers._decls.values())
                held = {k: sum(d.nbytes for d in decls if d.kind == k) for k in ("weight", "state", "io")}
                assert planned.weights + planned.tables == held["weight"] and planned.io == held["io"]
                assert planned.kv_global + planned.kv_local + planned.state == held["state"]
                assert planned.scratch == one.device.main.memory()["activations"]
                totals.append(planned)
        assert totals[1].scratch == 2 * totals[0].scratch and totals[1].io > totals[0].io
        assert totals[1].kv_local == totals[0].kv_local and totals[1].kv_global == totals[0].kv_global


def test_a_prompt_of_one_chunk_and_decoding_run_as_before(folder: Path) -> None:
    """One pass is in flight and does not wait for another; decode passes have no pipeline slot."""
    ids = list(range(10, 10 + CHUNK))
    counts = []
    for depth in (1, 2):
        with Opened(folder, "vulkan", schedule_of(ATTENTION, depth), slots=1) as one:
            handle = ask(one.engine, ids, 9)
            until(handle, 2)
            ahead, before = len(one.engine._flights), one.engine.counters.copy()
            handle.result()
            done = one.engine.counters.minus(before)
            passes = 9 - 2 - ahead
            counts.append((done.submits / passes, done.dispatches / passes, done.allocations, done.recordings))
            assert len(one.engine.runner.program("decode", 1, 1).passes) == 1
    assert counts[0] == counts[1] and counts[0][2:] == (0, 0)
