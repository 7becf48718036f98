"""The import contracts of pyproject.toml hold, and each rejects an import that violates it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tomli

from conformance.support.paths import ROOT

grimp = pytest.importorskip("grimp")
from importlinter.configuration import configure  # noqa: E402 (after the skip)
from importlinter.contracts import acyclic_siblings, forbidden, independence, layers  # noqa: E402 (after the skip)

SETTINGS = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = {c["name"]: c for c in SETTINGS["contracts"]}
TYPES = {
    "acyclic_siblings": acyclic_siblings.AcyclicSiblingsContract,
    "forbidden": forbidden.ForbiddenContract,
    "independence": independence.IndependenceContract,
    "layers": layers.LayersContract,
}
# An import that violates each contract.
WRONG = {
    "Imports run from commands down to data": ("hybrid.planning.planner", "hybrid.engine.loop"),
    "No kernels backend imports another": ("hybrid.kernels.npu.ops", "hybrid.kernels.oracle.linear"),
    "The engine does not know what measures and judges it": ("hybrid.engine.loop", "hybrid.harness.compare"),
    "Of the suite, measuring commands import its harness only": ("hybrid.perf.op", "conformance.support.models"),
    "Planning and the engine know devices by their protocol": ("hybrid.engine.runner", "hybrid.kernels.vulkan.device"),
    "No import circle": ("hybrid.engine.blocks", "hybrid.engine.loop"),
}


@pytest.fixture(scope="module")
def graph() -> Any:
    configure()
    return grimp.build_graph(*SETTINGS["root_packages"], exclude_type_checking_imports=True, cache_dir=None)


def holds(name: str, graph: Any) -> bool:
    given = {k: v for k, v in CONTRACTS[name].items() if k not in ("name", "type")}
    options = {k: str(v) if isinstance(v, bool) else v for k, v in given.items()}
    session = {k: v for k, v in SETTINGS.items() if k != "contracts"}
    return TYPES[CONTRACTS[name]["type"]](name, session, options).check(graph, verbose=False).kept


def test_every_contract_has_an_import_that_breaks_it() -> None:
    assert set(WRONG) == set(CONTRACTS)


@pytest.mark.parametrize("name", list(WRONG))
def test_a_contract_holds_until_it_is_broken(graph: Any, name: str) -> None:
    importer, imported = WRONG[name]
    assert holds(name, copy.deepcopy(graph)), f"{name}: run lint-imports"
    broken = copy.deepcopy(graph)
    broken.add_import(importer=importer, imported=imported, line_number=1, line_contents=f"import {imported}")
    assert not holds(name, broken)
