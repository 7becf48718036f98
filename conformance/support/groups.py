"""A fused group's steps as one plan on a device. Each step is checked by its own operation's definition, on the memory
that the group's dispatches left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformance.support.chains import CHAINS, OWN_STEPS, STEPS
from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.harness import POISON, control_of, declared, poisoned
from hybrid.harness.cases import Case
from hybrid.harness.compare import same_bits
from hybrid.harness.inputs import make
from hybrid.harness.reference import check, expect
from hybrid.spec import load_ops

SPECS = load_ops()


def cases(sizes: Mapping[str, int], w: str, rows: int, act: str, seed: int, live: int) -> list[Case]:
    """One case for each step of the group; with `own` among the sizes, of the step with per-layer input."""
    n, t = dict(sizes), {"T": rows}
    h = {**t, "H": n["hidden"]}
    first = ({**t, "K": n["heads"], "N": n["hidden"]}, h, {**h, "F": n["ffn"]}, h)
    product = {"x": act, "w": w}
    dtypes = [product, {"y": act}, {"x": act, "w_gate_up": w, "w_down": w, "h": act}, {"y": act}, product]
    steps, binds, attrs = STEPS, (*first, {**h, "HQ": n["hq"], "HK": n["hk"], "D": n["d"]}), {3: {"scale": 0.75}}
    if "own" in n:
        steps, attrs = OWN_STEPS, {4: {"layer": 1}, 5: {"scale": 0.75}}
        binds = (*first, {**h, "P": n["own"], "E": 3 * n["own"]}, h, {**t, "K": n["hidden"], "N": n["hq"] * n["d"]})
        dtypes[4:] = [{"x": act, "w_gate": w, "w_proj": w, "h": act}, {"y": act}, product]
    return [
        Case(
            op,
            bind,
            dict(SPECS[op].dtypes(types)),
            {**SPECS[op].attrs(bind, {}), **attrs.get(i, {})},
            live,
            live,
            seed=seed + i,
            style="full",
        )
        for i, ((op, _), bind, types) in enumerate(zip(steps, binds, dtypes, strict=True))
    ]


def planned(
    made: list[Case], device: str, order: Sequence[int] = (), swaps: Mapping[str, str] = {}
) -> tuple[Plan, dict[str, Tensor]]:
    """The steps as one plan, and values of tensors that no step writes first. `swaps`: other tensors for arguments,
    "step.argument" -> tensor."""
    values: dict[str, Tensor] = {}
    decls: dict[str, TensorDecl] = {}
    steps = []
    for i in order or range(len(made)):
        (op, args), case = CHAINS[tuple(c.op for c in made)][i], made[i]
        args = {a: swaps.get(f"{i}.{a}", t) for a, t in args.items()}
        drawn = make(SPECS[op], case)
        for arg, name in args.items():
            if name not in decls:
                decls[name] = replace(declared(SPECS[op], case, arg), name=name)
                if arg in SPECS[op].inputs:
                    values[name] = drawn[arg]
        steps.append(Step(op, f"{i}.{op}", dict(case.bind), args, dict(case.attrs), device=device))
    decls["control"], values["control"] = control_of(made[0], {})
    return Plan("group", made[0].bind["T"], 1, tuple(steps), decls), values


def beside(plan: Plan, values: dict[str, Tensor], others: Sequence[list[Case]], device: str) -> Plan:
    """The plan followed by other layers, which share nothing with it; their values join `values`."""
    for i, cases_of_layer in enumerate(others, 1):
        layer, theirs = planned(cases_of_layer, device)
        named = {name: name if name == "control" else f"{name}.{i}" for name in layer.tensors}
        values |= {named[name]: value for name, value in theirs.items() if name != "control"}
        steps = [replace(s, args={arg: named[name] for arg, name in s.args.items()}) for s in layer.steps]
        decls = {named[name]: replace(decl, name=named[name]) for name, decl in layer.tensors.items()}
        plan = replace(plan, steps=(*plan.steps, *steps), tensors={**decls, **plan.tensors})
    return plan


def run(
    device: Any, made: list[Case], given: Mapping[str, Tensor] = {}, others: Sequence[list[Case]] = (), **how: Any
) -> int:
    """Run the steps as one plan, twice from different poison, and check each on the memory it reads. Returns the plan's
    dispatches. `given`: other values of tensors; `others`: more layers after the plan; `how`: planned()'s order and
    swaps."""
    plan, values = planned(made, device.name, **how)
    judged_by = [made[int(step.name[0])] for step in plan.steps]
    plan = beside(plan, values, others, device.name)
    return proved(device, [*judged_by, *(case for layer in others for case in layer)], plan, {**values, **given}, given)


def proved(
    device: Any,
    judged_by: Sequence[Case],
    plan: Plan,
    values: Mapping[str, Tensor],
    given: Mapping[str, Tensor] = {},
    bindings: Mapping[str, Any] | None = None,
) -> int:
    """The same for a plan and the case of each of its steps, in their order. `bindings`: of this plan."""
    rows = judged_by[0].rows
    found = []
    for byte in POISON:
        device.reset()
        for name, decl in plan.tensors.items():
            device.store(decl, values.get(name, poisoned(decl, byte)))
        program = device.compile(plan, bindings=bindings)
        # Memory left by one submit must not change the next: a first result is compared with a second one.
        for _ in range(2 if byte == POISON[0] else 1):
            device.wait(program.submit())
        assert not device.check_guards()
        found.append({name: device.read(name) for name in plan.tensors})
    for name, decl in plan.tensors.items():
        if rows:
            _same(
                f"{name} depends on what its memory held before (unwritten elements, or a race)",
                *(f[name] for f in found),
            )
        elif name not in values:
            _same(f"{name} was written, of no live row", found[0][name], poisoned(decl, POISON[0]))
    for step, case in zip(plan.steps, judged_by, strict=True) if rows else ():
        spec = SPECS[step.op]
        held = {arg: found[0][name] for arg, name in step.args.items()}
        caches = {arg: given[step.args[arg]] for arg in spec.state}  # unmodified
        call = expect(spec, case, {**{n: held[n] for n in spec.inputs}, **caches}, device.has("f16_matrices"))
        check(spec, case, f"{device.name}: {step.name} of {case}", call, held)
    return program.dispatches


def _same(label: str, got: Tensor, wanted: Tensor) -> None:
    for a, b in zip(got.parts, wanted.parts, strict=True):
        same_bits(label, a, b)


def judged(device: Any, use: Mapping[str, Any], made: list[Case], **how: Any) -> int:
    with device.tuning.forced("layer", use):
        return run(device, made, **how)
