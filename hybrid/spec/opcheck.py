"""Cross-checks of an operation's declaration: undeclared names, unused axes, invalid workloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.spec.assignments import possible
from hybrid.spec.axes import roles
from hybrid.spec.expr import Expr, ExprError
from hybrid.spec.fields import EDGE_VALUES, Edge

if TYPE_CHECKING:
    from hybrid.spec.fields import Values, Workload
    from hybrid.spec.op import OpSpec


def check_declaration(spec: OpSpec) -> None:
    """Raises FieldError for the first problem."""
    _names(spec)
    _tensors(spec)
    _dtypes(spec)
    _expressions(spec)
    _tolerances(spec)
    _edges(spec)
    _backends(spec)


def _names(spec: OpSpec) -> None:
    if (spec.op.kind == "region") != bool(spec.op.members):
        raise FieldError("op.members", "a region names its member operations, and only a region does")
    if not spec.outputs and not spec.state:
        raise FieldError("outputs", "an operation has outputs or state; declare what it computes")
    seen: dict[str, str] = {}
    for section in ("axes", "attributes", "inputs", "outputs", "state", "scratch"):
        for name in getattr(spec, section):
            if name in seen:
                raise FieldError(f"{section}.{name}", f"the name is used in [{seen[name]}] already; choose another")
            seen[name] = section


def _tensors(spec: OpSpec) -> None:
    used: set[str] = set()
    earlier = [*spec.scratch, *spec.state]  # computed before the outputs
    for name, t in spec.tensors.items():
        at = f"{spec.section(name)}.{name}"
        for i, dim in enumerate(t.shape):
            _number(f"{at}.shape[{i}]", dim, spec.axes, "axis")
            used |= dim.names
        if t.domain is not None:
            for key in ("low", "high"):
                bound = getattr(t.domain, key)
                if bound is not None:
                    _number(f"{at}.domain.{key}", bound, [*spec.axes, *spec.attributes], "axis or attribute")
        if t.domain is None and name in spec.inputs:
            raise FieldError(f"{at}.domain", "is missing; say which values the input takes")
        for i, other in enumerate(t.given):
            if other not in earlier or other == name:
                raise FieldError(f"{at}.given[{i}]", f"no earlier result {other!r}{nearest(other, earlier)}")
        if name not in spec.inputs:
            earlier.append(name)
        elif t.given or t.tolerance:
            raise FieldError(f"{at}.{'given' if t.given else 'tolerance'}", "an input is not verified; remove it")
    for axis in spec.axes:
        if axis not in used:
            raise FieldError(f"axes.{axis}", "is used by no tensor's shape; remove it")
    for i, group in enumerate(spec.constraints.distinct):
        for tensor in group:
            if tensor not in spec.inputs:
                raise FieldError(f"constraints.distinct[{i}]", f"no input {tensor!r}{nearest(tensor, spec.inputs)}")


def _dtypes(spec: OpSpec) -> None:
    for name, t in spec.tensors.items():
        at = f"{spec.section(name)}.{name}.dtype"
        if t.same is None:
            if any(d.startswith("same:") for d in t.dtype):
                raise FieldError(at, "same:NAME stands alone; it cannot be one of several dtypes")
        elif t.same not in spec.tensors or spec.tensors[t.same].same is not None:
            free = [n for n, o in spec.tensors.items() if o.same is None]
            raise FieldError(at, f"no tensor {t.same!r} with dtypes of its own{nearest(t.same, free)}")
    rules = list(enumerate(spec.dtype_rules))
    tables = [(f"dtype_rules[{i}].{k}", getattr(r, k)) for i, r in rules for k in ("when", "require")]
    tables += [(f"backends.{n}.dtypes", b.dtypes) for n, b in spec.backends.items()]
    for at, table in tables:
        for tensor, dtypes in table.items():
            if tensor not in spec.tensors:
                raise FieldError(f"{at}.{tensor}", f"no tensor {tensor!r}{nearest(tensor, spec.tensors)}")
            source = spec.tensors[spec.tensors[tensor].same or tensor]
            for d in dtypes:
                if d not in source.dtype:
                    raise FieldError(f"{at}.{tensor}", f"{tensor} is never {d}; it may be {', '.join(source.dtype)}")
    if next(possible(spec, None), None) is None:
        raise FieldError("dtype_rules", "the rules leave no assignment of dtypes; loosen one")


def _expressions(spec: OpSpec) -> None:
    names = [*spec.axes, *spec.attributes]
    for i, expr in enumerate(spec.constraints.exprs):
        _condition(f"constraints.exprs[{i}]", expr, names)
    for key in ("flops", "bytes"):
        expr = getattr(spec.cost, key)
        _number(f"cost.{key}", expr, names, "axis or attribute", tensors=spec.tensors if key == "bytes" else ())
    for name, a in spec.attributes.items():
        for key in ("min", "max"):
            bound = getattr(a, key)
            if bound is not None:
                if a.type == "str":
                    raise FieldError(f"attributes.{name}.{key}", "a text has no range; use values")
                _number(f"attributes.{name}.{key}", bound, names, "axis or attribute")
        for i, value in enumerate(a.draw):
            _number(f"attributes.{name}.draw[{i}]", value, spec.axes, "axis")
        if len(set(a.draw or a.values or ())) < 2 and not any(value.names for value in a.draw):
            raise FieldError(
                f"attributes.{name}.draw",
                "tests need two values, or cannot tell whether a kernel reads it: add draw = [USUAL, ANOTHER]",
            )


def _tolerances(spec: OpSpec) -> None:
    results = {n: t for n, t in spec.tensors.items() if n not in spec.inputs}
    tables = [("tolerance", spec.tolerance)]
    tables += [(f"{spec.section(n)}.{n}.tolerance", t.tolerance) for n, t in results.items()]
    produced = {d for n in results for d in spec.tensors[spec.tensors[n].same or n].dtype}
    for at, table in tables:
        for dtype, tolerance in table.items():
            if dtype not in produced:
                raise FieldError(f"{at}.{dtype}", f"no result has this dtype{nearest(dtype, sorted(produced))}")
            _number(f"{at}.{dtype}.reduction", tolerance.reduction, spec.axes, "axis")
            if tolerance.metric == "codes" and dtype not in ("q8_act", "q8_0"):
                raise FieldError(
                    f"{at}.{dtype}.metric", "codes judges q8_act and q8_0 results; use scaled_bound or exact"
                )
    for name in results:
        for dtype in spec.tensors[spec.tensors[name].same or name].dtype:
            try:
                spec.tolerance_of(name, dtype)
            except SpecError as e:
                raise FieldError("tolerance", str(e).removeprefix(f"{spec.file}: tolerance: ")) from None


def _edges(spec: OpSpec) -> None:
    for i, case in enumerate(spec.edge.cases):
        key, settings = f"edge.cases[{i}]", Edge.settings(case)
        if twice := {n for n, _ in settings if sum(n == m for m, _ in settings) > 1}:
            raise FieldError(key, f"{case!r} sets {', '.join(sorted(twice))} twice; remove one")
        for target, value in settings:
            _setting(spec, key, target, value, case)


def _setting(spec: OpSpec, key: str, target: str, value: str, case: str) -> None:
    """One of an edge case's settings."""
    if not target or not value:
        raise FieldError(key, f"{case!r} is not of the form NAME=VALUE or NAME=VALUE, NAME=VALUE")
    if target in spec.axes:
        if value == "prime":
            if roles()[role := spec.axes[target].role].prime is None:
                raise FieldError(key, f"the role {role} has no prime in specs/axes.toml; write a size")
        else:
            size = _parse(key, value)
            _number(key, size, [*spec.axes, "tile"], "axis")
            if "tile" in size.names and not any(target in b.tile for b in spec.backends.values()):
                raise FieldError(key, f"no backend declares a tile of {target}; add tile = {{ {target} = ... }}")
    elif target in spec.attributes:
        _number(key, _parse(key, value), [*spec.axes, *spec.attributes], "axis or attribute")
    elif target in spec.tensors:
        if value not in EDGE_VALUES:
            raise FieldError(key, f"unknown kind of value {value!r}{nearest(value, EDGE_VALUES)}")
    else:
        known = [*spec.axes, *spec.attributes, *spec.tensors]
        raise FieldError(key, f"no axis, attribute or tensor {target!r}{nearest(target, known)}")


def _backends(spec: OpSpec) -> None:
    for name, b in spec.backends.items():
        if name in spec.not_on:
            raise FieldError(f"backends.{name}", f"not_on says that {name} does not run it; remove one of them")
        for i, limit in enumerate(b.limits):
            _condition(f"backends.{name}.limits[{i}]", limit, [*spec.axes, *spec.attributes])
        for i, table in enumerate(b.variants):
            _variant(f"backends.{name}.variants[{i}]", spec, table)
        for key in ("static", "tile"):
            for axis in getattr(b, key):
                if axis not in spec.axes:
                    raise FieldError(f"backends.{name}.{key}", f"no axis {axis!r}{nearest(axis, spec.axes)}")


def _variant(key: str, spec: OpSpec, table: Mapping[str, Values]) -> None:
    known = [*spec.axes, *spec.attributes]
    for names, values in table.items():
        for name in names.split(","):
            if name not in known:
                raise FieldError(f"{key}.{names}", f"no axis or attribute {name!r}{nearest(name, known)}")
        count = len(names.split(","))
        for value in values if isinstance(values, tuple) else (values,):
            if (len(value) if isinstance(value, tuple) else 1) != count:
                raise FieldError(f"{key}.{names}", f"{value!r} is not of {count} numbers")


def check_workloads(spec: OpSpec, workloads: Sequence[Workload]) -> None:
    """Check that ids are unique, and sizes, dtypes and attributes valid. FieldError for the first invalid workload."""
    seen: set[str] = set()
    for w in workloads:
        if w.id in seen:
            raise FieldError(w.origin, f"{w.id!r} is used twice; choose another")
        seen.add(w.id)
        try:
            spec.check(w.bind, w.attrs, spec.dtypes(w.dtypes))
            spec.flops(w.bind, w.attrs)
            spec.nbytes(w.bind, w.dtypes, w.attrs)
        except SpecError as e:
            raise FieldError(f"{w.origin} ({w.id})", str(e).removeprefix(f"{spec.file}: ")) from None


def _parse(key: str, text: str) -> Expr:
    try:
        return Expr(text)
    except ExprError as e:
        raise FieldError(key, str(e)) from None


def _number(key: str, expr: Expr, names: Iterable[str], what: str, tensors: Iterable[str] = ()) -> None:
    if expr.truth:
        raise FieldError(key, f"{str(expr)!r} is a condition; a number is needed")
    _uses(key, expr, names, what, tensors)


def _condition(key: str, expr: Expr, names: Iterable[str]) -> None:
    if not expr.truth:
        raise FieldError(key, f"{str(expr)!r} is a number; compare it with something")
    _uses(key, expr, names, "axis or attribute")


def _uses(key: str, expr: Expr, names: Iterable[str], what: str, tensors: Iterable[str] = ()) -> None:
    known, known_tensors = list(names), list(tensors)
    for name in sorted(expr.names):
        if name not in known:
            raise FieldError(key, f"unknown {what} {name!r} in {str(expr)!r}{nearest(name, known)}")
    for name in sorted(expr.tensors):
        if name not in known_tensors:
            raise FieldError(key, f"bytes({name}): no tensor {name!r}{nearest(name, known_tensors)}")
