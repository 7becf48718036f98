"""[[workloads]] of an operation written out: one workload for each model, variant and pass, sizes by the axes' roles.

specs/workloads.toml says what a pass is. It is read when the first operation is, and with it specs/models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.core.hparams import HParams
from hybrid.core.places import SPECS
from hybrid.spec.expr import Expr, ExprError
from hybrid.spec.fields import Attribute, Axis, AxisRole, Scalar, Tag, Variant, Workload, Workloads
from hybrid.spec.load import Model, load_toml, shown_path
from hybrid.spec.model import Shape, load_models

FILE = SPECS / "workloads.toml"
DEMO = "demo"
"""The demonstration model among `models`; its workloads are tagged demo, those of published models perf."""

# Role of an axis -> the hyper-parameter that is its size. What a pass has of an axis' role goes by the role's own name.
OF_MODEL: dict[AxisRole, str] = {
    "hidden": "hidden",
    "ffn": "ffn",
    "vocab": "vocab",
    "q_heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "rotary": "head_dim",
}
MOST = 1000
"""Workloads that an operation may have from models: a stranger's file must not take long to read."""
PassRole = Literal["tokens", "outs", "slots", "context", "block_size", "table", "blocks"]


class Pass(Model):
    """[passes.NAME]."""

    sizes: dict[PassRole, Expr] = Field(default_factory=dict)
    tags: tuple[Tag, ...]


class Source(Model):
    """specs/workloads.toml."""

    schema_: Literal[1] = Field(alias="schema")
    sizes: dict[PassRole, Expr]
    passes: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], Pass]
    demo: Shape


class Givens:
    """What expressions of a workload may name: hyper-parameters by model, sizes by pass."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.models = {name: sheet.hparams() for name, sheet in load_models().items()} | {
            DEMO: source.demo.hparams("gemma3")
        }
        """The smallest first, the demonstration model last."""
        self._numbers: dict[tuple[str, str], dict[str, int | float]] = {}

    def numbers(self, model: str, name: str) -> Mapping[str, int | float]:
        """Hyper-parameters of a model (_numbers); with the name of a pass, its sizes too."""
        if (model, name) not in self._numbers:
            found = _numbers(self.models[model])
            for role, expr in self.source.sizes.items() if name else ():
                try:
                    found[role] = _eval(role, self.source.passes[name].sizes.get(role, expr), found)
                except FieldError as e:
                    raise SpecError(f"{shown_path(FILE)}: passes.{name}: {e.key}: {e.message}") from None
            self._numbers[model, name] = found
        return self._numbers[model, name]


def _numbers(hp: HParams) -> dict[str, int | float]:
    """Of the model as a whole, and of layers: NAME of the first, global_NAME of the first that sees the whole context,
    last_NAME of the last; `window` of the local ones."""
    globals_ = [i for i, layer in enumerate(hp.layers) if not layer.window]
    kinds = {"": 0, "global_": globals_[0] if globals_ else 0, "last_": hp.n_layers - 1}
    of_layers = {
        f"{kind}{name}": n for kind, index in kinds.items() for name, n in hp.layers[index].numbers(index).items()
    }
    return {**of_layers, **hp.numbers, "window": hp.window}


@lru_cache(maxsize=1)
def givens() -> Givens:
    return Givens(load_toml(FILE, Source))


def derive(
    groups: tuple[Workloads, ...], axes: Mapping[str, Axis], attributes: Mapping[str, Attribute]
) -> Iterator[Workload]:
    """The workloads of an operation's [[workloads]]: by group, model (the smallest first, `demo` last), variant and
    pass.

    Raises FieldError for a model, pass, axis or name that there is not.
    """
    known, count = givens(), 0
    for i, group in enumerate(groups):
        for model in _models(f"workloads[{i}]", group, known):
            for name, variant in (group.variants or {"": Variant()}).items():
                entry = Entry(f"workloads[{i}]", name, group, variant)
                for one in entry.passes(known.source.passes):
                    count += 1
                    if count > MOST:
                        raise FieldError(
                            entry.key, f"the operation has more than {MOST} workloads; name fewer variants or passes"
                        )
                    numbers = known.numbers(model, one)
                    tags = known.source.passes[one].tags if one else ()
                    yield Workload(
                        id=".".join(part for part in (model, name, one) if part),
                        bind=entry.bind(axes, numbers),
                        attrs=entry.attrs(attributes, numbers),
                        dtypes={**group.dtypes, **variant.dtypes},
                        tags=(*tags, *group.tags, "demo" if model == DEMO else "perf"),
                    ).derived_from(entry.key)


def _models(key: str, group: Workloads, known: Givens) -> list[str]:
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
        """Key of what is written under `field`: in the variant, else in the table."""
        return (
            f"{self.key}.variants.{self.name}.{field}"
            if name in getattr(self.variant, field)
            else f"{self.key}.{field}"
        )

    def passes(self, known: Mapping[str, Pass]) -> tuple[str, ...]:
        """Names of passes; one that is empty where none is written."""
        own = self.variant.passes is not None
        passes = (self.variant.passes if own else self.group.passes) or ()
        for name in passes:
            if name not in known:
                key = f"{self.key}.variants.{self.name}.passes" if own else f"{self.key}.passes"
                raise FieldError(key, f"no pass is called {name!r}{nearest(name, known)}")
        return passes or ("",)

    def bind(self, axes: Mapping[str, Axis], numbers: Mapping[str, int | float]) -> dict[str, int]:
        """Each axis: as written, else the size that its role has in the model or the pass."""
        written = {**self.group.bind, **self.variant.bind}
        for name in written:
            if name not in axes:
                raise FieldError(f"{self.at('bind', name)}.{name}", f"no axis {name!r}{nearest(name, axes)}")
        bind = {}
        for name, axis in axes.items():
            key, role = f"{self.at('bind', name)}.{name}", OF_MODEL.get(axis.role, axis.role)
            if name in written:
                size = _eval(key, written[name], numbers)
            elif role in numbers:
                size = numbers[role]
            else:
                raise FieldError(key, f"is missing: nothing here has the role {axis.role}; write an expression")
            if size != int(size):
                raise FieldError(key, f"{written[name]} = {size} is not a whole number")
            bind[name] = int(size)
        return bind

    def attrs(self, attributes: Mapping[str, Attribute], numbers: Mapping[str, int | float]) -> dict[str, Scalar]:
        """Numbers are expressions; texts stay texts. What is no attribute is refused where all workloads are
        checked."""
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
