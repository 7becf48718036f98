"""The engine on Vulkan against the engine on NumPy: small random models of many shapes, ragged batches, counts."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.engine.test_engine_cpu import IDS, SHAPES
from conformance.support.cooperative import HPARAMS, engine, tuned
from conformance.support.devices import shared_device
from conformance.support.plain_gemma3 import forward
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import ask, greedy, together, until
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.kernels.vulkan.kernel import kernels_digest

MORE = {
    "narrowest": {
        "hidden": 32,
        "ffn": 32,
        "head_dim": 16,
        "n_heads": 1,
        "n_kv_heads": 1,
        "n_layers": 1,
        "layer_is_global": (True,),
    },
    "odd sizes": {"hidden": 96, "ffn": 160, "head_dim": 80, "vocab": 333},
    "groups of three": {"n_heads": 12, "n_kv_heads": 4, "head_dim": 32},
    "wide heads": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 256},
}


MANY = 30 if LONG else 12


@pytest.fixture(scope="module")
def opened():
    device = shared_device("vulkan")
    yield device
    device.close()


@pytest.fixture
def device(opened):
    yield opened
    opened.reset()
    opened.check_validation()


def model(folder, **changes):
    return open_checkpoint(write_hf(folder, tiny(**changes), dtype="f32"))


KERNELS = ["odd sizes", "groups of three", "wide heads"]
"""Shapes with their own kernels, which conformance/ops tests too: in the short profile one, alternating."""
TURN = int(kernels_digest(), 16) % len(KERNELS)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "capped",
        "scaled rope",
        "untied",
        "all local",
        "window of one",
        "narrowest",
        *(KERNELS if LONG else KERNELS[TURN : TURN + 1]),
    ],
)
def test_logits_and_hidden_states_are_those_of_the_equations(tmp_path, device, name):
    checkpoint = model(tmp_path, **(SHAPES | MORE)[name])
    made = Engine(checkpoint, device, EngineConfig(chunk=16))
    logits, hidden = forward(checkpoint, IDS)
    assert np.abs(made.logits(IDS) - logits).max() < 1e-4 * np.abs(logits).max()
    assert np.abs(made.hidden_states(IDS) - hidden).max() < 1e-4 * np.abs(hidden).max()


@pytest.mark.parametrize("weights", ["q8_0", "q4_0", "f16", "bf16"])
@pytest.mark.slow
def test_quantised_models_agree_with_the_cpu_device(tmp_path, device, weights):
    checkpoint = model(tmp_path)
    for precision, bound in (("exact", 1e-4), ("auto", 0.15)):  # int8: one code that rounds differently is visible
        ours = Engine(checkpoint, device, EngineConfig(chunk=16, weights=weights, precision=precision)).logits(IDS)
        theirs = Engine(checkpoint, CpuDevice(), EngineConfig(chunk=16, weights=weights, precision=precision)).logits(
            IDS
        )
        assert np.abs(ours - theirs).max() < bound * np.abs(theirs).max()
        device.reset()


def test_sampled_text_is_the_same_on_both_devices(tmp_path, device):
    checkpoint, texts = model(tmp_path), []
    for d in (device, CpuDevice()):
        made = Engine(checkpoint, d)
        texts.append(greedy(made, IDS[:9], 40, temperature=1.2, top_k=50, top_p=0.95, min_p=0.02, seed=11))
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_text_is_the_same_whether_a_layer_is_one_dispatch_or_six(tmp_path, device):
    """Includes the last layer, whose sum feeds the logits; inter-workgroup flags are zero again."""
    checkpoint, texts, dispatches = open_checkpoint(write_hf(tmp_path, HPARAMS, dtype="f32")), [], []
    for layer in (False, True):  # kernels of test_workgroup_flags.py: the driver takes seconds to compile them
        with tuned(device, 1, layer):
            made = engine(device, checkpoint)
            handle = ask(made, IDS[:9], MANY + 3)
            until(handle, 1)  # two later passes were submitted by now
            before = made.counters.copy()
            texts.append(list(handle.result().ids))
            dispatches.append(made.counters.minus(before).dispatches)
        device.reset()
    assert texts[0] == texts[1]
    assert dispatches[0] - dispatches[1] == MANY * (5 * (checkpoint.hparams.n_layers - 1) + 4)


def test_sequences_of_a_ragged_batch_do_not_touch_each_other(tmp_path, device):
    checkpoint, prompts = model(tmp_path), [IDS[:30], IDS[:1], IDS[5:18]]
    single = Engine(checkpoint, device, EngineConfig(chunk=16))
    alone = [greedy(single, ids, 21) for ids in prompts]
    device.reset()
    assert together(Engine(checkpoint, device, EngineConfig(chunk=16, slots=4)), prompts, 21) == alone


def test_a_token_is_one_submit_and_nothing_else(tmp_path, device):
    made = Engine(model(tmp_path), device)
    made.runner.warm_up()
    handle = ask(made, IDS[:1], 26)
    until(handle, 3)
    before = made.counters.copy()
    handle.result()
    done = made.counters.minus(before)
    assert done.submits == 21  # later passes were submitted early
    assert (
        done.allocations,
        done.recordings,
        done.transfers,
        done.pipelines,
        done.descriptor_writes,
        done.bytes_up,
    ) == (0,) * 6
