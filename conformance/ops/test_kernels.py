"""Every shipped Vulkan kernel is selected by some case of the suite, so that none ships unproved."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import replace

import pytest

from conformance.ops.test_ops import SPECS, combinations
from conformance.support.devices import GUARD, Devices, spy_kernels
from hybrid.harness import run_case
from hybrid.harness.fixed import dtype_cases, variant, variant_cases
from hybrid.harness.sizes import base_bind
from hybrid.harness.tuned import asking, plan_for, uses
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.kernel import SPIRV
from hybrid.kernels.vulkan.ops import attention
from hybrid.kernels.vulkan.repack import REPACKED
from hybrid.kernels.vulkan.tuning import space

# Kernels that only other devices select: (pattern, subgroup sizes that never do, why).
ELSEWHERE = [
    ("attention.*.4x4", range(0, 16), "a narrow subgroup (a CPU driver) holds at most 8 units of queries per lane"),
    ("attention.*.8x2", range(0, 16), "as above"),
    ("attention.*.4x4", range(32, 65), "heads that take four units of a wide subgroup's lanes have half the queries"),
    ("attention.*.2x[24]", range(16, 65), "a wide subgroup has room for more queries at once"),
    ("attention.*.2x8", range(16, 65), "head sizes end at 512: at most 4 units of a wide subgroup's lanes"),
    ("attention.*.2x16", range(16, 65), "as above"),
    ("decode_attention.*.1x[48]", range(16, 65), "a wide subgroup holds a head in fewer words per lane"),
    ("decode_attention.*.1x16", range(16, 65), "as above"),
    ("decode_attention.q8_0.[12]x2", range(32, 65), "as above"),
    ("probe_*", range(0, 65), "the bench's ceilings, no operation: test_bench.py runs them"),
    ("flash_attention.*", range(0, 32), "for matrix units, in subgroups of 32"),
    ("layer.*", range(0, 65), "no single operation: test_groups.py runs them"),
    ("own_gate.*.f16", range(0, 65), "a tile that only a GPU's table gives it: test_gemm_parts.py runs it"),
    ("altup_next.*", range(0, 65), "as above"),
    ("altup_gate.*", range(0, 65), "as above"),
    ("expert_route.*", range(0, 65), "as above"),
    ("add_router.*", range(0, 65), "as above"),
    (
        "sparse_down.*",
        range(0, 65),
        "from a second layout of weights, which a model's device makes: test_sparse_down.py runs them",
    ),
    ("columns.*", range(0, 65), "as above"),
    ("sample.1024", range(0, 32), "32 narrow subgroups do not make 1024 threads"),
]


@pytest.mark.slow
def test_every_kernel_is_selected(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of test_ops.py, and the candidates of the tuning tables, recorded only: they select exactly the
    manifest's kernels."""
    device = devices.get("vulkan", guard=GUARD)
    dry = DryDevice(device.subgroup_size, device.max_range, device.has, shared_bytes=device.shared_bytes)
    chosen = spy_kernels(dry, monkeypatch)
    chosen.add("grid")  # computes indirect grids; part of every plan with a live count
    chosen |= {f"repack.{dtype}" for dtype in REPACKED}  # uploads of a file's blocks: test_loading.py runs each
    for op, spec in SPECS.items():
        if not spec.runs_on("vulkan"):
            continue
        cases = [c for dtypes in combinations(op, "vulkan") for c in dtype_cases(spec, dtypes)]
        for case in cases + [c for _, c in variant_cases(spec, "vulkan")]:
            record(plan_for(spec, case), dry)
    for family in space().family:
        if not family.needs or device.has(family.needs):
            spec = SPECS[family.op]
            planned = [plan_for(spec, case) for case in asking(family, spec, device)]
            for use, plan in ((use, plan) for use in uses(family) for plan in planned):
                with dry.tuning.forced(family.name, use):  # test_tuning.py runs them
                    record(plan, dry)
    shipped = set(json.loads((SPIRV / "manifest.json").read_text()))
    elsewhere = {
        n
        for n in shipped
        for pattern, sizes, _ in ELSEWHERE
        if device.subgroup_size in sizes and fnmatch.fnmatchcase(n, pattern)
    }
    # f16 rows use matrix units where available, else the tiles.
    idle = ("*.tile.*.f16",) if device.has("f16_matrices") else ("*.gemm.*",)
    elsewhere |= {n for n in shipped if any(fnmatch.fnmatchcase(n, pattern) for pattern in idle)}
    missed = sorted(shipped - chosen - elsewhere)
    assert not missed, f"no case selects {missed}: add one to the variants of its spec, or remove the kernel"


@pytest.mark.parametrize("rows", [2, attention.DECODE_ROWS + 7])
@pytest.mark.parametrize("window", [0, 77])
def test_attention_over_a_context_longer_than_a_shaders_loops_may_run(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, rows: int, window: int
) -> None:
    """With the limit lowered, a short context is split as 100,000 positions are, in decode and in prefill."""
    device, spec = devices.get("vulkan", guard=GUARD), SPECS["attention"]
    monkeypatch.setattr(attention, "LOOPS", 150)
    bind = base_bind(spec) | {"T": rows, "S": 2, "BS": 16, "MB": 24, "HQ": 4, "HK": 2, "D": 64}
    span = window or 24 * 16
    assert attention.tiling(rows, 2, 64, span, device.subgroup_size).splits > (1 if window else 3)
    case = variant(spec, bind, spec.dtypes(), seed=0)
    for style in ("full", "ragged"):
        run_case(spec, device, replace(case, attrs={**case.attrs, "window": window}, style=style))
