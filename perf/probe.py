"""Peak copy bandwidth and matrix throughput of a device, over all variants of the probe kernels.

    python -m perf.probe --device vulkan

The bench runs the same probes before it measures anything and quotes its shares against the best of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from hybrid.bench.probe import probe
from hybrid.cli import Parser, run
from hybrid.core.units import show_rate
from hybrid.devices.about import driver_of
from hybrid.devices.opening import open_device


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(
        prog="python -m perf.probe",
        description="Bytes and operations per second that the probe kernels reach, by variant.",
    )
    p.add_argument("--device", default="auto", help="auto (a real GPU, else cpu), cpu, vulkan, or vulkan:N (auto)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = p.parse_args(argv)

    def command() -> int:
        device = open_device(args.device).device
        try:
            found = probe(device)
            about = {"device": device.name, "driver": driver_of(device)}
        finally:
            device.close()
        if args.json:
            print(json.dumps({**about, **asdict(found)}))
            return 0
        print(f"{about['device']}, {about['driver']}; measured, the fastest run of each variant")
        for name, figure in found.variants.items():
            best = " (best)" if name in (found.copy, found.matrix) else ""
            rate = show_rate(1e12 * figure, "FLOPS") if "mat" in name else show_rate(1e9 * figure, "B/s")
            print(f"{name:36} {rate:>12}{best}")
        return 0

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
