"""One model on two devices: attention on sim-npu1, the rest on the main device. Same text, every copy counted, and a
failing device is replaced as the schedule says."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model, open_backend, own_memory
from conformance.support.models import BOTH, MODELS, cut
from conformance.support.paths import ATTENTION, PROJECTIONS
from conformance.support.profile import LONG
from conformance.support.texts import ask, until
from conformance.support.ties import CLEAR, INT8_NEAR, agree, generated, leads
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core.dtypes import DTYPES
from hybrid.core.hostmemory import NotShareable, anonymous
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.devices import transfers
from hybrid.devices.multi import MultiDevice
from hybrid.engine.trace import events
from hybrid.kernels.npu import xrt_sim
from hybrid.planning.pipeline import written
from hybrid.planning.segments import segments
from hybrid.spec.schedule import find_schedule, named_schedule

FILE = MODELS / "demo-gemma3-q8_0.gguf"
LAYERS = None if LONG else BOTH
"""The layers of the file to keep. The NPU is simulated: three layers cover every copy between devices."""
PROMPT, TOKENS = CLEAR, 12 if LONG else 8
TEXT, CHUNKS = (20, {}), (15, {"chunk": 4})  # in the middle of the text, with two chunks in flight
FAULTS = [
    pytest.param("timeout_after", *TEXT, marks=pytest.mark.blas),
    pytest.param("timeout_after", *CHUNKS, marks=pytest.mark.blas),
    pytest.param("silent_after", *CHUNKS),
    pytest.param("silent_after", *TEXT),
    pytest.param("vanish_after", *TEXT),
    pytest.param("vanish_after", *CHUNKS),
]
OWN = "the device has memory of its own"


pytestmark = pytest.mark.usefixtures("sim_machine")


def load(backend: str, **options: Any) -> hybrid.Model:
    return hybrid.load(layers(), for_model(backend, named_schedule(ATTENTION)), ATTENTION, ctx=64, **options)


def layers() -> Checkpoint:
    checkpoint = open_checkpoint(FILE)
    return cut(checkpoint, LAYERS) if LAYERS else checkpoint


@dataclass(frozen=True, slots=True)
class Plain:
    """The model's output on cpu alone after PROMPT. logits: f32 [prompt, vocab]."""

    text: list[int]
    logits: np.ndarray
    leads: np.ndarray

    def agrees(self, model: hybrid.Model) -> None:
        """The text of `model`, which computes a layer in other types and orders, equals this one up to a near tie."""
        agree(generated(model, model.encode(PROMPT), TOKENS), self.text, self.leads, INT8_NEAR, at_least=8)


@pytest.fixture(scope="module")
def plain() -> Plain:
    with hybrid.load(layers(), "cpu", ctx=64) as model:
        ids = model.encode(PROMPT)
        chosen = generated(model, ids, TOKENS)
        return Plain(chosen, model.logits(ids), leads(model, ids, chosen))


def test_the_schedule_is_gemma3_with_attention_elsewhere() -> None:
    """All else is equal: a change of gemma3.toml that is not made here too fails."""
    ours, theirs = named_schedule(ATTENTION), find_schedule("gemma3")
    assert ours.fallback == {"npu": "main"} and ours.schedule.pipeline == 2
    wanted = []
    for step in theirs.layer:
        if step.op == "decode_attention":
            continue  # there it is fused with the previous step
        change: dict[str, object] = {}
        if step.op in ("attention", "qk_norm_rope_append"):
            change = {"phase": None, "device": "npu" if step.op == "attention" else "main"}
        elif step.name.endswith("attn_output"):
            change = {"act": {"x": "f32"}}
        wanted.append(step.model_copy(update=change))
    head = ours.schedule.model_copy(
        update={"name": theirs.schedule.name, "summary": theirs.schedule.summary, "pipeline": 1}
    )
    assert ours.layer == tuple(wanted)
    assert ours.model_copy(update={"schedule": head, "layer": theirs.layer, "fallback": {}}) == theirs


@pytest.mark.blas
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_the_text_is_that_of_one_device(backend: str, plain: Plain) -> None:
    with load(backend, profile=backend == "vulkan") as model:
        plain.agrees(model)
        assert model.stats is not None and model.stats.device.endswith("+ sim-npu1") and "shared" in model.stats.carried
        device = model.engine.device
        assert isinstance(device, MultiDevice) and not device.failures
        if own_memory(device):
            assert (
                device.transfers.counts.shared == 0 < device.transfers.counts.copies
                and OWN in device.transfers.counts.why_not
            )
        else:
            assert device.transfers.counts.shared > 2 * model.hparams.n_layers, (
                "caches, and what passes between the devices"
            )
            assert (device.transfers.counts.copies, device.transfers.counts.why_not) == (0, "")
            assert "npu.state" not in device.memory(), "held once"
        count = model.hparams.n_layers
        assert len(segments(model.engine.runner.program("decode", 1, 1).plan)) == 2 * count + 1
        logits = model.logits(model.encode(PROMPT))
        assert divergence(plain.logits, logits).max() < 0.01
        if backend == "vulkan":
            names = [e["name"] for e in events(model.engine.runner.trace, model.device)]
            assert sum(n.endswith("on sim-npu1") for n in names) > count and any(
                n.endswith("attn_output") for n in names
            )


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL divergence of each row's distribution q from p, in nats."""
    a, b = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True) for x in (p, q))
    return (np.exp(a) * (a - b)).sum(-1)


def drivers_memory(decl: TensorDecl) -> Tensor:
    """A tensor in a mapping of a simulated buffer, which is not anonymous memory."""
    (part,) = DTYPES[decl.dtype].parts
    mapped = xrt_sim.bo(xrt_sim.device(0), decl.nbytes, xrt_sim.bo.host_only, 0).map()
    return Tensor(
        decl.dtype, decl.shape, (np.frombuffer(mapped, part.dtype)[: math.prod(decl.shape)].reshape(decl.shape),)
    )


@pytest.mark.slow
def test_unshareable_tensors_are_copied_and_caches_by_blocks_in_use(
    monkeypatch: pytest.MonkeyPatch, plain: Plain
) -> None:
    """A driver's own mapping is refused. Tables, which a pass may change, are copied; caches by the blocks in use."""
    monkeypatch.setattr(transfers, "anonymous", drivers_memory)
    with load("vulkan") as model:
        plain.agrees(model)
        device = model.engine.device
        assert isinstance(device, MultiDevice)
        why = OWN if own_memory(device) else "not anonymous"
        assert device.transfers.counts.shared == 0 and why in device.transfers.counts.why_not
        assert model.stats is not None and f"not shared: {device.transfers.counts.why_not}" in model.stats.carried
        handle = ask(model.engine, model.encode(PROMPT), 8)
        until(handle, 2)
        passes = 8 - 2 - len(model.engine._flights)
        copied: list[tuple[str, int]] = []
        write = device.others["npu"].write

        def noted(name: str, value: Any, row: int = 0) -> None:
            copied.append((name, value.shape[0]))
            write(name, value, row)

        device.others["npu"].write = noted  # type: ignore[method-assign]
        handle.result()
        names = [n for n, _ in copied]
        assert "control" in names and {"params", "history"}.isdisjoint(names)
        caches = [(n, rows) for n, rows in copied if n.startswith("kv.")]
        assert len(caches) == passes * 2 * model.hparams.n_layers
        assert {rows for _, rows in caches} == {1}, "of the blocks, the one in which all positions so far are"
        assert max(model.engine.cache.global_blocks, model.engine.cache.local_blocks) > 1


def test_only_anonymous_pages_can_be_imported() -> None:
    decl = TensorDecl("t", "f32", (5, 1000), "io")
    good = anonymous(decl)
    opened: Any = open_backend("vulkan")
    with opened as device:
        if own_memory(device):
            with pytest.raises(NotShareable, match=OWN):
                device.adopt(decl, good)
            return
        device.adopt(decl, good)
        value = Tensor.of(np.arange(5000, dtype=np.float32).reshape(5, 1000))
        device.write("t", value)
        assert (good.array == value.array).all(), "the same memory"
        good.array[3] = 7
        assert (device.read("t", 3, 4).array == 7).all()
        device.drop("t")
        with pytest.raises(NotShareable, match="not anonymous"):
            device.adopt(decl, drivers_memory(decl))
        with pytest.raises(NotShareable, match="does not begin at a page"):
            device.adopt(replace(decl, shape=(4, 1000)), good.rows(1, 5))
        assert "t" not in device._tensors and not device.memory_pool.imported


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "after", "options"), FAULTS if LONG else FAULTS[::2])  # each fault at each place
def test_a_device_that_fails_is_replaced_and_the_text_is_the_same(
    fault: str, after: int, options: dict[str, int], plain: Plain
) -> None:
    with load("cpu", **options) as model:
        setattr(xrt_sim.faults, fault, after)
        plain.agrees(model)
        assert model.stats is not None and any(p.startswith("npu: sim-npu1") for p in model.stats.passed_over)
        assert "(fallback)" in model.stats.line()


@pytest.mark.slow
def test_without_a_fallback_a_failure_is_an_error(tmp_path: Path) -> None:
    schedule = named_schedule(ATTENTION).model_copy(update={"fallback": {}})
    with hybrid.load(layers(), "cpu", schedule, ctx=64, npu="sim") as model:
        xrt_sim.faults.timeout_after = 3
        with pytest.raises(RuntimeError, match="ERT_CMD_STATE_TIMEOUT"):
            generated(model, model.encode(PROMPT), TOKENS)
    with pytest.raises(RuntimeError, match="pyxrt"):
        hybrid.load(FILE, "cpu", schedule, ctx=64)


@pytest.mark.slow
@pytest.mark.blas
def test_without_an_npu_the_fallback_is_reported(plain: Plain) -> None:
    with hybrid.load(layers(), "cpu", ATTENTION, ctx=64) as model:
        assert model.device == "cpu"
        plain.agrees(model)
        assert any("pyxrt" in p for p in model.passed_over)


def test_the_writes_of_a_segment() -> None:
    with load("cpu") as model:
        plan = model.engine.runner.program("decode", 1, 1).plan
        first = segments(plan)[0]
        assert {"x.0", "q.0", "kv.0.k", "control", "positions"} <= set(written(first.steps))
        assert plan.tensors["q.0"].kind == plan.tensors["o.0"].kind == "io" and plan.tensors["y.0"].kind == "activation"
        assert replace(first, device="npu").device == "npu"


@pytest.mark.parametrize("backend", BACKENDS if LONG else BACKENDS[1:])  # on tiny models with cpu too: test_pipeline
@pytest.mark.slow
def test_prefill_projections_in_int8_and_their_fallback(backend: str) -> None:
    """Activation rows quantised whole instead of per 32: other numbers, nearly the same distributions. After a fault
    the main device computes the same integers: results differ at most by the order of the other sums."""
    with hybrid.load(layers(), "cpu", ctx=64) as model:
        exact = model.logits(model.encode(PROMPT))
    opened = for_model(backend, named_schedule(PROJECTIONS))
    with hybrid.load(layers(), opened, PROJECTIONS, ctx=64) as model:
        device, ids = model.engine.device, model.encode(PROMPT)
        assert isinstance(device, MultiDevice)
        plans = [model.engine.runner.program(phase, 1, 1).plan for phase in ("prefill", "decode")]
        assert {s.device for s in plans[1].steps} == {backend}
        assert sum(s.device == "npu" for s in plans[0].steps) == 4 * model.hparams.n_layers
        logits = model.logits(ids)
        kl = divergence(exact, logits)
        assert kl.mean() < 0.01, kl
        assert device.memory()["npu.tiled"] > 0 and not device.failures
        if not own_memory(device):
            counts = device.transfers.counts
            assert counts.shared > 8 and counts.copies == 4 * model.hparams.n_layers, "weights are copied, once"
        xrt_sim.faults.timeout_after = 3
        again = model.logits(ids)
        assert device.failures and device.failures[0].startswith("npu: sim-npu1") and not device.others
        assert np.abs(again - logits).max() <= 1e-4 * np.abs(logits).max()
        generated(model, ids, TOKENS)
        assert model.stats is not None and any(p.startswith("npu: sim-npu1") for p in model.stats.passed_over)


@pytest.mark.blas
@pytest.mark.slow
def test_the_shipped_schedule_places_the_down_projection_of_prefill(plain: Plain) -> None:
    """One segment a layer on the NPU in prefill, none in decode; nearly the same distributions. The rest is gemma3's
    schedule."""
    ours, theirs = named_schedule("gemma3-hybrid"), find_schedule("gemma3")
    assert ours.elsewhere == {"npu": ["blk.{l}.ffn_down (prefill)"]} and ours.fallback == {"npu": "main"}
    assert [s for s in ours.layer if "ffn" not in s.name] == [s for s in theirs.layer if "ffn" not in s.name]
    assert (ours.before, ours.after) == (theirs.before, theirs.after)
    with hybrid.load(layers(), "cpu", ours, ctx=64, npu="sim") as model:
        plans = [model.engine.runner.program(phase, 1, 1).plan for phase in ("prefill", "decode")]
        assert [sum(s.device == "npu" for s in p.steps) for p in plans] == [model.hparams.n_layers, 0]
        kl = divergence(plain.logits, model.logits(model.encode(PROMPT)))
        assert kl.mean() < 0.01 and not model.engine.device.failures
        plain.agrees(model)
