"""What an operation's kernels execute and touch, counted without a GPU: instructions by kind, bank conflicts in shared
memory, and the sectors of memory that loads and stores take.

    python -m perf.accesses linear --workload gemma3-27b.attn_output --set T=32

The kernels that a GPU with matrix units would choose run by NumPy (hybrid.harness.interpreter), `--workgroups` of each
dispatch. Simulated counts, no times: by the module, before a driver's compiler has seen it. 1.00 is the least that the
same words take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid.cli import Parser, positive, run
from hybrid.harness import POISON, prepare
from hybrid.harness.inputs import make
from hybrid.harness.interpreter.device import InterpretedDevice
from hybrid.harness.interpreter.watch import Accesses, Watch
from hybrid.perf.op import case_of, changed, setting, workloads
from hybrid.spec import OpSpec, load_op
from hybrid.spec.fields import Workload

TABLES = ("nvidia", "radv")
LACKS = {"nvidia": (), "radv": ("matrix_lanes", "fused_halves")}
"""Features that a device of this class has not."""


def counted(spec: OpSpec, workload: Workload, table: str, workgroups: int) -> Iterator[dict[str, Any]]:
    """For each kernel that the workload takes by a class of devices' table, its counts; instructions of a subgroup, on
    average."""
    case, watch = case_of(spec, workload), Watch()
    device = InterpretedDevice("auto", validation=False, tuning=table, without=LACKS[table])
    with device:
        program = prepare(spec, device, case, make(spec, case), POISON[0])
        device.watch, device.limit = watch, workgroups
        program.submit()
    for kernel, subgroups in watch.subgroups.items():
        yield {
            "schema": 1,
            "workload": workload.id,
            "kernel": kernel,
            "subgroups": subgroups,
            "instructions": {
                k: n / subgroups for k, n in sorted(watch.instructions[kernel].items(), key=lambda kn: -kn[1])
            },
            "shared": _accesses(watch.shared[kernel], "wavefronts"),
            "buffers": _accesses(watch.buffers[kernel], "sectors"),
        }


def _accesses(found: dict[tuple[str, int], Accesses], unit: str) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "bytes": size, "requests": a.requests, unit: a.taken, "least": a.least}
        for (kind, size), a in sorted(found.items())
    ]


def lines(one: dict[str, Any]) -> Iterator[str]:
    """A kernel's counts as text."""
    yield f"{one['workload']}: {one['kernel']}, {one['subgroups']} subgroups"
    every = one["instructions"]
    counts = ", ".join(f"{n:,.0f} {k}" for k, n in every.items() if n >= 0.5)
    yield f"  instructions of a subgroup: {sum(every.values()):,.0f}: {counts}"
    for where, unit in (("shared", "wavefronts"), ("buffers", "sectors")):
        for a in one[where]:
            ratio = f"{a[unit] / a['least']:.2f} of the least" if a["least"] else "none"
            yield f"  {where}: {a['requests']:,} {a['kind']} of {a['bytes']} bytes a lane, {a[unit]:,} {unit}, {ratio}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m perf.accesses",
        description="Count what an operation's kernels execute and touch, without a GPU.",
    )
    parser.add_argument("op", help="operation, as in specs/ops")
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="ID",
        help="workloads whose id begins so (repeatable; default: those tagged demo)",
    )
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an axis or a dtype of the workloads: T=32, x=f16",
    )
    parser.add_argument(
        "--table", choices=TABLES, default=TABLES[0], help="whose kernels: kernels/vulkan/tuning (nvidia)"
    )
    parser.add_argument("--workgroups", type=positive, default=8, metavar="N", help="of each dispatch that run (8)")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel")
    args: argparse.Namespace = parser.parse_args(argv)

    def command() -> int:
        spec = load_op(args.op)
        for workload in [changed(spec, w, dict(args.set)) for w in workloads(spec, args.workload)]:
            for one in counted(spec, workload, args.table, args.workgroups):
                print(json.dumps(one) if args.json else "\n".join(lines(one)), flush=True)
        return 0

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
