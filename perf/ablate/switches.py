"""Optimisations that can be switched off: declared in perf/ablate/switches.toml, applied to a device, a schedule or a
plan.

A switch says what makes the difference and nothing else does: `split` records an operation as if its joined weight were
the matrices it was joined from, `profile` gives matrices other inputs, `tuning` overrides numbers of a family of the
tuning tables. A later optimisation joins by declaring its switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.core.plan import Step
from hybrid.kernels.vulkan.groups import Binding
from hybrid.kernels.vulkan.ops import BINDINGS
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor, cut
from hybrid.kernels.vulkan.tuning import Tuning, Value, space
from hybrid.spec.expr import Expr
from hybrid.spec.load import Model, load_toml
from hybrid.spec.schedule import Profile, Schedule

FILE = Path(__file__).with_name("switches.toml")


class Split(Model):
    """An operation's weight as separate matrices, by their numbers of rows: expressions over its axes."""

    op: str
    weight: str
    rows: tuple[Annotated[str, Field(min_length=1)], ...]


class Override(Model):
    """Numbers of a family (kernels/vulkan/tuning/space.toml) that plans take instead of what the device's table
    says."""

    family: str
    use: dict[str, Value] = Field(min_length=1)

    @model_validator(mode="after")
    def _validate_declared(self) -> Override:
        known = [f.name for f in space().family]
        if self.family not in known:
            raise FieldError("family", f"no family {self.family!r}{nearest(self.family, known)}")
        try:
            space().named(self.family).check(self.use)
        except FieldError as error:
            raise FieldError(f"use.{error.key}", error.message) from None
        return self


class Switch(Model):
    """One optimisation, and how to switch it off."""

    name: str
    summary: str
    split: Split | None = None
    profile: Profile | None = None
    tuning: Override | None = None
    beside: tuple[str, ...] = ()
    """Switches that depend on this one: its speed-up is measured on plans without them too."""

    @model_validator(mode="after")
    def _validate_one(self) -> Switch:
        means = [m for m in (self.split, self.profile, self.tuning) if m is not None]
        if len(means) != 1:
            raise FieldError("name", f"{self.name!r} must say exactly one of split, profile, tuning")
        return self


class Switches(Model):
    schema_version: Literal[1] = Field(alias="schema")
    switch: tuple[Switch, ...]

    @model_validator(mode="after")
    def _validate_beside(self) -> Switches:
        names = [s.name for s in self.switch]
        for name in (n for s in self.switch for n in s.beside):
            if name not in names:
                raise FieldError("beside", f"no optimisation is called {name!r}{nearest(name, names)}")
        return self


def load_switches() -> dict[str, Switch]:
    return {s.name: s for s in load_toml(FILE, Switches).switch}


def find_switch(name: str) -> Switch:
    known = load_switches()
    if name not in known:
        raise SpecError(f"no optimisation is called {name!r}{nearest(name, known)}")
    return known[name]


def bindings_without(switches: Sequence[Switch]) -> dict[str, Binding]:
    """The Vulkan bindings, with the weights of switched operations split."""
    found: dict[str, Binding] = dict(BINDINGS)
    for split in (s.split for s in switches if s.split):
        if split.op not in found:
            raise SpecError(f"{FILE.name}: split.op: no binding for {split.op!r}{nearest(split.op, found)}")
        found[split.op] = _cut(found[split.op], split)
    return found


def _cut(record: Binding, split: Split) -> Binding:
    exprs = [Expr(text) for text in split.rows]

    def recorded(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
        sizes = [int(e.eval(step.bind)) for e in exprs]
        record(rec, step, {**t, split.weight: in_rows(t[split.weight], sizes)})

    return recorded


def in_rows(tensor: DeviceTensor, sizes: Sequence[int]) -> DeviceTensor:
    """The same memory as chunks of `sizes` rows (where it is in one chunk). ValueError where they are not all its
    rows."""
    if len(tensor.chunks) != 1:
        return tensor  # cut already, by its storage types or by what the device can bind
    (whole,) = tensor.chunks
    if sum(sizes) != whole.rows:
        raise ValueError(f"{tensor.name} has {whole.rows} rows, which {list(sizes)} do not add up to")
    chunks, row = [], 0
    for size in sizes:
        chunks.append(cut(whole, row, size, tensor.shape[-1]))
        row += size
    return replace(tensor, chunks=tuple(chunks))


def schedule_without(schedule: Schedule, switches: Sequence[Switch]) -> Schedule:
    """The schedule with the profiles of switched precisions, for quantised weights."""
    for profile in (s.profile for s in switches if s.profile):
        auto = schedule.precision["auto"].model_copy(update={"quantised": profile})
        schedule = schedule.model_copy(update={"precision": {**schedule.precision, "auto": auto}})
    return schedule


@contextmanager
def tuning_without(switches: Sequence[Switch], tuning: Tuning) -> Iterator[None]:
    """A device's tuning table as the switches override it, for plans that are compiled inside."""
    with ExitStack() as held:
        for override in (s.tuning for s in switches if s.tuning):
            held.enter_context(tuning.forced(override.family, override.use))
        yield
