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
class Pass:
    """One timed submit: seconds on the host's clock, and the devices' times of its steps (of its last repetition)."""

    plan: str
    begin: float
    seconds: float
    steps: tuple[StepTime, ...]
    pipeline_slot: int = 0
    """Passes of different pipeline slots may overlap."""


class Timing:
    """Passes that were submitted and whose times have not been read, because reading waits; `trace` gets them
    afterwards."""

    def __init__(self, trace: list[Pass]) -> None:
        self.trace = trace
        self._running: list[tuple[Program, float]] = []

    def start(self, program: Program) -> None:
        self._running.append((program, time.perf_counter()))

    def stop(self, pipeline_slot: int | None = None) -> None:
        """The passes of a pipeline slot (None: all) are done: read their times."""
        done = [r for r in self._running if pipeline_slot is None or r[0].plan.pipeline_slot == pipeline_slot]
        self._running = [r for r in self._running if r not in done]
        for program, begin in done:
            steps, now, began = tuple(program.times()), time.perf_counter(), program.began()
            shift = 0.0 if began is None else max(0.0, began - begin)
            steps = tuple(replace(s, start=s.start + shift) for s in steps)
            alone = program.plan.pipeline_slot is None or not steps
            end = now if alone else begin + max(s.start + s.duration for s in steps)
            self.trace.append(Pass(program.plan.name, begin, end - begin, steps, program.plan.pipeline_slot or 0))


def events(passes: Sequence[Pass], device: str) -> list[dict[str, Any]]:
    """Chrome trace events: a row for the passes of each pipeline slot (host clock), a row for the steps of each device,
    on the host's clock where the device's can be compared with it, else from their pass's begin. Microseconds from the
    first pass."""
    zero = min((p.begin for p in passes), default=0.0)
    others = sorted({s.device for p in passes for s in p.steps} - {""})
    step_row = {"": 1, **{name: 2 + i for i, name in enumerate(others)}}
    pass_row = {slot: 100 + slot if slot else 0 for slot in sorted({0, *(p.pipeline_slot for p in passes)})}
    rows = {
        row: f"passes{f', pipeline slot {slot}' if len(pass_row) > 1 else ''} (host clock)"
        for slot, row in pass_row.items()
    }
    rows |= {row: f"steps ({name or 'device'})" for name, row in step_row.items()}
    found: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": device}}]
    for row, title in sorted(rows.items()):
        found.append({"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": title}})
    for number, p in enumerate(passes):
        start = 1e6 * (p.begin - zero)
        args: dict[str, Any] = {"pass": number, "pipeline_slot": p.pipeline_slot}
        whole = {
            "ph": "X",
            "pid": 0,
            "tid": pass_row[p.pipeline_slot],
            "name": p.plan,
            "ts": start,
            "dur": 1e6 * p.seconds,
        }
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


def write_trace(path: Path, passes: Sequence[Pass], device: str) -> None:
    path.write_text(json.dumps({"traceEvents": events(passes, device), "displayTimeUnit": "ms"}), encoding="utf-8")
