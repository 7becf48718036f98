"""Schedules: a model family as data. A schedule lists operations with their layers, phases, devices and activation
precisions. hybrid.planning.planner binds it to a checkpoint and checks every edge. A file with `extends` moves another
schedule's steps to other devices (hybrid.spec.placement)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from hybrid.core.dtypes import DTYPES, CacheType
from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.core.places import SPECS
from hybrid.core.plan import FEW_ROWS
from hybrid.spec.expr import Expr
from hybrid.spec.fields import MAIN_DEVICES
from hybrid.spec.load import Model, read_toml, shown_path, validate
from hybrid.spec.placement import MOST, Placement, placed
from hybrid.spec.step import Phase, StepSpec, Text, When

SCHEDULES, PARTS = SPECS / "schedules", SPECS / "parts"

Act = Literal["f32", "f16", "q8_act"]
Capability = Literal["f16_matrices"]
"""Device features that select a precision: f16_matrices = cooperative 16x16 f16 matrices."""
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


class Head(Model):
    """[schedule]."""

    name: Text
    family: Text
    """The model architecture: `general.architecture` of GGUF files."""
    summary: Text
    source: str = ""
    pipeline: Literal[1, 2] = 1
    """Overlapping prefill passes on several devices, each with its own rows and activations."""
    without_room: tuple[Text, ...] = ()
    """Shipped schedules to try if the weights do not fit in the device's memory; the first that fits is used."""
    residual: Text = "x"
    """Name of the residual stream: `<residual>.0` before the layers, `<residual>.{l+1}` after layer l."""
    experts: Text = "experts"
    """Name of the experts that each row chose: `<experts>.{l}` in layer l."""


class Profile(Model):
    """A precision profile: dtypes of matrix inputs and of the KV cache."""

    act: Act
    kv: CacheType
    prefill: dict[Capability, Act] = Field(default_factory=dict)
    """Device capability -> `act` of prefill; the first that the device has."""
    batch: dict[Capability, Act] = Field(default_factory=dict)
    """Device capability -> `act` of decode passes with more than Device.few_rows rows. Passes of at most few_rows rows
    have `act` in both phases."""

    def act_in(self, phase: Phase, rows: int, capabilities: Collection[str], few: int = FEW_ROWS) -> Act:
        """The dtype of matrix inputs in a pass of at most `rows` rows on a device with these capabilities. few:
        Device.few_rows."""
        instead = {} if rows <= few else self.prefill if phase == "prefill" else self.batch
        return next((act for need, act in instead.items() if need in capabilities), self.act)


class Precision(Model):
    quantised: Profile
    unquantised: Profile
    beside_quantised: Profile | None = None
    """For unquantised weights of a checkpoint that also has quantised ones; None: `unquantised`."""

    def of(self, quantised: bool, beside: bool) -> Profile:
        """The profile of a weight. beside: it is unquantised in a checkpoint with quantised weights."""
        return self.quantised if quantised else (beside and self.beside_quantised) or self.unquantised

    @model_validator(mode="after")
    def _validate_unquantised(self) -> Precision:
        for name, profile in (("unquantised", self.unquantised), ("beside_quantised", self.beside_quantised)):
            if profile and "q8_act" in (profile.act, *profile.prefill.values(), *profile.batch.values()):
                raise ValueError(f"{name}.act cannot be q8_act: only quantised weights take int8 activations")
        return self


class Declared(Model):
    """A persistent or host-visible tensor."""

    kind: Literal["io", "state", "weight"]
    role: Literal["rope", "kv"] | None = None
    """rope: a RoPE table that the host computes for the layers that name it. kv: part of the KV cache."""
    dtype: Text
    """A storage type, or `kv:WEIGHT` = the profile's KV type for that weight's type."""
    shape: tuple[Expr, ...]

    @field_validator("dtype")
    @classmethod
    def _validate_dtype(cls, value: str) -> str:
        if value not in DTYPES and not value.startswith("kv:"):
            raise ValueError(f"unknown dtype {value!r}: use one of {', '.join(DTYPES)} or kv:WEIGHT")
        return value


def _is_device(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for _, pattern in MAIN_DEVICES.values())


class Tables(Model):
    """Tables of a schedule that an extension may add to."""

    axes: dict[str, Expr] = Field(default_factory=dict)
    devices: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further names of --device, and what each tries in order (`Schedule.chains` has the usual ones)."""
    fallback: dict[Literal["npu"], Literal["main"]] = Field(default_factory=dict)
    """Fallback of a missing or failed device; without an entry its absence or failure is an error."""
    precision: dict[Literal["auto", "exact", "fast"], Precision] = Field(default_factory=dict)
    values: dict[str, dict[When, str]] = Field(default_factory=dict)
    fused: dict[str, tuple[str, ...] | dict[When, tuple[str, ...]]] = Field(default_factory=dict)
    choice: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    tensors: dict[str, Declared] = Field(default_factory=dict)
    before: tuple[StepSpec, ...] = ()
    layer: tuple[StepSpec, ...] = ()
    after: tuple[StepSpec, ...] = ()


class Schedule(Tables):
    """A complete schedule: one file, or an extension merged with its base."""

    schema_: Literal[1] = Field(alias="schema")
    schedule: Head
    axes: dict[str, Expr]
    precision: dict[Literal["auto", "exact", "fast"], Precision]
    tensors: dict[str, Declared]
    layer: tuple[StepSpec, ...]

    @field_validator("devices")
    @classmethod
    def _validate_devices(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, chain in value.items():
            if not chain or not all(map(_is_device, chain)):
                raise ValueError(f"{name} = {list(chain)}: a chain of cpu, vulkan, vulkan:gpu, vulkan:NUMBER")
        return value

    @model_validator(mode="after")
    def _validate_whole(self) -> Schedule:
        missing = {"auto", "exact", "fast"} - set(self.precision)
        if missing:
            raise ValueError(f"[precision] lacks the profiles {sorted(missing)}")
        steps = self.steps
        for i, step in enumerate(steps):
            for other in steps[:i]:
                if step.name == other.name and step.meets(other):
                    raise ValueError(f"two steps are named {step.name!r} in the same layers and phase")
        return self

    @property
    def steps(self) -> tuple[StepSpec, ...]:
        """All steps: before, in and after the layers."""
        return (*self.before, *self.layer, *self.after)

    @property
    def elsewhere(self) -> dict[str, list[str]]:
        """Secondary device -> its steps (`blk.{l}.ffn`, `blk.{l}.ffn (prefill)`)."""
        found: dict[str, list[str]] = {}
        for step in self.steps:
            if step.device != "main":
                found.setdefault(step.device, []).append(step.name + (f" ({step.phase})" if step.phase else ""))
        return found

    @property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """--device NAME -> the devices that it tries: `auto` all main devices, a backend's name that backend."""
        auto = tuple(first for first, _ in MAIN_DEVICES.values())
        return {"auto": auto, **{name: (name,) for name in MAIN_DEVICES}, **self.devices}

    def chain(self, device: str) -> tuple[str, ...]:
        """Devices to try, in order, for a --device choice: a chain's name, or one device such as vulkan:1."""
        if device in self.chains:
            return self.chains[device]
        if _is_device(device):
            return (device,)
        raise ValueError(f"unknown device {device!r}: use {', '.join(self.chains)} or vulkan:NUMBER")


class ExtensionHead(Model):
    """[schedule] of an extension: its name and summary, and fields that the base leaves unset."""

    name: Text
    summary: Text
    family: Text | None = None
    source: str | None = None
    pipeline: Literal[1, 2] | None = None
    residual: Text | None = None


class Extension(Tables):
    """A file that extends another schedule: additions, and placements of the base's steps."""

    schema_: Literal[1] = Field(alias="schema")
    extends: Text
    """A shipped schedule's name, or a path ending in .toml, relative to this file's folder."""
    schedule: ExtensionHead
    placement: tuple[Placement, ...] = Field((), max_length=MOST)


class PartHead(Model):
    name: Text
    summary: Text


class Part(Model):
    """One file of specs/parts: tensors and steps shared by schedules of several families. Its steps precede a
    schedule's own [[before]] and follow its own [[after]]."""

    schema_: Literal[1] = Field(alias="schema")
    part: PartHead
    tensors: dict[str, Declared] = Field(default_factory=dict)
    before: tuple[StepSpec, ...] = ()
    after: tuple[StepSpec, ...] = ()


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule file and its bases. SpecError (one line) names the file, the key and the fix."""
    return read_schedule(shown_path(Path(path)), read_toml(path), Path(path))


def read_schedule(file: str, tables: dict[str, Any], path: Path, chain: tuple[Path, ...] = ()) -> Schedule:
    """Parse the tables of a schedule file. file: its path for messages; chain: the files that extend it."""
    if "extends" not in tables:
        return validate(file, _with_parts(file, tables), Schedule)
    extension, chain = validate(file, tables, Extension), (*chain, path.resolve())
    other = _extended(file, extension.extends, path)
    if other.resolve() in chain:
        circle = " -> ".join(shown_path(p) for p in (*chain[chain.index(other.resolve()) :], other))
        raise SpecError(f"{file}: extends: goes in a circle ({circle}); one of them must be whole")
    base = read_schedule(shown_path(other), read_toml(other), other, chain)
    try:
        return validate(file, _joined(extension, base, shown_path(other)), Schedule)
    except FieldError as e:
        raise SpecError(f"{file}: {e.key}: {e.message}") from None


def _with_parts(file: str, tables: dict[str, Any]) -> dict[str, Any]:
    """Merge the tables of `parts = [NAME, ..]`, files of specs/parts, into those of a schedule."""
    whole = {key: value for key, value in tables.items() if key != "parts"}
    names = tables.get("parts", [])
    known = sorted(p.stem for p in PARTS.glob("*.toml"))
    for i, name in enumerate(names if isinstance(names, list) else [names]):
        if name not in known:
            raise SpecError(f"{file}: parts[{i}]: no part is called {name!r}{nearest(str(name), known)}")
        path = PARTS / f"{name}.toml"
        part = read_toml(path)
        validate(shown_path(path), part, Part)
        own = whole.get("tensors", {})
        if isinstance(own, dict):
            twice = own.keys() & part.get("tensors", {}).keys()
            if twice:
                raise SpecError(f"{file}: tensors.{min(twice)}: {shown_path(path)} sets it too; remove one of the two")
            whole["tensors"] = {**own, **part.get("tensors", {})}
        before, after = whole.get("before", []), whole.get("after", [])
        if isinstance(before, list) and isinstance(after, list):
            whole |= {"before": [*part.get("before", []), *before], "after": [*after, *part.get("after", [])]}
    return whole


def extended(path: str | Path) -> list[str]:
    """Names of a valid file's bases, the nearest first; empty for a complete schedule."""
    found: list[str] = []
    path = Path(path)
    while "extends" in (tables := read_toml(path)):
        path = _extended(shown_path(path), tables["extends"], path)
        found.append(path.stem)
    return found


def _extended(file: str, name: str, path: Path) -> Path:
    """The file that `extends = name` refers to."""
    if name.endswith(".toml"):
        if not os.path.isfile(path.parent / name):  # also False for an invalid file name
            raise SpecError(
                f"{file}: extends: there is no file {name!r} from here; give its path, or a shipped schedule's name"
            )
        return path.parent / name
    known = sorted(p.stem for p in SCHEDULES.glob("*.toml"))
    if name not in known:
        raise SpecError(f"{file}: extends: no shipped schedule is called {name!r}{nearest(name, known)}")
    return SCHEDULES / f"{name}.toml"


def _joined(extension: Extension, base: Schedule, base_file: str) -> dict[str, Any]:
    """Merge the fields; FieldError for one that both set."""

    def twice(key: str) -> FieldError:
        return FieldError(key, f"{base_file} sets it too, and what it extends stays as it is; remove one of the two")

    head = {key: getattr(base.schedule, key) for key in base.schedule.model_fields_set - {"without_room"}}
    for key in sorted(extension.schedule.model_fields_set):
        if key in head and key not in ("name", "summary"):
            raise twice(f"schedule.{key}")
        head[key] = getattr(extension.schedule, key)
    whole: dict[str, Any] = {"schema": base.schema_, "schedule": head}
    for key in Tables.model_fields:
        ours, theirs = getattr(extension, key), getattr(base, key)
        if isinstance(ours, dict):
            for name in ours:
                if name in theirs:
                    raise twice(f"{key}.{name}")
            whole[key] = {**theirs, **ours}
        elif ours and theirs:
            raise twice(key)
        else:
            whole[key] = ours or theirs
    return whole | placed({key: whole[key] for key in ("before", "layer", "after")}, extension.placement)


def named_schedule(name: str | Path) -> Schedule:
    """Load a schedule file, or a shipped schedule by name (`gemma3-hybrid`). ValueError if there is neither."""
    shipped = SCHEDULES / f"{name}.toml"
    if Path(name).exists():
        return load_schedule(name)
    if not shipped.is_file():
        known = ", ".join(sorted(p.stem for p in SCHEDULES.glob("*.toml")))
        raise ValueError(f"{name}: neither a file nor a shipped schedule; specs/schedules has {known}")
    return _shipped(shipped)


def find_schedule(family: str) -> Schedule:
    """The shipped schedule for a checkpoint's architecture."""
    path = SCHEDULES / f"{family}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in SCHEDULES.glob("*.toml")))
        raise ValueError(f"no schedule for the architecture {family!r}; specs/schedules has {known}")
    return _shipped(path)


@cache
def _shipped(path: Path) -> Schedule:
    """Cached: the plan cache compares schedules by identity."""
    return load_schedule(path)


@cache
def scheduled() -> frozenset[str]:
    """Operations in any shipped schedule."""
    shipped = [_shipped(path) for path in sorted(SCHEDULES.glob("*.toml"))]
    return frozenset(step.op for s in shipped for step in s.steps)
