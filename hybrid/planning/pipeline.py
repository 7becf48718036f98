"""Passes that overlap: each has a set (a lane) of rows, control words and activations of its own; weights, caches and what
belongs to sequences are one. What one pass may not do before another is done is read off the plans.

A pass appends positions of its own to a cache and reads those up to them. So of two passes in flight the later one reads
what the earlier appended, and overwrites nothing that it still reads: rings have room for the rows of every lane
(CacheShape's chunk).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from re import sub

from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.planning.planner import Segment
from hybrid.spec import load_ops
from hybrid.spec.schedule import Schedule

CACHES = ("k_cache", "v_cache")  # arguments that are read and appended to through block_table


def lanes_of(schedule: Schedule) -> int:
    """Prefill passes that a schedule lets overlap: 1 where all its steps are the main device's."""
    elsewhere = any(s.device != "main" for s in (*schedule.before, *schedule.layer, *schedule.after))
    return schedule.schedule.pipeline if elsewhere else 1


def named(name: str, lane: int) -> str:
    """What a pass's own tensor is called in a lane."""
    return f"{name}@{lane}" if lane else name


def is_result(name: str) -> bool:
    """Numbers that a plan leaves for the host when it is asked to: their tensors are made then."""
    return name.partition("@")[0] == "logits" or name.startswith("hidden.")


def outlasting(plans: Iterable[Plan]) -> dict[str, TensorDecl]:
    """What must be stored for these plans: all but activations and results, each as large as any plan declares it."""
    decls: dict[str, TensorDecl] = {}
    for name, decl in (item for p in plans for item in p.tensors.items()):
        if decl.kind != "activation" and not is_result(name):
            decls[name] = max(decls.get(name, decl), decl, key=lambda d: d.shape)
    return decls


def in_lane(plan: Plan, lane: int, schedule: Schedule, arena_bytes: int) -> Plan:
    """The same pass on the tensors and the part of the arena of a lane; lane 0 keeps the plan's names. arena_bytes: of each
    lane's part, at least the plan's."""
    if plan.arena_bytes > arena_bytes:
        raise ValueError(f"plan {plan.name} has {plan.arena_bytes} bytes of activations, a lane {arena_bytes}")
    own = {n: named(n, lane) if passing(plan, n, schedule) else n for n in plan.tensors}

    def moved(decl: TensorDecl) -> TensorDecl:
        shift = lane * arena_bytes if decl.kind == "activation" else 0
        return replace(decl, name=own[decl.name], offset=decl.offset + shift)

    steps = tuple(replace(s, args={k: own[n] for k, n in s.args.items()}) for s in plan.steps)
    tensors = {own[n]: moved(d) for n, d in plan.tensors.items()}
    name = f"{plan.name}@{lane}" if lane else plan.name
    size = (lane + 1) * arena_bytes
    return replace(plan, name=name, steps=steps, tensors=tensors, arena_bytes=size, control=own[plan.control], lane=lane)


def passing(plan: Plan, name: str, schedule: Schedule) -> bool:
    """Does a tensor belong to one pass? Activations, control words, rows, outputs and what goes from one device to another
    do; weights, state, and what the schedule declares for sequences (`params`, `history`) do not."""
    if plan.tensors[name].kind in ("weight", "state"):
        return False
    for text, declared in schedule.tensors.items():
        if name != plan.control and fnmatchcase(name, sub(r"\{[^}]*\}", "*", text)):
            return bool({"T", "O"} & {n for e in declared.shape for n in e.names})
    return True


@dataclass(frozen=True, slots=True)
class Uses:
    """Tensors that a segment's steps read and write. appended: caches among them, of which a pass writes only its own
    positions."""

    reads: frozenset[str]
    writes: frozenset[str]
    appended: frozenset[str]


def uses(segment: Segment) -> Uses:
    ops = load_ops()
    reads = {s.args[n] for s in segment.steps for n in (*ops[s.op].inputs, *ops[s.op].state)}
    appended = {s.args[n] for s in segment.steps for n in CACHES if n in s.args and "block_table" in s.args}
    return Uses(frozenset(reads), frozenset(written(segment.steps)), frozenset(appended))


def written(steps: Sequence[Step], control: str = "control") -> list[str]:
    """Tensors that steps write: results, scratch and state; the control tensor where an operation sets words of it."""
    ops = load_ops()

    def of(step: Step) -> list[str]:
        spec = ops[step.op]
        made = [step.args[n] for n in (*spec.outputs, *spec.scratch, *spec.state)]
        return made + ([control] if spec.op.writes_control else [])

    return list(dict.fromkeys(n for s in steps for n in of(s)))


def needs(earlier: Sequence[Segment], later: Sequence[Segment]) -> tuple[tuple[int, ...], ...]:
    """For each segment of a later pass: the segments of an earlier one that must be done before it begins, because it reads
    what they write, or writes what they read or write."""
    before, after = [uses(s) for s in earlier], [uses(s) for s in later]
    readers, writers = _by_tensor([u.reads for u in before]), _by_tensor([u.writes for u in before])
    found = []
    for use in after:
        first = {i for n in use.reads for i in writers.get(n, ())}
        for name in use.writes:
            apart = {i for i in range(len(before)) if name in use.appended and name in before[i].appended}
            first |= {*readers.get(name, ()), *writers.get(name, ())} - apart
        found.append(tuple(sorted(first)))
    return tuple(found)


def _by_tensor(names: Sequence[frozenset[str]]) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, of in enumerate(names):
        for name in of:
            found.setdefault(name, []).append(i)
    return found
