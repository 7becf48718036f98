"""Prefill passes that overlap on several devices. Each uses a pipeline slot: rows, control words and activations of its
own (`TensorDecl.per_pass`); weights, caches and the state of sequences are shared. Which segments of an earlier pass a
later one waits for is read off the plans (`needs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.planning.segments import Segment
from hybrid.spec import load_op
from hybrid.spec.schedule import Schedule

TABLES = ("global_table", "local_table")
"""Arguments of begin_pass by which overlapping passes do not wait for one another: what it enters of a slot is beyond the
positions that a pass in flight has reached, and no slot changes hands meanwhile (Limits.overlap)."""
CACHES = ("k_cache", "v_cache")  # arguments that are read and appended to through block_table


def pipeline_depth(schedule: Schedule) -> int:
    """Prefill passes that a schedule lets overlap: 1 where all its steps are the main device's."""
    elsewhere = any(s.device != "main" for s in schedule.steps)
    return schedule.schedule.pipeline if elsewhere else 1


def caches_elsewhere(schedule: Schedule) -> bool:
    """Does a device other than the main one read or append to caches? One on the host sees the memory itself."""
    return any(s.device not in ("main", "cpu") and set(CACHES) & set(load_op(s.op).tensors) for s in schedule.steps)


def name_in_slot(name: str, pipeline_slot: int) -> str:
    """The name of a pass's own tensor in a pipeline slot; slot 0 keeps the plan's names."""
    return f"{name}@{pipeline_slot}" if pipeline_slot else name


def is_result(name: str) -> bool:
    """Logits and hidden states that a plan leaves for the host: their tensors are stored when they are first asked
    for."""
    return name.partition("@")[0] == "logits" or name.startswith("hidden.")


def outlasting(plans: Iterable[Plan]) -> dict[str, TensorDecl]:
    """What must be stored for these plans: all but activations and results, each as large as any plan declares it."""
    decls: dict[str, TensorDecl] = {}
    for name, decl in (item for p in plans for item in p.tensors.items()):
        if decl.kind != "activation" and not is_result(name):
            decls[name] = max(decls.get(name, decl), decl, key=lambda d: d.shape)
    return decls


def for_pipeline_slot(plan: Plan, pipeline_slot: int, arena_bytes: int) -> Plan:
    """The same pass on the tensors of a pipeline slot and its range of the arena; slot 0 keeps the plan's names.
    arena_bytes: of each slot's range, at least the plan's."""
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


def written(steps: Sequence[Step]) -> list[str]:
    """Tensors that steps write: results, scratch and state."""
    ops = [(s, load_op(s.op)) for s in steps]
    return list(dict.fromkeys(s.args[n] for s, op in ops for n in (*op.outputs, *op.scratch, *op.state)))


def needs(earlier: Sequence[Segment], later: Sequence[Segment]) -> tuple[tuple[int, ...], ...]:
    """For each segment of a later pass: the segments of an earlier one that must be done before it begins, because it
    reads what they write, or writes what they read or write."""
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
