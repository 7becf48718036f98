"""Runs become records only with their proof; the report shows them, the peer, the targets and the gates."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from conformance.test_targets import RECORD, RUN
from hybrid.spec.errors import SpecError
from perf import record, report

BENCH = {
    "command": "python -m hybrid.bench --random gemma3-27b --json",
    "device": "vulkan:0 (NVIDIA H200)",
    "driver": "NVIDIA 580.159.04",
    "model": "gemma3-27b (random)",
    "precision": {"weights": ["q4_0", "q6_k"], "activations": ["q8_act"], "kv": ["f16"]},
    "weights_bytes": 15500000000,
    "errors": [],
    "results": [
        {"test": "prefill 512 @ 0", "phase": "prefill", "n": 512, "depth": 0, "batch": 1, "tokens_per_second": 3000.0},
        {"test": "decode 128 @ 0", "phase": "decode", "n": 128, "depth": 0, "batch": 1, "tokens_per_second": 150.0},
    ],
}


def junit(tmp_path, **changes):
    said = {"device": "NVIDIA H200", "kernels": "0123456789abcdef", "command": "python -m pytest conformance/test_ops.py"}
    counts = {"tests": "900", "failures": "0", "errors": "0", "skipped": "4"}
    for key, value in changes.items():
        (said if key in said else counts)[key] = value
    suite = ET.Element("testsuite", counts)
    for name, value in said.items():
        ET.SubElement(ET.SubElement(suite, "properties"), "property", name=name, value=value)
    path = tmp_path / "proof.xml"
    ET.ElementTree(suite).write(path)
    return path


def test_a_bench_with_its_proof_becomes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    proof = record.proof_of(junit(tmp_path), "NVIDIA H200")
    assert proof.passed == 896
    made = record.take(BENCH, proof, "4564b6f", "not locked", "2026-11-21")
    assert [(r.model, r.dtype, r.phase, r.context) for r in made.runs] == [
        ("gemma3-27b", "q4_0", "prefill", 512),
        ("gemma3-27b", "q4_0", "decode", 0),
    ]
    cut = record.take({**BENCH, "command": BENCH["command"] + " --layers 2"}, proof, "4564b6f", "not locked", "2026-11-21")
    assert cut.runs[0].model == "gemma3-27b, layers 2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failures": "1"}, "1 tests failed"),
        ({"device": "llvmpipe"}, "proves kernels on llvmpipe"),
        ({"command": "python -m pytest conformance/test_ops.py -k linear"}, "a selection"),
    ],
)
def test_a_proof_of_something_else_is_refused(tmp_path, changes, words):
    with pytest.raises(SpecError, match=words):
        record.proof_of(junit(tmp_path, **changes), "NVIDIA H200")


def test_a_bench_that_says_it_is_wrong_is_refused(tmp_path):
    proof = record.proof_of(junit(tmp_path), "NVIDIA H200")
    with pytest.raises(SpecError, match="above the 4800"):
        record.take({**BENCH, "errors": ["decode: 5000 GB/s is above the 4800"]}, proof, "4564b6f", "", "2026-11-21")


def test_the_page_names_what_it_shows(tmp_path, monkeypatch):
    few = [t for t in report.load_targets() if t.id in ("27b-11-at-25gb", "27b-token-50ms")]  # test_targets judges all
    monkeypatch.setattr(report, "load_targets", lambda: few)
    kept = [
        record.Record.model_validate_json(json.dumps({**RECORD, "commit": commit, "runs": [{**RUN, "tokens_per_second": speed}]}))
        for commit, speed in (("4564b6f", 85.0), ("5564b6f", 150.0))
    ]
    path = report.build(tmp_path, kept, [("plans", [])])
    text = path.read_text()
    for words in ("NVIDIA H200", "llama.cpp (Vulkan)", "85.6", "150.0", "borderline", "gfx1103 rules", "580.159.04", "modelled"):
        assert words in text
    for picture in ("roofline.svg", "gfx1103.svg", "measured-nvidia-h200.svg"):
        assert ET.fromstring((tmp_path / picture).read_text()).tag.endswith("svg")
    assert "No run of ours is kept yet" in report.build(tmp_path / "empty", []).read_text()
