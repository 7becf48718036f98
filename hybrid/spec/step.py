"""One step of a schedule: an operation, what it reads and writes, where, in which phase and layers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, field_validator

from hybrid.core.dtypes import ACTIVATION_TYPES
from hybrid.spec.expr import Expr
from hybrid.spec.load import Model

Phase = Literal["prefill", "decode"]
Option = Literal["adjust", "logprobs", "verify"]
"""What a pass may do beside choosing tokens: adjust = penalties, biases and masks; logprobs = log-probabilities for the
host; verify = hold guessed tokens against what was chosen."""
OPTIONS: frozenset[Option] = frozenset(get_args(Option))
EXTENTS = ("rows", "outs", "wanted")
"""rows: all of a pass. outs: those whose logits are wanted; a pass that wants none leaves the step out. wanted: the
same in prefill; all rows where every row is wanted anyway, in decode and where hidden states are read."""
Text = Annotated[str, Field(min_length=1)]
ANY = "any"


def _condition(value: str) -> str:
    if value != ANY and not Expr(value).truth:
        raise ValueError(f"{value!r} is a number; a condition is needed, such as layer.window > 0, or {ANY}")
    return value


When = Annotated[Text, AfterValidator(_condition)]
"""A condition over a layer (`layer.window > 0`, `l == 0`) and the model, or `any`."""


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
    extent: Text = "rows"
    """Which rows it is for: rows, outs, or wanted (EXTENTS); may hold {holes}."""
    live: str | None = None
    """What counts its live rows in place of the pass's: TENSOR:WORD, a u32 tensor that another step writes; may hold
    {holes}."""
    option: Option | None = None
    """Only in plans that are made with this option; None: in all."""
    alias: dict[str, str] = Field(default_factory=dict)
    """Result -> input, of a step that may be left out: one with an option, in a plan without it; one that picks the
    wanted rows of tensors, in a plan that wants every row; one that changes a type, where readers take the type that is
    there. Its results are then those inputs."""
    same: dict[str, str] = Field(default_factory=dict)
    """Result -> tensor that another step has made, of a step that is left out where every row is wanted, because what
    it makes of the wanted rows is there for all of them."""
    phase: Phase | None = None
    """Only in this phase; None: in both."""
    when: When = ANY
    """Only in these layers."""

    @field_validator("act")
    @classmethod
    def _validate_act(cls, value: dict[str, str]) -> dict[str, str]:
        return checked_act(value)

    @field_validator("extent")
    @classmethod
    def _validate_extent(cls, value: str) -> str:
        if "{" not in value and value not in EXTENTS:
            raise ValueError(f"{value!r}: use one of {', '.join(EXTENTS)}, or a text with a {{hole}}")
        return value

    @property
    def phases(self) -> tuple[Phase, ...]:
        return ("prefill", "decode") if self.phase is None else (self.phase,)

    def meets(self, other: StepSpec) -> bool:
        """Do both run in one layer and phase, as far as their conditions' texts tell?"""
        phases = self.phase is None or other.phase is None or self.phase == other.phase
        return phases and (ANY in (self.when, other.when) or self.when == other.when)


def checked_act(value: dict[str, str]) -> dict[str, str]:
    """`act` of a step as given; ValueError for a type that no matrix input has."""
    for name, dtype in value.items():
        if dtype not in ACTIVATION_TYPES and not re.fullmatch(r"auto:\w+", dtype):
            raise ValueError(f"{name} = {dtype!r}: use one of {', '.join(ACTIVATION_TYPES)} or auto:WEIGHT_ARGUMENT")
    return value
