"""Program-order check: objects are acquired before use and released, and the object counts of a core's ports agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from hybrid.kernels.npu.design import Acquire, Call, Design, Element, Finish, Loop, Release, Statement, Worker
from hybrid.kernels.npu.lower import Lowered

Found = tuple[str, str, str]


def disorder(low: Lowered) -> Iterator[Found]:
    """(where, rule, what is wrong) for each break of the order."""
    design = low.design
    for worker in design.workers:
        where = f"{design.name}: {worker.tile}"
        held: dict[str, int] = dict.fromkeys(worker.ports, 0)
        yield from (
            (where, "program order", text) for text in _body(design, worker, design.core(worker.core).body, held)
        )
        for port, count in held.items():
            if count:
                yield where, "program order", f"an iteration of {worker.core} keeps {count} objects of {port}"
    yield from _sequence(design)
    yield from _balance(design)


def _body(design: Design, worker: Worker, body: Sequence[Statement], held: dict[str, int]) -> Iterator[str]:
    names = {formal for formal, b in worker.binds if b.kind == "buffer"}
    yield from _walk(design, worker, body, held, {}, names)


def _walk(
    design: Design,
    worker: Worker,
    body: Sequence[Statement],
    held: dict[str, int],
    owner: dict[str, str],
    names: set[str],
) -> Iterator[str]:
    for s in body:
        if isinstance(s, Loop):
            before = dict(held)
            if isinstance(s.count, Element):
                yield from _bound(design, worker, s.count, names)
            yield from _walk(design, worker, s.body, held, owner, names | {s.index})
            if held != before:
                yield f"a loop of {worker.core} takes and gives different numbers of objects"
        elif isinstance(s, Acquire):
            if s.port not in worker.ports:
                yield f"acquires {s.port}, which is no port"
                continue
            if held[s.port]:
                yield f"acquires {s.port} while it holds objects of it: IRON would give the same ones again"
            held[s.port] += len(s.names)
            depth = design.fifo(worker.ports[s.port].name).depth
            if held[s.port] > depth:
                yield f"holds {held[s.port]} objects of {s.port}, whose depth is {depth}: it waits for itself"
            owner.update(dict.fromkeys(s.names, s.port))
        elif isinstance(s, Release):
            held[s.port] -= s.count
            if held[s.port] < 0:
                yield f"releases an object of {s.port} that it does not hold"
            for name in [n for n, p in owner.items() if p == s.port and held[s.port] <= 0]:
                del owner[name]
        else:
            yield from _call(design, worker, s, owner, names)


def _bound(design: Design, worker: Worker, count: Element, names: set[str]) -> Iterator[str]:
    """A loop's count that is read while the core runs."""
    bind = dict(worker.binds).get(count.buffer)
    if bind is None or count.buffer not in names:
        yield f"a loop of {worker.core} counts to an element of {count.buffer}, which is no buffer"
        return
    array = design.buffer(bind.name).array
    if array.dtype != "i32" or not 0 <= count.index < array.size:
        yield f"a loop of {worker.core} counts to element {count.index} of {count.buffer}, which has {array.size} {array.dtype}"


def _call(design: Design, worker: Worker, call: Call, owner: dict[str, str], names: set[str]) -> Iterator[str]:
    kernel = design.kernel(dict(worker.binds)[call.kernel].name)
    if len(call.args) != len(kernel.args):
        yield f"{kernel.name} is called with {len(call.args)} arguments, it takes {len(kernel.args)}"
        return
    for given, wanted in zip(call.args, kernel.args, strict=True):
        if isinstance(given, int) or given in names:
            number = isinstance(given, int) or (given not in dict(worker.binds))
            if number != (wanted == "i32"):
                yield f"{kernel.name} gets {given} where it takes {wanted if wanted == 'i32' else 'an array'}"
            elif not number and design.buffer(dict(worker.binds)[str(given)].name).array != wanted:
                yield f"{kernel.name} gets buffer {given}, whose type is another"
        elif given not in owner:
            yield f"{kernel.name} uses {given}, which is not acquired"
        elif design.fifo(worker.ports[owner[given]].name).array != wanted:
            yield f"{kernel.name} gets {given}, whose type is another"


def _sequence(design: Design) -> Iterator[Found]:
    open_groups: set[int] = set()
    filled = False
    for step in design.sequence:
        if isinstance(step, Finish):
            if step.group not in open_groups:
                yield design.name, "program order", f"group {step.group} is finished with no task in it"
            open_groups.discard(step.group)
            continue
        filled |= step.kind == "fill"
        if step.kind == "drain" and step.wait and not filled and _finished_next(design, step.group):
            yield design.name, "program order", f"the drain of {step.fifo} is waited for before anything is filled"
        open_groups.add(step.group)
    for group in sorted(open_groups):
        yield design.name, "program order", f"group {group} is never finished: its descriptors are never free"
    if not any(m.kind == "drain" and m.wait for m in design.moves()):
        yield design.name, "program order", "no drain is waited for: a run would end before its results are written"


def _finished_next(design: Design, group: int) -> bool:
    steps = list(design.sequence)
    end = next((i for i, s in enumerate(steps) if isinstance(s, Finish) and s.group == group), len(steps))
    return not any(not isinstance(s, Finish) and s.kind == "fill" for s in steps[:end])


def _balance(design: Design) -> Iterator[Found]:
    """Objects that the sequence sends and takes, against what one iteration of each core takes and sends."""
    objects: dict[str, Fraction] = {}
    for move in design.moves():
        objects[move.fifo] = objects.get(move.fifo, Fraction(0)) + Fraction(
            move.size, design.fifo(move.fifo).array.size
        )
    for name, count in objects.items():
        if count.denominator != 1:
            yield (
                f"{design.name}: {name}",
                "program order",
                f"the sequence moves {float(count):g} objects: not a whole number",
            )
    for link in design.links:
        if link.whole in objects:
            forward = design.fifo(link.target[0]) if len(link.source) == len(link.target) == 1 else None
            times = forward.repeat * design.fifo(link.whole).array.size // forward.array.size if forward else 1
            objects.update({p: objects[link.whole] * times for p in link.parts})
        elif link.parts[0] in objects:
            objects[link.whole] = objects[link.parts[0]]
    for worker in design.workers:
        per = {p: 0 for p in worker.ports}
        _releases(design.core(worker.core).body, per, 1)  # a port whose count the data decides is not in it afterwards
        rounds = {p: objects[b.name] / per[p] for p, b in worker.ports.items() if b.name in objects and per.get(p)}
        if len(set(rounds.values())) > 1 or any(r.denominator != 1 for r in rounds.values()):
            shown = ", ".join(f"{p} {float(r):g}" for p, r in rounds.items())
            yield (
                f"{design.name}: {worker.tile}",
                "program order",
                f"ports see different numbers of iterations: {shown}",
            )


def _releases(body: Sequence[Statement], per: dict[str, int], times: int) -> None:
    for s in body:
        if isinstance(s, Loop) and isinstance(s.count, int):
            _releases(s.body, per, times * s.count)
        elif isinstance(s, Loop):
            inside = dict.fromkeys(per, 0)
            _releases(s.body, inside, 1)
            for port in (p for p, count in inside.items() if count):
                per.pop(port, None)
        elif isinstance(s, Release) and s.port in per:
            per[s.port] += times * s.count
