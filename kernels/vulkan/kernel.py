"""Kernels: compute pipelines of a SPIR-V module with specialisation constants.

A pipeline is built once per device, several in parallel: a GPU driver may take seconds for a large kernel. The driver's
pipeline cache is kept on disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.core.places import cache_folder
from hybrid.kernels.vulkan import modules
from hybrid.kernels.vulkan.api import VulkanError, check, ffi, lib, vk
from hybrid.kernels.vulkan.features import CAPABILITIES, Report, can_choose_subgroup
from hybrid.kernels.vulkan.spirv import ModuleInfo, SpirvError, inspect, written

log = logging.getLogger("hybrid.vulkan")
_FULL_SUBGROUPS = 2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT, which the package does not name
SPIRV = Path(__file__).resolve().parent / "spirv"
Key = tuple[str, tuple[tuple[str, int], ...]]


def kernels_digest(manifest: bytes | None = None) -> str:
    """Digest of a SPIR-V manifest (default: this tree's). It identifies the kernels of a measurement."""
    return hashlib.sha256((SPIRV / "manifest.json").read_bytes() if manifest is None else manifest).hexdigest()[:16]


def most_polls(kind: str) -> int:
    """Most polls of one wait between workgroups (workgroup_flags.slang).

    A poll takes 1 to 3 us on a GPU, so that a wait ends within a second. llvmpipe ends every loop after 65535
    iterations
    of an invocation."""
    return 1 << 14 if kind == "cpu" else 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A pipeline, possibly still being built, and what its dispatch must supply."""

    name: str
    bindings: int
    push: int
    local_size: tuple[int, int, int]
    made: Future[Any] | None = None
    layout: Any = None
    set_layout: Any = None
    writes: frozenset[int] = frozenset()
    """Bindings that the module writes; some only with other constants (`writes_now`)."""
    writes_now: Callable[[], frozenset[int]] | None = None
    """Bindings that it writes with this kernel's constants."""

    @property
    def pipeline(self) -> Any:
        """The pipeline; waits for the driver's compiler. VulkanError where it failed. None for a kernel that is only
        recorded."""
        return None if self.made is None else self.made.result()


@functools.cache
def warn_once(text: str) -> None:
    """Log a text once: every program saves its pipelines and would repeat it."""
    log.warning("%s", text)


def cache_path(uuid: str, driver: str) -> Path:
    """Path of this driver's pipeline cache: $XDG_CACHE_HOME/hybrid-kernels/."""
    return cache_folder() / f"vulkan-{uuid}-{hashlib.sha256(driver.encode()).hexdigest()[:12]}.bin"


def read_cache(path: Path) -> bytes:
    """Contents of a cache file, or b'' (logged) if it is damaged: drivers do not validate it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        log.warning("pipeline cache %s cannot be read (%s); pipelines are built anew", path, error)
        return b""
    if len(data) < 32 or hashlib.sha256(data[32:]).digest() != data[:32]:
        log.warning("pipeline cache %s is damaged; pipelines are built anew and it is written again", path)
        return b""
    return data[32:]


def write_cache(path: Path, data: bytes) -> None:
    """Replace a cache file atomically. A folder that cannot be written is logged."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        temporary.replace(path)
    except OSError as error:
        warn_once(f"pipeline cache {path} cannot be written ({error}); the next process builds its pipelines anew")


class KernelCache:
    """Modules of a SPIR-V folder, pipelines by (module, constants), layouts by binding count."""

    create_flags = 0
    """VkPipelineCreateFlags of every pipeline; set by tools that read compiler statistics."""

    def __init__(
        self,
        device: Any,
        report: Report,
        subgroup_size: int,
        folder: Path | None,
        counters: Any,
        builders: int = 1,
        of: KernelCache | None = None,
    ) -> None:
        """builders: threads that build pipelines; 1: the calling thread builds. of: the cache of a device on the same
        VkDevice, closed after this one; it builds the pipelines of both if they have one folder."""
        self.folder = folder or SPIRV
        self._maker: KernelCache = of._maker if of is not None and of.folder == self.folder else self
        self._builders = ThreadPoolExecutor(builders, "pipelines") if builders > 1 and self._maker is self else None
        self.device, self.report, self.subgroup_size, self.counters = device, report, subgroup_size, counters
        path = self.folder / "manifest.json"
        if not path.exists():
            raise VulkanError(f"{path} does not exist: build the shaders with python -m kernels.vulkan.build")
        self.manifest: dict[str, dict[str, Any]] = json.loads(path.read_text())
        self.kernels: dict[Key, Kernel] = {}
        """Pipelines that this device has requested; the counters report their number."""
        self._made: dict[Key, Kernel] = {}
        self.modules: dict[str, Any] = {}
        self.set_layouts: dict[int, Any] = {}
        self.layouts: dict[tuple[int, int], Any] = {}
        self.path = cache_path(report.uuid, report.driver)
        self.unsaved = False
        self.cache = self._open_cache() if self._maker is self else None

    def _open_cache(self) -> Any:
        data = read_cache(self.path)
        out = ffi.new("VkPipelineCache *")
        keep = ffi.new("char[]", data) if data else ffi.NULL
        info = vk.VkPipelineCacheCreateInfo(initialDataSize=len(data), pInitialData=keep)
        check(lib.vkCreatePipelineCache(self.device, ffi.addressof(info), ffi.NULL, out), "creating the pipeline cache")
        return out[0]

    def get(self, name: str, constants: Mapping[str, int]) -> Kernel:
        """The kernel `name` with these specialisation constants; the rest keep the shader's defaults."""
        key = (name, tuple(sorted(constants.items())))
        if key not in self.kernels:
            self.kernels[key] = self._maker._built(key)
            self.counters.pipelines += 1
        return self.kernels[key]

    def _built(self, key: Key) -> Kernel:
        if key not in self._made:
            self._made[key] = self._build(key[0], dict(key[1]))
            self.unsaved = True
        return self._made[key]

    def named(self, prefix: str) -> list[str]:
        """Modules of the manifest whose names begin with `prefix`."""
        return sorted(n for n in self.manifest if n.startswith(prefix))

    def _build(self, name: str, constants: Mapping[str, int]) -> Kernel:
        entry = self.manifest.get(name)
        if entry is None:
            near = [n for n in self.manifest if n.split(".")[0] == name.split(".")[0]]
            raise VulkanError(
                f"no SPIR-V module {name!r} in {self.folder} (nearest: {', '.join(near[:8]) or 'none'}); "
                "declare it in the shader's .toml and run python -m kernels.vulkan.build"
            )
        unknown = sorted(set(constants) - set(entry["constants"]))
        if unknown:
            raise VulkanError(f"{name} has no specialisation constants {unknown}; known: {sorted(entry['constants'])}")
        ids = {entry["constants"][k]: int(v) & 0xFFFFFFFF for k, v in constants.items()}
        code = self._code(name, entry["spirv"])
        info = inspect(code, ids)
        self._fits(name, constants, info, entry)  # before the driver sees an unsupported module
        module = self._module(name, code)
        layout = self._layout(entry["bindings"], entry["push"])
        made = self._start(lambda: self._pipeline(name, module, ids, info, layout))
        return Kernel(
            name,
            entry["bindings"],
            entry["push"],
            info.local_size,
            made,
            layout,
            self.set_layouts[entry["bindings"]],
            frozenset(entry["writes"]),
            functools.cache(lambda: written(code, ids)),
        )

    def _start(self, build: Callable[[], Any]) -> Future[Any]:
        if self._builders is not None:
            return self._builders.submit(build)
        made: Future[Any] = Future()
        made.set_result(build())
        return made

    def _fits(self, name: str, constants: Mapping[str, int], info: ModuleInfo, entry: Mapping[str, Any]) -> None:
        limits, x = self.report.limits, info.local_size
        over = []
        if info.shared_bytes > limits.shared_bytes:
            over.append(f"{info.shared_bytes} bytes of shared memory (limit {limits.shared_bytes})")
        if x[0] * x[1] * x[2] > limits.invocations or any(a > b for a, b in zip(x, limits.workgroup, strict=True)):
            over.append(f"a workgroup of {x} (limit {limits.invocations} in all, {limits.workgroup})")
        if can_choose_subgroup(self.report) and x[0] * x[1] * x[2] > self.subgroup_size * limits.workgroup_subgroups:
            over.append(f"a workgroup of more than {limits.workgroup_subgroups} subgroups of {self.subgroup_size}")
        if entry["push"] > limits.push_bytes:
            over.append(f"{entry['push']} bytes of push constants (limit {limits.push_bytes})")
        if entry["bindings"] > limits.storage_buffers:
            over.append(f"{entry['bindings']} storage buffers (limit {limits.storage_buffers})")
        present = {f.name: f.present for f in self.report.features}
        over += [f"the feature {f}" for c, f in CAPABILITIES.items() if c in info.capabilities and not present[f]]
        if over:
            raise VulkanError(f"{name} {dict(constants)} does not fit this device: it needs {', '.join(over)}")

    def _code(self, name: str, digest: str) -> bytes:
        with contextlib.suppress(SpirvError):  # a damaged file is reported below
            code = modules.read(self.folder, name)
            if hashlib.sha256(code).hexdigest() == digest:
                return code
        raise VulkanError(
            f"{modules.path_of(self.folder, name)} is not the module that manifest.json describes; run "
            "python -m kernels.vulkan.build"
        )

    def _module(self, name: str, code: bytes) -> Any:
        if name not in self.modules:
            words = ffi.new("char[]", code)
            info = vk.VkShaderModuleCreateInfo(codeSize=len(code))
            info.pCode = ffi.cast("uint32_t *", words)
            out = ffi.new("VkShaderModule *")
            check(lib.vkCreateShaderModule(self.device, ffi.addressof(info), ffi.NULL, out), f"loading {name}")
            self.modules[name] = out[0]
        return self.modules[name]

    def _layout(self, bindings: int, push: int) -> Any:
        stage = vk.VK_SHADER_STAGE_COMPUTE_BIT
        if bindings not in self.set_layouts:
            slots = [
                vk.VkDescriptorSetLayoutBinding(
                    binding=i, descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=1, stageFlags=stage
                )
                for i in range(bindings)
            ]
            info = vk.VkDescriptorSetLayoutCreateInfo(bindingCount=bindings, pBindings=slots)
            self.set_layouts[bindings] = vk.vkCreateDescriptorSetLayout(self.device, info, None)
        if (bindings, push) not in self.layouts:
            ranges = [vk.VkPushConstantRange(stageFlags=stage, offset=0, size=push)] if push else []
            info = vk.VkPipelineLayoutCreateInfo(
                setLayoutCount=1,
                pSetLayouts=[self.set_layouts[bindings]],
                pushConstantRangeCount=len(ranges),
                pPushConstantRanges=ranges,
            )
            self.layouts[bindings, push] = vk.vkCreatePipelineLayout(self.device, info, None)
        return self.layouts[bindings, push]

    def _pipeline(self, name: str, module: Any, ids: Mapping[int, int], info: ModuleInfo, layout: Any) -> Any:
        data = ffi.new("uint32_t[]", list(ids.values()) or [0])
        entries = ffi.new("VkSpecializationMapEntry[]", max(1, len(ids)))
        for i, constant in enumerate(ids):
            entries[i].constantID, entries[i].offset, entries[i].size = constant, 4 * i, 4
        special = ffi.new(
            "VkSpecializationInfo *",
            {"mapEntryCount": len(ids), "pMapEntries": entries, "dataSize": 4 * len(ids), "pData": data},
        )
        flags, chain = 0, None
        if can_choose_subgroup(self.report):
            chain = vk.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo(requiredSubgroupSize=self.subgroup_size)
        if self.report.has("computeFullSubgroups") and info.local_size[0] % self.subgroup_size == 0:
            flags = _FULL_SUBGROUPS
        stage = vk.VkPipelineShaderStageCreateInfo(
            pNext=chain,
            flags=flags,
            stage=vk.VK_SHADER_STAGE_COMPUTE_BIT,
            module=module,
            pName="main",
            pSpecializationInfo=special,
        )
        create = vk.VkComputePipelineCreateInfo(flags=self.create_flags, stage=stage, layout=layout)
        out = ffi.new("VkPipeline *")
        check(
            lib.vkCreateComputePipelines(self.device, self.cache, 1, ffi.addressof(create), ffi.NULL, out),
            f"building the pipeline {name}",
        )
        return out[0]

    def save(self) -> None:
        """Write the pipeline cache if pipelines were built since it was read."""
        if self._maker is not self:
            self._maker.save()
        if not self.unsaved:
            return
        size = ffi.new("size_t *")
        check(lib.vkGetPipelineCacheData(self.device, self.cache, size, ffi.NULL), "reading the pipeline cache")
        data = ffi.new("char[]", max(1, size[0]))
        check(lib.vkGetPipelineCacheData(self.device, self.cache, size, data), "reading the pipeline cache")
        write_cache(self.path, bytes(ffi.buffer(data, size[0])))
        self.unsaved = False

    def close(self) -> None:
        """Destroy the cache's objects; compile() has saved the built pipelines."""
        if self._maker is not self:
            return
        if self._builders is not None:
            self._builders.shutdown()
        for kernel in self._made.values():
            if kernel.made is not None and kernel.made.exception() is None:
                vk.vkDestroyPipeline(self.device, kernel.pipeline, None)
        for module in self.modules.values():
            vk.vkDestroyShaderModule(self.device, module, None)
        for layout in self.layouts.values():
            vk.vkDestroyPipelineLayout(self.device, layout, None)
        for layout in self.set_layouts.values():
            vk.vkDestroyDescriptorSetLayout(self.device, layout, None)
        vk.vkDestroyPipelineCache(self.device, self.cache, None)
        self.kernels, self._made, self.modules, self.layouts, self.set_layouts = {}, {}, {}, {}, {}
