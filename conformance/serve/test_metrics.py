"""Metrics: every name that the Grafana dashboard and the page use exists, and has the right value."""

from __future__ import annotations

import json
import re
from pathlib import Path

from conformance.support.paths import ROOT
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import running
from hybrid.devices.energy import Meter
from hybrid.serve.pages import FOLDER
from hybrid.serve.power import Joules

NAMES = re.compile(r"\b((?:hybrid|process)_[a-z_]+)")
ELSEWHERE = {"hybrid_device_joules_total"}
"""Only where the machine counts it."""


def test_the_dashboards_ask_for_what_is_there() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {n for panel in board["panels"] for t in panel["targets"] for n in NAMES.findall(t["expr"])}
    asked |= {
        n + "_bucket" if n.endswith("_seconds") else n for n in NAMES.findall((FOLDER / "dashboard.js").read_text())
    }
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


def test_joules_are_a_counter_or_power_times_time(tmp_path: Path) -> None:
    assert Joules(Meter("nothing")).read() is None
    counted = iter([50.0, 80.0])
    assert Joules(Meter("counter", counter=lambda: next(counted))).read() == 30.0
    now, asleep = [0.0], [False]

    def power() -> float:
        if asleep[0]:
            raise OSError("asleep")
        return 10.0 + now[0]

    joules = Joules(Meter("sensor", power=power), clock=lambda: now[0])
    for at, sleeps, total in [(2.0, False, 22.0), (4.0, True, 22.0), (6.0, False, 22.0), (7.0, False, 38.5)]:
        now[0], asleep[0] = at, sleeps
        joules.look()
        assert joules.read() == total


def test_a_counter_that_has_gone_has_no_figure() -> None:
    said: list[float | OSError] = [1.0, OSError("the GPU has gone")]

    def counter() -> float:
        value = said.pop(0)
        if isinstance(value, OSError):
            raise value
        return value

    assert Joules(Meter("counter", counter=counter)).read() is None


def test_pass_times_are_published_by_phase() -> None:
    with running(lambda: ScriptedModel(Script())) as server:
        server.app.state.backend.joules = Joules(Meter("a counter", counter=iter(range(100)).__next__))
        text = server.http.get("/metrics").text
    for name, value in {"seconds": 0.25, "passes": 3.0, "rows": 5.0, "bytes": "1e+06", "operations": "2e+09"}.items():
        assert f'hybrid_device_{name}_total{{phase="decode"}} {value}' in text
    assert 'hybrid_device_joules_total{source="a counter"} 1.0' in text


def test_the_pages_share_a_head() -> None:
    with running(lambda: ScriptedModel(Script())) as server:
        heads = [server.http.get(path).text.partition("</head>")[0] for path in ("/", "/dashboard")]
        assert server.http.get("/page/head.html").status_code == 404
    for head in heads:
        assert '<meta charset="utf-8">' in head and "page.css" in head and "<!--" not in head
