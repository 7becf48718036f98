"""Test cases for the families of the tuning tables: they prove every candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.core.plan import Plan
from hybrid.harness import control_of, declared, plan_of, step_of
from hybrid.harness.cases import Case
from hybrid.harness.fixed import covering, edge_cases, variant, variant_cases
from hybrid.harness.sizes import base_bind
from hybrid.kernels.vulkan.dry import asked
from hybrid.kernels.vulkan.tuning import Family, Value, tables
from hybrid.spec import OpSpec


def plan_for(spec: OpSpec, case: Case) -> Plan:
    """A plan with only the case's step, without a device."""
    decls = {n: declared(spec, case, n) for n in spec.tensors}
    decls["control"], _ = control_of(case, {})
    return plan_of(case, (step_of(spec, case, spec.name, {n: n for n in spec.tensors}, "vulkan"),), decls)


def facts_of(family: str, spec: OpSpec, device: Any, case: Case) -> list[Mapping[str, Value]]:
    """The facts with which the case's step queries the family on this Vulkan device; empty if it does not."""
    return [a.facts for a in asked(plan_for(spec, case), device) if a.family == family]


def asking(family: Family, spec: OpSpec, device: Any) -> list[Case]:
    """The fixed cases that query the family; for matrix units, which decode each type separately, in all types
    together."""
    cases = [c for found in (edge_cases(spec, "vulkan"), variant_cases(spec, "vulkan")) for _, c in found]
    if family.needs:
        cases += [
            variant(spec, base_bind(spec) | {k: int(v) for k, v in s.items() if k in spec.axes}, dtypes, i)
            for s in spec.backend("vulkan").sizes()
            for i, dtypes in enumerate(covering(spec, "vulkan"))
        ]
    return [c for c in cases if facts_of(family.name, spec, device, c)]


def uses(declared: Family) -> list[dict[str, Value]]:
    """Candidates in which every value of every parameter of a family occurs, and the entries of every table, each once."""
    values = list(declared.candidates.values())
    # Each value with two sets of other values: together they select the module.
    rows = [
        [v[(i + shift * j) % len(v)] for j, v in enumerate(values)]
        for shift in (0, 1)
        for i in range(max(map(len, values)))
    ]
    tuned = [e.use for table in tables().values() for e in table.family if e.name == declared.name]
    every = [dict(zip(declared.candidates, row, strict=True)) for row in rows] + tuned
    return list({tuple(sorted(use.items())): use for use in every}.values())
