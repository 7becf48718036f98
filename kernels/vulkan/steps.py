"""Record a plan's steps in order: by the operation's binding or in a fused group, then the TLB prefetch that the tuning
table asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybrid.core.plan import Plan, Step
from hybrid.kernels.vulkan.groups import Binding, Tensors
from hybrid.kernels.vulkan.ops import BINDINGS, GROUPS
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor
from hybrid.kernels.vulkan.tlb_prefetch import TlbPrefetch

BEGUN_BY = {op: [(ops, group) for ops, group in GROUPS.items() if ops[0] == op] for op in {ops[0] for ops in GROUPS}}
"""Fused groups by their first operation, in GROUPS' order."""


def record_steps(
    rec: Recorder, plan: Plan, tensors: Mapping[str, DeviceTensor], binding: Callable[[str], Binding]
) -> None:
    """Record every step of a plan. `tensors`: by name in the plan. `binding`: returns an operation's binding; a
    replaced binding is never part of a fused group."""
    steps, prefetch = plan.steps, TlbPrefetch(rec, plan, tensors)
    rec.steps = steps
    args: list[Tensors] = [{arg: tensors[name] for arg, name in step.args.items()} for step in steps]
    at = 0
    while at < len(steps):
        counts = steps[at].counts
        rec.begin_step(at, tensors[counts].parts[0] if counts else None)
        count = _record_group(rec, steps, args, at, binding)
        if not count:
            count = 1
            binding(steps[at].op)(rec, steps[at], args[at])
        prefetch.record(range(at, at + count))
        at += count


def _record_group(
    rec: Recorder, steps: Sequence[Step], args: Sequence[Tensors], first: int, binding: Callable[[str], Binding]
) -> int:
    """Record a fused group that begins at step `first`; returns its number of steps, 0 where none fits."""
    for ops, group in BEGUN_BY.get(steps[first].op, ()):
        end = first + len(ops)
        matches = tuple(s.op for s in steps[first:end]) == ops and all(binding(op) is BINDINGS[op] for op in ops)
        matches = matches and not any(s.counts for s in steps[first:end])  # groups read the plan's control
        if matches and group(rec, steps[first:end], args[first:end]):
            return len(ops)
    return 0
