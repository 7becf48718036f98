"""Each mutant, a mutation of a shipped kernel, makes a conformance case fail that the sound kernel passes."""

from __future__ import annotations

import collections
import functools
from pathlib import Path
from typing import Any

import pytest

from conformance.mutation.mutate import Mutant, case_of, load, mutated_function, mutated_spirv, tried
from conformance.support.devices import (
    GUARD,
    OP_BACKENDS,
    Devices,
    MatrixDevices,
    need_compiler,
    open_another,
    open_backend,
    open_for_binding,
    spy_kernels,
)
from hybrid.harness import run_case
from hybrid.harness.compare import Disagreement
from hybrid.harness.interpreter.values import Fault
from hybrid.harness.tuned import plan_for
from hybrid.kernels.vulkan.build import sources, variants
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.recorder import WrongBinding
from hybrid.kernels.vulkan.tuning import DEFAULT
from hybrid.spec import load_ops

SPECS = load_ops()
MUTANTS = [s for s in load() if s.kind != "aie"]  # tile kernels have a separate harness


def _device(mutant: Mutant, sound: Any, kernels: set[str], options: dict[str, Any], folder: Path) -> Any:
    if mutant.kind == "oracle":
        return open_backend("cpu", overrides={mutant.op: mutated_function(mutant, mutant.op)}, **options)
    if mutant.kind == "npu":
        device = open_backend("npu", **options)
        device.functions[mutant.op] = functools.partial(mutated_function(mutant, mutant.op), device)
        return device
    if mutant.kind == "shader":
        return open_another(sound, spirv=mutated_spirv(mutant, kernels, folder), **options)
    from hybrid.kernels.vulkan.ops import BINDINGS

    return open_for_binding(sound, bindings={**BINDINGS, mutant.op: mutated_function(mutant, "record")}, **options)


@pytest.mark.parametrize("mutant", [pytest.param(s, id=f"{s.op}-{s.kind}-{s.name}") for s in tried(MUTANTS)])
def test_caught(
    devices: Devices, matrices: MatrixDevices, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant.kind == "shader":
        need_compiler()
    spec, case = SPECS[mutant.op], case_of(mutant, SPECS[mutant.op])
    options = {"guard": GUARD, **mutant.case.get("options", {})}
    if mutant.needs == "f16_matrices":
        sound = matrices(**options)
    else:
        sound = devices.get(mutant.backend, **options)
        if mutant.needs and not sound.has(mutant.needs):
            pytest.skip(f"{sound.name} lacks {mutant.needs}: it never runs this kernel")
    chosen: set[str] = set()
    if mutant.backend == "vulkan":
        chosen = spy_kernels(sound, monkeypatch)
    run_case(spec, sound, case)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # mutants do not belong in the pipeline cache
    device = _device(mutant, sound, chosen, options, tmp_path)
    try:
        with pytest.raises((Disagreement, Fault, WrongBinding)):
            run_case(spec, device, case)
    finally:
        device.close()


def test_no_mutant_is_stale() -> None:
    """Includes those that the short profile skips: their `find` text occurs once in the file."""
    for mutant in load():
        assert mutant.mutated() != mutant.path.read_text()


def test_mutants_of_matrix_units_are_of_kernels_that_their_cases_run() -> None:
    """Without matrix units their cases are recorded for a device with them: a table that selects another tile is
    detected."""
    stale = []
    for mutant in (m for m in load() if m.kind == "shader" and m.needs == "f16_matrices"):
        options = mutant.case.get("options", {})
        has = {"f16_matrices", "matrix_lanes"} - set(options.get("without", ()))
        dry = DryDevice(features=has.__contains__, tuning=options.get("tuning", DEFAULT), cores=132, shared_bytes=49152)
        spec = SPECS[mutant.op]
        run = {d.kernel.name for d in record(plan_for(spec, case_of(mutant, spec)), dry).dispatches}
        built = {v.source for v in variants() if v.module in run}
        if not any(mutant.path in sources(source) for source in built):
            stale.append(f"mutants/{mutant.op}.toml: {mutant.name}: none of {sorted(run)} uses {mutant.file}")
    assert not stale, "\n".join(stale)


def test_every_operation_has_mutants() -> None:
    """At least two for each operation and backend; for Vulkan one in a shader and one in a binding."""
    kinds = collections.Counter((s.op, s.kind) for s in MUTANTS)
    for op, spec in SPECS.items():
        supported = [b for b in OP_BACKENDS if spec.runs_on(b)]
        if "cpu" in supported:
            assert kinds[op, "oracle"] >= 2, f"mutants/{op}.toml needs two [[oracle]] tables"
        if "npu" in supported:
            assert kinds[op, "npu"], f"mutants/{op}.toml needs an [[npu]] table"
        if "vulkan" in supported:
            for kind in ("shader", "binding"):
                assert kinds[op, kind], f"mutants/{op}.toml needs a [[{kind}]] table"
