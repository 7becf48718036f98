"""Cost of steps and plans from their operations' declarations: arithmetic and memory traffic."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from hybrid.core.dtypes import DTYPES
from hybrid.core.plan import Plan, Step
from hybrid.spec.op import load_op


@dataclass(frozen=True, slots=True)
class Cost:
    """Arithmetic operations, and bytes to and from memory, of a step or a sum of steps."""

    flops: int = 0
    nbytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.nbytes + other.nbytes)

    def times(self, n: int) -> Cost:
        return Cost(self.flops * n, self.nbytes * n)


def step_cost(plan: Plan, step: Step, context: int | None = None, sizes: Mapping[str, int] | None = None) -> Cost:
    """Cost of a step with a longest sequence of `context` positions (default: the block table's). sizes: override the
    plan's rows (`tokens`), output rows (`outs`) and sequences (`slots`)."""
    bind = dict(step.bind)
    for axis, n in _resized(plan, step, sizes or {}):
        bind[axis] = n
    if context is not None and "MB" in bind and "BS" in bind:
        bind["MB"] = max(1, min(bind["MB"], -(-context // bind["BS"])))
    decls = {key: plan.tensors[name] for key, name in step.args.items()}
    dtypes = {key: d.dtype for key, d in decls.items()}
    cost = _declared(step.op, tuple(bind.items()), tuple(dtypes.items()), tuple(step.attrs.items()))
    for d in decls.values():  # counts mixed rows as of the widest type
        cost += Cost(0, d.data_bytes - DTYPES[d.dtype].nbytes(d.shape)) if d.row_types else Cost()
    return cost


@lru_cache(maxsize=4096)
def _declared(
    op: str,
    bind: tuple[tuple[str, int], ...],
    dtypes: tuple[tuple[str, str], ...],
    attrs: tuple[tuple[str, float | int | str], ...],
) -> Cost:
    """Evaluate the operation's cost formulas. Cached: layers of a plan repeat."""
    declared = load_op(op)
    return Cost(declared.flops(dict(bind), dict(attrs)), declared.nbytes(dict(bind), dict(dtypes), dict(attrs)))


def bytes_read(plan: Plan, names: Collection[str]) -> int:
    """Declared bytes that a plan's steps move of these tensors."""
    total = 0
    for step in plan.steps:
        if of := {key for key, name in step.args.items() if name in names}:
            dtypes = {key: plan.tensors[name].dtype for key, name in step.args.items()}
            total += load_op(step.op).nbytes(step.bind, dtypes, step.attrs, of)
    return total


def _resized(plan: Plan, step: Step, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Axes of a step that `sizes` overrides. Row axes are recognised by size, since the output head's token axis is
    output rows."""
    for axis, spec in load_op(step.op).axes.items() if sizes else ():
        role = spec.role
        if role == "tokens" and step.bind.get(axis) != plan.rows:
            role = "outs"
        if axis in step.bind and role in sizes:
            yield axis, sizes[role]


def plan_cost(plan: Plan, context: int | None = None, sizes: Mapping[str, int] | None = None) -> Cost:
    """The sum over a plan's steps; arguments as of `step_cost`."""
    return sum((step_cost(plan, s, context, sizes) for s in plan.steps), Cost())
