"""Per-step device times: collected pass by pass, and as a file for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid.core.device import Program, StepTime


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One timed pass: seconds on the host's clock and device times of its steps. Passes of several devices may overlap."""

    plan: str
    begin: float
    seconds: float
    steps: tuple[StepTime, ...]
    rows: int = 0
    outs: int = 0
    context: int = 0
    """Mean context of its rows."""


class Timing:
    """Submitted passes whose device times are unread; they end up in `trace`. overlaps: whether passes overlap, so that
    the host does not see a pass's end."""

    def __init__(self, trace: list[TimedPass], overlaps: bool) -> None:
        self.trace, self.overlaps = trace, overlaps
        self._running: list[tuple[Program, int, float, tuple[int, int, int]]] = []

    def start(self, program: Program, ticket: int, begin: float, size: tuple[int, int, int] = (0, 0, 0)) -> None:
        """size: rows, rows whose logits are wanted, mean context."""
        self._running.append((program, ticket, begin, size))

    def stop(self, ticket: int) -> None:
        """Read the times of passes up to a finished ticket."""
        done = [r for r in self._running if r[1] <= ticket]
        self._running = [r for r in self._running if r[1] > ticket]
        for program, number, begin, size in done:
            steps, now, began = tuple(program.times(number)), time.perf_counter(), program.began(number)
            shift = 0.0 if began is None else max(0.0, began - begin)
            steps = tuple(replace(s, start=s.start + shift) for s in steps)
            end = begin + max(s.start + s.duration for s in steps) if self.overlaps and steps else now
            self.trace.append(TimedPass(program.plan.name, begin, end - begin, steps, *size))


def _lanes(passes: Sequence[TimedPass]) -> list[int]:
    """For each pass the first lane without overlap."""
    ends: list[float] = []
    found = []
    for p in passes:
        lane = next((i for i, end in enumerate(ends) if end <= p.begin), len(ends))
        ends[lane : lane + 1] = [p.begin + p.seconds]
        found.append(lane)
    return found


def events(passes: Sequence[TimedPass], device: str) -> list[dict[str, Any]]:
    """Chrome trace events in microseconds: lanes for passes (host clock) and one lane per device for its steps, placed on
    the host's clock where the device's clock is calibrated, else from the begin of their pass."""
    zero = min((p.begin for p in passes), default=0.0)
    others = sorted({s.device for p in passes for s in p.steps} - {""})
    step_row = {"": 1, **{name: 2 + i for i, name in enumerate(others)}}
    lanes = _lanes(passes)
    pass_row = {lane: 100 + lane if lane else 0 for lane in sorted({0, *lanes})}
    rows = {row: f"passes{f', {lane + 1}' if len(pass_row) > 1 else ''} (host clock)" for lane, row in pass_row.items()}
    rows |= {row: f"steps ({name or 'device'})" for name, row in step_row.items()}
    found: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": device}}]
    for row, title in sorted(rows.items()):
        found.append({"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": title}})
    for number, (p, lane) in enumerate(zip(passes, lanes, strict=True)):
        start = 1e6 * (p.begin - zero)
        args: dict[str, Any] = {"pass": number}
        whole = {"ph": "X", "pid": 0, "tid": pass_row[lane], "name": p.plan, "ts": start, "dur": 1e6 * p.seconds}
        found.append({**whole, "args": args})
        for s in p.steps:
            found.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": step_row[s.device],
                    "name": s.name,
                    "cat": s.op,
                    "ts": start + 1e6 * s.start,
                    "dur": 1e6 * s.duration,
                    "args": {"op": s.op, "layer": s.layer, "plan": p.plan, **args},
                }
            )
    return found


def write_trace(path: Path, passes: Sequence[TimedPass], device: str) -> None:
    path.write_text(json.dumps({"traceEvents": events(passes, device), "displayTimeUnit": "ms"}), encoding="utf-8")
