"""Overlapping prefill passes on several devices. Each pass uses a pipeline slot with its own rows, control words and
activations (`TensorDecl.per_pass`); weights, caches and sequence state are shared. `needs` derives the dependencies
between segments of two passes from the plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.planning.segments import Segment
from hybrid.spec import load_op
from hybrid.spec.schedule import Schedule

TABLES = ("global_table", "local_table")
"""Arguments of begin_pass that create no dependency between overlapping passes. It writes only entries beyond the
positions of passes in flight, and no slot is reassigned meanwhile (Limits.overlap)."""
CACHES = ("k_cache", "v_cache")  # arguments accessed through block_table


def pipeline_depth(schedule: Schedule) -> int:
    """Prefill passes that may overlap under a schedule: 1 if all its steps are on the main device."""
    elsewhere = any(s.device != "main" for s in schedule.steps)
    return schedule.schedule.pipeline if elsewhere else 1


def caches_elsewhere(schedule: Schedule) -> bool:
    """Whether a secondary device accesses KV caches. A host device is excluded: it accesses the memory directly."""
    return any(s.device not in ("main", "cpu") and set(CACHES) & set(load_op(s.op).tensors) for s in schedule.steps)


def name_in_slot(name: str, pipeline_slot: int) -> str:
    """The name of a per-pass tensor in a pipeline slot; slot 0 keeps the plan's names."""
    return f"{name}@{pipeline_slot}" if pipeline_slot else name


def is_result(name: str) -> bool:
    """True for results that the host reads on request, stored on first use: logits, chosen experts, hidden states."""
    return name.partition("@")[0] == "logits" or name.startswith(("chosen.", "hidden."))


def outlasting(plans: Iterable[Plan]) -> dict[str, TensorDecl]:
    """Persistent tensors of these plans: all but activations and results, at the largest declared size."""
    decls: dict[str, TensorDecl] = {}
    for name, decl in (item for p in plans for item in p.tensors.items()):
        if decl.kind != "activation" and not is_result(name):
            decls[name] = max(decls.get(name, decl), decl, key=lambda d: d.shape)
    return decls


def for_pipeline_slot(plan: Plan, pipeline_slot: int, arena_bytes: int) -> Plan:
    """The plan on a pipeline slot's tensors and arena range; slot 0 keeps the plan's names. arena_bytes: size of each
    slot's range, at least the plan's."""
    if plan.arena_bytes > arena_bytes:
        raise ValueError(f"plan {plan.name} has {plan.arena_bytes} bytes of activations, a pipeline slot {arena_bytes}")
    if pipeline_slot == 0:
        return replace(plan, arena_bytes=arena_bytes)
    own = {n: name_in_slot(n, pipeline_slot) if d.per_pass else n for n, d in plan.tensors.items()}

    def moved(decl: TensorDecl) -> TensorDecl:
        shift = pipeline_slot * arena_bytes if decl.kind == "activation" else 0
        return replace(decl, name=own[decl.name], offset=decl.offset + shift)

    return replace(
        plan,
        name=name_in_slot(plan.name, pipeline_slot),
        steps=tuple(
            replace(s, args={k: own[n] for k, n in s.args.items()}, counts=own.get(s.counts, "")) for s in plan.steps
        ),
        tensors={own[n]: moved(d) for n, d in plan.tensors.items()},
        arena_bytes=(pipeline_slot + 1) * arena_bytes,
        control=own[plan.control],
    )


@dataclass(frozen=True, slots=True)
class Uses:
    """Tensors that a segment's steps read and write."""

    reads: frozenset[str]
    writes: frozenset[str]


def uses(segment: Segment) -> Uses:
    def named(step: Step, args: Iterable[str]) -> set[str]:
        return {step.args[n] for n in args if not (step.op == "begin_pass" and n in TABLES)}

    ops = [(s, load_op(s.op)) for s in segment.steps]
    reads = {n for s, op in ops for n in named(s, (*op.inputs, *op.state))} | {s.counts for s, _ in ops if s.counts}
    writes = {n for s, op in ops for n in named(s, (*op.outputs, *op.scratch, *op.state))}
    return Uses(frozenset(reads), frozenset(writes))


def results(steps: Sequence[Step]) -> list[str]:
    """Tensors that steps write for others: outputs and state."""
    ops = [(s, load_op(s.op)) for s in steps]
    return list(dict.fromkeys(s.args[n] for s, op in ops for n in (*op.outputs, *op.state)))


def written(steps: Sequence[Step]) -> list[str]:
    """Tensors that steps write: results and scratch."""
    return list(dict.fromkeys([*results(steps), *(s.args[n] for s in steps for n in load_op(s.op).scratch)]))


def needs(earlier: Sequence[Segment], later: Sequence[Segment]) -> tuple[tuple[int, ...], ...]:
    """For each segment of a later pass, the segments of an earlier pass that it depends on: read after write, write
    after read, write after write."""
    before, after = [uses(s) for s in earlier], [uses(s) for s in later]
    readers, writers = _by_tensor([u.reads for u in before]), _by_tensor([u.writes for u in before])
    found = []
    for use in after:
        first = {i for n in use.reads for i in writers.get(n, ())}
        for name in use.writes:
            first |= {*readers.get(name, ()), *writers.get(name, ())}
        found.append(tuple(sorted(first)))
    return tuple(found)


def _by_tensor(names: Sequence[frozenset[str]]) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, of in enumerate(names):
        for name in of:
            found.setdefault(name, []).append(i)
    return found
