"""Derive workloads of an operation: one for each model, variant and pass, with sizes by the axes' roles.

specs/workloads.toml defines the passes. It is read with the first operation, as is specs/models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.core.hparams import HParams
from hybrid.core.places import SPECS
from hybrid.spec.axes import roles
from hybrid.spec.expr import Expr, ExprError
from hybrid.spec.fields import Attribute, Axis, Scalar, Tag, Variant, Workload, Workloads
from hybrid.spec.load import Model, load_toml, shown_path
from hybrid.spec.model import Shape, load_models
from hybrid.spec.schedule import find_schedule

if TYPE_CHECKING:
    from hybrid.spec.op import OpSpec

FILE = SPECS / "workloads.toml"
MOST = 1000
"""Most workloads of an operation: bounds the time to read an untrusted file."""


class Pass(Model):
    """[passes.NAME]."""

    sizes: dict[str, Expr] = Field(default_factory=dict)
    tags: tuple[Tag, ...]


class Demo(Shape):
    """A demonstration model, not a published size."""

    family: str


class Source(Model):
    """specs/workloads.toml."""

    schema_: Literal[1] = Field(alias="schema")
    sizes: dict[str, Expr]
    passes: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], Pass]
    demos: dict[str, Demo]
    """Demonstration models; their workloads have the tag demo, those of published models perf."""

    def model_post_init(self, context: object) -> None:
        for name, one in self.passes.items():
            for size in one.sizes:
                if size not in self.sizes:
                    raise FieldError(f"passes.{name}.sizes.{size}", f"unknown size {size!r}{nearest(size, self.sizes)}")


class Givens:
    """Variables of a workload's expressions: hyper-parameters by model, sizes by pass."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.models = {name: sheet.hparams() for name, sheet in load_models().items()} | {
            name: demo.hparams(demo.family) for name, demo in source.demos.items()
        }
        """Models, smallest first, demonstration models last."""
        self._numbers: dict[tuple[str, str], dict[str, int | float]] = {}

    def numbers(self, model: str, name: str) -> Mapping[str, int | float]:
        """Hyper-parameters of a model (_numbers), and the sizes of the pass `name` if given."""
        if (model, name) not in self._numbers:
            found = _numbers(self.models[model])
            for size, expr in self.source.sizes.items() if name else ():
                try:
                    found[size] = _eval(size, self.source.passes[name].sizes.get(size, expr), found)
                except FieldError as e:
                    raise SpecError(f"{shown_path(FILE)}: passes.{name}: {e.key}: {e.message}") from None
            self._numbers[model, name] = found
        return self._numbers[model, name]

    def running(self, op: str) -> list[str]:
        """Models with the operation in their family's schedule."""
        having = {hp.family for hp in self.models.values() if any(s.op == op for s in find_schedule(hp.family).steps)}
        return [name for name, hp in self.models.items() if hp.family in having]

    def has(self, model: str, op: str, name: str) -> bool:
        """True if the model's schedule runs the operation in pass `name`."""
        steps = find_schedule(self.models[model].family).steps
        return name not in USUAL or any(s.op == op and s.phase in (None, name) for s in steps)


def _numbers(hp: HParams) -> dict[str, int | float]:
    """Numbers of the model, and of layers: NAME of the first, global_NAME of the first with full attention, last_NAME
    of the last; `window` of the local ones."""
    globals_ = [i for i, layer in enumerate(hp.layers) if not layer.window]
    kinds = {"": 0, "global_": globals_[0] if globals_ else 0, "last_": hp.n_layers - 1}
    of_layers = {
        f"{kind}{name}": n for kind, index in kinds.items() for name, n in hp.layers[index].numbers(index).items()
    }
    return {**of_layers, **hp.numbers, "window": hp.window}


@lru_cache(maxsize=1)
def givens() -> Givens:
    return Givens(load_toml(FILE, Source))


def derive(spec: OpSpec) -> Iterator[Workload]:
    """Yield an operation's workloads by table, model (smallest first, demonstrations last), variant and pass.

    Raises FieldError for an unknown model, pass, axis or name.
    """
    known, count = givens(), 0
    for i, group in enumerate(spec.workloads or (Workloads(passes=USUAL, dtypes=usual(spec)),)):
        models = _models(f"workloads[{i}]", spec.name, group, known)
        for model in models:
            for name, variant in (group.variants or {"": Variant()}).items():
                entry = Entry(f"workloads[{i}]", name, group, variant)
                for one in entry.passes(known.source.passes):
                    numbers = known.numbers(model, one)
                    bind = entry.bind(spec.axes, numbers)
                    if group.models is None and (0 in bind.values() or not known.has(model, spec.name, one)):
                        continue  # no such step in a model of this size, or in the pass
                    count += 1
                    if count > MOST:
                        raise FieldError(
                            entry.key, f"the operation has more than {MOST} workloads; name fewer variants or passes"
                        )
                    tags = known.source.passes[one].tags if one else ()
                    yield Workload(
                        id=".".join(part for part in (model, name, one) if part),
                        bind=bind,
                        attrs=entry.attrs(spec.attributes, numbers),
                        dtypes={**group.dtypes, **variant.dtypes},
                        tags=(*tags, *group.tags, "demo" if model in known.source.demos else "perf"),
                    ).derived_from(entry.key)


USUAL = ("decode", "prefill")


def usual(spec: OpSpec) -> dict[str, str]:
    """Tensor -> dtype in a model with q8_0 weights, for tensors that support it."""
    chosen: dict[str, str] = {}
    for name, tensor in spec.tensors.items():
        dtype = {"weight": "q8_0", "cache": "f16", "activation": "q8_act"}.get(tensor.role, "")
        if dtype in tensor.dtype and len(tensor.dtype) > 1:
            wider = {**chosen, name: dtype}
            if any(all(c[t] == d for t, d in wider.items()) for c in spec.dtype_choices()):
                chosen = wider
    return chosen


def _models(key: str, op: str, group: Workloads, known: Givens) -> list[str]:
    if group.models is None:
        if not (found := known.running(op)):
            raise FieldError(f"{key}.models", f"is missing: no model's schedule has {op}")
        return found
    for k, pattern in enumerate(group.models):
        if not any(fnmatchcase(m, pattern) for m in known.models):
            raise FieldError(f"{key}.models[{k}]", f"no model is called {pattern!r}{nearest(pattern, known.models)}")
    return [m for m in known.models if any(fnmatchcase(m, pattern) for pattern in group.models)]


@dataclass(frozen=True, slots=True)
class Entry:
    """One variant of a [[workloads]] table (`key`), or the table itself (name "")."""

    key: str
    name: str
    group: Workloads
    variant: Variant

    def at(self, field: str, name: str) -> str:
        """The key path of `field`: in the variant, else in the table."""
        return (
            f"{self.key}.variants.{self.name}.{field}"
            if name in getattr(self.variant, field)
            else f"{self.key}.{field}"
        )

    def passes(self, known: Mapping[str, Pass]) -> tuple[str, ...]:
        """Names of passes; one empty name if none is given."""
        own = self.variant.passes is not None
        passes = (self.variant.passes if own else self.group.passes) or ()
        for name in passes:
            if name not in known:
                key = f"{self.key}.variants.{self.name}.passes" if own else f"{self.key}.passes"
                raise FieldError(key, f"no pass is called {name!r}{nearest(name, known)}")
        return passes or ("",)

    def bind(self, axes: Mapping[str, Axis], numbers: Mapping[str, int | float]) -> dict[str, int]:
        """The size of each axis: as written, else its role's size in the model or the pass."""
        written = {**self.group.bind, **self.variant.bind}
        for name in written:
            if name not in axes:
                raise FieldError(f"{self.at('bind', name)}.{name}", f"no axis {name!r}{nearest(name, axes)}")
        bind = {}
        for name, axis in axes.items():
            key, usual_size = f"{self.at('bind', name)}.{name}", roles()[axis.role].size
            if name in written:
                size = _eval(key, written[name], numbers)
            elif usual_size is not None and usual_size.names <= numbers.keys():
                size = _eval(key, usual_size, numbers)
            else:
                raise FieldError(key, f"is missing: nothing here has the role {axis.role}; write an expression")
            if size != int(size):
                raise FieldError(key, f"{written[name]} = {size} is not a whole number")
            bind[name] = int(size)
        return bind

    def attrs(self, attributes: Mapping[str, Attribute], numbers: Mapping[str, int | float]) -> dict[str, Scalar]:
        """Attribute values; numbers are evaluated as expressions. Unknown attributes are refused by
        check_workloads."""
        attrs: dict[str, Scalar] = {}
        for name, value in {**self.group.attrs, **self.variant.attrs}.items():
            kind = attributes[name].type if name in attributes else "str"
            attrs[name] = value
            if kind != "str":
                key = f"{self.at('attrs', name)}.{name}"
                number = _eval(key, _parsed(key, value), numbers)
                attrs[name] = float(number) if kind == "float" else int(number) if number == int(number) else number
        return attrs


def _parsed(key: str, value: Scalar) -> Expr:
    try:
        return Expr(value)
    except ExprError as e:
        raise FieldError(key, str(e)) from None


def _eval(key: str, expr: Expr, numbers: Mapping[str, int | float]) -> int | float:
    for name in sorted(expr.names):
        if name not in numbers:
            raise FieldError(key, f"unknown name {name!r} in {expr.text!r}{nearest(name, numbers)}")
    if expr.truth:
        raise FieldError(key, f"{expr.text!r} is a condition; a number is needed")
    try:
        return expr.eval(numbers)
    except ExprError as e:
        raise FieldError(key, str(e)) from None
