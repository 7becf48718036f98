"""python -m hybrid.doctor: check this machine's drivers, packages and devices, with fixes for what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybrid.cli import Parser, run

State = Literal["ok", "missing", "optional"]
PACKAGES = ("numpy", "pydantic", "vulkan", "gguf", "jinja2", "tqdm", "threadpoolctl")
EXTRAS = {
    "slangpy": ("shader compiler", "kernels", "only needed to change shaders"),
    "onnxruntime": ("cpu", "cpu", "makes the device cpu faster and smaller"),
    "huggingface_hub": ("models", "hub", "fetches models by their name"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. fix: what to do if it is not ok."""

    area: str
    name: str
    state: State
    detail: str = ""
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def findings() -> Iterator[Finding]:
    """All checks, in the order of the report."""
    yield Finding(
        "python",
        "interpreter",
        "ok" if sys.version_info >= (3, 10) else "missing",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "install Python 3.10 or newer",
    )
    for name in PACKAGES:
        yield _package(name, "python", f"pip install {name}", "missing")
    for name, (area, extra, why) in EXTRAS.items():
        yield _package(name, area, f"{why}: pip install 'hybrid-kernels[{extra}]'", "optional")
    yield _embedded()
    yield from _vulkan()
    yield from _npu()
    yield _memory()


def _package(name: str, area: str, fix: str, otherwise: State) -> Finding:
    try:
        return Finding(area, name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(area, name, otherwise, "not installed", fix)


def _embedded() -> Finding:
    from hybrid.core.places import DEMO

    there = DEMO.is_file()
    return Finding(
        "models",
        "embedded model",
        "ok" if there else "optional",
        f"{DEMO} ({DEMO.stat().st_size / 1e6:.1f} MB)" if there else f"{DEMO} does not exist",
        "" if there else "name a model on the command line, or clone the repository whole",
    )


def _vulkan() -> Iterator[Finding]:
    from hybrid.kernels.vulkan.api import INSTALL, VulkanUnavailable

    try:
        from hybrid.kernels.vulkan.features import query
        from hybrid.kernels.vulkan.instance import Instance

        instance = Instance()
    except (VulkanUnavailable, ImportError) as e:
        yield Finding("vulkan", "driver", "missing", str(e), INSTALL + "; until then --device cpu works")
        return
    try:
        devices = instance.devices()
        if not devices:
            yield Finding("vulkan", "driver", "missing", "a loader, but no device answers", INSTALL)
        for info in devices:
            report = query(instance.handle, info.handle)
            yield _device(info, report, _heaps(info.handle))
            yield _proof(info, report.driver)
        if devices and all(d.kind == "cpu" for d in devices):
            yield Finding(
                "vulkan",
                "GPU",
                "optional",
                "only a CPU driver answers: right results, no speed",
                "install your GPU's Vulkan driver (AMD and Intel: mesa-vulkan-drivers; NVIDIA: its own) and let "
                "this user open /dev/dri/render*",
            )
    finally:
        instance.close()


def _proof(info: Any, driver: str) -> Finding:
    """What `hybrid.prove` has said of a device with this driver and these kernels."""
    from hybrid.devices.proofs import known, report_path
    from hybrid.kernels.vulkan.kernel import kernels_digest

    name, found = f"{info.label}: kernels", known(report_path(info.name, driver, kernels_digest()))
    if found is None:
        return Finding(
            "vulkan",
            name,
            "optional",
            "not proved with this driver",
            f"python -m hybrid.prove --device vulkan:{info.index}",
        )
    if not found.wrong:
        return Finding("vulkan", name, "ok", f"{len(found.proved)} proved with this driver")
    wrong = f"wrong with this driver: {', '.join(found.wrong)}"
    if found.options is None:
        return Finding("vulkan", name, "missing", wrong, "another driver; until then --device cpu works")
    return Finding("vulkan", name, "optional", f"{wrong}; runs with {found.options} instead", "another driver")


def _device(info: Any, report: Any, heaps: list[dict[str, Any]]) -> Finding:
    from hybrid.kernels.vulkan.features import F16_MATRIX
    from hybrid.spec.devicesheet import sheet_for

    sheet = sheet_for(info.label)
    peak = sheet.peak.bandwidth_gb_s if sheet else None
    memory = ", ".join(f"{h['bytes'] / 2**30:.1f} GiB{' device' if h['device_local'] else ''}" for h in heaps)
    data = {
        "kind": info.kind,
        "driver": report.driver,
        "features": [asdict(f) for f in report.features],
        "extensions": [asdict(f) for f in report.extensions],
        "limits": asdict(report.limits),
        "matrices": [asdict(m) for m in report.matrices],
        "heaps": heaps,
        "peak_gb_s": peak.value if peak else None,
    }
    limits = report.limits
    f16 = report.has("f16_matrices")
    units = (
        f"{F16_MATRIX}{', used for prefill' if f16 else ': no'}; {len(report.matrices)} shapes"
        if report.matrices
        else "no"
    )
    detail = (
        f"{info.kind}, {report.driver}; memory {memory}; subgroup {limits.subgroup}; storage buffers up to "
        f"{limits.max_storage_range / 2**20:.0f} MiB; matrix units {units}"
        + (f"; peak {peak.value:g} GB/s ({peak.provenance})" if peak else "; peak not known to any device sheet")
    )
    missing = ", ".join(f.name for f in report.missing)
    return Finding(
        "vulkan",
        info.label,
        "missing" if missing else "ok",
        detail + (f"; lacks {missing}" if missing else ""),
        "a newer driver may have what is lacking" if missing else "",
        data,
    )


def _heaps(handle: Any) -> list[dict[str, Any]]:
    from hybrid.kernels.vulkan.api import vk

    properties = vk.vkGetPhysicalDeviceMemoryProperties(handle)
    local = vk.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT
    heaps = [properties.memoryHeaps[i] for i in range(properties.memoryHeapCount)]
    return [{"bytes": int(h.size), "device_local": bool(h.flags & local)} for h in heaps]


def _npu() -> Iterator[Finding]:
    nodes = sorted(str(p) for p in Path("/dev/accel").glob("accel*")) if Path("/dev/accel").is_dir() else []
    yield Finding(
        "npu",
        "device node",
        "ok" if nodes else "optional",
        ", ".join(nodes) or "no /dev/accel/accel*",
        "" if nodes else "only for Ryzen AI: needs a kernel with amdxdna (6.14 or newer) and the IPU enabled",
    )
    from hybrid.kernels.npu.xrt import MINIMUM, RUNLISTS, shown_version, xrt_version

    there = importlib.util.find_spec("pyxrt") is not None
    version = xrt_version()
    old = there and version is not None and version < RUNLISTS
    detail = f"XRT {shown_version()}; {MINIMUM} or newer is wanted, for runlists" if there else "cannot be imported"
    yield Finding(
        "npu",
        "pyxrt",
        "ok" if there and not old else "optional",
        detail + ("; this one submits runs one by one" if old else ""),
        f"XRT {MINIMUM} or newer submits the runs of a step together"
        if old
        else ""
        if there
        else "comes with XRT, not from PyPI: install XRT and the amdxdna plug-in, then "
        f"source /opt/xilinx/xrt/setup.sh (it fits one minor version of Python; XRT {MINIMUM} or newer)",
    )


def _memory() -> Finding:
    from hybrid.kernels.host.memory import available_bytes, usable_bytes

    free, usable = available_bytes(), usable_bytes()
    detail = f"{free / 2**30:.1f} GiB available; the cpu device takes up to {usable / 2**30:.1f} GiB and reads what weights are "
    data = {"available_bytes": free, "usable_bytes": usable}
    return Finding("host", "memory", "ok", detail + "beyond from their file at every use", data=data)


def main(argv: list[str] | None = None) -> int:
    p = Parser(
        prog="python -m hybrid.doctor",
        description="Check this machine's drivers, packages and devices, with fixes for what is missing.",
        epilog="Exit codes: 0 everything needed for --device vulkan is there, 1 something needed is missing.",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = p.parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    found = list(findings())
    usable = any(f.area == "vulkan" and f.state == "ok" for f in found)
    bad = any(f.state == "missing" for f in found if f.area != "vulkan") or not usable
    if args.json:
        print(json.dumps({"ok": not bad, "vulkan": usable, "findings": [asdict(f) for f in found]}))
        return int(bad)
    for f in found:
        print(f"{f.state:9} {f.area:15} {f.name}: {f.detail}")
        if f.fix and f.state != "ok":
            print(f"{'':25} -> {f.fix}")
    print("ready for --device vulkan" if not bad else "not ready for --device vulkan; see the lines marked missing")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
