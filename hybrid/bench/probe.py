"""Measure a device's roofs: bandwidth of a copy, and rate of its matrix units.

Every variant of the probe kernels runs a few times; the fastest run counts. A copy of n bytes moves 2n bytes. On cpu
the probes are NumPy's copy and its float32 matrix product.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid.core.plan import Plan, Step
from hybrid.spec.cost import Cost

REPEATS = 4
COPY_BYTES = {
    "discrete": 2 << 30,
    "integrated": 256 << 20,
    "cpu": 24 << 20,
}  # bytes of a buffer, far larger than caches
GROUPS = (0, 1 << 13)  # workgroups of a copy; 0: one for each tile, else each loops over tiles
MATRIX_GROUPS, MATRIX_STEPS = 4096, 512


@dataclass(frozen=True, slots=True)
class Probes:
    """Measured roofs; None without matrix units. `variants`: each variant's best rate, GB/s or TFLOPS."""

    copy_gb_s: float
    copy: str
    matrix_tflops: float | None
    matrix: str
    variants: Mapping[str, float]


def probe(device: Any) -> Probes:
    """Measure an open device; frees its buffers afterwards."""
    if device.backend not in PROBES:
        raise ValueError(f"no probe measures what {device.backend} reaches: add one to PROBES of hybrid/bench/probe.py")
    copies, matrices = PROBES[device.backend](device)
    best = max(copies, key=lambda name: copies[name])
    fastest = max(matrices, key=lambda name: matrices[name], default=None)
    return Probes(
        copies[best], best, None if fastest is None else matrices[fastest], fastest or "none", {**copies, **matrices}
    )


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, by the host's clock."""
    found = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def _cpu_copy() -> dict[str, float]:
    source, target = np.ones(32 << 20, np.uint8), np.zeros(32 << 20, np.uint8)
    return {"numpy copy": 2 * source.nbytes / _fastest(lambda: np.copyto(target, source)) / 1e9}


def _cpu_matrix() -> dict[str, float]:
    n = 1024
    a, out = np.ones((n, n), np.float32), np.empty((n, n), np.float32)
    return {"numpy matmul f32": 2 * n**3 / _fastest(lambda: np.matmul(a, a, out=out)) / 1e12}


@dataclass(frozen=True, slots=True)
class Variant:
    """One dispatch of a probe kernel: a copy, or products."""

    label: str
    kernel: str
    push: bytes
    groups: int
    cost: Cost


def _vulkan(device: Any) -> tuple[dict[str, float], dict[str, float]]:
    with ExitStack() as held:
        source, target = buffers(device, held)
        copied = {v.label: v.cost.nbytes / _timed(device, v, source, target) / 1e9 for v in copies(device, source.size)}
        multiplied = {
            v.label: v.cost.flops / _timed(device, v, source, target) / 1e12 for v in products(device, source.size)
        }
        device.wait()
    return copied, multiplied


def buffers(device: Any, held: ExitStack) -> tuple[Any, Any]:
    """Two buffers for the probes of a Vulkan device, far larger than its caches; `held` frees them."""
    from hybrid.kernels.vulkan.memory import align_up

    pool = device.memory_pool
    size = min(COPY_BYTES.get(device.info.kind, 64 << 20), pool.available("device") // 4, device.max_range)
    size -= size % (1 << 20)  # whole tiles of every variant

    def allocate() -> Any:
        piece = pool.allocate(align_up(size), "scratch")
        held.callback(pool.release, piece, "scratch")
        device.fill(piece, 0x3C)  # f16 values slightly above 1
        return piece

    return allocate(), allocate()


def copies(device: Any, nbytes: int) -> list[Variant]:
    """Copy variants that the device supports, for buffers of `nbytes`."""
    found = []
    for name in device.kernels_named("probe_copy."):
        threads, each = map(int, name.split(".")[1:])
        if threads > device.max_threads:
            continue
        tiles = nbytes // 16 // (threads * each)  # a workgroup copies threads * each 16-byte words at a time
        for groups in GROUPS if device.info.kind != "cpu" else GROUPS[1:]:
            grid = min(groups or tiles, tiles, device.max_groups[0])
            label = f"{name}{f' x {grid} groups' if groups else ''}"
            found.append(Variant(label, name, struct.pack("<II", nbytes // 16, grid), grid, Cost(nbytes=2 * nbytes)))
    return found if device.info.kind != "cpu" else found[::4]  # a CPU's copy hardly depends on the kernel


def products(device: Any, nbytes: int) -> list[Variant]:
    """Matrix-unit variants with results that fit in `nbytes`; empty without matrix units."""
    if not device.has("cooperative_matrix") or device.subgroup_size != 32:
        return []
    found = []
    for name in device.kernels_named("probe_matrix."):
        _, threads, tile = name.split(".")
        rows, columns = map(int, tile.split("x"))
        subgroups, tiles = int(threads) // 32, rows * columns  # of a workgroup; of each subgroup in a step
        if MATRIX_GROUPS * subgroups * 1024 <= nbytes:
            flops = MATRIX_GROUPS * subgroups * MATRIX_STEPS * tiles * 2 * 16**3
            found.append(Variant(name, name, struct.pack("<I", MATRIX_STEPS), MATRIX_GROUPS, Cost(flops)))
    return found


def record(device: Any, variant: Variant, source: Any, target: Any, profile: bool = False) -> Any:
    """The variant as a program of one dispatch. The caller closes it."""
    from hybrid.kernels.vulkan.program import Program
    from hybrid.kernels.vulkan.recorder import Recorder

    plan = Plan("probe", 1, 0, (Step(variant.kernel, variant.kernel, {}, {}),), {})
    recorder = Recorder(device, source)
    recorder.dispatch(device.kernel(variant.kernel), [source], [target], variant.push, (variant.groups,))
    return Program(device, plan, recorder, profile, cost=variant.cost)


def _timed(device: Any, variant: Variant, source: Any, target: Any) -> float:
    """Seconds of the fastest of a few dispatches, by the device's clock."""
    program = record(device, variant, source, target, profile=True)
    try:
        times: list[Sequence[Any]] = []
        for _ in range(REPEATS + 1):
            device.wait(program.submit())
            times.append(program.times())
    finally:
        program.close()
    return min(t[0].duration for t in times)


PROBES: dict[str, Callable[[Any], tuple[dict[str, float], dict[str, float]]]] = {
    "cpu": lambda device: (_cpu_copy(), _cpu_matrix()),
    "vulkan": _vulkan,
}
"""By backend: GB/s of copies and TFLOPS of products, by variant."""
