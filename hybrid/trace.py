"""Per-step device times as a file for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.engine import Pass


def events(passes: Sequence[Pass], device: str) -> list[dict[str, Any]]:
    """Chrome trace events: a row for passes (host clock), a row for steps (device times, placed at their pass's begin).
    Times in microseconds from the first pass."""
    zero = passes[0].begin if passes else 0.0
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": device}},
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "passes (host clock)"}},
        {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "steps (device)"}},
    ]
    for p in passes:
        start = 1e6 * (p.begin - zero)
        found.append({"ph": "X", "pid": 0, "tid": 0, "name": p.plan, "ts": start, "dur": 1e6 * p.seconds})
        for s in p.steps:
            found.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": 1,
                    "name": s.name,
                    "cat": s.op,
                    "ts": start + 1e6 * s.start,
                    "dur": 1e6 * s.duration,
                    "args": {"op": s.op, "layer": s.layer, "plan": p.plan},
                }
            )
    return found


def write_trace(path: Path, passes: Sequence[Pass], device: str) -> None:
    path.write_text(json.dumps({"traceEvents": events(passes, device), "displayTimeUnit": "ms"}), encoding="utf-8")
