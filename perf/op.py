"""Time one operation on its spec's workloads, and compare each with the device's roofline.

    python -m perf.op linear --device vulkan --workload gemma3-27b

Method: the workload is first run and judged as a conformance case; one that fails is not timed. Then a plan holds the
step several times over, each with weights and caches of its own so that together they exceed the last-level cache
(`--footprint`), and is submitted until `--seconds` have passed. The time of a step is the median over submits of the
device's timestamps; where the device has none (cpu), of the host clock around the call. Bytes and operations are the
spec's cost expressions: every tensor touched once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from hybrid.checkpoint.random import random_packed
from hybrid.cli import Parser, amount, run
from hybrid.cli.progress import progress_bar
from hybrid.core.device import Device
from hybrid.core.dtypes import WEIGHT_TYPES
from hybrid.core.errors import nearest
from hybrid.core.plan import Plan
from hybrid.core.units import show_rate
from hybrid.devices.opening import open_device
from hybrid.harness import control_of, declared, plan_of, run_case, step_of
from hybrid.harness.cases import Case
from hybrid.harness.inputs import make
from hybrid.spec import OpSpec, load_op
from hybrid.spec.devicesheet import DeviceSheet, sheet_for
from hybrid.spec.fields import Workload

MAX_COPIES = 64
WARM_UP = 1.0  # seconds: a GPU that has idled while values were made takes a while to raise its clocks


@dataclass(frozen=True, slots=True)
class Timing:
    """One workload on one device: seconds per call, the spec's bytes and operations, and its bound."""

    op: str
    workload: str
    device: str
    dtypes: dict[str, str]
    seconds: float
    nbytes: int
    flops: int
    copies: int
    share: float | None
    """Time that the sheet's peak bandwidth or arithmetic rate allows, over the time measured; None: no sheet."""
    bound: str | None

    def line(self) -> str:
        rate = f"{show_rate(self.nbytes / self.seconds, 'B/s'):>10} {show_rate(self.flops / self.seconds, 'FLOPS'):>12}"
        share = f"{100 * self.share:5.1f} % of {self.bound}" if self.share is not None else "no device sheet"
        types = " ".join(sorted({d for d in self.dtypes.values() if d not in ("i32", "u32")}))
        return f"{self.workload:36} {self.seconds * 1e6:10.1f} us {rate}  {share:22}  {types}"


def workloads(spec: OpSpec, wanted: Sequence[str]) -> list[Workload]:
    """The spec's workloads whose id begins with one of `wanted` (none given: those tagged demo)."""
    if not wanted:
        return [w for w in spec.workload if "demo" in w.tags] or list(spec.workload[:1])
    found = [w for w in spec.workload if any(w.id.startswith(p) for p in wanted)]
    if not found:
        known = ", ".join(w.id for w in spec.workload)
        raise ValueError(f"{spec.file} has no workload {' or '.join(wanted)}; it has {known}")
    return found


def setting(text: str) -> tuple[str, str]:
    """For arguments such as T=2048 and x=f16."""
    name, _, value = text.partition("=")
    if not name or not value or (name.isupper() and not value.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no setting such as T=2048 or x=f16")
    return name, value


def changed(spec: OpSpec, workload: Workload, settings: Mapping[str, str]) -> Workload:
    """A workload with other axes and dtypes. ValueError for a name that the operation has not."""
    axes = {k: int(v) for k, v in settings.items() if k in spec.axes}
    dtypes = {k: v for k, v in settings.items() if k in spec.tensors}
    stray = next((k for k in settings if k not in axes and k not in dtypes), None)
    if stray:
        raise ValueError(
            f"--set {stray}: {spec.name} has no such axis or tensor{nearest(stray, [*spec.axes, *spec.tensors])}"
        )
    return workload.model_copy(update={"bind": {**workload.bind, **axes}, "dtypes": {**workload.dtypes, **dtypes}})


def case_of(spec: OpSpec, workload: Workload) -> Case:
    """A full bucket of the workload's shapes."""
    bind = workload.bind
    attrs, style = spec.attrs(bind, workload.attrs), "full" if bind.get("T") == 1 else "ragged"
    return Case(
        spec.name, bind, dict(spec.dtypes(workload.dtypes)), attrs, bind.get("T", 1), bind.get("O", 1), style=style
    )


def repeated(spec: OpSpec, case: Case, device: Device, footprint: int, noise: bool = False) -> tuple[Plan, int]:
    """The step repeated over copies of its large tensors; everything stored on the device and filled, its matrices with
    the bench's noise if asked for: drawing and quantising them as the spec says takes minutes for a large model's."""
    matrices = {
        n
        for n, t in spec.inputs.items()
        if noise
        and t.role == "weight"
        and len(t.shape) == 2
        and t.domain is not None
        and case.dtypes[n] in WEIGHT_TYPES
        and t.domain.dist == "normal"
    }
    values = make(spec, case, matrices)
    own = [n for n in spec.tensors if spec.tensors[n].role in ("weight", "cache")]
    large = sum(declared(spec, case, n).nbytes for n in own)
    copies = max(1, min(MAX_COPIES, -(-footprint // large))) if large else 1
    control, words = control_of(case, values)
    decls = {"control": control}
    device.store(control, words)
    steps = []
    for i in range(copies):
        args = {n: f"{n}.{i}" if n in own else n for n in spec.tensors}
        for name, stored in args.items():
            if stored not in decls:
                decl = replace(declared(spec, case, name), name=stored)
                # as inside a model: activations lie in the device's own memory, not where the host writes
                decls[stored] = replace(decl, kind="state") if decl.kind == "io" else decl
                if name in matrices:
                    packed = random_packed(stored, decl.dtype, decl.shape)
                    device.store(decls[stored], parts=(lambda packed=packed: packed,))  # type: ignore[misc]
                else:
                    device.store(decls[stored], values.get(name))
        steps.append(step_of(spec, case, f"{spec.name}.{i}", args, device.name))
    return plan_of(case, tuple(steps), decls), copies


def measure(device: Device, plan: Plan, copies: int, seconds: float) -> float:
    """Median seconds of one step: device timestamps where there are any, else the host's clock around a submit."""
    program = device.compile(plan, profile=True)
    samples: list[float] = []
    warm = time.perf_counter() + WARM_UP
    device.wait(program.submit())
    while time.perf_counter() < warm:
        device.wait(program.submit())
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        device.wait(program.submit())
        host = time.perf_counter() - start
        times = program.times()
        spent = times[-1].start + times[-1].duration - times[0].start if times else host
        samples.append(spent / copies)
    return statistics.median(samples)


def ceiling(sheet: DeviceSheet | None, nbytes: int, flops: int, dtypes: dict[str, str]) -> tuple[float, str] | None:
    """The least time that the sheet allows, and which peak sets it."""
    if sheet is None:
        return None
    peak = sheet.peak
    rate = peak.int8_tops if "q8_act" in dtypes.values() and peak.int8_tops else peak.f32_tflops or peak.f16_tflops
    floors = [(nbytes / (peak.bandwidth_gb_s.value * 1e9), "bandwidth")] if peak.bandwidth_gb_s else []
    floors += [(flops / (rate.value * 1e12), "arithmetic")] if rate else []
    return max(floors, default=None)


def time_op(spec: OpSpec, workload: Workload, device: Device, footprint: int, seconds: float) -> Timing:
    """Prove, then time. Raises conformance.harness.compare.Disagreement for a workload that is computed wrongly."""
    case = case_of(spec, workload)
    run_case(spec, device, case)
    device.reset()  # type: ignore[attr-defined]
    plan, copies = repeated(spec, case, device, footprint)
    spent = measure(device, plan, copies, seconds)
    nbytes, flops = spec.nbytes(case.bind, case.dtypes, case.attrs), spec.flops(case.bind, case.attrs)
    floor = ceiling(sheet_for(device.name), nbytes, flops, dict(case.dtypes))
    return Timing(
        spec.name,
        workload.id,
        device.name,
        dict(case.dtypes),
        spent,
        nbytes,
        flops,
        copies,
        floor[0] / spent if floor else None,
        floor[1] if floor else None,
    )


def timings(args: argparse.Namespace, device: Device) -> Iterator[Timing]:
    spec = load_op(args.op)
    for workload in workloads(spec, args.workload):
        yield time_op(spec, workload, device, int(args.footprint * 1e6), args.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m perf.op", description="Time an operation on its workloads, after proving each.")
    parser.add_argument("op", help="operation, as in specs/ops")
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="ID",
        help="workloads whose id begins so (repeatable; default: those tagged demo)",
    )
    parser.add_argument("--device", default="vulkan", help="cpu, vulkan, vulkan:N or auto (default: vulkan)")
    parser.add_argument(
        "--footprint",
        type=amount,
        default=256.0,
        metavar="MB",
        help="bytes of weights and caches to rotate through, in 1e6 (default: 256)",
    )
    parser.add_argument("--seconds", type=amount, default=0.5, help="how long to repeat each workload (default: 0.5)")
    parser.add_argument("--json", action="store_true", help="one JSON object per workload")
    args = parser.parse_args(argv)

    def command() -> int:
        wanted = workloads(load_op(args.op), args.workload)  # a wrong name is said before anything is opened or printed
        opened = open_device(args.device)
        try:
            if not args.json:
                clock = "the host's clock" if opened.device.backend == "cpu" else "device timestamps"
                print(f"{args.op} on {opened.device.name}; measured, {clock}, median", flush=True)
            with progress_bar(len(wanted), f"perf.op {args.op}", False, "workloads", after=1.0) as advance:
                for t in timings(args, opened.device):
                    print(json.dumps(asdict(t)) if args.json else t.line(), flush=True)
                    advance(1)
        finally:
            opened.device.close()
        return 0

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
