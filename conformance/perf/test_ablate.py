"""Every switch can be measured, decodes the same tokens where its arithmetic is the same, and is undone afterwards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conformance.support.devices import without_vulkan
from conformance.support.models import MODELS
from conformance.support.profile import LONG
from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.random import random_checkpoint
from hybrid.core.errors import SpecError
from hybrid.kernels.vulkan.ops.decode_attention import DEFAULT, shape
from hybrid.kernels.vulkan.tuning import Tuning, space
from hybrid.perf import ablate
from hybrid.perf.ablate.switches import Override, Switch, Switches, find_switch, load_switches, tuning_without
from hybrid.perf.gate import gated

pytestmark = pytest.mark.slow
END = 25 if LONG else 17


@pytest.fixture(scope="module")
def device():
    try:
        return gated.cpu_driver()
    except SpecError as error:
        without_vulkan(error)


@pytest.fixture(scope="module")
def baseline(device):
    with (
        open_checkpoint(MODELS / "demo-gemma3-q8_0.gguf") as checkpoint,
        ablate.opened(checkpoint, device, [], 8, 24) as made,
    ):
        yield made


def text(made, program):
    """Ids that a decode program samples for positions 9..END, and the previous one."""
    ablate.seconds(made, program, 8, 1)
    return ablate.decode(made, 8, END - 8, 7)[1]


@pytest.fixture(scope="module")
def wanted(baseline):
    return text(baseline, ablate.program_without(baseline, []))


@pytest.mark.parametrize("name", [s.name for s in load_switches().values() if not (s.profile or s.tuning)])
def test_every_way_to_decode_gives_the_same_tokens(baseline, wanted, name):
    """Sampling is greedy: splitting joined weights changes no id."""
    program = ablate.program_without(baseline, [find_switch(name)])
    submits = list[int]()
    whole = program.submit
    program.submit = lambda times=1: submits.append(times) or whole(times)
    assert len(set(wanted)) > 3
    assert text(baseline, program) == wanted
    assert len(submits) == 2 + END - 7, "every token is one of this program"


def test_the_command_measures_what_it_is_asked(device, capsys):
    shape = ["--random", "gemma3-270m", "--layers", "2", "--vocab", "2048", "--device", device]
    given = [*shape, "--depth", "16", "--tokens", "4", "-r", "2", "--only", "split-attention", "fused-qkv", "--json"]
    assert ablate.main(given) == 0
    found = {w["name"]: w for w in json.loads(capsys.readouterr().out)["speedups"]}
    for one in found.values():
        assert one["ratios"][0] <= one["times"] * 1.5 and one["with_it"] > 0 and one["without"] > 0
    assert ablate.main([*shape, "--only", "fused-ffm"]) == 1
    assert "fused-ffn" in capsys.readouterr().err


def test_a_speed_up_is_measured_on_plans_without_what_cannot_stay(device, monkeypatch):
    """Both sides are compiled without the incompatible parts; the other side without the switch as well."""
    compiled = []
    real = ablate.program_without
    monkeypatch.setattr(
        ablate, "program_without", lambda made, off: (compiled.append([s.name for s in off]), real(made, off))[1]
    )
    shape = random_checkpoint("gemma3-270m", "q4_0", None, 2, 2048)
    with shape as checkpoint, ablate.Ablation(checkpoint, device, 16, 4, 1) as ablation:
        found = ablation.speed_up([find_switch("fused-qkv")], "fused-qkv")
    assert compiled[-2:] == [["layer-in-one"], ["fused-qkv", "layer-in-one"]]
    assert found.summary.endswith("both sides without layer-in-one")
    override = Override(family="layer", use={"workgroups": 0})
    wrong = Switch(name="a", summary="", tuning=override, beside=("layer-in-two",))
    with pytest.raises(ValueError, match="no optimisation is called 'layer-in-two'"):
        Switches(schema=1, switch=(wrong,))


@pytest.mark.parametrize("name", [s.name for s in load_switches().values() if s.tuning])
def test_a_switch_of_the_tuning_table_changes_what_plans_ask_and_is_undone(name):
    """The switched plan uses the override, whatever the table says; afterwards the table's value again."""
    override, tuning = find_switch(name).tuning, Tuning("nvidia")
    declared = space().named(override.family)
    default = {key: values[0] for key, values in declared.candidates.items()}
    facts = dict.fromkeys(declared.facts, 1)
    before = tuning.choose(override.family, default, **facts)
    with tuning_without([find_switch(name)], tuning):
        assert tuning.choose(override.family, default, **facts) == before | override.use
    assert tuning.choose(override.family, default, **facts) == before


def test_one_kv_split_is_what_the_switch_of_split_attention_asks_for():
    """For any number of rows and heads, whatever the rest of the table says."""
    (groups,) = find_switch("split-attention").tuning.use.values()
    for rows, heads, kv_heads in ((1, 1, 1), (1, 32, 16), (8, 4, 1)):
        made = [
            shape(rows, heads, kv_heads, 128, "f16", 8192, 32, 32, 49152, {**DEFAULT, "groups": g})
            for g in (528, groups)
        ]
        assert made[0].splits > 1 and made[1] == replace(made[0], splits=1)


def test_a_switch_says_exactly_one_thing():
    with pytest.raises(ValueError, match="exactly one"):
        Switch(name="nothing", summary="")
    for use, says in (
        ({"workgroup": 0}, "did you mean 'workgroups'"),
        ({"workgroups": 7}, "7 is no candidate of layer"),
    ):
        with pytest.raises(ValueError, match=says):
            Switch(name="a", summary="", tuning=Override(family="layer", use=use))
    with pytest.raises(ValueError, match="no family 'layers'; did you mean 'layer'"):
        Switch(name="a", summary="", tuning=Override(family="layers", use={"workgroups": 0}))
    with pytest.raises(SpecError, match="no optimisation"):
        find_switch("x")
