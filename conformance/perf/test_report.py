"""Runs become records only with their proof; the report shows them, the peer, the targets and the gates."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from conformance.perf.test_targets import RECORD, RUN
from hybrid.core.errors import SpecError
from hybrid.core.places import ROOT
from hybrid.perf import campaign, report
from hybrid.perf.record import schema as record
from hybrid.perf.record import taking
from hybrid.perf.report import quoted
from hybrid.perf.report.measured import markdown
from tools import pages

KERNELS = "0123456789abcdef"
COMMON = {
    "command": "python -m hybrid.bench --random gemma3-27b --json",
    "device": "vulkan:0 (NVIDIA H200)",
    "driver": "NVIDIA 580.159.04",
    "kernels": KERNELS,
    "model": "gemma3-27b (random)",
    "precision": {"weights": ["q4_0", "q6_k"], "activations": ["q8_act"], "kv": ["f16"]},
}
RESULT = {
    "depth": 0,
    "batch": 1,
    "spread": 1.5,
    "share_of_copy": 0.5,
    "share_of_matrix": 0.4,
    "host_us_per_token": 27.0,
    "per_pass": {"dispatches": 440.0},
}
BENCH = {
    **COMMON,
    "weights_bytes": 15500000000,
    "schedule": "gemma3",
    "errors": [],
    "results": [
        {**RESULT, "test": "prefill 512 @ 0", "phase": "prefill", "n": 512, "tokens_per_second": 3000.0},
        {**RESULT, "test": "decode 128 @ 0", "phase": "decode", "n": 128, "tokens_per_second": 150.0},
    ],
}
SPEEDUP = {
    "name": "fused-ffn",
    "summary": "one kernel",
    "with_it": 0.006,
    "without": 0.009,
    "ratios": [1.4, 1.6],
    "times": 1.5,
}
ABLATION = {
    **COMMON,
    "command": "python -m perf.ablate --random gemma3-27b --json",
    "depth": 512,
    "tokens": 16,
    "pairs": 7,
    "speedups": [SPEEDUP],
}
OP = {
    "op": "fused_ffn",
    "calls": 62,
    "us": 3844.0,
    "share": 1.0,
    "nbytes": 11900000000,
    "flops": 43000000000,
    "floor_us": 2765.0,
}
PROFILE = {
    **COMMON,
    "command": "python -m perf.profile --random gemma3-27b --json",
    "phase": "decode",
    "context": 512,
    "probes": {"copy_gb_s": 4303.0, "matrix_tflops": 620.0},
    "passes": [{"host_us": 7300.0}],
    "ops": [OP],
}


def junit(tmp_path, **changes):
    said = {
        "device": "NVIDIA H200",
        "kernels": "0123456789abcdef",
        "command": "python -m pytest conformance/ops/test_ops.py",
    }
    counts = {"tests": "900", "failures": "0", "errors": "0", "skipped": "4"}
    for key, value in changes.items():
        (said if key in said else counts)[key] = value
    suite = ET.Element("testsuite", counts)
    for name, value in said.items():
        ET.SubElement(ET.SubElement(suite, "properties"), "property", name=name, value=value)
    path = tmp_path / "proof.xml"
    ET.ElementTree(suite).write(path)
    return path


def test_a_bench_with_its_proof_becomes_a_record(tmp_path):
    proof = taking.proof_of(junit(tmp_path), "NVIDIA H200")
    assert proof.passed == 896
    made = taking.take(BENCH, proof, "4564b6f", "not locked", "2026-11-21")
    assert [(r.model, r.dtype, r.phase, r.context, r.share) for r in made.runs] == [
        ("gemma3-27b", "q4_0", "prefill", 512, 0.4),
        ("gemma3-27b", "q4_0", "decode", 0, 0.5),
    ]
    cut = taking.take(
        {**BENCH, "command": BENCH["command"] + " --layers 2"}, proof, "4564b6f", "not locked", "2026-11-21"
    )
    assert cut.runs[0].model == "gemma3-27b, layers 2"
    eight = taking.take(
        {**BENCH, "command": BENCH["command"] + " --type q8_0 --head q6_k"}, proof, "4564b6f", "", "2026-11-21"
    )
    assert eight.runs[0].dtype == "q8_0"


def test_bench_ablation_and_profile_of_a_commit_are_one_record(tmp_path, monkeypatch, capsys):
    """As the command takes them; a measurement with other kernels is refused, and then no record is kept."""
    kept = tmp_path / "records"
    monkeypatch.setattr(taking, "add", lambda made: record.add(made, kept))
    files = []
    for i, made in enumerate((BENCH, ABLATION, PROFILE)):
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps(made))
    given = ["--clock", "not locked", "--commit", "0000000", "--date", "2026-11-21"]
    assert taking.main([str(junit(tmp_path)), *map(str, files), *given]) == 0
    (path,) = kept.glob("*.json")
    assert capsys.readouterr().out.split() == [str(path)]
    found = record.load_record(path)
    assert (len(found.runs), round(found.ablations[0].speedups[0].times, 6), found.profiles[0].ops[0].calls) == (
        2,
        1.5,
        62,
    )
    files[1].write_text(json.dumps({**ABLATION, "kernels": "other"}))
    before = path.read_bytes()
    assert taking.main([str(junit(tmp_path)), *map(str, files), *given]) == 1 and path.read_bytes() == before
    assert "1.json: ran kernels other, but 0123456789abcdef were proved" in capsys.readouterr().err
    files[1].write_text("{}")
    assert taking.main([str(junit(tmp_path)), *map(str, files), *given]) == 1
    assert "not what hybrid.bench, perf.ablate or perf.profile print" in capsys.readouterr().err


def test_kernels_of_another_commit_are_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    monkeypatch.setattr(taking, "kernels_at", lambda commit: "fedcba9876543210")
    assert taking.main([str(junit(tmp_path)), str(path), "--clock", "", "--commit", "4564b6f"]) == 1
    assert "commit 4564b6f has fedcba9876543210" in capsys.readouterr().err
    assert taking.kernels_at("HEAD") is None or len(taking.kernels_at("HEAD")) == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failures": "1"}, "1 tests failed"),
        ({"device": "llvmpipe"}, "proves kernels on llvmpipe"),
        ({"command": "python -m pytest conformance/ops/test_ops.py -k linear"}, "a selection"),
    ],
)
def test_a_proof_of_something_else_is_refused(tmp_path, changes, words):
    with pytest.raises(SpecError, match=words):
        taking.proof_of(junit(tmp_path, **changes), "NVIDIA H200")


def test_a_bench_with_an_error_field_is_refused(tmp_path):
    proof = taking.proof_of(junit(tmp_path), "NVIDIA H200")
    with pytest.raises(SpecError, match="above the 4800"):
        taking.take({**BENCH, "errors": ["decode: 5000 GB/s is above the 4800"]}, proof, "4564b6f", "", "2026-11-21")


@pytest.mark.slow
def test_the_page_names_what_it_shows(tmp_path, monkeypatch):
    few = [t for t in report.load_targets() if t.id in ("27b-11-at-25gb", "27b-token-50ms")]  # test_targets judges all
    monkeypatch.setattr(report, "load_targets", lambda: few)
    proof = taking.proof_of(junit(tmp_path), "NVIDIA H200")
    more = [taking.take(made, proof, "5564b6f", "not locked", "2026-11-21") for made in (ABLATION, PROFILE)]
    kept = [
        record.Record.model_validate_json(
            json.dumps({**RECORD, "commit": commit, "runs": [{**RUN, "tokens_per_second": speed}]})
        )
        for commit, speed in (("4564b6f", 85.0), ("5564b6f", 150.0))
    ] + more
    path = report.build(tmp_path, kept, [("plans", [])])
    text = path.read_text()
    for words in (
        "NVIDIA H200",
        "llama.cpp (Vulkan)",
        "85.6",
        "150.0",
        "borderline",
        "gfx1103 rules",
        "580.159.04",
        "modelled",
        "fused-ffn",
        "1.50",
        "lost us",
        "1,079.0",
    ):
        assert words in text
    for picture in ("roofline.svg", "gfx1103.svg", "measured-nvidia-h200.svg"):
        assert ET.fromstring((tmp_path / picture).read_text()).tag.endswith("svg")
    assert len(list(tmp_path.glob("ablation-*.svg"))) == len(list(tmp_path.glob("profile-*.svg"))) == 1
    lines = markdown(kept)
    for words in (
        "| gemma3-27b | q4_0 | decode | 1 | 256 | 150.0 |",
        "| fused-ffn | 6.000 | 9.000 | 1.50 |",
        "| fused_ffn | 62 |",
    ):
        assert words in lines
    assert "No run of ours is kept yet" in report.build(tmp_path / "empty", []).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_quotes_the_records_and_names_what_is_there(page):
    assert pages.faults(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("README.md", "| 27B | ", "| 27B | 9", "a generated part is stale"),
        ("docs/verification.md", "5,580,676", "5,580,677", "a generated part is stale"),
        ("docs/support.md", "| `linear` |", "| `linears` |", "a generated part is stale"),
        ("docs/performance.md", "## Gates", "27B decodes 180.7 tok/s. ## Gates", "'180.7 tok/s' is quoted by hand"),
        ("docs/performance.md", "## Gates", "It reaches 360 TFLOPS", "'360 TFLOPS' is quoted by hand"),
        ("docs/performance.md", "<!-- figures of: an example", "<!-- figures of: -->", "no partner, or no name"),
        ("README.md", "<!-- end -->", "", "has no partner"),
        (
            "docs/npu.md",
            "`kernels/npu/design.py`",
            "`kernels/npu/designer.py`",
            "kernels/npu/designer.py does not exist",
        ),
        ("docs/architecture.md", "Runner.warm_up`", "Runner.warm_ups`", "runner.py does not define Runner.warm_ups"),
        ("README.md", "python -m hybrid.bench", "python -m hybrid.benches", "hybrid.benches: there is no such module"),
        ("README.md", "(docs/npu.md)", "(docs/gpu.md)", "the link docs/gpu.md leads nowhere"),
        ("docs/serving.md", "(#access)", "(#accesses)", "serving.md has no such heading"),
        ("docs/decisions.md", "**2026-11-20: Rows are flat.**", "**Rows are flat.**", "an entry begins like"),
        ("docs/decisions.md", "**2026-11-20: Rows are flat.**", "**2026-11-29: Rows are flat.**", "newest first"),
    ],
)
def test_a_stale_figure_or_a_name_that_is_not_there_is_refused(name, old, new, words):
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    assert old in text
    assert words in "\n".join(pages.faults(page, text.replace(old, new, 1)))


def test_generated_parts_are_written_and_others_are_not_touched(tmp_path, monkeypatch, capsys):
    """Text around a generated part is unchanged; an unknown part, and a row without a record, are errors."""
    page, kept = tmp_path / "README.md", "Before.\n<!-- made: headline -->\nold\n<!-- end -->\nAfter.\n"
    page.write_text(kept)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: [page])
    monkeypatch.setattr(pages, "faults", lambda page, text: [])
    assert pages.main([]) == 0
    made = page.read_text()
    assert made.startswith("Before.\n<!-- made: headline -->\n| Q4_0") and made.endswith("\n<!-- end -->\nAfter.\n")
    page.write_text(kept.replace("headline", "footline"))
    assert pages.main([]) == 1 and "nothing makes the part 'footline'" in capsys.readouterr().err
    with pytest.raises(SpecError, match=r"quoted.toml: no record of gemma3-27b q4_0, decode after 512, on NVIDIA H200"):
        quoted.headline([record.Record.model_validate_json(json.dumps(RECORD))])


@pytest.mark.slow
def test_a_campaign_is_its_declared_commands(tmp_path, monkeypatch, capsys):
    """Each in a separate process; existing results are kept, a failing command leaves no file."""
    assert campaign.main(["--list", "--device", "vulkan:1", "--jobs", "3", "--out", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    files = " ".join(
        f"conformance/ops/test_{of}.py"
        for of in ("ops", "flash_attention", "gemm_parts", "tuning", "decode_attention", "groups")
    )
    assert f"pytest -q -n 3 {files} --junitxml={tmp_path}/proof.xml" in listed
    assert "perf.ablate --random gemma3-27b --device vulkan:1 --json" in listed
    steps = [
        campaign.Step(name="one", command="hybrid.inspect gemma3-1b --json"),
        campaign.Step(name="two", command="hybrid.inspect nothing --json"),
    ]
    monkeypatch.setattr(campaign, "chosen", lambda patterns: iter(steps))
    assert campaign.main(["--out", str(tmp_path)]) == 1
    assert "two: python -m hybrid.inspect nothing --json ended with 1: error: " in capsys.readouterr().err
    made = tmp_path / "one.json"
    assert json.loads(made.read_text()) and not (tmp_path / "two.json").exists()
    made.write_text("kept")
    del steps[1]
    assert campaign.main(["--out", str(tmp_path)]) == 0 and made.read_text() == "kept"
    assert f"python -m perf.record {tmp_path}/proof.xml {made}" in capsys.readouterr().out


def test_every_command_of_the_campaign_is_one_that_parses():
    import importlib

    for step in campaign.chosen(["27b*", "4b*", "1b*"]):
        module, *given = step.arguments(campaign.ROOT, "vulkan", 1)
        made = importlib.import_module(module if module.startswith("perf.") else f"{module}.__main__")
        assert made.parser().parse_args(given).json
