"""What is published: every name that the Grafana dashboard and the page ask for is there, and counts what happened."""

from __future__ import annotations

import json
import re
from pathlib import Path

from conformance.support.paths import ROOT
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import running
from hybrid.serve.pages import FOLDER
from hybrid.serve.power import watts

NAMES = re.compile(r"\b((?:hybrid|process)_[a-z_]+)")
ELSEWHERE = {"hybrid_device_watts"}
"""Only where a sensor is."""


def test_the_dashboards_ask_for_what_is_there() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {n for panel in board["panels"] for t in panel["targets"] for n in NAMES.findall(t["expr"])}
    asked |= {n + "_bucket" if n.endswith("_seconds") else n for n in NAMES.findall((FOLDER / "dashboard.js").read_text())}
    asked -= {"process_resident_memory"}
    with running(lambda: ScriptedModel(Script())) as server:
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
        text = server.http.get("/metrics").text
    given = {m[1] for line in text.splitlines() if (m := re.match(r"([a-z_]+)[ {]", line))}
    assert len(asked) > 15 and asked - ELSEWHERE <= given
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


def test_counts_and_times() -> None:
    with running(lambda: ScriptedModel(Script(text="one two three", pause=0.01))) as server:
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": 5}):
            server.post("/v1/completions", body)
        text = server.http.get("/metrics").text
    for outcome, n in {"ok": 2, "refused": 1}.items():
        assert f'hybrid_requests_total{{endpoint="/v1/completions",outcome="{outcome}"}} {n}.0' in text
    assert "hybrid_time_to_first_token_seconds_count 2.0" in text and "hybrid_request_seconds_count 2.0" in text
    assert 'hybrid_blocks{kind="all",state="cached"} 2.0' in text and "hybrid_ready 1.0" in text


def test_watts_are_read_where_a_sensor_is(tmp_path: Path) -> None:
    assert watts(tmp_path / "none") is None and watts(tmp_path) is None
    for n, (name, file, value) in enumerate([("amdgpu", "power1_average", "31000000"), ("k10temp", "temp1_input", "40000")]):
        folder = tmp_path / f"hwmon{n}"
        folder.mkdir()
        (folder / "name").write_text(name + "\n")
        (folder / file).write_text(value + "\n")
    assert watts(tmp_path) == 31.0
    (tmp_path / "hwmon0" / "power1_average").write_text("")
    assert watts(tmp_path) is None
