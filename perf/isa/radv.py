"""Compiles the project's pipelines for the Radeon 780M where there is none: RADV's null device, asked for the
statistics and the assembly of every pipeline (VK_KHR_pipeline_executable_properties).

Runs in a separate process, started by perf.mesa with the environment that RADV needs:
    RADV_FORCE_FAMILY=gfx1103_r1 VK_DRIVER_FILES=.../radeon_icd.x86_64.json python -m perf.isa.radv [SHARE TABLES] >
    table.json
SHARE and TABLES (a folder of tables by version, as perf/gfx1103): of the kernels whose SPIR-V is that of the table, one
in SHARE.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.convert.kinds import Wanted
from hybrid.core.device import Counters
from hybrid.core.dtypes import DTYPES, CacheChoice, native_types
from hybrid.core.hparams import HParams
from hybrid.core.plan import Plan
from hybrid.kernels.vulkan.api import VulkanError, check, ffi, lib, vk
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.features import _SHORT, Report, enabled_chain, query
from hybrid.kernels.vulkan.instance import DeviceInfo, Instance, select
from hybrid.kernels.vulkan.kernel import Kernel, KernelCache
from hybrid.perf.roofline.work import Planned, of_shape
from hybrid.planning.passes import capabilities_of, chunk_of
from hybrid.spec.model import load_models

CAPTURE = 0x40 | 0x80  # VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR, ..._INTERNAL_REPRESENTATIONS_BIT_KHR
# head_dim 128 with every type that devices hold, and 256 with one of each kind; other models differ in widths only.
WIDE = {"gemma3-27b": native_types("vulkan"), "gemma3-1b": ("q4_0", "q8_0", "bf16")}
Q8_0_CACHE = ("gemma3-27b", "gemma3-1b", "gemma4-e4b")
"""Heads of 128, 256 and 512; layers that read another's cache."""
BUCKETS, DECODE, LOGITS = (1, 8, 32, 128, 512, 2048), (1, 2, 3, 8, 32), (8, 64)
Key = tuple[str, tuple[tuple[str, int], ...]]


class Capturing(KernelCache):
    """Pipelines that keep compiler statistics."""

    create_flags = CAPTURE


class Collector(DryDevice):
    """A device that notes which kernels plans ask for, and answers for the one whose features it was given. The kernels
    that it returns are called by their names and constants, as in the tables."""

    def __init__(self, features: Mapping[str, bool], max_range: int = 2**32 - 1) -> None:
        super().__init__(32, max_range, features.__getitem__, "radv")
        self.used: dict[Key, str] = {}
        """Kernel -> the first plan that used it."""
        self.where = ""

    def kernel(self, name: str, **constants: int) -> Kernel:
        key = name, tuple(sorted(constants.items()))
        self.used.setdefault(key, self.where)
        return replace(super().kernel(name, **constants), name=shown(key))


def shown(key: Key) -> str:
    """`linear.gemv.q4_0.q8_act SUBGROUP=32 TOKENS=1`"""
    return key[0] + "".join(f" {k}={v}" for k, v in key[1])


def features_of(report: Report) -> dict[str, bool]:
    """Everything that Report.has answers, by every name that it takes."""
    names = {f.name for f in (*report.features, *report.extensions)} | set(_SHORT)
    names |= {"cooperative_matrix", "f16_matrices", "matrix_lanes", "fused_halves"}
    return {name: report.has(name) for name in sorted(names)}


def precisions(dtype: str, name: str) -> tuple[str, ...]:
    """Those that differ: quantised weights compute alike in auto and fast, others in auto and exact."""
    if name != "gemma3-27b":
        return ("auto",)
    return ("auto", "exact") if DTYPES[dtype].quantised else ("auto", "fast")


def plans(capabilities: frozenset[str]) -> Iterator[tuple[str, Plan]]:
    """Plans that together use every kernel a schedule can ask for on a device with these capabilities: models, storage
    types, precisions, phases, buckets.
    Layers repeat, so of each model one of each kind is planned, and those whose caches they read."""
    from hybrid.planning.planner import plan

    for name, sheet in load_models().items():
        hp = sheet.hparams()
        small, ctx = hp.only(one_of_each(hp)), min(4096, hp.context_length)
        for dtype in WIDE.get(name, ("q4_0",)):
            for precision in precisions(dtype, name):
                model = _planned(name, small, dtype, precision, capabilities)
                tag = f"{name} {dtype} {precision}"
                for rows in DECODE:
                    yield f"{tag} decode {rows}", model.plan("decode", rows, rows, ctx, 32)
                for rows in (n for n in BUCKETS if n <= chunk_of(capabilities)):
                    yield f"{tag} prefill {rows}", model.plan("prefill", rows, 1, ctx, 1)
                for rows in LOGITS:
                    yield f"{tag} logits {rows}", plan(model.target(rows, ctx, 1), rows, rows, "prefill", sample=False)
        if name in Q8_0_CACHE:
            model = _planned(name, small, "q4_0", "auto", capabilities, "q8_0")
            for rows in (1, 8):
                yield f"{name} q8_0 cache decode {rows}", model.plan("decode", rows, rows, ctx, 32)
            for rows in (8, 128):
                yield f"{name} q8_0 cache prefill {rows}", model.plan("prefill", rows, 1, ctx, 1)


def one_of_each(hp: HParams) -> list[int]:
    """The first layer of each kind, and the layers whose caches those read."""
    first = {layer.kind: index for index, layer in reversed([*enumerate(hp.layers)])}
    sources = {hp.layers[index].kv_from for index in first.values()}
    return sorted({*first.values(), *(s for s in sources if s is not None)})


def _planned(
    name: str, hp: HParams, dtype: str, precision: Any, capabilities: frozenset[str], kv: CacheChoice = "auto"
) -> Planned:
    return of_shape(name, hp, Wanted(dtype), precision, kv, capabilities)


def collect(report: Report) -> dict[Key, str]:
    """Every kernel of every plan, with what loading a model uses, and where each was first met."""
    device = Collector(features_of(report), report.limits.max_storage_range)
    for where, made in plans(capabilities_of(device.has)):
        device.where = where
        record(made, device)
    manifest = device._manifest
    for name in manifest:  # repacking at load is no step of a plan
        if name.startswith(("repack.", "columns.")):
            device.used.setdefault((name, ()), "loading")
    return device.used


def statistics(device: Any, pipeline: Any) -> dict[str, Any]:
    """The compiler's numbers of a compute pipeline by their names, and its assembly under `assembly`."""
    which = vk.VkPipelineExecutableInfoKHR(pipeline=pipeline, executableIndex=0)
    numbers = _Listing(device, which, "Statistic", "STATISTIC")
    found: dict[str, Any] = {}
    for s in numbers.items():
        found[ffi.string(s.name).decode()] = {0: s.value.b32, 1: s.value.i64, 2: s.value.u64, 3: s.value.f64}[s.format]
    texts = _Listing(device, which, "InternalRepresentation", "INTERNAL_REPRESENTATION")
    named = {
        ffi.string(t.name).decode(): ffi.string(ffi.cast("char *", t.pData)).decode(errors="replace")
        for t in texts.items()
    }
    return {**found, "assembly": named["Assembly"]}


class _Listing:
    """One of the extension's two enumerations; owns the memory that its items point to."""

    def __init__(self, device: Any, which: Any, kind: str, stype: str) -> None:
        name = f"vkGetPipelineExecutable{kind}sKHR"
        function = ffi.cast(f"PFN_{name}", lib.vkGetDeviceProcAddr(device, name.encode()))
        self.count = ffi.new("uint32_t *")

        def call(items: Any) -> None:
            check(function(device, ffi.addressof(which), self.count, items), name)

        call(ffi.NULL)
        self.array = ffi.new(f"VkPipelineExecutable{kind}KHR[]", max(1, self.count[0]))
        for item in self.items():
            item.sType = getattr(vk, f"VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_{stype}_KHR")
        call(self.array)
        if kind == "InternalRepresentation":  # sizes are known now, so the texts can be asked for
            self.texts = [ffi.new("char[]", item.dataSize + 1) for item in self.items()]
            for item, text in zip(self.items(), self.texts, strict=True):
                item.pData = text
            call(self.array)

    def items(self) -> Iterator[Any]:
        return (self.array[i] for i in range(self.count[0]))


@contextmanager
def null_device() -> Iterator[tuple[DeviceInfo, Report, Any]]:
    """RADV's null device: it compiles, but has no queue, memory or semaphores, so it cannot be opened as others are."""
    instance = Instance()
    try:
        info = select(instance.devices(), "vulkan")
        if "RADV" not in info.name:
            raise VulkanError(f"{info.name} is not RADV's null device: start this through python -m perf.isa")
        report = query(instance.handle, info.handle)
        features, extensions, keep = enabled_chain(report)
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
        create = vk.VkDeviceCreateInfo(
            pNext=features,
            queueCreateInfoCount=1,
            pQueueCreateInfos=[queue],
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extensions,
        )
        device = vk.vkCreateDevice(info.handle, create, None)
        del keep
        try:
            yield info, report, device
        finally:
            vk.vkDestroyDevice(device, None)
    finally:
        instance.close()


def spared(share: int, tables: Path, driver: str) -> Callable[[str, str], bool]:
    """Which kernels (name, digest of SPIR-V) need not be compiled: the same driver made the same code of them before.
    One in `share` of these is compiled all the same."""
    version = re.search(r"Mesa (\d+\.\d+\.\d+)", driver)
    path = tables / f"{version[1] if version else driver}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if share > 1 and path.exists() else {}

    def of(name: str, spirv: str) -> bool:
        return name in known and known[name]["spirv"] == spirv and zlib.crc32(name.encode()) % share != 0

    return of


def table(share: int = 1, tables: Path = Path()) -> dict[str, Any]:
    """Compile everything on this process's null device: driver, and statistics by kernel; `spared`: kernels that were
    not."""
    with null_device() as (info, report, device):
        cache = Capturing(device, report, 32, None, Counters())
        kernels: dict[str, Any] = {}
        left_out, known = [], spared(share, tables, report.driver)
        try:
            for (name, constants), where in sorted(collect(report).items()):
                if known(shown((name, constants)), cache.manifest[name]["spirv"][:16]):
                    left_out.append(shown((name, constants)))
                    continue
                kernel = cache.get(name, dict(constants))
                kernels[shown((name, constants))] = {
                    "module": name,
                    "spirv": cache.manifest[name]["spirv"][:16],
                    "local": list(kernel.local_size),
                    "used": where,
                    **statistics(device, kernel.pipeline),
                }
        finally:
            cache.close()
        about = {"device": info.name, "driver": report.driver, "features": features_of(report)}
        return {**about, "kernels": kernels, "spared": left_out}


if __name__ == "__main__":
    json.dump(table(int(sys.argv[1]), Path(sys.argv[2])) if sys.argv[1:] else table(), sys.stdout)
