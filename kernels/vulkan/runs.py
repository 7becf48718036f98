"""Recording the steps of a plan: one by one through their operations' bindings, or a run of them as one dispatch, where a
kernel does what they do together.

A run leaves in memory what its steps would have left one after another: every tensor that one of them writes. So its
proof needs no definition of its own: conformance judges each step by its operation's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

Tensors = Mapping[str, DeviceTensor]
Binding = Callable[[Recorder, Any, Tensors], None]
Run = Callable[[Recorder, Sequence[Step], Sequence[Tensors]], bool]
"""Records these steps as one dispatch; False where it cannot."""

LONGEST = 6  # steps that one dispatch may take


def record(rec: Recorder, steps: Sequence[Step], tensors: Tensors, binding: Callable[[str], Binding]) -> Iterator[range]:
    """Record all steps, and give the indices of those that were recorded together. `tensors`: by their names in the plan;
    `binding`: of an operation. An operation whose binding is not the shipped one is recorded by that, in no run."""
    from hybrid.kernels.vulkan.ops import BINDINGS, RUNS

    given = [{arg: tensors[name] for arg, name in step.args.items()} for step in steps]

    def run_from(first: int) -> int:
        """Steps that are recorded together from there on: 0 for none."""
        for ops, run in RUNS.items():
            end = first + len(ops)
            together = tuple(s.op for s in steps[first:end]) == ops and len(ops) <= LONGEST
            if together and all(binding(op) is BINDINGS[op] for op in ops) and run(rec, steps[first:end], given[first:end]):
                return len(ops)
        return 0

    at = 0
    while at < len(steps):
        rec.begin_step(at)
        taken = run_from(at)
        if not taken:
            taken = 1
            binding(steps[at].op)(rec, steps[at], given[at])
        yield range(at, at + taken)
        at += taken
