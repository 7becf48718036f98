"""Expand a schedule for a checkpoint: unroll layers, substitute names, evaluate expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from hybrid.core.dtypes import DTYPES
from hybrid.core.errors import SpecError, nearest
from hybrid.core.hparams import HParams
from hybrid.core.plan import TensorDecl
from hybrid.spec.expr import LAYER, Expr, ExprError
from hybrid.spec.schedule import Declared, Phase, Schedule, StepSpec
from hybrid.spec.step import ANY, EXTENTS

_HOLE = re.compile(r"\{([^{}]*)\}")
_read = lru_cache(maxsize=4096)(Expr)  # cached: every layer of every plan evaluates the same conditions


class WeightInfo(NamedTuple):
    """Storage type and shape of a checkpoint tensor."""

    dtype: str
    shape: tuple[int, ...]
    row_types: tuple[tuple[str, int], ...] = ()
    """(dtype, rows) of each run of rows if the types differ; `dtype` is then the widest."""


@dataclass(frozen=True, slots=True)
class UnboundStep:
    """A step with substituted names, before shapes and dtypes are resolved."""

    spec: StepSpec
    name: str
    layer: int | None
    args: Mapping[str, str]
    extent: str
    """One of EXTENTS."""
    same: Mapping[str, str]


class Names:
    """Substitutes {holes} in names and evaluates expressions, for a layer or (None) outside the layers."""

    def __init__(self, schedule: Schedule, hparams: HParams, sizes: Mapping[str, int]) -> None:
        self.schedule = schedule
        self.hparams = hparams
        self.base: dict[str, int | float] = hparams.numbers | dict(sizes)
        self._numbers: dict[int | None, dict[str, int | float]] = {}
        self._axes: dict[int | None, dict[str, int]] = {}

    def axes(self, layer: int | None) -> Mapping[str, int]:
        """[axes] of a layer; outside the layers only those that do not depend on the layer. Cached."""
        if layer in self._axes:
            return self._axes[layer]
        found: dict[str, int] = {}
        env = self._given(layer)
        for name, expr in self.schedule.axes.items():
            if layer is not None or not any(n.startswith(f"{LAYER}.") for n in expr.names):
                found[name] = self._whole(expr, {**env, **found}, f"axes.{name}")
        self._axes[layer] = found
        return found

    def numbers(self, layer: int | None) -> dict[str, int | float]:
        """Variables of expressions: hyper-parameters, sizes and axes; for a layer also its numbers. Cached."""
        if layer not in self._numbers:
            self._numbers[layer] = {**self._given(layer), **self.axes(layer)}
        return self._numbers[layer]

    def _given(self, layer: int | None) -> dict[str, int | float]:
        """`numbers` without [axes]."""
        if layer is None:
            return self.base
        own = self.hparams.layers[layer].numbers(layer)
        return {**self.base, **{f"{LAYER}.{name}": value for name, value in own.items()}, "l": layer}

    def fill(self, text: str, layer: int | None) -> str:
        """Substitute the holes of a name such as `blk.{l}.attn_norm.weight`: {l}, {l+1}, {layer.NAME}, a name of
        [values], or {L}, the number of layers."""

        def hole(match: re.Match[str]) -> str:
            name = match.group(1)
            if name == "L":
                return str(self.hparams.n_layers)
            if name in self.schedule.values:
                return self.fill(self.value(name, layer), layer)
            of_layer = name in ("l", "l+1") or name.startswith(f"{LAYER}.")
            if of_layer and layer is None:
                raise self.error(text, f"{{{name}}} has a value only in [[layer]] steps")
            if name in ("l", "l+1"):
                return str(int(layer or 0) + (name == "l+1"))
            number = self.numbers(layer).get(name) if of_layer else None
            if isinstance(number, int):
                return str(number)
            known = [
                "l",
                "l+1",
                "L",
                *self.schedule.values,
                *(n for n in self.numbers(layer) if n.startswith(f"{LAYER}.")),
            ]
            raise self.error(text, f"unknown {{{name}}}{nearest(name, known)}")

        return _HOLE.sub(hole, text) if "{" in text else text

    def value(self, name: str, layer: int | None) -> str:
        """The text of [values] NAME for a layer: that of the first condition that holds."""
        for when, text in self.schedule.values[name].items():
            if self.holds(when, layer, f"values.{name}"):
                return text
        where = "outside the layers" if layer is None else f"for layer {layer}"
        raise self.error(f"values.{name}", f"no condition holds {where}; add any = ...")

    def holds(self, when: str, layer: int | None, where: str) -> bool:
        return when == ANY or bool(self._eval(_read(when), self.numbers(layer), where))

    def number(self, expr: Expr, layer: int | None, where: str) -> int | float:
        """The value of an expression over hyper-parameters, axes, [values] and, inside a layer, its numbers."""
        env = self.numbers(layer)
        for name in expr.names & self.schedule.values.keys():
            env = {**env, name: self._eval(_read(self.value(name, layer)), self.numbers(layer), f"values.{name}")}
        return self._eval(expr, env, where)

    def shape(self, declared: Declared, layer: int | None, name: str) -> tuple[int, ...]:
        numbers = [self.number(e, layer, f"tensors.{name}.shape") for e in declared.shape]
        for expr, n in zip(declared.shape, numbers, strict=True):
            if n != int(n):
                raise self.error(f"tensors.{name}.shape", f"{expr} = {n} is not a whole number")
        return tuple(map(int, numbers))

    def error(self, where: str, text: str) -> SpecError:
        return SpecError(f"schedule {self.schedule.schedule.name}: {where}: {text}")

    def _whole(self, expr: Expr, env: Mapping[str, int | float], where: str) -> int:
        number = self._eval(expr, env, where)
        if number != int(number):
            raise self.error(where, f"{expr} = {number} is not a whole number")
        return int(number)

    def _eval(self, expr: Expr, env: Mapping[str, int | float], where: str) -> int | float:
        unknown = expr.names - env.keys()
        if unknown:
            name = min(unknown)
            outside = name == "l" or name.startswith(f"{LAYER}.")
            why = " has a value only in [[layer]] steps" if outside and "l" not in env else nearest(name, env)
            raise self.error(where, f"unknown name {name!r} in {expr.text!r}{why}")
        try:
            return expr.eval(env)
        except ExprError as e:
            raise self.error(where, str(e)) from None


def expand(names: Names, phase: Phase) -> list[UnboundStep]:
    """All steps of a phase in order, layers unrolled."""
    schedule, unbound_steps = names.schedule, []
    for layer, spec in _walk(schedule, names.hparams.n_layers):
        if spec.phase not in (None, phase) or not names.holds(spec.when, layer, f"{spec.name}.when"):
            continue
        args = {key: names.fill(value, layer) for key, value in spec.args.items()}
        extent = names.fill(spec.extent, layer)
        if extent not in EXTENTS:
            raise names.error(f"{spec.name}.extent", f"{spec.extent} is {extent!r}; use one of {', '.join(EXTENTS)}")
        same = {key: names.fill(value, layer) for key, value in spec.same.items()}
        unbound_steps.append(UnboundStep(spec, names.fill(spec.name, layer), layer, args, extent, same))
    seen: set[str] = set()
    for unbound in unbound_steps:
        if unbound.name in seen:
            raise names.error(
                unbound.name, "two steps of this name run in the same layer and phase: their conditions overlap"
            )
        seen.add(unbound.name)
    return unbound_steps


def _walk(schedule: Schedule, n_layers: int) -> Iterator[tuple[int | None, StepSpec]]:
    yield from ((None, s) for s in schedule.before)
    for layer in range(n_layers):
        yield from ((layer, s) for s in schedule.layer)
    yield from ((None, s) for s in schedule.after)


def declared(names: Names, unbound_steps: list[UnboundStep]) -> dict[str, tuple[Declared, int | None, str]]:
    """[tensors] by substituted name: (declaration, layer, name as written)."""
    found: dict[str, tuple[Declared, int | None, str]] = {}
    layers = sorted({d.layer for d in unbound_steps if d.layer is not None})
    for text, decl in names.schedule.tensors.items():
        if "{" not in text.replace("{L}", ""):
            found[names.fill(text, None)] = (decl, None, text)
            continue
        for layer in layers:
            _, first, _ = found.setdefault(name := names.fill(text, layer), (decl, layer, text))
            own, other = names.hparams.layers[layer], names.hparams.layers[layer if first is None else first]
            if decl.role == "rope" and own.rotation != other.rotation:
                raise names.error(
                    f"tensors.{text}", f"layers {first} and {layer} rotate differently, but both have {name}"
                )
    return found


def choices(names: Names, weights: Mapping[str, WeightInfo]) -> dict[str, str]:
    """[choice]: name in steps -> the first of its options that the checkpoint has."""
    chosen = {}
    for name, options in names.schedule.choice.items():
        found = next((o for o in options if o in weights), None)
        if found is None:
            raise SpecError(f"the checkpoint has none of {', '.join(options)} for {name}")
        chosen[name] = found
    return chosen


def fused(names: Names, weights: Mapping[str, WeightInfo]) -> dict[str, tuple[WeightInfo, tuple[str, ...]]]:
    """[fused]: each concatenated matrix and its checkpoint tensors, whose types may differ."""
    found = {}
    for text, said in names.schedule.fused.items():
        layers: list[int | None] = list(range(names.hparams.n_layers)) if "{" in text else [None]
        by_condition = said if isinstance(said, dict) else {ANY: said}
        for layer in layers:
            parts = next((p for when, p in by_condition.items() if names.holds(when, layer, f"fused.{text}")), None)
            if parts is None:
                continue  # no step of this layer may name it
            name, own = names.fill(text, layer), tuple(names.fill(p, layer) for p in parts)
            missing = [p for p in own if p not in weights]
            if missing:
                raise SpecError(f"the checkpoint has no tensor {missing[0]}, which {name} needs")
            infos = [weights[p] for p in own]
            if len({i.shape[1:] for i in infos}) > 1:
                shown = ", ".join(f"{p} {list(i.shape)}" for p, i in zip(own, infos, strict=True))
                raise SpecError(f"{name} joins matrices with rows of different lengths ({shown})")
            shape = (sum(i.shape[0] for i in infos), *infos[0].shape[1:])
            found[name] = (WeightInfo(**_joined(infos), shape=shape), own)
    return found


def _joined(infos: list[WeightInfo]) -> dict[str, Any]:
    """Storage type of matrices concatenated by rows; row_types if they differ, with neighbours of one type merged."""
    runs: list[tuple[str, int]] = []
    for info in infos:
        rows = info.shape[0] + (runs.pop()[1] if runs and runs[-1][0] == info.dtype else 0)
        runs.append((info.dtype, rows))
    widest = max((dtype for dtype, _ in runs), key=lambda dtype: DTYPES[dtype].bits)
    return {"dtype": widest, "row_types": tuple(runs) if len(runs) > 1 else ()}


def housed(
    tensors: Mapping[str, TensorDecl], users: Mapping[str, set[str]], schedule: Schedule, main: str
) -> dict[str, TensorDecl]:
    """Declarations of weights to store on a secondary device: those that only it uses and that have no fallback.
    users: devices by tensor."""
    away = {s.device for s in schedule.steps} - {"main", main, *schedule.fallback}
    weights = [n for n, d in tensors.items() if d.kind == "weight" and not d.role]
    alone = {n: next(iter(users[n])) for n in weights if len(users.get(n, ())) == 1}
    return {n: replace(tensors[n], device=where) for n, where in alone.items() if where in away}
