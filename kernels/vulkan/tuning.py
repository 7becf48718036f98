"""Tuning tables: the tile, split or variant of a kernel family on this device. One committed table per device class.

    rec.device.tuning.choose("linear.gemv", {"ROWS": 4, "SPLIT": 1}, w="q4_0", x="q8_act", rows=1, n=n, k=k) -> dict

`tuning/space.toml` declares each family: the facts it is chosen by and the candidates of each parameter, all of which
conformance runs. `tuning/CLASS.toml` holds the results of `python -m perf.tune`: the first entry of the family whose
`when` holds gives its `use`, merged over the binding's default. Unknown devices get `default.toml`. A number of
workgroups may be a multiple of the device's cores: "2 * cores". A bad entry costs speed, never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.core.plan import FEW_ROWS
from hybrid.kernels.vulkan.features import Report
from hybrid.spec.load import Model, load_toml, shown_path

TABLES = Path(__file__).resolve().parent / "tuning"
SPACE, DEFAULT = "space", "default"
Value = bool | int | str
Condition = Value | tuple[Value, ...]
_BOUND = re.compile(r"(>=|<=|>|<)\s*(\d+)")
_SPAN = re.compile(r"(\d+)\s*\.\.\s*(\d+)")
_CORES = re.compile(r"(\d+) \* cores")
UNCOUNTED = 24  # concurrent workgroups assumed where the device does not report its cores


def holds(condition: Condition, value: Value) -> bool:
    """Whether a value meets a condition: equality; any of a list; ">=N", ">N", "<=N", "<N" and "A..B" (both included)
    for numbers."""
    if isinstance(condition, tuple):
        return any(holds(c, value) for c in condition)
    if isinstance(condition, str) and isinstance(value, int):
        if bound := _BOUND.fullmatch(condition):
            n = int(bound[2])
            return {">=": value >= n, ">": value > n, "<=": value <= n, "<": value < n}[bound[1]]
        if span := _SPAN.fullmatch(condition):
            return int(span[1]) <= value <= int(span[2])
    return type(condition) is type(value) and condition == value


class Family(Model):
    """One family of kernels: the facts it is chosen by, and its candidates."""

    name: str
    summary: str
    op: str
    """The operation whose workloads the sweep times, and whose cases prove each candidate."""
    needs: str | None = None
    """Device feature that its bindings require."""
    fused: bool = False
    """Asked where `op` begins a fused group (kernels/vulkan/groups.py): no single step's sweep or case reaches it."""
    facts: tuple[str, ...] = Field(min_length=1)
    candidates: dict[str, tuple[Value, ...]] = Field(min_length=1)

    @field_validator("candidates")
    @classmethod
    def _validate_candidates(cls, value: dict[str, tuple[Value, ...]]) -> dict[str, tuple[Value, ...]]:
        for key, values in value.items():
            if len(set(values)) != len(values) or not values:
                raise FieldError(key, "must list different values, at least one")
        return value

    def check(self, use: Mapping[str, Value]) -> None:
        """FieldError for a parameter or value that the family does not declare."""
        for key, value in use.items():
            if key not in self.candidates:
                raise FieldError(key, f"{self.name} has no such number{nearest(key, self.candidates)}")
            if not any(type(c) is type(value) and c == value for c in self.candidates[key]):
                known = ", ".join(map(str, self.candidates[key]))
                raise FieldError(key, f"{value!r} is no candidate of {self.name}: {known} ({SPACE}.toml)")


class Space(Model):
    """tuning/space.toml."""

    schema_version: Literal[1] = Field(alias="schema")
    family: tuple[Family, ...] = ()

    @model_validator(mode="after")
    def _validate_names(self) -> Space:
        names = [f.name for f in self.family]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice:
            raise FieldError("family", f"{twice} is declared twice")
        return self

    def named(self, name: str) -> Family:
        """SpecError with the nearest name where there is none."""
        found = next((f for f in self.family if f.name == name), None)
        if found is None:
            hint = nearest(name, [f.name for f in self.family])
            raise SpecError(f"{shown_path(TABLES / (SPACE + '.toml'))}: family: there is no {name!r}{hint}")
        return found


class Match(Model):
    """Traits of a device class; an omitted field matches every device."""

    vendor: str | None = None
    driver: str | None = None
    subgroup: int | None = None
    cooperative_matrix: bool | None = None

    def holds(self, device: Mapping[str, Value]) -> bool:
        return all(device[key] == value for key, value in self.written.items())

    @property
    def written(self) -> dict[str, Value]:
        return self.model_dump(exclude_none=True)


class Measured(Model):
    """Provenance of a family's figures."""

    device: str
    driver: str
    commit: str
    command: str


class Entry(Model):
    """`use` of a family where `when` holds for the facts."""

    name: str
    when: dict[str, Condition] = Field(default_factory=dict)
    use: dict[str, Value] = Field(min_length=1)

    @model_validator(mode="after")
    def _validate_declared(self, info: ValidationInfo) -> Entry:
        try:
            family = space().named(self.name)
        except SpecError:
            raise FieldError(
                "name", f"no family {self.name!r}{nearest(self.name, [f.name for f in space().family])}"
            ) from None
        for key in self.when:
            if key not in family.facts:
                raise FieldError(f"when.{key}", f"{self.name} is not chosen by it{nearest(key, family.facts)}")
        try:
            family.check(self.use)
        except FieldError as error:
            raise FieldError(f"use.{error.key}", error.message) from None
        return self


class Passes(Model):
    """Plan settings of this device class where `when` holds for the model."""

    when: dict[Literal["hidden", "experts"], Condition] = Field(default_factory=dict)
    few_rows: int = Field(ge=0, le=512)
    """See Device.few_rows (hybrid/core/device.py)."""


class Table(Model):
    """One file tuning/CLASS.toml."""

    schema_version: Literal[1] = Field(alias="schema")
    match: Match
    passes: tuple[Passes, ...] = ()
    """The first match applies."""
    measured: dict[str, Measured] = Field(default_factory=dict)
    """By family."""
    family: tuple[Entry, ...] = ()

    @field_validator("measured")
    @classmethod
    def _validate_families(cls, value: dict[str, Measured]) -> dict[str, Measured]:
        known = [f.name for f in space().family]
        for name in value:
            if name not in known:
                raise FieldError(name, f"no such family{nearest(name, known)}")
        return value


@lru_cache(maxsize=1)
def space() -> Space:
    return load_toml(TABLES / f"{SPACE}.toml", Space)


@lru_cache(maxsize=1)
def tables() -> dict[str, Table]:
    """Every table by class. SpecError names file and field of a wrong one, and two that match the same devices."""
    found = {p.stem: load_toml(p, Table) for p in sorted(TABLES.glob("*.toml")) if p.stem != SPACE}
    seen: dict[tuple[tuple[str, Value], ...], str] = {}
    for name, table in found.items():
        key = tuple(table.match.written.items())
        if (not key) != (name == DEFAULT):
            raise SpecError(f"{shown_path(TABLES / (name + '.toml'))}: match: only {DEFAULT}.toml matches every device")
        if key in seen:
            raise SpecError(f"{shown_path(TABLES / (name + '.toml'))}: match: the same as {seen[key]}.toml's")
        seen[key] = name
    return found


def traits(report: Report, subgroup: int) -> dict[str, Value]:
    """Traits that select a device's class."""
    return {
        "vendor": report.vendor,
        "driver": report.driver_id,
        "subgroup": subgroup,
        "cooperative_matrix": report.has("cooperative_matrix"),
    }


def device_class(device: Mapping[str, Value]) -> str:
    """The matching class with the most traits; `default` where none matches."""
    fitting = [name for name, table in tables().items() if table.match.holds(device)]
    return max(fitting, key=lambda name: len(tables()[name].match.written))


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of a binding, and the answer."""

    family: str
    facts: Mapping[str, Value]
    use: Mapping[str, Value]


def _space() -> str:
    """Path of space.toml, for messages."""
    return shown_path(TABLES / f"{SPACE}.toml")


class Tuning:
    """One device's table, as bindings ask it (`rec.device.tuning`)."""

    def __init__(self, name: str = DEFAULT, cores: int = 1) -> None:
        if name not in tables():
            raise SpecError(f"no tuning table {name!r}{nearest(name, tables())}")
        self.name, self.table = name, tables()[name]
        self._cores = cores if cores > 1 else UNCOUNTED
        self._forced: tuple[Asked, ...] = ()
        self._asked: list[Asked] | None = None

    def choose(self, family: str, default: Mapping[str, Any], **facts: Value) -> dict[str, Any]:
        """`default` overridden by the table. SpecError for a family, fact or default that space.toml does not declare:
        conformance must know all candidates."""
        declared = space().named(family)
        if set(facts) != set(declared.facts):
            raise SpecError(
                f"{_space()}: {family}: facts: {', '.join(declared.facts)}, but its binding gives {', '.join(facts)}"
            )
        if set(default) != set(declared.candidates):
            raise SpecError(
                f"{_space()}: {family}: candidates: {', '.join(declared.candidates)}, but its binding's default has "
                f"{', '.join(default)}"
            )
        try:
            declared.check(default)
        except FieldError as error:
            raise SpecError(
                f"{_space()}: {family}: candidates.{error.key}: the binding's default {error.message}"
            ) from None
        use = {**default, **self._found(family, facts)}
        for f in self._forced:
            if f.family == family and all(facts[k] == v for k, v in f.facts.items()):
                use.update(f.use)
        if self._asked is not None:
            self._asked.append(Asked(family, facts, use))
        return {key: self._counted(value) for key, value in use.items()}

    def _counted(self, value: Value) -> Value:
        """The value, with a multiple of the device's cores resolved."""
        found = _CORES.fullmatch(value) if isinstance(value, str) else None
        return int(found[1]) * self._cores if found else value

    def few_rows(self, hidden: int, experts: int) -> int:
        """See Device.few_rows (hybrid/core/device.py)."""
        facts = {"hidden": hidden, "experts": experts}
        fits = (p.few_rows for p in self.table.passes if all(holds(c, facts[key]) for key, c in p.when.items()))
        return next(fits, FEW_ROWS)

    def _found(self, family: str, facts: Mapping[str, Value]) -> Mapping[str, Value]:
        for entry in self.table.family:
            if entry.name == family and all(holds(c, facts[key]) for key, c in entry.when.items()):
                return entry.use
        return {}

    @contextmanager
    def forced(self, family: str, use: Mapping[str, Value], **facts: Value) -> Iterator[None]:
        """Plans compiled within take `use` where these facts hold, whatever the table says: for sweeps, conformance and
        ablations."""
        space().named(family).check(use)
        before = self._forced
        self._forced = (*before, Asked(family, facts, use))
        try:
            yield
        finally:
            self._forced = before

    @contextmanager
    def watched(self) -> Iterator[list[Asked]]:
        """Collect the queries of plans compiled within."""
        before, self._asked = self._asked, []
        try:
            yield self._asked
        finally:
            self._asked = before
