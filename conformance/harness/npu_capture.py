"""python -m hybrid.harness.npu_capture FILE: run every NPU case on a real device and write one file; --compare reads
such a file.

No capture from an NPU exists yet. For each case the file holds its text (which reproduces it on any machine), the digest
of each output and the outputs; and the device's name, clock, driver and firmware, the digests of kernels and designs,
and the release and compiler that built them. --compare computes the cases in the simulator and prints the outputs that
differ, and by how much.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.cli import Parser, run
from hybrid.cli.progress import tracked
from hybrid.harness import GUARD, POISON, execute, run_case
from hybrid.harness.cases import Case
from hybrid.harness.fixed import dtype_cases, edge_cases, variant_cases
from hybrid.harness.inputs import make
from hybrid.harness.sizes import fits
from hybrid.kernels.npu.artefact import ArtefactError, fabric_digest
from hybrid.kernels.npu.designs import shipped
from hybrid.kernels.npu.device import NpuDevice
from hybrid.kernels.npu.xrt import NpuError
from hybrid.spec import OpSpec, load_ops


def cases() -> Iterator[tuple[str, OpSpec, Case]]:
    """(name, operation, case): fixed cases only, so that every machine runs the same cases."""
    for op, spec in load_ops().items():
        if not spec.runs_on("npu"):
            continue
        choices = enumerate(spec.dtype_choices("npu"))
        found = [(f"dtypes.{i}.{j}", c) for i, d in choices for j, c in enumerate(dtype_cases(spec, d))]
        found += list(edge_cases(spec, "npu")) + list(variant_cases(spec, "npu"))
        for i, (name, case) in enumerate(found):
            if fits(spec, "npu", case.bind, case.attrs, case.dtypes):
                yield f"{op}/{i:03d}/{name}", spec, case


def capture(device: NpuDevice, file: Path, only: str = "") -> int:
    """Run and check every case; write the file. Returns the number of failures."""
    entries: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    failed = 0
    for name, spec, case in tracked([c for c in cases() if only in c[0]], "cases"):
        try:
            report = run_case(spec, device, case)
        except (AssertionError, NpuError, ArtefactError) as error:
            failed += 1
            entries[name] = {"case": str(case), "failed": str(error)}
            print(f"{name}: FAILED: {error}", file=sys.stderr)
            continue
        outputs = {n: report.outputs[n].parts[0] for n in spec.outputs}
        entries[name] = {
            "case": str(case),
            "outputs": {n: digest(a) for n, a in outputs.items()},
            "share of bound": {n: v.passes for n, v in report.verdicts.items()},
        }
        arrays |= {f"{name}/{n}": a for n, a in outputs.items()}
    if not entries:
        raise ValueError(f"no case has {only!r} in its name")
    head = {
        "device": device.name,
        "simulated": device.host.simulated,
        "machine": machine(device),
        "entries": entries,
        "designs": {n: fabric_digest(m()) for n, m in shipped().items()},
        "builders": sorted({json.loads(p.read_text())["builder"] for p in device.host.folder.glob("*.json")}),
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("capture.json", json.dumps(head, indent=1))
        for name, array in arrays.items():
            with out.open(f"{name}.npy", "w") as stream:
                np.save(stream, array)
    print(f"{file}: {len(entries)} cases on {device.name}, {failed} failed")
    return failed


def compare(file: Path) -> int:
    """Compare the file's outputs with the simulator's. Returns the number of cases that differ in a bit."""
    with zipfile.ZipFile(file) as box:
        head = json.loads(box.read("capture.json"))
        known = {name: (spec, case) for name, spec, case in cases()}
        device, differ, compared = NpuDevice("sim", guard=GUARD), 0, 0
        for name, entry in tracked(list(head["entries"].items()), "cases"):
            if "failed" in entry or name not in known or str(known[name][1]) != entry["case"]:
                print(f"{name}: {'failed there' if 'failed' in entry else 'is another case here'}: not compared")
                continue
            spec, case = known[name]
            run = execute(spec, device, case, make(spec, case, backend="npu"), POISON[0])
            for output in spec.outputs:
                there = np.load(box.open(f"{name}/{output}.npy"))
                here = run[output].parts[0]
                if digest(there) != entry["outputs"][output]:
                    raise ValueError(f"{file}: {name}/{output} does not match its digest: the file is damaged")
                compared += 1
                live = slice(0, case.rows)
                if digest(here[live]) != digest(there[live]):
                    differ += 1
                    off = np.abs(here[live].astype(np.float64) - there[live].astype(np.float64))
                    print(
                        f"{name}/{output}: {int((off > 0).sum())} of {off.size} elements differ, by at most {off.max():.6g}"
                    )
    print(f"{file}: {head['device']}: {compared} outputs compared with sim-npu1, {differ} differ in a bit")
    return differ


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def machine(device: NpuDevice) -> dict[str, str]:
    """Clock, driver and firmware, as far as the machine reports them."""
    found = {"kernel": platform.release(), "python": platform.python_version()}
    xrt = device.host.xrt.xrt_info_device
    for key in ("bdf", "max_clock_frequency_mhz"):
        found[key] = device.host.device.get_info(getattr(xrt, key))
    module = Path("/sys/module/amdxdna/version")
    found["amdxdna"] = module.read_text().strip() if module.exists() else "not loaded"
    try:
        text = subprocess.run(
            ["xrt-smi", "examine", "-r", "platform"], capture_output=True, text=True, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"xrt-smi: {error}"
    return found | {"xrt-smi": text}


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="python -m hybrid.harness.npu_capture", description="NPU cases of an owner's device, in a file.")
    p.add_argument("file", type=Path, metavar="FILE", help="the file to write, or with --compare to read")
    p.add_argument("--compare", action="store_true", help="compare a file with the simulator")
    p.add_argument(
        "--npu", default="npu", choices=("npu", "sim"), help="the hardware, or the simulator to try the command (npu)"
    )
    p.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    args = p.parse_args(argv)

    def command() -> int:
        if args.compare:
            return int(compare(args.file) > 0)
        return int(capture(NpuDevice(args.npu, guard=GUARD, builds=True), args.file, args.only) > 0)

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
