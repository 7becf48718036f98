"""Checkpoints of random weights: the planned bytes on the device, the same numbers on both devices, and one line for
each refusal."""

from __future__ import annotations

import numpy as np
import pytest

import hybrid
from conformance.support.devices import BACKENDS
from conformance.support.profile import LONG
from hybrid.checkpoint.random import random_checkpoint
from hybrid.convert.kinds import Wanted, plan_types
from hybrid.core.errors import SpecError
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.planning.cost import memory

SMALL = {"layers": 2, "vocab": 2048}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [(k, b) for k in ("q4_0", "q8_0", "f16") for b in BACKENDS if LONG or b == "cpu" or k == "q4_0"],
)
def test_a_random_model_computes_finite_numbers_of_a_sane_size(devices, backend, kind):
    devices.get(backend)  # skips where there is no Vulkan
    with hybrid.load(random_checkpoint("gemma3-270m", kind, **SMALL), backend, ctx=64) as model:
        logits = model.logits([2, 100, 200])
        assert np.isfinite(logits).all() and 0.2 < logits.std() < 50, logits.std()
        assert "".join(model.generate([2, 5], 4, ignore_eos=True)) and model.stats.tokens == 4


def test_the_device_holds_the_bytes_that_the_plan_names_and_every_tensor_its_own(devices):
    device = devices.get("vulkan")
    device.reset()
    checkpoint = random_checkpoint("gemma3-270m", "q4_0", "q8_0", **SMALL)
    engine = Engine(checkpoint, device, EngineConfig(ctx=64, n_tokens=2048))
    held = memory(engine.runner.plan("decode", 1, 1))
    assert device.memory()["weights"] == held["weights"] + held["tables"]
    places = [
        (id(s.buffer), s.offset)
        for d in engine.runner.plan("decode", 1, 1).tensors.values()
        if d.kind == "weight"
        for s in device.slices([d.name])
    ]
    assert len(set(places)) == len(places)
    first, second = (device.read(f"blk.{i}.ffn_gate_up.weight").parts[0] for i in (0, 1))
    assert (first != second).mean() > 0.9
    device.reset()


@pytest.mark.slow
def test_both_devices_get_the_same_weights(devices):
    device, cpu = devices.get("vulkan"), CpuDevice()
    device.reset()
    checkpoint = random_checkpoint("gemma3-1b", "q4_0", layers=1, vocab=512)
    config = EngineConfig(ctx=32, n_tokens=512, precision="exact")
    ours, theirs = (Engine(checkpoint, d, config).logits([2, 3, 4]) for d in (device, cpu))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    device.reset()


def test_rows_are_those_of_the_whole():
    checkpoint = random_checkpoint("gemma3-1b", "q4_0", layers=1, vocab=512)
    whole, part = checkpoint.tensor("token_embd.weight"), checkpoint.rows("token_embd.weight", 100, 120)
    assert all((a == b).all() for a, b in zip(whole.rows(100, 120).parts, part.parts, strict=True))


def test_rows_that_are_no_whole_blocks_take_the_type_that_conversion_takes():
    with random_checkpoint("gemma3-270m", "q3_k", **SMALL) as made:
        kinds = plan_types({n: ("bf16", made.shape(n)) for n in made.names}, Wanted("q3_k", {"embed": "q8_0"})).kinds
        assert {n: made.dtype(n) for n in made.names} == kinds
        assert {kinds["blk.0.attn_output.weight"], kinds["blk.0.ffn_up.weight"]} == {"q3_k", "iq4_nl"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "gemma3-27"}, "no model is called 'gemma3-27'; did you mean 'gemma3-27b'?"),
        ({"kind": "q4"}, "--type: 'q4' is no storage type; did you mean 'q4_"),
        ({"head": "q6"}, "--head: 'q6' is no storage type; did you mean 'q6_k'?"),
        ({"layers": 19}, "--layers 19 is outside 1..18"),
        ({"vocab": 5}, "--vocab 5 is outside 32..262144"),
    ],
)
def test_refusals_are_one_line(options, says):
    with pytest.raises((ValueError, SpecError)) as error:
        random_checkpoint(**{"name": "gemma3-270m", **options})
    assert says in str(error.value)
