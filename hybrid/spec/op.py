"""The declaration of an operation: shapes, dtypes, costs and tolerances for the planner, backends and tests.

op = load_op("linear")
bind = op.solve({"x": (4, 256), "w": (768, 256)})    # {'T': 4, 'K': 256, 'N': 768}
op.bind_shapes(bind)["y"]                            # (4, 768)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from hybrid.core.dtypes import DTYPES, FILE_TYPES, native_types
from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.core.places import SPECS as SPECS_DIR
from hybrid.spec.asked import Asked
from hybrid.spec.assignments import assignments
from hybrid.spec.expr import Expr, ExprError
from hybrid.spec.fields import (
    BACKENDS,
    EXACT,
    NO_LIMITS,
    Attribute,
    Axis,
    Backend,
    BackendName,
    Constraints,
    Cost,
    DTypeRule,
    Edge,
    Head,
    Name,
    Numerics,
    Reason,
    Scalar,
    TensorSpec,
    Tolerance,
    Workload,
    Workloads,
)
from hybrid.spec.load import load_toml
from hybrid.spec.opcheck import check_declaration, check_workloads
from hybrid.spec.solve import Size, solve

_NO_WEIGHTS = DTYPES.keys() - FILE_TYPES.keys()


class OpSpec(Asked):
    """One file of specs/ops. Immutable; cross-checked on construction."""

    schema_version: Literal[1] = Field(alias="schema")
    op: Head
    axes: dict[Name, Axis] = Field(min_length=1)
    inputs: dict[Name, TensorSpec]
    outputs: dict[Name, TensorSpec] = Field(default_factory=dict)
    state: dict[Name, TensorSpec] = Field(default_factory=dict)
    """Persistent device memory, updated in place."""
    scratch: dict[Name, TensorSpec] = Field(default_factory=dict)
    """Intermediate results; the caller allocates them like outputs."""
    attributes: dict[Name, Attribute] = Field(default_factory=dict)
    constraints: Constraints = Constraints()
    dtype_rules: tuple[DTypeRule, ...] = ()
    numerics: Numerics = Numerics()
    tolerance: dict[str, Tolerance] = Field(default_factory=dict)
    """By dtype of a result. Integers are exact; other missing types use f32's."""
    cost: Cost
    edge: Edge
    workloads: tuple[Workloads, ...] = Field((), exclude=True)
    """Derivation of workloads from models. None: a decode and a prefill pass of each model whose schedule has the
    operation."""
    not_on: dict[BackendName, Reason] = Field(default_factory=dict)
    """Backends that do not support it, with reasons; all others do."""
    backends: dict[BackendName, Backend] = Field(default_factory=dict)
    """Limits by backend."""

    _file: str = PrivateAttr("")

    def model_post_init(self, context: Any) -> None:
        self._file = (context or {}).get("file", f"specs/ops/{self.op.name}.toml")
        check_declaration(self)

    @field_validator("attributes", mode="after")
    @classmethod
    def _attributes(cls, value: dict[str, Attribute], info: ValidationInfo) -> dict[str, Attribute]:
        for name, a in value.items():
            for key, v in [("default", a.default)] + [(f"values[{i}]", v) for i, v in enumerate(a.values or ())]:
                if v is not None and not _typed(v, a.type):
                    raise ValueError(f"{name}.{key}: {v!r} is not of type {a.type}")
        return value

    @property
    def edges(self) -> tuple[str, ...]:
        """For each tiled axis a whole tile and one step more, and the declared edge cases."""
        tiled = [a for a in self.axes if any(a in b.tile for b in self.backends.values())]
        implied = [f"{a}={size}" for a in tiled for size in ("tile", f"tile+{self.axes[a].multiple_of}")]
        return tuple(dict.fromkeys((*implied, *self.edge.cases)))

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def file(self) -> str:
        """The path for messages: specs/ops/linear.toml."""
        return self._file

    @cached_property
    def workload(self) -> tuple[Workload, ...]:
        """The workloads, derived and checked lazily: planning and execution do not need them. Raises SpecError for the
        first invalid one."""
        from hybrid.spec.workload import derive

        try:
            made = tuple(derive(self))
            check_workloads(self, made)
        except FieldError as e:
            raise SpecError(f"{self.file}: {e.key}: {e.message}") from None
        return made

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """All tensors: inputs, outputs, state, scratch, each in the file's order."""
        return MappingProxyType({**self.inputs, **self.outputs, **self.state, **self.scratch})

    @cached_property
    def matrices(self) -> tuple[str, ...]:
        """Weight matrices: inputs of several dtypes with a reduction over rows."""
        return tuple(
            n
            for n, t in self.inputs.items()
            if t.role == "weight" and len(t.shape) == 2 and len(t.dtype) > 1 and self._summed(t.shape[1])
        )

    def _summed(self, dim: Expr) -> bool:
        axis = self.axes.get(str(dim))
        return axis is not None and axis.reduction

    @property
    def token_axis(self) -> str | None:
        """The axis that a live count bounds at run time: O for operations on output rows, else T; None: neither."""
        for role in ("outs", "tokens"):
            for name, axis in self.axes.items():
                if axis.role == role:
                    return name
        return None

    @cached_property
    def digest(self) -> str:
        """Content hash of the declaration, for binding measurements and artefacts to it."""
        return hashlib.sha256(self.model_dump_json(by_alias=True).encode()).hexdigest()

    def runs_on(self, backend: str) -> bool:
        """Whether a backend supports it. SpecError for an unknown backend."""
        return self._backend_name(backend) not in self.not_on

    def backend(self, name: str) -> Backend:
        """The limits of a backend. SpecError for an unknown backend."""
        return self.backends.get(self._backend_name(name), NO_LIMITS)

    def taken(self, backend: str) -> Mapping[str, tuple[str, ...]]:
        """Tensor -> dtypes that a backend supports, for tensors where it lacks some: declared limits, and for weights
        the backend's native types."""
        if backend not in self._taken:
            declared, native = dict(self.backend(backend).dtypes), native_types(backend)
            for name, t in self.inputs.items():
                if t.role == "weight" and name not in declared and not set(t.dtype) <= {*native, *_NO_WEIGHTS}:
                    declared[name] = tuple(d for d in t.dtype if d in native)
            self._taken[backend] = declared
        return self._taken[backend]

    @cached_property
    def _taken(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {}

    def bind_shapes(self, bind: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor for bound axes. Raises SpecError for an unknown or missing axis."""
        return {name: self.shape(name, bind) for name in self.tensors}

    def shape(self, tensor: str, bind: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one tensor; only its own axes need to be bound."""
        dims = []
        for i, dim in enumerate(self._tensor(tensor).shape):
            try:
                value = dim.eval(bind)
            except ExprError as e:
                raise self._error(f"{self.section(tensor)}.{tensor}.shape[{i}]", str(e)) from None
            if value != int(value) or value < 0:
                raise self._error(f"{tensor}.shape[{i}]", f"{dim} = {value} is not a size")
            dims.append(int(value))
        return tuple(dims)

    def section(self, tensor: str) -> str:
        """inputs, outputs, state or scratch."""
        return self.sections.get(tensor, "tensors")

    @cached_property
    def sections(self) -> dict[str, str]:
        """Section of each tensor, cached for planning."""
        return {t: s for s in ("scratch", "state", "outputs", "inputs") for t in getattr(self, s)}

    def solve(self, shapes: Mapping[str, tuple[int, ...]], bind: Mapping[str, int] | None = None) -> dict[str, int]:
        """Solve for the axes from concrete shapes of some or all tensors.

        `bind` fixes axes that the shapes leave open. Every given shape is checked. Raises SpecError naming two tensors
        that disagree, or an undetermined axis of a given tensor.
        """
        sizes: list[Size] = []
        for name, shape in shapes.items():
            dims = self._tensor(name).shape
            where = f"{self.section(name)}.{name}"
            if len(dims) != len(shape):
                raise self._error(f"{where}.shape", f"has {len(dims)} axes ({_dims(dims)}), got shape {tuple(shape)}")
            sizes += [Size(f"{where}.shape[{i}]", d, int(n)) for i, (d, n) in enumerate(zip(dims, shape, strict=True))]
        self._known_axes(bind or {})
        return solve(self.file, sizes, bind or {})

    def check(
        self,
        bind: Mapping[str, int],
        attrs: Mapping[str, Scalar] | None = None,
        dtypes: Mapping[str, str] | None = None,
        backend: str | None = None,
    ) -> None:
        """Check bound axes, attributes and dtypes against the declaration (and the limits of `backend`). SpecError.

        Missing attributes have their defaults. dtypes may name only some of the tensors.
        """
        self._known_axes(bind)
        for name, axis in self.axes.items():
            if name not in bind:
                raise self._error(f"axes.{name}", "is not bound")
            n = bind[name]
            if not axis.min <= n <= axis.max:
                raise self._error(f"axes.{name}", f"{name} = {n} is outside {axis.min}..{axis.max}")
            if n % axis.multiple_of:
                raise self._error(f"axes.{name}", f"{name} = {n} is not a multiple of {axis.multiple_of}")
        if backend is not None and not self.runs_on(backend):
            raise self._error(f"not_on.{backend}", self.not_on[self._backend_name(backend)])
        env = {**bind, **self.attrs(bind, attrs)}
        limits = [(f"constraints.exprs[{i}]", e) for i, e in enumerate(self.constraints.exprs)]
        if backend is not None:
            limits += [(f"backends.{backend}.limits[{i}]", e) for i, e in enumerate(self.backend(backend).limits)]
        for key, expr in limits:
            if not self._eval(key, expr, env):
                given = ", ".join(f"{n} = {env[n]}" for n in sorted(expr.names))
                raise self._error(key, f"{expr} does not hold for {given}")
        if dtypes is not None:
            self.check_dtypes(dtypes, backend)
            for name, dtype in dtypes.items():
                block = DTYPES[dtype].block
                if block > 1 and (shape := self.shape(name, bind))[-1] % block:
                    key = f"{self.section(name)}.{name}.dtype"
                    raise self._error(key, f"{dtype} needs rows of a multiple of {block} elements, not shape {shape}")

    def attrs(self, bind: Mapping[str, int], attrs: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
        """Attributes with defaults filled in, each checked for type, values and range. Raises SpecError."""
        given = dict(attrs or {})
        for name in given:
            if name not in self.attributes:
                raise self._error("attributes", f"no attribute {name!r}{nearest(name, self.attributes)}")
        out: dict[str, Scalar] = {}
        for name, a in self.attributes.items():
            value = given.get(name, a.default)
            key = f"attributes.{name}"
            if value is None:
                raise self._error(key, "has no default and is not given")
            if not _typed(value, a.type):
                raise self._error(key, f"{value!r} is not of type {a.type}")
            if a.values is not None and value not in a.values:
                raise self._error(key, f"{value!r} is not one of {', '.join(map(repr, a.values))}")
            out[name] = value
        for name, a in self.attributes.items():
            for bound, sign, word in ((a.min, 1, "below"), (a.max, -1, "above")):
                if bound is None:
                    continue
                limit = self._eval(f"attributes.{name}", bound, {**bind, **out})
                if not sign * float(out[name]) >= sign * limit:
                    raise self._error(f"attributes.{name}", f"{out[name]} is {word} {limit}")
        return out

    def check_dtypes(self, dtypes: Mapping[str, str], backend: str | None = None) -> None:
        """Check a combination of dtypes of some or all tensors. Raises SpecError naming the violated rule."""
        for name, dtype in dtypes.items():
            spec, key = self._tensor(name), f"{self.section(name)}.{name}.dtype"
            if spec.same is not None:
                other = dtypes.get(spec.same, dtype)
                if dtype != other:
                    raise self._error(key, f"{name} is {dtype} but must be {other}, as {spec.same} is")
                spec = self._tensor(spec.same)
            if dtype not in spec.dtype:
                raise self._error(key, f"{dtype} is not allowed; allowed: {', '.join(spec.dtype)}")
            narrow = self.taken(backend).get(name) if backend else None
            if narrow is not None and dtype not in narrow:
                key = f"backends.{backend}.dtypes.{name}"
                help_ = f"; choose one of them by kv, or place {self.name} elsewhere" if spec.role == "cache" else ""
                raise self._error(key, f"{dtype} is not allowed; allowed: {', '.join(narrow)}{help_}")
        for i, rule in enumerate(self.dtype_rules):
            if all(dtypes.get(t) in allowed for t, allowed in rule.when.items()):
                for tensor, allowed in rule.require.items():
                    if tensor in dtypes and dtypes[tensor] not in allowed:
                        why = " and ".join(f"{t} is {dtypes[t]}" for t in rule.when)
                        what = f"{tensor} must be {' or '.join(allowed)} when {why}, not {dtypes[tensor]}"
                        raise self._error(f"dtype_rules[{i}]", what)

    def dtype_choices(self, backend: str | None = None) -> tuple[Mapping[str, str], ...]:
        """Every valid assignment of dtypes to all tensors; with `backend`, those that it supports."""
        fewer = backend if backend is not None and self.taken(backend) else None
        if fewer not in self._choices_of:
            self._choices_of[fewer] = assignments(self, fewer)
        return self._choices_of[fewer]

    def dtypes(self, given: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """The first valid assignment that agrees with `given`. Raises SpecError if there is none."""
        given = dict(given or {})
        key = tuple(sorted(given.items()))
        if key not in self._first_choice:
            self.check_dtypes(given)
            choice = next((c for c in self.dtype_choices() if all(c[t] == d for t, d in given.items())), None)
            if choice is None:
                raise self._error("dtype_rules", f"no assignment of dtypes agrees with {given}")
            self._first_choice[key] = choice
        return self._first_choice[key]

    @cached_property
    def _first_choice(self) -> dict[tuple[tuple[str, str], ...], Mapping[str, str]]:
        """Cache of `dtypes`."""
        return {}

    @cached_property
    def _choices_of(self) -> dict[str | None, tuple[Mapping[str, str], ...]]:
        """Cache of `dtype_choices`, by backend or None."""
        return {}

    def tolerance_of(self, tensor: str, dtype: str) -> Tolerance:
        """The tolerance of an output, state or scratch tensor of `dtype`. Raises SpecError if none is declared."""
        own = self._tensor(tensor).tolerance
        for table in (own, self.tolerance):
            if dtype in table:
                return table[dtype]
        if dtype not in FILE_TYPES and not DTYPES[dtype].quantised:
            return EXACT
        for table in (own, self.tolerance):
            if "f32" in table:
                return table["f32"].rounded_to(dtype)
        raise self._error("tolerance", f"none for {dtype}, which {tensor} may have; add [tolerance.{dtype}]")

    def flops(self, bind: Mapping[str, int], attrs: Mapping[str, Scalar] | None = None) -> int:
        """Arithmetic operations of one call (a multiply-add counts as 2)."""
        return math.ceil(self._eval("cost.flops", self.cost.flops, {**bind, **self.attrs(bind, attrs)}))

    def nbytes(
        self,
        bind: Mapping[str, int],
        dtypes: Mapping[str, str],
        attrs: Mapping[str, Scalar] | None = None,
        of: Collection[str] | None = None,
    ) -> int:
        """Bytes that must move to and from device memory in one call, each tensor touched once. of: only these
        tensors'."""
        full = self.dtypes(dtypes)
        env = {**bind, **self.attrs(bind, attrs)}
        sizes = {t: DTYPES[full[t]].bits / 8 if of is None or t in of else 0.0 for t in full}
        return math.ceil(self._eval("cost.bytes", self.cost.bytes, env, sizes.__getitem__))

    def judged_on(self, backend: str | None) -> OpSpec:
        """The operation with a backend's own tolerances and unit roundoff, for judging its results."""
        b = self.backend(backend) if backend else None
        if b is None or (not b.tolerance and b.accumulate is None):
            return self
        numerics = self.numerics.model_copy(update={"accumulate": b.accumulate or self.numerics.accumulate})
        return self.model_copy(update={"tolerance": {**self.tolerance, **b.tolerance}, "numerics": numerics})

    def requirements(self, backend: str, dtypes: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Device features that `backend` requires: for these dtypes, or for all dtypes."""
        b = self.backend(backend)
        used = set(self.dtypes(dtypes).values()) if dtypes is not None else set(b.requires_for)
        extra = [f for d, features in b.requires_for.items() if d in used for f in features]
        return tuple(dict.fromkeys([*b.requires, *extra]))

    def _eval(self, key: str, expr: Expr, env: Mapping[str, Any], size: Any = None) -> Any:
        try:
            return expr.eval(env, size)
        except ExprError as e:
            raise self._error(key, str(e)) from None

    def _known_axes(self, bind: Mapping[str, int]) -> None:
        for name in bind:
            if name not in self.axes:
                raise self._error("axes", f"no axis {name!r}{nearest(name, self.axes)}")

    def _tensor(self, name: str) -> TensorSpec:
        if name not in self.tensors:
            raise self._error("tensors", f"no tensor {name!r}{nearest(name, self.tensors)}")
        return self.tensors[name]

    def _backend_name(self, name: str) -> BackendName:
        for known in BACKENDS:
            if known == name:
                return known
        raise self._error("backends", f"no backend {name!r}{nearest(name, BACKENDS)}")

    def _error(self, key: str, message: str) -> SpecError:
        return SpecError(f"{self.file}: {key}: {message}")


def _typed(value: Scalar, kind: str) -> bool:
    if kind == "str" or isinstance(value, (str, bool)):
        return kind == "str" and isinstance(value, str)
    return isinstance(value, int) if kind == "int" else math.isfinite(value)


def _dims(dims: tuple[Expr, ...]) -> str:
    return ", ".join(map(str, dims))


@lru_cache(maxsize=256)
def _load(path: Path) -> OpSpec:
    spec = load_toml(path, OpSpec)
    if spec.name != path.stem:
        raise SpecError(f"{spec.file}: op.name: {spec.name!r} must be the file's name, {path.stem!r}")
    for i, member in enumerate(spec.op.members):
        if not path.with_name(f"{member}.toml").exists():
            known = [p.stem for p in path.parent.glob("*.toml") if p.stem != spec.name]
            raise SpecError(f"{spec.file}: op.members[{i}]: no operation {member!r}{nearest(member, sorted(known))}")
    return spec


def load_op(name_or_path: str | Path) -> OpSpec:
    """An operation by name (`linear`) or by the path of its TOML file. Cached. Raises SpecError."""
    if str(name_or_path).endswith(".toml"):
        return _load(Path(name_or_path).resolve())
    return _named(SPECS_DIR, str(name_or_path))  # cached: planning calls this thousands of times


@lru_cache(maxsize=256)
def _named(specs: Path, name: str) -> OpSpec:
    path = specs / "ops" / f"{name}.toml"
    if not path.exists():
        raise SpecError(f"specs/ops: no operation {name!r}{nearest(name, op_names(path.parent))}")
    return _load(path.resolve())


@lru_cache(maxsize=4)
def op_names(folder: Path = SPECS_DIR / "ops") -> tuple[str, ...]:
    """Names of all operations in a folder, sorted, without reading the files."""
    return tuple(sorted(p.stem for p in folder.glob("*.toml")))


def load_ops(directory: Path | None = None) -> dict[str, OpSpec]:
    """Every operation of a directory (default: specs/ops), by name. Cached. Raises SpecError, also for an empty
    directory."""
    return dict(_all(SPECS_DIR / "ops") if directory is None else _all.__wrapped__(directory))


@lru_cache(maxsize=4)
def _all(directory: Path) -> dict[str, OpSpec]:
    folder = directory.resolve()
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise SpecError(f"{folder}: holds no operation specs (*.toml)")
    return {p.stem: _load(p) for p in files}
