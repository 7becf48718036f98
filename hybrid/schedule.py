"""python -m hybrid.schedule check|show FILE MODEL: type-check a schedule against a checkpoint, print its plan."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid.cli import Parser, UsageError, positive, run


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m hybrid.schedule", description=__doc__.split(": ", 1)[1])
    p.add_argument("command", choices=("check", "show"), help="check: every edge, both phases; show: print the plan")
    p.add_argument("file", type=Path, metavar="FILE", help="schedule file, or the name of a shipped one such as gemma3")
    p.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help=".gguf file, Hugging Face directory, or OWNER/NAME[:FILE.gguf] on Hugging Face",
    )
    p.add_argument(
        "--phase", choices=("decode", "prefill"), help="which plan to show (decode; of an embedding model prefill)"
    )
    p.add_argument(
        "--rows", type=positive, default=1, metavar="N", help="rows of a pass: decode slots, or prompt tokens (1)"
    )
    p.add_argument("--ctx", type=int, metavar="N", help="context to plan for (the model's, at most 4096)")
    p.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="device to plan for: cpu, vulkan, or vulkan:N for the capabilities of that device (cpu)",
    )
    p.add_argument("--weights", metavar="TYPE", help="plan for matrices converted to this type")
    p.add_argument("--precision", default="auto", choices=("auto", "exact", "fast"), help="precision profile (auto)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    from hybrid.checkpoint import open_checkpoint
    from hybrid.planning.cache import MAX_SLOTS
    from hybrid.planning.planner import plan
    from hybrid.planning.segments import segments
    from hybrid.spec.schedule import SCHEDULES, extended, load_schedule

    if args.device != "cpu" and not re.fullmatch(r"vulkan(:\d+)?", args.device):
        raise ValueError(f"--device {args.device}: use cpu, vulkan or vulkan:NUMBER")
    path = args.file
    if not path.exists() and (SCHEDULES / f"{path}.toml").is_file():
        path = SCHEDULES / f"{path}.toml"
    schedule = load_schedule(path)
    args.phase = args.phase or ("decode" if any(s.phase != "prefill" for s in schedule.steps) else "prefill")
    if args.phase == "decode" and args.rows > MAX_SLOTS:
        raise UsageError(f"--rows {args.rows}: a decode pass has at most {MAX_SLOTS} rows, one for each sequence")
    with open_checkpoint(args.model) as checkpoint:
        target = _target(checkpoint, schedule, args)
        outs = args.rows if args.phase == "decode" else 1
        checked = {
            "decode": plan(target, target.cache.slots, target.cache.slots, "decode"),
            "prefill": plan(target, max(args.rows, 8), 1, "prefill"),
            "hidden": plan(target, max(args.rows, 8), 0, "prefill", capture=True),
        }
        made = plan(target, args.rows, outs, args.phase)
    about = {"schedule": schedule.schedule.name, "extends": extended(path), "elsewhere": schedule.elsewhere}
    if args.command == "check":
        summary = {
            **about,
            "model": str(args.model),
            **{
                k: {"steps": len(p.steps), "tensors": len(p.tensors), "segments": len(segments(p))}
                for k, p in checked.items()
            },
        }
        steps = ", ".join(f"{k} {len(p.steps)} steps" for k, p in checked.items())
        fits = f"{path}: fits {args.model}: {steps}; every edge agrees"
        print(json.dumps(summary) if args.json else "\n".join([fits, *_about(about)]))
        return 0
    report = about | _report(made, target, _dispatches(made, args.device))
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _target(checkpoint: Any, schedule: Any, args: argparse.Namespace) -> Any:
    from hybrid.engine.loading import stored_types
    from hybrid.planning.cache import DEFAULT_CTX, CacheShape
    from hybrid.planning.passes import capabilities_of, chunk_of
    from hybrid.planning.planner import Target

    hp = checkpoint.hparams
    ctx = min(hp.context_length, DEFAULT_CTX) if args.ctx is None else args.ctx
    if not 1 <= ctx <= hp.context_length:
        raise ValueError(f"--ctx {ctx} is outside 1..{hp.context_length}, the context that the model was made for")
    slots = args.rows if args.phase == "decode" else 1
    can = capabilities_of(_dry(args.device).has) if args.device != "cpu" else frozenset()
    cache = CacheShape.of(hp, ctx, slots, chunk_of(can))
    return Target(
        schedule,
        hp,
        stored_types(checkpoint, args.weights, args.device.partition(":")[0], requantize=True),
        cache,
        hp.vocab,
        args.precision,
        device=args.device.partition(":")[0],
        capabilities=can,
    )


def _dry(device: str) -> Any:
    """A dry-run device like one of the survey; for plain `vulkan` one with subgroups of 32 and no matrix units."""
    from hybrid.kernels.vulkan.dry import DryDevice

    if device == "vulkan":
        return DryDevice()
    from hybrid.kernels.vulkan.instance import survey

    found = {f"vulkan:{info.index}": report for info, report in survey()}
    if device not in found:
        raise ValueError(f"--device {device}: there is {', '.join(found) or 'no Vulkan device'}")
    return DryDevice.like(found[device])


def _report(plan: Any, target: Any, dispatches: dict[str, int]) -> dict[str, Any]:
    """The plan as plain data."""
    from hybrid.planning.cost import memory, plan_cost, precision_of, step_cost
    from hybrid.planning.segments import segments

    rows = []
    for step in plan.steps:
        args = {k: (n, plan.tensors[n].dtype, list(plan.tensors[n].shape)) for k, n in step.args.items()}
        rows.append(
            {
                "name": step.name,
                "op": step.op,
                "layer": step.layer,
                "device": step.device,
                **asdict(step_cost(plan, step)),
                "dispatches": dispatches.get(step.name),
                "args": args,
            }
        )
    total = plan_cost(plan)
    per_layer: dict[int, int] = {}
    for row in rows:
        if row["layer"] is not None and row["dispatches"] is not None:
            per_layer[row["layer"]] = per_layer.get(row["layer"], 0) + row["dispatches"]
    return {
        "plan": plan.name,
        "rows": plan.rows,
        "outs": plan.outs,
        "ctx": target.cache.ctx,
        "steps": rows,
        "segments": [{"device": s.device, "steps": len(s.steps)} for s in segments(plan)],
        "precision": {k: list(v) for k, v in precision_of(plan).items()},
        "flops": total.flops,
        "nbytes": total.nbytes,
        "memory": memory(plan),
        "dispatches_per_layer": per_layer,
        "dispatches": sum(dispatches.values()) if dispatches else None,
    }


def _dispatches(plan: Any, device: str) -> dict[str, int]:
    """Dispatches of each step, counted without running the plan."""
    if device == "cpu":
        return {s.name: 1 for s in plan.steps}
    from hybrid.kernels.vulkan.dry import count

    return count(plan, _dry(device)).dispatches


def _about(report: dict[str, Any]) -> list[str]:
    """Lines on the schedule's bases and on steps that it places on secondary devices."""
    lines = [f"{report['schedule']} extends {', which extends '.join(report['extends'])}"] if report["extends"] else []
    return lines + [
        f"on {device}: {', '.join(steps)}; the rest on the main device" for device, steps in report["elsewhere"].items()
    ]


def _text(report: dict[str, Any]) -> str:
    """A text table with one line for each step."""
    lines = [
        *_about(report),
        f"{report['plan']}: {report['rows']} rows, {report['outs']} outputs, context {report['ctx']}",
        f"{'step':28} {'op':20} {'device':8} {'inputs -> outputs':60} {'Mflop':>10} {'MB':>9} {'disp':>5}",
    ]
    for s in report["steps"]:
        types = " ".join(f"{k}:{d}{shape}" for k, (_, d, shape) in s["args"].items() if len(shape) > 1)
        disp = "-" if s["dispatches"] is None else s["dispatches"]
        lines.append(
            f"{s['name']:28} {s['op']:20} {s['device']:8} {types[:60]:60} {s['flops'] / 1e6:10.3f} "
            f"{s['nbytes'] / 1e6:9.3f} {disp:>5}"
        )
    per_layer = sorted(set(report["dispatches_per_layer"].values()))
    counts = (
        f"{report['dispatches']} dispatches, {'/'.join(map(str, per_layer))} per layer"
        if report["dispatches"]
        else "dispatches: not counted for this device"
    )
    lines.append(
        f"total: {len(report['steps'])} steps in {len(report['segments'])} segment(s), "
        f"{report['flops'] / 1e9:.3f} Gflop, {report['nbytes'] / 1e6:.2f} MB; {counts}"
    )
    lines.append("precision: " + "; ".join(f"{k} {', '.join(v)}" for k, v in report["precision"].items()))
    lines.append("memory: " + ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in report["memory"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
