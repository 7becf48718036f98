"""Run one case of one operation on a device, twice, and check everything that the definition allows.

    run_case(spec, device, case)

`device` is a hybrid.core.device.Device that also has reset() and check_guards(). The plan has this one step. Every
tensor is stored on the device, with guard bands where it was opened with `guard=`. Outputs start as 0xFF bytes in the
first run and 0x5A in the second: the two results must agree bit for bit, inputs must stay unmodified, and rows beyond
the live count must keep the poison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hybrid.core.device import Program
from hybrid.core.plan import CONTROL, CONTROL_WORDS, NOT_FINITE, Plan, Step, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.harness import compare
from hybrid.harness.cases import Case, live
from hybrid.harness.compare import Disagreement, Verdict
from hybrid.harness.inputs import make
from hybrid.harness.reference import check, expect
from hybrid.harness.sampling import Params, judge
from hybrid.spec import OpSpec

POISON = (0xFF, 0x5A)
GUARD = 256  # guard bytes on both sides of every tensor, for a device opened with guards
Kind = Literal["weight", "state", "io", "activation"]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a case that passed: for each result the worst element's share of its bound, and the NMSE."""

    verdicts: Mapping[str, Verdict]
    outputs: Mapping[str, Tensor]


def run_case(spec: OpSpec, device: Any, case: Case) -> Report:
    """Run and judge a case. Raises Disagreement, whose text reproduces it; SpecError if the case breaks the spec."""
    label, spec = f"{device.name}: {case}", spec.judged_on(device.backend)
    if case.rows < 1 or case.outs < 1:
        raise Disagreement(f"{label}: no live rows: a case that computes nothing proves nothing")
    spec.check(case.bind, case.attrs, case.dtypes)
    before = make(spec, case, backend=device.backend)
    runs = [execute(spec, device, case, before, byte) for byte in POISON]
    _check_memory(spec, case, label, before, runs, device)
    if case.op == "sample":
        _check_choice(case, label, before, runs[0])
        return Report({"choice": Verdict(0.0, 0.0)}, runs[0])
    call = expect(spec, case, before, device.has("f16_matrices"))
    return Report(check(spec, case, label, call, runs[0]), runs[0])


def execute(spec: OpSpec, device: Any, case: Case, before: Mapping[str, Tensor], byte: int) -> dict[str, Tensor]:
    """Run once and read back every tensor, `control` included; results start filled with `byte`."""
    program = prepare(spec, device, case, before, byte)
    device.wait(program.submit())
    return {name: device.read(name) for name in program.plan.tensors}


def prepare(spec: OpSpec, device: Any, case: Case, before: Mapping[str, Tensor], byte: int) -> Program:
    """Reset the device, store the case's tensors and compile its one step."""
    decls = {n: declared(spec, case, n) for n in spec.tensors}
    decls["control"], control = control_of(case, before)
    start = {n: poisoned(d, byte) for n, d in decls.items()} | dict(before) | {"control": control}
    device.reset()
    for name, decl in decls.items():
        device.store(decl, start[name])
    step = step_of(spec, case, f"case.{case.op}", {n: n for n in spec.tensors}, device.name)
    return device.compile(plan_of(case, (step,), decls))


def control_of(case: Case, before: Mapping[str, Tensor]) -> tuple[TensorDecl, Tensor]:
    """Control words of a case: its live counts, and the context length that its live positions need."""
    control = np.zeros(CONTROL_WORDS, np.uint32)
    control[CONTROL["rows"]], control[CONTROL["outs"]] = (0, case.rows) if case.wanted else (case.rows, case.outs)
    if last := before.get("positions", before.get("views")):
        control[CONTROL["context"]] = int(last.array[: case.rows].max()) + 1
    return TensorDecl("control", "u32", (CONTROL_WORDS,), "io"), Tensor.of(control)


def step_of(spec: OpSpec, case: Case, name: str, args: Mapping[str, str], device: str) -> Step:
    """The case's call, on tensors stored under the names `args`."""
    outs = case.wanted or bool(spec.token_axis and spec.axes[spec.token_axis].role == "outs")
    extent = "outs" if outs else "rows"
    return Step(case.op, name, dict(case.bind), dict(args), dict(case.attrs), device=device, extent=extent)


def plan_of(case: Case, steps: tuple[Step, ...], decls: Mapping[str, TensorDecl]) -> Plan:
    return Plan(f"case.{case.op}", case.bind.get("T", 1), case.bind.get("O", 1), steps, dict(decls))


def poisoned(decl: TensorDecl, byte: int) -> Tensor:
    """A tensor whose every byte is `byte`."""
    empty = Tensor.empty(decl.dtype, decl.shape)
    for part in empty.parts:
        part.view(np.uint8)[...] = byte
    return empty


def declared(spec: OpSpec, case: Case, name: str) -> TensorDecl:
    """A tensor of the operation with the case's dtype and sizes."""
    t = spec.tensors[name]
    kind: Kind = (
        "weight" if t.role == "weight" else "state" if name in spec.state or t.role in ("cache", "table") else "io"
    )
    return TensorDecl(name, case.dtypes[name], spec.shape(name, case.bind), kind)


def _check_memory(
    spec: OpSpec, case: Case, label: str, before: Mapping[str, Tensor], runs: list[dict[str, Tensor]], device: Any
) -> None:
    """Check inputs unmodified, results independent of earlier memory, dead rows untouched, guard bands intact."""
    damaged = device.check_guards()
    if damaged:
        raise Disagreement(f"{label}: guard bands overwritten around {', '.join(damaged)}")
    for run, byte in zip(runs, POISON, strict=True):
        for name in spec.inputs:
            _same_parts(f"{label}: input {name} was modified", run[name], before[name])
        for name in (*spec.outputs, *spec.scratch):
            count = live(spec, case, name)
            if count is not None:
                dead = poisoned(declared(spec, case, name), byte)
                size = dead.shape[0]
                _same_parts(
                    f"{label}: rows of {name} beyond the {count} live ones were written",
                    run[name].rows(count, size),
                    dead.rows(count, size),
                )
    for name in (*spec.outputs, *spec.scratch, *spec.state):
        count = live(spec, case, name)
        a, b = (r[name] if count is None else r[name].rows(0, count) for r in runs)
        _same_parts(f"{label}: {name} depends on what its memory held before (unwritten elements, or a race)", a, b)


def _same_parts(label: str, got: Tensor, wanted: Tensor) -> None:
    for part, a, b in zip(got.type.parts, got.parts, wanted.parts, strict=True):
        compare.same_bits(f"{label} ({part.name})", a, b)


def _check_choice(case: Case, label: str, before: Mapping[str, Tensor], run: Mapping[str, Tensor]) -> None:
    """Check that sampled tokens are allowed, that state tensors match them, and that no other state changed."""
    expected = {name: before[name].array.copy() for name in ("next_token", "next_position", "history")}
    valid = int(case.attrs["valid"])
    for i, row in enumerate(before["out_rows"].array[: case.outs]):
        slot, pos = int(before["slots"].array[row]), int(before["positions"].array[row])
        logits = before["logits"].array[i, :valid].astype(np.float64)
        token = NOT_FINITE
        if np.isfinite(logits.max()):
            token = expected["next_token"][slot] = int(run["next_token"].array[slot])
            judge(f"{label}: output row {i}", logits, Params.of(before["params"].array[slot]), pos, token)
        expected["next_position"][slot] = pos + 1
        if pos + 1 < expected["history"].shape[1]:
            expected["history"][slot, pos + 1] = token
    for name, wanted in expected.items():
        compare.same(f"{label}: {name}", run[name].array, wanted)
