"""The cost model: it reproduces published ceilings, no model beats its device, sheets are complete."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from hybrid.core.errors import SpecError
from hybrid.perf.acceptance import pairs
from hybrid.perf.roofline import __main__ as roofline
from hybrid.perf.roofline.model import Speculation, at_least, estimate
from hybrid.perf.roofline.work import subject
from hybrid.perf.svg import Axis, Chart, page
from hybrid.spec.devicesheet import find_sheet, load_sheets

APU = find_sheet("radeon-780m")
BATCHES = (1, 8, 16, 32)
# Tokens per second by hand: B x bandwidth / (weights + B x KV); 27B caches 256 positions, 3n 512, which all its layers
# read.
PEAK = {
    ("gemma3-27b", "q4_0", 256): (5.8, 44, 83, 148),
    ("gemma3-27b", "q8_0", 256): (3.1, 24, 47, 87),
    ("gemma3n-e2b", "q4_0", 512): (65, 440, 747, 1175),
    ("gemma3n-e2b", "q8_0", 512): (36.1, 260, 464, 790),
}


@pytest.mark.parametrize(("key", "wanted"), PEAK.items(), ids=lambda v: "-".join(map(str, v)))
def test_ceilings_of_the_apu_come_out(key, wanted):
    name, dtype, context = key
    model = subject(name, dtype)
    for batch, tokens in zip(BATCHES, wanted, strict=True):
        found = estimate(model.decode(batch, context), APU, "ceiling")
        assert found.tokens_per_second == pytest.approx(tokens, rel=0.02) and found.bound == "memory"


@pytest.mark.parametrize(("acceptance", "length", "tokens"), [(0.7, 4, 14.3), (0.8, 4, 17.3), (0.9, 8, 27.9)])
def test_speculation_as_by_hand(acceptance, length, tokens):
    plan = Speculation(subject("gemma3-1b"), length, acceptance)
    assert plan.tokens_per_second(subject("gemma3-27b"), 32, APU, "ceiling") == pytest.approx(tokens, rel=0.03)


def test_a_draft_elsewhere_by_hand():
    """27B in q4_0 is 15.2 GB a pass, 1B 0.72: of 65.4 GB/s by the iGPU, 46.8 by the NPU, 85.7 by both."""
    model, draft, npu = subject("gemma3-27b"), subject("gemma3-1b"), find_sheet("hawk-point-npu")

    def seconds(length, acceptance, on, level):
        return Speculation(draft, length, acceptance, on).seconds(model, 32, APU, level)

    assert seconds(4, 0.8, npu, "ceiling") == pytest.approx(
        seconds(4, 0.8, None, "ceiling"), rel=0.02
    )  # the same bytes
    verifying = estimate(model.verify(4, 32), APU, "expected").seconds
    drafting = at_least(draft.decode(1, 32), npu, "expected")
    work = draft.decode(1, 32)
    slots = sum(i.barriers for i in work.items) * 27.7e-6 + 110e-6
    assert drafting == pytest.approx(work.nbytes / 46.8e9 + slots, rel=0.02)
    assert seconds(4, 0.0, npu, "expected") == pytest.approx(
        verifying + 4 * drafting
    )  # no token drafted early is accepted
    together = (model.verify(4, 32).nbytes + 5 * work.nbytes) / 85.7e9  # the token after the drafts is drafted too
    ready = 0.95**5
    assert seconds(4, 0.95, npu, "expected") == pytest.approx(
        max(verifying, 5 * drafting, together) + (1 - ready) * 4 * drafting
    )
    waiting = Speculation(draft, 4, 0.95, npu, waits=True).seconds(model, 32, APU, "expected")
    assert waiting == pytest.approx(verifying + 4 * drafting)
    lookup = Speculation(None, 4, 0.8)
    assert lookup.seconds(model, 32, APU, "expected") == verifying and lookup.yields == pytest.approx(3.3616)
    with pytest.raises(SpecError, match="does not share the memory of NVIDIA H200"):
        Speculation(draft, 4, 0.8, npu).seconds(model, 32, find_sheet("h200"), "expected")


def test_the_command_costs_speculation(capsys):
    given = ["gemma3-27b", "--draft-length", "3"]
    assert roofline.main([*given, "--draft", "gemma3-1b", "--draft-device", "ryzen-cpu", "--acceptance", "0.9"]) == 0
    said = capsys.readouterr().out
    assert "draft gemma3-1b on AMD Ryzen 7040/8040, eight Zen 4 cores, length 3, acceptance 0.9: 3.44" in said
    assert "where it waits for each verification" in said
    assert roofline.main([*given, "--draft", "lookup"]) == 0
    assert f"draft lookup on AMD Radeon 780M, length 3, acceptance {pairs()[0].agreed:.3g}" in capsys.readouterr().out
    assert roofline.main([*given, "--draft-device", "ryzen-cpu"]) == 2
    assert "--draft-device belongs to a draft model" in capsys.readouterr().err


def test_arithmetic_bounds_what_memory_does_not():
    prompt = subject("gemma3-27b").work("prefill", 4096, 1, 4096, 1)
    found = estimate(prompt, APU, "ceiling")
    assert found.bound == "int8" and 250 < found.tokens_per_second < 318  # the matrices only would take 318
    units = subject("gemma3-27b", capabilities=APU.limits.capabilities).work("prefill", 4096, 1, 4096, 1)
    assert {i.op: i.rate for i in units.items if i.op in ("fused_ffn", "attention")} == {
        "fused_ffn": "f16",
        "attention": "f16",
    }
    assert units.flops == prompt.flops and estimate(units, APU, "ceiling").bound == "f16"
    exact = subject("gemma3-27b", precision="exact").work("prefill", 4096, 1, 4096, 1)
    assert 75 < estimate(exact, APU, "ceiling").tokens_per_second < 85  # only a prompt's last row gets logits


@pytest.mark.parametrize("device", ["radeon-780m", "h200"])
@pytest.mark.parametrize("name", ["gemma3-270m", "gemma3-27b", "gemma3n-e4b"])
def test_expected_rates_are_below_the_ceiling(device, name):
    sheet, model = find_sheet(device), subject(name)
    last = 0.0
    for batch, context in ((1, 256), (8, 256), (8, 4096)):
        work = model.decode(batch, context)
        ceiling, expected = (estimate(work, sheet, level) for level in ("ceiling", "expected"))
        assert ceiling.seconds < expected.seconds
        assert expected.seconds > last
        last = expected.seconds
        assert work.streamed <= work.nbytes


def test_a_dispatch_costs_where_the_sheet_says_so():
    work = subject("gemma3-270m").decode(1, 256)
    free = APU.model_copy(update={"costs": type(APU.costs)()})
    paid = estimate(work, APU, "expected").seconds - estimate(work, free, "expected").seconds
    assert paid == pytest.approx(
        sum(i.barriers * 4e-6 + (i.dispatches - i.barriers) * 0.5e-6 for i in work.items) + 60e-6
    )


@pytest.mark.slow
def test_layers_that_share_a_cache_cost_a_prompt_nothing():
    """Only the wanted rows of a prompt pass the layers without a cache: Gemma 4 E2B computes 1.14 instead of 3.75 Gflop
    for each of a prompt's rows (by the published shapes, plus attention and per-layer inputs), 3n E2B two thirds."""
    for name, least, most in (("gemma4-e2b", 1.14, 1.35), ("gemma3n-e2b", 2.4, 2.9)):
        model = subject(name)
        one, many = (model.work("prefill", rows, 1, 512, 1) for rows in (128, 512))
        per_row = (many.flops - one.flops) / 384 / 1e9
        assert least < per_row < most, (name, per_row)
        every = model.work("prefill", 512, 512, 512, 1)
        assert every.flops / 512 > 1.4 * per_row * 1e9


def test_every_figure_of_a_sheet_says_where_it_comes_from():
    for name, sheet in load_sheets().items():
        for table in (sheet.peak, sheet.reached, sheet.costs):
            for key in type(table).model_fields:
                figure = getattr(table, key)
                assert figure is None or len(figure.source) > 10, f"{name}: {key}"
    assert find_sheet("radeon-780m").device.shares == "ryzen-apu"


def test_a_sheet_without_a_bandwidth_models_nothing():
    with pytest.raises(SpecError, match="lavapipe has no bandwidth_gb_s"):
        estimate(subject("gemma3-270m").decode(1, 64), find_sheet("lavapipe"), "ceiling")
    with pytest.raises(SpecError, match="did you mean 'radeon-780m'"):
        find_sheet("radeon-780")


@pytest.mark.slow
def test_command_prints_tables_json_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "r.svg"
    given = ["gemma3-270m", "--batch", "1,8", "--context", "256", "--draft", "gemma3-270m"]
    assert roofline.main([*given, "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "modelled" in shown and re.search(r"^ +8 +0\.\d\d", shown, re.M) and "speculative" in shown
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    assert roofline.main([*given, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["provenance"] == "modelled" and [p["rows"] for p in data["passes"]] == [1, 8]
    assert sum(op["share"] for op in data["passes"][0]["ops"]) == pytest.approx(1, abs=0.1)
    assert roofline.main(["gemma3-27c"]) == 1
    assert "did you mean 'gemma3-27b'" in capsys.readouterr().err


def test_charts_place_points_inside_their_frame():
    chart = Chart(400, 300, "t", Axis("x", 1, 1000, log=True), Axis("y", 0, 10))
    chart.line([(0.1, -5), (5000, 50)], 0, "clamped")
    chart.bar(0, 5, 1, label="five")
    for x, y in re.findall(r"([\d.]+),([\d.]+)", chart.svg().split("points=")[1].split('"')[1]):
        assert 0 <= float(x) <= 400 and 0 <= float(y) <= 300
    assert "five" in page([chart])
    with pytest.raises(ValueError, match="cannot reach"):
        Axis("x", 0, 10, log=True)
