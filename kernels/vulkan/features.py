"""Features and limits of a physical device against the kernels' requirements.

Used by the report of `hybrid.doctor`, and to enable features when a device is opened. Everything is queried; only the
preferred subgroup size is assumed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hybrid.kernels.vulkan.api import VulkanUnavailable, check, ffi, lib, vk

API = (1, 3)
WANTED_SUBGROUP = 32
# Blocks of 32 are quantised over 8 lanes, and 32 threads are the smallest workgroup: other sizes give wrong results.
SUBGROUPS = (8, 16, 32)
# (structure, field, required, why)
_FEATURES = (
    ("11", "storageBuffer16BitAccess", True, "f16 and bf16 tensors, fp16 block scales"),
    ("11", "uniformAndStorageBuffer16BitAccess", True, "declared by the compiler for every 16-bit buffer"),
    ("12", "storageBuffer8BitAccess", True, "int8 codes and q4_0 nibbles"),
    ("12", "uniformAndStorageBuffer8BitAccess", True, "declared by the compiler for every 8-bit buffer"),
    ("12", "shaderFloat16", True, "f16 arithmetic and conversions"),
    ("12", "shaderInt8", True, "int8 activations"),
    ("12", "scalarBlockLayout", True, "tightly packed structures"),
    ("12", "timelineSemaphore", True, "tickets of submits"),
    ("12", "vulkanMemoryModel", False, "cooperative matrices"),
    ("12", "vulkanMemoryModelDeviceScope", False, "device-wide atomics"),
    ("12", "shaderSubgroupExtendedTypes", False, "subgroup operations on 8- and 16-bit types"),
    ("13", "shaderIntegerDotProduct", True, "4x8 packed dot products of W4A8 and W8A8"),
    ("13", "maintenance4", True, "workgroup sizes set by specialisation constants"),
    ("13", "subgroupSizeControl", False, "a chosen subgroup size where the device has several"),
    ("13", "computeFullSubgroups", False, "no partly filled subgroups"),
    ("13", "synchronization2", False, "finer barriers"),
    ("10", "shaderInt16", False, "16-bit integer arithmetic"),
    ("10", "shaderInt64", False, "64-bit addresses and products"),
    ("coop", "cooperativeMatrix", False, "matrix units for prefill"),
    ("exec", "pipelineExecutableInfo", False, "compiler statistics of a pipeline"),
)
_EXTENSIONS = (
    ("VK_KHR_cooperative_matrix", "matrix units for prefill"),
    ("VK_EXT_memory_budget", "how much memory other processes have left"),
    ("VK_EXT_external_memory_host", "sharing host memory with another device without a copy"),
    ("VK_KHR_external_memory_fd", "importing another driver's buffers"),
    ("VK_EXT_external_memory_dma_buf", "importing dma-bufs without a copy"),
    ("VK_KHR_pipeline_executable_properties", "compiler statistics of a pipeline"),
    ("VK_EXT_calibrated_timestamps", "device and host times on one axis"),
    ("VK_NV_shader_sm_builtins", "the number of multiprocessors"),
)
_SHORT = {
    "cooperative_matrix": "VK_KHR_cooperative_matrix",
    "memory_budget": "VK_EXT_memory_budget",
    "external_memory_host": "VK_EXT_external_memory_host",
    "pipeline_executable_properties": "VK_KHR_pipeline_executable_properties",
    "calibrated_timestamps": "VK_EXT_calibrated_timestamps",
}
_SUBGROUP_OPS = {"BASIC": 1, "VOTE": 2, "ARITHMETIC": 4, "BALLOT": 8, "SHUFFLE": 16}
VENDORS = {
    0x10DE: "nvidia",
    0x1002: "amd",
    0x8086: "intel",
    0x13B5: "arm",
    0x5143: "qualcomm",
    0x106B: "apple",
    0x10005: "mesa",
}
DRIVERS = {
    1: "amdpro",
    2: "amdvlk",
    3: "radv",
    4: "nvidia",
    5: "intel",
    6: "anv",
    13: "llvmpipe",
    14: "moltenvk",
    18: "turnip",
    23: "nvk",
    26: "honeykrisp",
}
# SPIR-V capability -> the feature that allows it (capabilities that Vulkan 1.3 always has are left out)
CAPABILITIES = {
    9: "shaderFloat16",
    39: "shaderInt8",
    22: "shaderInt16",
    11: "shaderInt64",
    4433: "storageBuffer16BitAccess",
    4434: "uniformAndStorageBuffer16BitAccess",
    4448: "storageBuffer8BitAccess",
    4449: "uniformAndStorageBuffer8BitAccess",
    6016: "shaderIntegerDotProduct",
    6017: "shaderIntegerDotProduct",
    6018: "shaderIntegerDotProduct",
    6019: "shaderIntegerDotProduct",
    5345: "vulkanMemoryModel",
    5346: "vulkanMemoryModelDeviceScope",
    6022: "cooperativeMatrix",
    61: "subgroup basic",
    62: "subgroup vote",
    63: "subgroup arithmetic",
    64: "subgroup ballot",
    65: "subgroup shuffle",
}


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature or extension of the report."""

    name: str
    present: bool
    required: bool
    why: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in nanoseconds per tick."""

    max_storage_range: int
    max_buffer: int
    max_allocation: int
    max_allocations: int
    shared_bytes: int
    workgroup: tuple[int, int, int]
    invocations: int
    groups: tuple[int, int, int]
    push_bytes: int
    offset_alignment: int
    subgroup: int
    min_subgroup: int
    max_subgroup: int
    workgroup_subgroups: int
    timestamp_period: float
    storage_buffers: int
    """Storage buffers that one kernel may bind."""
    cores: int
    """Multiprocessors, each of which can hold a workgroup of any size; 1 where the driver does not report them."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """One product of a subgroup's matrix unit: [m, k] of type a times [k, n] of type b plus [m, n] of type c."""

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.a} {self.b} {self.c}"


F16_MATRIX = MatrixShape(16, 16, 16, "f16", "f16", "f32")
F16_N8 = MatrixShape(16, 8, 16, "f16", "f16", "f32")  # the shape whose lanes are probed (lanes.py)
_COMPONENTS = {
    0: "f16",
    1: "f32",
    2: "f64",
    3: "i8",
    4: "i16",
    5: "i32",
    6: "i64",
    7: "u8",
    8: "u16",
    9: "u32",
    10: "u64",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Everything queried from one physical device."""

    features: tuple[Feature, ...]
    extensions: tuple[Feature, ...]
    limits: Limits
    driver: str
    uuid: str
    heaps: tuple[tuple[int, bool], ...]
    """(bytes, is device-local) of each memory heap."""
    vendor: str = ""
    """Vendor by PCI or Khronos number: a name of VENDORS, else the number in hexadecimal."""
    driver_id: str = ""
    """Driver: a name of DRIVERS, else VkDriverId's number."""
    matrices: tuple[MatrixShape, ...] = ()
    """Cooperative matrices of subgroup scope; empty where the feature is missing or off."""
    lanes: bool = False
    """Whether lanes hold the matrix elements that kernels which dequantise into registers assume; measured when the
    device is opened (lanes.py)."""
    fused: bool = False
    """Whether fma() on f16 rounds once, which Vulkan leaves open; measured with `lanes`."""
    hidden: frozenset[str] = frozenset()
    """Names for which `has` returns False."""
    subgroup: int = 0
    """Lanes of a subgroup that kernels are specialised for; 0: `choose_subgroup` decides."""

    @property
    def missing(self) -> tuple[Feature, ...]:
        return tuple(f for f in self.features if f.required and not f.present)

    def has(self, name: str) -> bool:
        """Whether a feature or an extension (`cooperative_matrix`, or its full name) is present and enabled."""
        if name in self.hidden:
            return False
        known = {f.name: f.present for f in (*self.features, *self.extensions)}
        if name == "cooperative_matrix":
            return all(known[n] for n in ("cooperativeMatrix", "VK_KHR_cooperative_matrix", "vulkanMemoryModel"))
        if name == "f16_matrices":  # the shape that the kernels use
            return self.has("cooperative_matrix") and F16_MATRIX in self.matrices
        if name == "matrix_lanes":
            return self.lanes
        if name == "fused_halves":
            return self.fused
        key = _SHORT.get(name, name)
        if key not in known:
            raise KeyError(f"no Vulkan feature {name!r} is ever asked about; known: {', '.join([*_SHORT, *known])}")
        return known[key]

    def known(self, names: Collection[str]) -> frozenset[str]:
        """The names as a set. KeyError for one that `has` does not know."""
        return frozenset(name for name in names if self.has(name) is not None)

    def demand(self, device: str) -> None:
        """Raise VulkanUnavailable when a required feature is missing."""
        if self.missing:
            lines = "; ".join(f"{f.name} ({f.why})" for f in self.missing)
            raise VulkanUnavailable(
                f"{device} ({self.driver}) lacks what the kernels need: {lines}. A newer driver "
                "may have it; otherwise choose another device (--device cpu needs no Vulkan)"
            )


def _feature_chain(extensions: set[str]) -> dict[str, Any]:
    chain: dict[str, Any] = {"11": vk.VkPhysicalDeviceVulkan11Features()}
    chain["12"] = vk.VkPhysicalDeviceVulkan12Features(pNext=chain["11"])
    chain["13"] = last = vk.VkPhysicalDeviceVulkan13Features(pNext=chain["12"])
    # A structure of a missing extension must not be in the chain.
    if "VK_KHR_cooperative_matrix" in extensions:
        chain["coop"] = last = vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR(pNext=last)
    if "VK_KHR_pipeline_executable_properties" in extensions:
        chain["exec"] = last = vk.VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR(pNext=last)
    chain["all"] = vk.VkPhysicalDeviceFeatures2(pNext=last)
    chain["10"] = chain["all"].features
    return chain


def device_extensions(physical: Any) -> set[str]:
    return {e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(physical, None)}


def matrix_shapes(instance: Any, physical: Any) -> tuple[MatrixShape, ...]:
    """Cooperative matrices of subgroup scope and known component types. The device must have the extension."""
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    found = lib.vkGetInstanceProcAddr(instance, name.encode())
    if not found:  # a loader older than the driver may not export it
        return ()
    ask, count = ffi.cast(f"PFN_{name}", found), ffi.new("uint32_t *")
    check(ask(physical, count, ffi.NULL), "counting cooperative matrices")
    shapes = ffi.new("VkCooperativeMatrixPropertiesKHR[]", count[0])
    for shape in shapes:
        shape.sType = vk.VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
    check(ask(physical, count, shapes), "listing cooperative matrices")
    return tuple(
        MatrixShape(s.MSize, s.NSize, s.KSize, *(_COMPONENTS[t] for t in (s.AType, s.BType, s.CType)))
        for s in shapes[0 : count[0]]
        if s.scope == vk.VK_SCOPE_SUBGROUP_KHR
        and s.CType == s.ResultType
        and not s.saturatingAccumulation
        and {s.AType, s.BType, s.CType} <= _COMPONENTS.keys()
    )


def query(instance: Any, physical: Any) -> Report:
    """Query all of the above from a physical device (VkPhysicalDevice of a VkInstance)."""
    extensions = device_extensions(physical)
    chain = _feature_chain(extensions)
    lib.vkGetPhysicalDeviceFeatures2(physical, ffi.addressof(chain["all"]))
    p11 = vk.VkPhysicalDeviceVulkan11Properties()
    p12 = vk.VkPhysicalDeviceVulkan12Properties(pNext=p11)
    p13 = vk.VkPhysicalDeviceVulkan13Properties(pNext=p12)
    sm = vk.VkPhysicalDeviceShaderSMBuiltinsPropertiesNV(pNext=p13)
    counted = "VK_NV_shader_sm_builtins" in extensions  # else the structure must not be in the chain
    p2 = vk.VkPhysicalDeviceProperties2(pNext=sm if counted else p13)
    lib.vkGetPhysicalDeviceProperties2(physical, ffi.addressof(p2))
    api = p2.properties.apiVersion >> 22, p2.properties.apiVersion >> 12 & 0x3FF
    present = [Feature(f"Vulkan {API[0]}.{API[1]}", api >= API, True, "the core that everything is written to")]
    for source, name, required, why in _FEATURES:
        here = source in chain and api >= API and bool(getattr(chain[source], name))
        present.append(Feature(name, here, required, why))
    compute = vk.VK_SHADER_STAGE_COMPUTE_BIT
    for name, bit in _SUBGROUP_OPS.items():
        here = bool(p11.subgroupSupportedOperations & bit and p11.subgroupSupportedStages & compute)
        present.append(Feature(f"subgroup {name.lower()}", here, True, "reductions across a subgroup"))
    choice = bool(p13.requiredSubgroupSizeStages & compute)
    present.append(Feature("required subgroup size", choice, False, "a chosen subgroup size in compute kernels"))
    lim = p2.properties.limits
    limits = Limits(
        max_storage_range=lim.maxStorageBufferRange,
        max_buffer=p13.maxBufferSize,
        max_allocation=p11.maxMemoryAllocationSize,
        max_allocations=lim.maxMemoryAllocationCount,
        shared_bytes=lim.maxComputeSharedMemorySize,
        workgroup=tuple(lim.maxComputeWorkGroupSize),
        invocations=lim.maxComputeWorkGroupInvocations,
        groups=tuple(lim.maxComputeWorkGroupCount),
        push_bytes=lim.maxPushConstantsSize,
        offset_alignment=lim.minStorageBufferOffsetAlignment,
        subgroup=p11.subgroupSize,
        min_subgroup=p13.minSubgroupSize or p11.subgroupSize,
        max_subgroup=p13.maxSubgroupSize or p11.subgroupSize,
        workgroup_subgroups=p13.maxComputeWorkgroupSubgroups,
        timestamp_period=lim.timestampPeriod,
        storage_buffers=lim.maxPerStageDescriptorStorageBuffers,
        cores=sm.shaderSMCount if counted else 1,
    )
    driver = " ".join(ffi.string(getattr(p12, f)).decode() for f in ("driverName", "driverInfo"))
    uuid = bytes(p2.properties.pipelineCacheUUID).hex()
    offered = tuple(Feature(name, name in extensions, False, why) for name, why in _EXTENSIONS)
    memory = vk.vkGetPhysicalDeviceMemoryProperties(physical)
    heaps = tuple(
        (memory.memoryHeaps[i].size, bool(memory.memoryHeaps[i].flags & vk.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT))
        for i in range(memory.memoryHeapCount)
    )
    vendor, kind = p2.properties.vendorID, int(p12.driverID)
    report = Report(
        tuple(present),
        offered,
        limits,
        driver,
        uuid,
        heaps,
        VENDORS.get(vendor, hex(vendor)),
        DRIVERS.get(kind, str(kind)),
    )
    if report.has("cooperative_matrix"):
        report = replace(report, matrices=matrix_shapes(instance, physical))
    return replace(report, features=(*report.features, subgroup_fits(report)))


def subgroup_fits(report: Report) -> Feature:
    """Whether the kernels support the subgroup size that would be used."""
    size = choose_subgroup(report)
    return Feature("subgroups of 8, 16 or 32 lanes", size in SUBGROUPS, True, f"every kernel; here they have {size}")


# Extension, its feature -> the first validation layer that knows it: an older one refuses the device's creation.
_LAYER_KNOWS = {("VK_KHR_cooperative_matrix", "cooperativeMatrix"): 1 << 22 | 3 << 12 | 255}  # 1.3.255


def known_to_layer(report: Report, version: int) -> Report:
    """The report without features that a validation layer of this specVersion does not know."""
    new = {name for names, first in _LAYER_KNOWS.items() if version < first for name in names}

    def cut(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
        return tuple(replace(f, present=f.present and f.name not in new) for f in features)

    kept = replace(report, features=cut(report.features), extensions=cut(report.extensions))
    return kept if kept.has("cooperative_matrix") else replace(kept, matrices=())


def enabled_chain(report: Report) -> tuple[Any, list[str], Any]:
    """(VkPhysicalDeviceFeatures2 with all known and present features enabled, extensions, objects to keep alive)."""
    extensions = [f.name for f in report.extensions if f.present]
    chain = _feature_chain(set(extensions))
    there = {f.name: f.present for f in report.features}
    for source, name, _, _ in _FEATURES:
        if there[name]:
            setattr(chain[source], name, 1)
    return chain["all"], extensions, chain


def can_choose_subgroup(report: Report) -> bool:
    """Whether the device has several subgroup sizes and a pipeline may require one."""
    control = report.has("subgroupSizeControl") and report.has("required subgroup size")
    return control and report.limits.min_subgroup < report.limits.max_subgroup


def with_subgroup(report: Report, size: int) -> Report:
    """The report with another subgroup size. ValueError where the device does not have it."""
    low, high = report.limits.min_subgroup, report.limits.max_subgroup
    if not can_choose_subgroup(report) or not low <= size <= high or size & (size - 1):
        raise ValueError(f"no subgroups of {size}: this device has {low} to {high}, of which it may choose only one")
    return replace(report, subgroup=size)


def most_threads(report: Report) -> int:
    """Most threads of a one-dimensional workgroup."""
    limits = report.limits
    most = min(limits.invocations, limits.workgroup[0])
    if can_choose_subgroup(report):  # a required size limits the number of subgroups
        most = min(most, choose_subgroup(report) * limits.workgroup_subgroups)
    return most


def choose_subgroup(report: Report) -> int:
    """The subgroup size that kernels are specialised for: 32 where the device allows a choice, else its own."""
    limits = report.limits
    if report.subgroup:
        return report.subgroup
    if not can_choose_subgroup(report):
        return limits.subgroup
    return min(max(WANTED_SUBGROUP, limits.min_subgroup), limits.max_subgroup)
