"""Cost of a plan from its operations' declarations: arithmetic, memory traffic, memory size."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from hybrid.core.plan import PURPOSE, Plan, TensorDecl
from hybrid.spec.cost import Cost, bytes_read, plan_cost, step_cost
from hybrid.spec.op import load_op

__all__ = [
    "Cost",
    "bytes_elsewhere",
    "bytes_read",
    "memory",
    "plan_cost",
    "precision_by_phase",
    "precision_of",
    "purpose",
    "step_cost",
]


def memory(plan: Plan) -> dict[str, int]:
    """Bytes by purpose, every tensor of the plan once; activations share one arena."""
    held = {"weights": 0, "tables": 0, "kv": 0, "state": 0, "io": 0}
    for decl in plan.tensors.values():
        if decl.kind == "activation":
            continue
        held[purpose(decl)] += decl.nbytes
    return {**held, "activations": plan.arena_bytes}


def bytes_elsewhere(plan: Plan, context: int, main: str, spilled: Collection[str] = ()) -> dict[str, int]:
    """Declared bytes of a plan outside the memory of the device `main`: of steps on other devices, by device, and of
    `spilled`, weights in host memory, as the host's (`cpu`)."""
    away = dict.fromkeys(s.device for s in plan.steps if s.device != main)
    parts = {d: replace(plan, steps=tuple(s for s in plan.steps if s.device == d)) for d in away}
    found = {d: plan_cost(part, context).nbytes for d, part in parts.items()}
    return {**found, "cpu": found.get("cpu", 0) + bytes_read(plan, spilled)} if spilled else found


def purpose(decl: TensorDecl) -> str:
    """A tensor's purpose as Device.memory() names it, but with RoPE tables and the KV cache counted separately."""
    return {"rope": "tables", "kv": "kv"}.get(decl.role) or PURPOSE[decl.kind]


def precision_of(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Storage types in use: of weight matrices, their inputs and the KV cache."""
    weights, acts, kv = set(), set(), set()
    for step in plan.steps:
        op = load_op(step.op)
        names = {k: plan.tensors[n] for k, n in step.args.items()}
        matrices = [k for k, d in names.items() if d.kind == "weight" and len(d.shape) == 2 and not d.role]
        weights |= {dtype for k in matrices for dtype in names[k].dtypes}
        if matrices and "x" in op.inputs:
            acts |= {names[k].dtype for k in ("x", "h") if k in names}
        kv |= {d.dtype for d in names.values() if d.role == "kv"}
    return {"weights": tuple(sorted(weights)), "activations": tuple(sorted(acts)), "kv": tuple(sorted(kv))}


def precision_by_phase(decode: Plan, prefill: Plan) -> Mapping[str, tuple[str, ...]]:
    """`precision_of` the decode plan, with `prefill activations` if these differ."""
    found, acts = precision_of(decode), precision_of(prefill)["activations"]
    return found if acts == found["activations"] else {**found, "prefill activations": acts}
