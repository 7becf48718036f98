"""Schedules: a model family as data. Which operation runs in which layers and phases, on which device, with what
activation precision. A schedule names things; hybrid.planning.planner binds it to a checkpoint and checks every edge."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from hybrid.core.dtypes import ACTIVATION_TYPES, DTYPES
from hybrid.core.places import SPECS
from hybrid.spec.expr import Expr
from hybrid.spec.load import Model, load_toml

SCHEDULES = SPECS / "schedules"

Phase = Literal["prefill", "decode"]
Act = Literal["f32", "f16", "q8_act"]
Capability = Literal["f16_matrices"]
"""What a device may have that changes which precision pays: f16_matrices = subgroups multiply 16x16 f16 matrices."""
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
FEW_ROWS = 4
"""Rows of a decode pass up to which reading the weights is all that takes time; with more it is a batch."""
When = Literal["first", "last", "local", "global", "any"]
Text = Annotated[str, Field(min_length=1)]


class Head(Model):
    """[schedule]: what this file describes."""

    name: Text
    family: Text
    """Architecture it serves: `general.architecture` of GGUF files."""
    summary: Text
    source: str = ""
    pipeline: Literal[1, 2] = 1
    """Prefill passes that overlap where steps run on several devices: each holds rows and activations of its own."""
    residual: Text = "x"
    """Activation of the residual stream: `<residual>.0` before the layers, `<residual>.{l+1}` after layer l."""


class Profile(Model):
    """Dtypes that a precision profile gives to the inputs of matrices and to the KV cache beside them."""

    act: Act
    kv: Literal["f32", "f16"]
    prefill: dict[Capability, Act] = Field(default_factory=dict)
    """Device capability -> `act` of prefill on devices that have it; the first that holds."""

    batch: dict[Capability, Act] = Field(default_factory=dict)
    """The same for decode passes of more than FEW_ROWS rows."""

    def act_in(self, phase: Phase, rows: int, capabilities: Collection[str]) -> Act:
        """The dtype of matrix inputs in a pass of at most `rows` rows, on a device with these capabilities."""
        instead = self.prefill if phase == "prefill" else self.batch if rows > FEW_ROWS else {}
        return next((act for need, act in instead.items() if need in capabilities), self.act)


class Precision(Model):
    quantised: Profile
    unquantised: Profile

    @model_validator(mode="after")
    def _validate_unquantised(self) -> Precision:
        if "q8_act" in (self.unquantised.act, *self.unquantised.prefill.values(), *self.unquantised.batch.values()):
            raise ValueError("unquantised.act cannot be q8_act: only quantised weights take int8 activations")
        return self


class Declared(Model):
    """A tensor that outlives a pass, or that the host reads and writes."""

    kind: Literal["io", "state", "weight"]
    dtype: Text
    """A storage type, or `kv:WEIGHT` = the profile's KV type for that weight's type."""
    shape: tuple[Expr, ...]

    @field_validator("dtype")
    @classmethod
    def _validate_dtype(cls, value: str) -> str:
        if value not in DTYPES and not value.startswith("kv:"):
            raise ValueError(f"unknown dtype {value!r}: use one of {', '.join(DTYPES)} or kv:WEIGHT")
        return value


class StepSpec(Model):
    """One operation of the figure."""

    name: Text
    op: Text
    args: dict[str, str] = Field(default_factory=dict)
    """Operation's tensor name -> tensor; one that is not written has the tensor of its own name."""
    attrs: dict[str, Expr] = Field(default_factory=dict)
    act: dict[str, str] = Field(default_factory=dict)
    """Matrix input -> f32, f16, q8_act, or auto:ARG = what the profile gives for the dtype of weight ARG."""
    axes: dict[str, Expr] = Field(default_factory=dict)
    """Axes of the operation that are not the family's of the same letter."""
    device: Text = "main"
    extent: Literal["rows", "outs"] = "rows"
    phase: Phase | None = None
    """Only in this phase; None: in both."""
    when: When = "any"
    """Only in these layers."""

    @field_validator("act")
    @classmethod
    def _validate_act(cls, value: dict[str, str]) -> dict[str, str]:
        for name, dtype in value.items():
            if dtype not in ACTIVATION_TYPES and not re.fullmatch(r"auto:\w+", dtype):
                raise ValueError(f"{name} = {dtype!r}: use one of {', '.join(ACTIVATION_TYPES)} or auto:WEIGHT_ARGUMENT")
        return value

    def meets(self, other: StepSpec) -> bool:
        """Can both run in one layer and phase?"""
        phases = self.phase is None or other.phase is None or self.phase == other.phase
        return phases and ("any" in (self.when, other.when) or self.when == other.when)


class Schedule(Model):
    """A whole schedule file."""

    schema_: Literal[1] = Field(alias="schema")
    schedule: Head
    axes: dict[str, Expr]
    devices: dict[str, tuple[str, ...]]
    fallback: dict[Literal["npu"], Literal["main"]] = Field(default_factory=dict)
    """What takes over the steps of a device that is not there, or fails; without an entry that is an error."""
    precision: dict[Literal["auto", "exact", "fast"], Precision]
    values: dict[str, dict[When, str]] = Field(default_factory=dict)
    fused: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    choice: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    tensors: dict[str, Declared]
    before: tuple[StepSpec, ...] = ()
    layer: tuple[StepSpec, ...]
    after: tuple[StepSpec, ...] = ()

    @field_validator("devices")
    @classmethod
    def _validate_devices(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, chain in value.items():
            bad = [d for d in chain if not re.fullmatch(r"cpu|vulkan(:(\d+|gpu))?", d)]
            if not chain or bad:
                raise ValueError(f"{name} = {list(chain)}: a chain of cpu, vulkan, vulkan:gpu, vulkan:NUMBER")
        if "auto" not in value:
            raise ValueError('needs the chain "auto"')
        return value

    @model_validator(mode="after")
    def _validate_whole(self) -> Schedule:
        missing = {"auto", "exact", "fast"} - set(self.precision)
        if missing:
            raise ValueError(f"[precision] lacks the profiles {sorted(missing)}")
        steps = [*self.before, *self.layer, *self.after]
        for i, step in enumerate(steps):
            for other in steps[:i]:
                if step.name == other.name and step.meets(other):
                    raise ValueError(f"two steps are named {step.name!r} in the same layers and phase")
        return self

    def chain(self, device: str) -> tuple[str, ...]:
        """Devices to try, in order, for a --device choice: a chain's name, or one device such as vulkan:1."""
        if device in self.devices:
            return self.devices[device]
        if re.fullmatch(r"vulkan:\d+", device):
            return (device,)
        raise ValueError(f"unknown device {device!r}: use {', '.join(self.devices)} or vulkan:NUMBER")


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule file; SpecError (one line) names the file, the key and the fix."""
    return load_toml(Path(path), Schedule)


def named_schedule(name: str | Path) -> Schedule:
    """A schedule file, or a shipped schedule by its name (`gemma3-hybrid`). ValueError where there is neither."""
    shipped = SCHEDULES / f"{name}.toml"
    if Path(name).exists():
        return load_schedule(name)
    if not shipped.is_file():
        known = ", ".join(sorted(p.stem for p in SCHEDULES.glob("*.toml")))
        raise ValueError(f"{name}: neither a file nor a shipped schedule; specs/schedules has {known}")
    return load_schedule(shipped)


def find_schedule(family: str) -> Schedule:
    """The shipped schedule for a checkpoint's architecture."""
    path = SCHEDULES / f"{family}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in SCHEDULES.glob("*.toml")))
        raise ValueError(f"no schedule for the architecture {family!r}; specs/schedules has {known}")
    return load_schedule(path)


@cache
def scheduled() -> frozenset[str]:
    """Operations that some shipped schedule names."""
    shipped = [load_schedule(path) for path in sorted(SCHEDULES.glob("*.toml"))]
    return frozenset(step.op for s in shipped for step in (*s.before, *s.layer, *s.after))
