"""Generate the operation reference and the support matrix as Markdown from the operation specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybrid.spec.fields import (
    BACKENDS,
    EDGE_VALUES,
    FEATURES,
    SCALES,
    Attribute,
    Backend,
    BackendName,
    TensorSpec,
    Tolerance,
    Workload,
)
from hybrid.spec.op import OpSpec


def reference(ops: Mapping[str, OpSpec]) -> str:
    """The reference of all operations."""
    parts = [
        "# Operations\n",
        "Rows are flat: each row of a batch has a sequence slot and a position. A live count, which the device reads at "
        "run time, bounds an operation's token axis (T, or O for output rows); rows beyond it are undefined. State is "
        "persistent device memory. Backend support: [support matrix](support.md).\n",
        _table("operation, what it computes", [(f"[{n}](#{n})", _cell(o.op.summary)) for n, o in ops.items()]),
    ]
    parts += [_operation(o) for o in ops.values()]
    parts += [
        "## Terms\n",
        "The tolerance `scaled_bound` is `|e| <= c_out*u_out*|ref| + c*sqrt(reduction)*u_acc*scale` for every element: "
        "u is 2^-24 for f32 and 2^-11 for f16; u_acc that of the accumulation type. `codes` judges int8 activations: "
        "the same bound before quantisation plus half a code step, one code off allowed within `tie` of a "
        "half-integer, the stored sum exact. `choice`: the oracle's index, or one whose score is within `tie` of the "
        "best. A dtype without a line has f32's tolerance; integers are exact.\n",
        *(
            _table(f"{what}, is", [(f"`{k}`", v) for k, v in known.items()])
            for what, known in (("scale", SCALES), ("edge value", EDGE_VALUES), ("device feature", FEATURES))
        ),
    ]
    return "\n".join(parts)


def _operation(o: OpSpec) -> str:
    members = f" Region of {', '.join(o.op.members)}: its oracle is their composition." if o.op.members else ""
    parts = [f"## {o.name}\n", f"{o.op.summary}.{members}\n", f"Source: {o.op.source}.\n"]
    parts.append(_table("tensor, , shape, dtype, role, notes", [_tensor(o, n, t) for n, t in o.tensors.items()]))
    parts.append(
        _table(
            "axis, role, range, multiple of, summed over",
            [
                (
                    n,
                    a.role,
                    f"{a.min}..{a.max}",
                    f"{a.multiple_of}" if a.multiple_of > 1 else "",
                    "yes" if a.reduction else "",
                )
                for n, a in o.axes.items()
            ],
        )
    )
    if o.attributes:
        parts.append(_table("attribute, type, range, default, ", [_attribute(n, a) for n, a in o.attributes.items()]))
    parts += [_rules(o), _numerics(o)]
    parts.append(f"Cost: `{o.cost.flops}` operations, `{o.cost.bytes}` bytes.\n")
    parts.append(_requirements(o))
    parts.append("Edge cases: " + ", ".join(f"`{c}`" for c in o.edges) + ".\n")
    rows = [_workload(o, w) for w in o.workload]
    parts.append(_table("workload, axes, dtypes, operations, bytes, operations/byte", rows))
    return "\n".join(p for p in parts if p)


def _attribute(name: str, a: Attribute) -> tuple[str, ...]:
    limits = [f"{word} {b}" for word, b in ((">=", a.min), ("<=", a.max)) if b is not None]
    limits += [" or ".join(map(str, a.values))] if a.values else []
    return name, a.type, ", ".join(limits), "required" if a.default is None else str(a.default), _cell(a.summary)


def _rules(o: OpSpec) -> str:
    rules = [f"- `{e}`" for e in o.constraints.exprs]
    rules += [f"- rows of ({', '.join(g)}) are pairwise different" for g in o.constraints.distinct]
    for r in o.dtype_rules:
        when = " and ".join(f"{t} is {'/'.join(d)}" for t, d in r.when.items())
        rules.append(f"- when {when}: " + " and ".join(f"{t} is {'/'.join(d)}" for t, d in r.require.items()))
    return "Constraints:\n" + "\n".join(rules) + "\n" if rules else ""


def _numerics(o: OpSpec) -> str:
    n = o.numerics
    line = (
        f"Numerics: accumulation {n.accumulate}; integer part {n.integer_part.replace('_', ' ')}; determinism "
        f"{n.determinism.replace('_', ' ')}; non-finite values: {n.nonfinite}.\n"
    )
    line += "".join(f"With {x} activations weights are rounded to {w}.\n" for x, w in n.operands.items())
    if n.matrices:
        types = " and ".join(f"{t} is {'/'.join(d)}" for t, d in n.matrices.dtypes.items())
        line += f"Where {types} and `{n.matrices.when}`, matrix units may round operands to f16.\n"
    tolerances = [(d, "results of this dtype", t) for d, t in o.tolerance.items()]
    tolerances += [(d, name, t) for name, spec in o.tensors.items() for d, t in spec.tolerance.items()]
    rows = [(d, who, _tolerance(t)) for d, who, t in tolerances]
    return line + "\n" + (_table("tolerance, of, metric", rows) if rows else "Results are exact.\n")


def _workload(o: OpSpec, w: Workload) -> tuple[str, ...]:
    flops, size = o.flops(w.bind, w.attrs), o.nbytes(w.bind, w.dtypes, w.attrs)
    shape = " ".join(f"{k}={v}" for k, v in w.bind.items())
    chosen = ", ".join(f"{t} {d}" for t, d in w.dtypes.items())
    return w.id, shape, chosen, quantity(flops), quantity(size), f"{flops / size:.3g}" if size else ""


def _tensor(o: OpSpec, name: str, t: TensorSpec) -> tuple[str, ...]:
    kind = {"inputs": "in", "outputs": "out"}.get(o.section(name), o.section(name))
    notes = [t.summary] if t.summary else []
    notes += [f"verified given {', '.join(t.given)}"] if t.given else []
    dtype = f"as {t.same}" if t.same else " ".join(t.dtype)
    return name, kind, f"[{', '.join(map(str, t.shape))}]", dtype, t.role, _cell("; ".join(notes))


def _tolerance(t: Tolerance) -> str:
    if t.metric in ("exact", "choice"):
        return t.metric + (f", tie {t.tie:g}" if t.tie is not None else "")
    tie = f", tie {t.tie:g}" if t.tie is not None else ""
    out = f", c_out {t.c_out:g}" if t.c_out != 1 else ""
    return f"{t.metric}: c {t.c:g}, reduction {t.reduction}, scale {t.scale}{out}{tie}"


def support(ops: Mapping[str, OpSpec]) -> str:
    """docs/support.md: one line for each operation, with the dtypes that a backend does not support."""
    whole = [b for b in BACKENDS if all(_support(o, b) == "yes" for o in ops.values())]
    shown = [b for b in BACKENDS if b not in whole]
    lines = [
        "# Support matrix\n",
        "Made from `specs/ops` by `make docs`; `make check` compares it. *yes*: every case of the operation runs in "
        "`conformance/ops`. *no*: unsupported, for the reason below. *not ...*: the dtypes that this backend does not support. "
        "Vulkan re-encodes those when it loads a file ([storage types](quantisation.md)). `python -m hybrid.spec docs` "
        "prints the device features that each kernel needs.\n",
    ]
    if whole:
        lines.append(f"Every operation runs in every declared dtype on: {', '.join(f'`{b}`' for b in whole)}.\n")
    rows = [(f"`{o.name}`", *(_support(o, b) for b in shown)) for o in ops.values()]
    lines += [_table(", ".join(("operation", *shown)), rows), _refusals(ops)]
    return "\n".join(line for line in lines if line)


def _support(o: OpSpec, backend: BackendName) -> str:
    if not o.runs_on(backend):
        return "no"
    choices = o.dtype_choices(backend)
    missing = []
    for name, t in o.tensors.items():
        lost = [d for d in t.dtype if t.same is None and not any(c[name] == d for c in choices)]
        if lost:
            missing.append(f"{name} {'/'.join(lost)}")
    return f"not {', '.join(missing)}" if missing else "yes"


def _refusals(ops: Mapping[str, OpSpec]) -> str:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for o in ops.values():
        for backend, reason in o.not_on.items():
            by_reason.setdefault((backend, reason), []).append(f"`{o.name}`")
    return "".join(f"- not on {n}: {', '.join(names)}: {_cell(reason)}.\n" for (n, reason), names in by_reason.items())


def _requirements(o: OpSpec) -> str:
    """Device features and limits by backend."""
    rows = [
        (name, ", ".join(b.requires) or "-", _needs(o, name), ", ".join(b.uses) or "-", _limits(b))
        for name, b in o.backends.items()
        if b.requires or b.requires_for or b.uses or b.limits or b.static
    ]
    return _table("backend, needs, by dtype, uses if present, limits", rows) if rows else ""


def _needs(o: OpSpec, backend: BackendName) -> str:
    taken = {d for choice in o.dtype_choices(backend) for d in choice.values()}
    asked = {d: f for d, f in o.backend(backend).requires_for.items() if d in taken}
    return "; ".join(f"{d}: {', '.join(f)}" for d, f in asked.items()) or "-"


def _limits(b: Backend) -> str:
    static = [f"known when built: {', '.join(b.static)}"] if b.static else []
    return "; ".join([*(f"`{e}`" for e in b.limits), *static]) or "-"


def quantity(n: float) -> str:
    """1234567 -> 1.23 M"""
    for unit in ("", " k", " M", " G"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g} T"


def _cell(text: str) -> str:
    # escape * and _ of formulas, and |, which would end the cell
    return "".join(f"\\{c}" if c in "|*_" else c for c in text)


def _table(head: str, rows: Sequence[tuple[str, ...]]) -> str:
    columns = tuple(head.split(", "))
    lines = [columns, tuple("-" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def plain(o: OpSpec) -> str:
    """The reference of one operation for a terminal, with aligned tables."""
    out: list[str] = []
    block: list[list[str]] = []
    for line in [*_operation(o).replace("\\", "").splitlines(), ""]:
        if line.startswith("|"):
            block.append([c.strip() for c in line.strip("|").split(" | ")])
            continue
        if block:
            widths = [max(map(len, column)) for column in zip(*block, strict=True)]
            rows = [r for r in block if set(r) != {"-"}]
            out += ["  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
            block = []
        out.append(line.removeprefix("## "))
    where = [n if o.runs_on(n) else f"not {n} ({o.not_on[n]})" for n in BACKENDS]
    return "\n".join(out).rstrip() + f"\n\nBackends: {', '.join(where)}"
