"""hybrid.prove's cases flag each mutant of a shader whose kernels models' plans use on this device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from conformance.mutation.mutate import SHARE, Mutant, case_of, load, mutated_spirv, order
from conformance.support.devices import GUARD, Devices, need_compiler, open_another
from conformance.support.profile import LONG
from hybrid import prove, proving
from hybrid.harness import run_case
from hybrid.harness.compare import Disagreement
from hybrid.harness.tuned import plan_for
from hybrid.kernels.vulkan.build import sources, variants
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.recorder import WrongBinding
from hybrid.spec import load_ops

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LONG, reason="in the long profile")]

SPECS = load_ops()
MUTANTS = [m for m in load() if m.kind == "shader"]


@dataclass(frozen=True, slots=True)
class Proving:
    """Kernels and trials of `hybrid.prove` for its default models on one device."""

    dry: DryDevice
    kernels: frozenset[str]
    trials: tuple[proving.Trial, ...]


@pytest.fixture(scope="module")
def found(open_devices: Devices) -> Proving:
    subjects = [partial(prove.opened_model, name) for name in prove.all_models()]
    wanted, dry, _ = proving.wanted_by(subjects, open_devices.get("vulkan", guard=GUARD))
    return Proving(dry, frozenset(wanted.kernels), tuple(proving.trials(wanted, dry)))


def changed(mutant: Mutant, found: Proving) -> set[str]:
    """The mutated kernels of the mutant's case that a plan uses; none for one of another tuning table."""
    tuning = mutant.case.get("options", {}).get("tuning", "default")
    if tuning not in ("default", found.dry.tuning.name) or (mutant.needs and not found.dry.has(mutant.needs)):
        return set()
    spec = SPECS[mutant.op]
    run = {d.kernel.name for d in record(plan_for(spec, case_of(mutant, spec)), found.dry).dispatches}
    mutated = {v.module for v in variants() if mutant.path in sources(v.source)}
    return run & mutated & found.kernels


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=f"{m.op}-{m.name}") for m in sorted(MUTANTS, key=order)[::SHARE]]
)
def test_a_mutant_that_a_plan_uses_is_flagged(
    devices: Devices, found: Proving, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler()
    if not (names := changed(mutant, found)):
        # prove runs kernels of plans only: another tuning table, or a capability that the device lacks
        pytest.skip("no plan of this device uses its kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # mutants do not belong in the pipeline cache
    some = [t for t in found.trials if t.selects & names]
    spirv = mutated_spirv(mutant, {name for t in some for name in t.selects}, tmp_path)
    device = open_another(devices.get("vulkan", guard=GUARD), spirv=spirv, guard=GUARD)
    try:
        with pytest.raises((Disagreement, WrongBinding)):
            for trial in some:
                with trial.on(device):
                    run_case(SPECS[trial.case.op], device, trial.case)
    finally:
        device.close()
