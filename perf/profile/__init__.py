"""Time of a token or a prompt by operation, from the device's timestamps.

    python -m perf.profile --random gemma3-27b --phase decode --context 512 --picture decode.png

Method: the engine writes a timestamp after every step and waits for each pass; every pass is repeated, and a step's
time is its median. Bytes and operations are the declared costs. What the steps leave of the host's time for a pass is
the submit and the wait; in an ordinary run the next pass hides it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hybrid.arguments import add_devices, add_model, fallbacks, open_devices, open_model
from hybrid.cli import CACHES, Parser, positive, run
from hybrid.cli.progress import tracked
from hybrid.core.units import show_rate
from hybrid.devices.about import driver_of, kernels_of, provenance

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of one pass: median microseconds from `start` on, and what it must move and compute."""

    name: str
    op: str
    layer: int | None
    start: float
    us: float
    nbytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class OpRow:
    """All steps of one operation, over all passes."""

    op: str
    calls: int
    us: float
    share: float
    """Of the device's time."""
    nbytes: int
    flops: int
    floor_us: float
    """Time of its bytes and operations at the rates of this run's probes."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.us / 1e3 if self.us else 0.0

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6 if self.us else 0.0


def floor(step: StepRow, copy_gb_s: float, matrix_tflops: float | None) -> float:
    """Microseconds below which the step cannot be done at the rates that the probes reached."""
    return max(step.nbytes / copy_gb_s / 1e3, step.flops / matrix_tflops / 1e6 if matrix_tflops else 0.0)


def by_op(steps: Sequence[StepRow], copy_gb_s: float, matrix_tflops: float | None) -> list[OpRow]:
    """Sums by operation, the longest first."""
    total = sum(s.us for s in steps) or 1.0
    found = []
    for op in dict.fromkeys(s.op for s in steps):
        own = [s for s in steps if s.op == op]
        us = sum(s.us for s in own)
        least = sum(floor(s, copy_gb_s, matrix_tflops) for s in own)
        found.append(OpRow(op, len(own), us, us / total, sum(s.nbytes for s in own), sum(s.flops for s in own), least))
    return sorted(found, key=lambda row: -row.us)


def measure(engine: Any, phase: str, context: int, repeats: int) -> tuple[list[StepRow], list[dict[str, Any]]]:
    """Steps of all passes of one token after `context` others, or of a prompt of `context` tokens, of every slot; and
    the passes. The engine was made with profile=True. RuntimeError for a device without timestamps."""
    from hybrid.bench.measure import Bench

    bench, runs, trace = Bench(engine, 1), list[list[Any]](), engine.runner.trace
    for i in tracked(range(repeats + 1), "passes"):  # the first warms up, and fills the cache
        trace.clear()
        if phase == "prefill":
            bench.run(bench.requests(context, 1, 0))
            runs.append(list(trace))
        else:
            wanted = bench.requests(context + 1, 2, 0 if i == 0 else context)
            bench.run(wanted)
            runs.append(trace[-1:])
    if not all(p.steps for p in runs[-1]):
        raise RuntimeError(f"{engine.device.name} has no timestamps")
    steps: list[StepRow] = []
    passes: list[dict[str, Any]] = []
    for i, first in enumerate(runs[1]):
        rows, outs, length = first.rows, first.outs, first.context
        same = [run_[i] for run_ in runs[1:]]
        found = _steps(
            engine.runner.plan(phase, rows, outs), length, [p.steps for p in same], sum(p["device_us"] for p in passes)
        )
        device_us, host_us = sum(s.us for s in found), 1e6 * statistics.median(p.seconds for p in same)
        passes.append(
            {"plan": same[0].plan, "rows": rows, "context": length, "device_us": device_us, "host_us": host_us}
        )
        steps += found
    return steps, passes


def _steps(plan: Any, context: int, runs: Sequence[Any], begin: float) -> list[StepRow]:
    from hybrid.planning.cost import step_cost

    found: list[StepRow] = []
    for i, step in enumerate(plan.steps):
        us, cost = 1e6 * statistics.median(steps[i].duration for steps in runs), step_cost(plan, step, context)
        if runs[0][i].within is not None:  # one dispatch: one row, from its first operation to its last
            row = found.pop()
            ops = f"{row.op.partition(' .. ')[0]} .. {step.op}"
            found.append(
                replace(row, op=ops, us=row.us + us, nbytes=row.nbytes + cost.nbytes, flops=row.flops + cost.flops)
            )
            begin += us
            continue
        found.append(StepRow(step.name, step.op, step.layer, begin, us, cost.nbytes, cost.flops))
        begin += us
    return found


def profile(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Everything as plain data."""
    from hybrid.bench.probe import probe
    from hybrid.engine.loading import EngineConfig, LoadClock
    from hybrid.engine.loop import Engine

    with ExitStack() as held:
        checkpoint = held.enter_context(open_model(args))
        schedule, opened = open_devices(args, checkpoint, held)
        device = opened.device
        probes = probe(opened.main)
        ctx = args.context + 3
        if ctx > checkpoint.hparams.context_length:
            raise ValueError(
                f"--context {args.context}: the model was made for {checkpoint.hparams.context_length} positions"
            )
        config = EngineConfig(
            precision=args.precision,
            kv=args.kv,
            ctx=ctx,
            chunk=args.chunk,
            n_tokens=checkpoint.hparams.vocab,
            slots=args.batch,
            profile=True,
        )
        clock = LoadClock()
        with clock.shown(True):
            engine = Engine(checkpoint, device, config, schedule=schedule, clock=clock)
        steps, passes = measure(engine, args.phase, args.context, args.repetitions)
        return {
            "schema": SCHEMA,
            "command": command,
            "device": device.name,
            "driver": driver_of(opened.main),
            "kernels": kernels_of(opened.main),
            "model": checkpoint.name,
            "precision": {k: list(v) for k, v in engine.runner.precision.items()},
            "phase": args.phase,
            "context": args.context,
            "batch": args.batch,
            "repetitions": args.repetitions,
            "passed_over": fallbacks(opened, engine),
            "probes": asdict(probes),
            "passes": passes,
            "ops": [
                {**asdict(r), "gb_per_second": r.gb_per_second, "tflops": r.tflops}
                for r in by_op(steps, probes.copy_gb_s, probes.matrix_tflops)
            ],
            "steps": [asdict(s) for s in steps],
        }


def read(path: Path) -> dict[str, Any]:
    """Read a file that --json printed. ValueError for anything else."""
    try:
        report = json.loads(path.read_text())
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or "steps" not in report:
        raise ValueError(f"{path}: not what perf.profile --json prints")
    return report


def subject(report: Mapping[str, Any]) -> str:
    """The profile as text."""
    batch = report.get("batch", 1)
    what = (
        f"one token after {report['context']}"
        if report["phase"] == "decode"
        else f"a prompt of {report['context']} tokens"
    )
    return what if batch == 1 else f"{what}, {batch} sequences"


def text(report: Mapping[str, Any]) -> str:
    """For people."""
    what = subject(report)
    lines = [
        f"{report['device']}, {report['driver']}; {provenance(report['device'])}, medians of {report['repetitions']}",
        *(f"passed over: {reason}" for reason in report.get("passed_over", ())),
        f"{report['model']}: {what}, {len(report['passes'])} pass{'es' * (len(report['passes']) > 1)}",
    ]
    probes = report["probes"]
    matrix = "" if probes["matrix_tflops"] is None else f" and {show_rate(1e12 * probes['matrix_tflops'], 'FLOPS')}"
    lines.append(
        f"floor: what bytes and operations take at {probes['copy_gb_s']:.4g} GB/s{matrix}, the probes of this run; lost: above it"
    )
    lines += [
        "",
        f"{'operation':24}{'calls':>7}{'us':>11}{'us each':>10}{'share':>9}{'GB/s':>9}{'FLOPS':>9}{'floor':>11}{'lost':>11}",
    ]
    for r in report["ops"]:
        lines.append(_line(r, r["us"]))
    device, host = (sum(p[key] for p in report["passes"]) for key in ("device_us", "host_us"))
    total = {key: sum(r[key] for r in report["ops"]) for key in ("nbytes", "flops", "calls", "floor_us")}
    lines.append(_line({"op": "device", "share": 1.0, **total}, device))
    lines.append(f"{'host, waiting':24}{'':7}{host:11.1f}")
    return "\n".join(lines)


def _line(r: Mapping[str, Any], us: float) -> str:
    rates = f"{r['nbytes'] / us / 1e3:9.1f}{show_rate(1e6 * r['flops'] / us, ''):>9}" if us else f"{'-':>9}{'-':>9}"
    each = f"{us / r['calls']:10.2f}{100 * r['share']:7.1f} %"
    return f"{r['op']:24}{r['calls']:7}{us:11.1f}{each}{rates}{r['floor_us']:11.1f}{us - r['floor_us']:11.1f}"


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.profile",
        description="Device time of a token or a prompt by operation: a table, a picture.",
    )
    add_model(p)
    p.add_argument("--phase", default="decode", choices=("decode", "prefill"), help="one token, or a prompt (decode)")
    p.add_argument(
        "--context", type=positive, default=512, metavar="N", help="positions before the token, or of the prompt (512)"
    )
    p.add_argument(
        "-b", "--batch", type=positive, default=1, metavar="N", help="sequences, each with such a token or prompt (1)"
    )
    p.add_argument(
        "-r", "--repetitions", type=positive, default=9, metavar="N", help="of every pass, after one to warm up (9)"
    )
    add_devices(p)
    p.add_argument(
        "--precision", default="auto", choices=("auto", "exact", "fast"), help="as for hybrid.generate (auto)"
    )
    p.add_argument(
        "--kv", default="auto", choices=CACHES, metavar="TYPE", help=f"type of the KV cache: {', '.join(CACHES)} (auto)"
    )
    p.add_argument("--chunk", type=positive, metavar="N", help="rows of a prefill pass (the engine's)")
    p.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw it: .png or .svg (needs matplotlib: the extra `perf`)"
    )
    p.add_argument("--read", type=Path, metavar="FILE", help="show what --json printed before; no model is run")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    command = f"python -m perf.profile {shlex.join(sys.argv[1:] if argv is None else argv)}"

    def work() -> int:
        if args.picture is not None:
            from hybrid.perf.profile import (
                picture as profile_picture,  # before anything is measured: it may not be installed
            )

            profile_picture.check(args.picture)
        report = read(args.read) if args.read else profile(args, command)
        print(json.dumps(report) if args.json else text(report))
        if args.picture is not None:
            profile_picture.draw(report, args.picture)
        return 0

    return run(work)
