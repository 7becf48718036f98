"""hybrid.prove's cases flag each mutant of a shader that changes the code of a kernel which models' plans use on this
device."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from conformance.mutation.mutate import Mutant, case_of, load, mutated_spirv
from conformance.support.devices import GUARD, Devices, need_compiler, open_another
from conformance.support.profile import LONG
from hybrid import prove, proving
from hybrid.harness import run_case
from hybrid.harness.compare import Disagreement
from hybrid.harness.tuned import plan_for
from hybrid.kernels.vulkan import modules
from hybrid.kernels.vulkan.build import sources, variants
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.kernel import SPIRV
from hybrid.kernels.vulkan.recorder import WrongBinding
from hybrid.spec import load_ops

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LONG, reason="in the long profile")]

SPECS = load_ops()
MUTANTS = [m for m in load() if m.kind == "shader"]


@dataclass(frozen=True, slots=True)
class Proving:
    """hybrid.prove for its default models on one device. trials: by each kernel of the plans that they select. kernels:
    those that an operation's trials select, of operations that are steps of the plans."""

    dry: DryDevice
    trials: Mapping[str, list[proving.Trial]]
    kernels: Mapping[str, set[str]]


@pytest.fixture(scope="module")
def found(open_devices: Devices) -> Proving:
    subjects = [partial(prove.opened_model, name) for name in prove.all_models()]
    wanted, dry, _ = proving.wanted_by(subjects, open_devices.get("vulkan", guard=GUARD))
    trials: dict[str, list[proving.Trial]] = {name: [] for name in wanted.kernels}
    kernels: dict[str, set[str]] = {op: set() for op in wanted.types}
    for trial in proving.trials(wanted, dry):
        for name in trial.selects & wanted.kernels.keys():
            trials[name].append(trial)
            kernels.get(trial.case.op, set()).add(name)
    return Proving(dry, trials, kernels)


def of_plans(mutant: Mutant, found: Proving) -> list[str]:
    """The plans' kernels that include the mutated file, most cases first: those that the mutant's case runs, or where no
    plan uses its types, those of other types. Of an operation that is a step of plans, those of its steps: what only
    another operation's steps run does not reach the code. Skips the test where another tuning table or a capability
    selects them."""
    tuning = mutant.case.get("options", {}).get("tuning", "default")
    if tuning not in ("default", found.dry.tuning.name):
        pytest.skip(f"selected with the tuning table {tuning}")
    if mutant.needs and not found.dry.has(mutant.needs):
        pytest.skip(f"the device lacks {mutant.needs}")
    spec = SPECS[mutant.op]
    run = {d.kernel.name for d in record(plan_for(spec, case_of(mutant, spec)), found.dry).dispatches}
    families = {name.partition(".")[0] for name in run}
    known = found.kernels.get(mutant.op, {name for name in found.trials if name.partition(".")[0] in families})
    used = {v.module for v in variants() if v.module in known and mutant.path in sources(v.source)}
    return sorted(run & used or used, key=lambda name: (-len(found.trials[name]), name))


def with_mutated(mutant: Mutant, kernel: str, trials: Sequence[proving.Trial], folder: Path) -> Path:
    """A folder of SPIR-V with the kernels of the trials, of which one is built from the mutated file."""
    folder.mkdir()
    spirv = mutated_spirv(mutant, {kernel}, folder)
    for name in {name for t in trials for name in t.selects} - {kernel}:
        shutil.copy(modules.path_of(SPIRV, name), spirv)
    return spirv


@pytest.mark.parametrize("mutant", [pytest.param(m, id=f"{m.op}-{m.name}") for m in MUTANTS])
def test_a_mutant_that_a_plan_uses_is_flagged(
    devices: Devices, found: Proving, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of the kernels that compile to other code, if any does."""
    need_compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # mutants do not belong in the pipeline cache
    unnoticed = list[str]()
    for name in of_plans(mutant, found):
        spirv = with_mutated(mutant, name, found.trials[name], tmp_path / name)
        if modules.read(spirv, name) != modules.read(SPIRV, name):
            if flagged(devices, spirv, found.trials[name]):
                assert not mutant.unseen, f"a case of {name} differs: remove unseen from mutants/{mutant.op}.toml"
                return
            unnoticed.append(name)
    assert mutant.unseen or not unnoticed, f"no case of {', '.join(unnoticed)} differs"
    pytest.skip(mutant.unseen or f"no plan runs a kernel of {mutant.op} that compiles the mutated code")


def flagged(devices: Devices, spirv: Path, trials: Sequence[proving.Trial]) -> bool:
    device = open_another(devices.get("vulkan", guard=GUARD), spirv=spirv, guard=GUARD)
    try:
        for trial in trials:
            with trial.on(device):
                run_case(SPECS[trial.case.op], device, trial.case)
    except (Disagreement, WrongBinding):
        return True
    finally:
        device.close()
    return False
