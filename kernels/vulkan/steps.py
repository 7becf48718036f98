"""The recording loop: the steps of a plan in order, each by its operation's binding or within a fused group, and behind
each dispatch the TLB prefetch that the tuning table asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybrid.core.plan import Plan, Step
from hybrid.kernels.vulkan.groups import Binding, Tensors
from hybrid.kernels.vulkan.ops import BINDINGS, GROUPS
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor
from hybrid.kernels.vulkan.tlb_prefetch import TlbPrefetch

BEGUN_BY = {op: [(ops, group) for ops, group in GROUPS.items() if ops[0] == op] for op in {ops[0] for ops in GROUPS}}
"""The groups that begin with an operation, in GROUPS' order."""


def record_steps(
    rec: Recorder, plan: Plan, tensors: Mapping[str, DeviceTensor], binding: Callable[[str], Binding]
) -> None:
    """Record every step of a plan. `tensors`: by their names in the plan; `binding`: of an operation. An operation
    whose binding is not the shipped one is recorded by that, and never within a fused group."""
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
    """Steps recorded as a fused group from `first` on: 0 where no fused group begins there or none of them fits."""
    for ops, group in BEGUN_BY.get(steps[first].op, ()):
        end = first + len(ops)
        matches = tuple(s.op for s in steps[first:end]) == ops and all(binding(op) is BINDINGS[op] for op in ops)
        matches = matches and not any(s.counts for s in steps[first:end])  # they read more of a plan's control
        if matches and group(rec, steps[first:end], args[first:end]):
            return len(ops)
    return 0
