"""One step of a schedule: an operation with its tensors, device, phase and layers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, field_validator

from hybrid.core.dtypes import ACTIVATION_TYPES
from hybrid.spec.expr import Expr
from hybrid.spec.load import Model

Phase = Literal["prefill", "decode"]
Option = Literal["adjust", "hidden", "logprobs", "verify"]
"""Optional parts of a sampling pass: adjust = penalties, biases and masks; hidden = keep each sequence's last hidden
state for a drafter; logprobs = log-probabilities for the host; verify = compare draft tokens with sampled ones."""
OPTIONS: frozenset[Option] = frozenset(get_args(Option))
EXTENTS = ("rows", "outs", "wanted")
"""rows: all rows of a pass. outs: output rows, those with logits; a pass without any omits the step. wanted: output
rows in prefill, all rows in decode and in passes that read hidden states."""
Text = Annotated[str, Field(min_length=1)]
ANY = "any"


def _condition(value: str) -> str:
    if value != ANY and not Expr(value).truth:
        raise ValueError(f"{value!r} is a number; a condition is needed, such as layer.window > 0, or {ANY}")
    return value


When = Annotated[Text, AfterValidator(_condition)]
"""A condition over a layer (`layer.window > 0`, `l == 0`) and the model, or `any`."""


class StepSpec(Model):
    """One operation of a schedule."""

    name: Text
    op: Text
    args: dict[str, str] = Field(default_factory=dict)
    """Operation's tensor name -> tensor; the default is the tensor of the same name."""
    attrs: dict[str, Expr] = Field(default_factory=dict)
    act: dict[str, str] = Field(default_factory=dict)
    """Matrix input -> f32, f16, q8_act, or auto:ARG = the profile's type for the dtype of weight ARG."""
    axes: dict[str, Expr] = Field(default_factory=dict)
    """Axes of the operation that override [axes]."""
    device: Text = "main"
    extent: Text = "rows"
    """Its rows: rows, outs, or wanted (EXTENTS); may contain {holes}."""
    live: str | None = None
    """Its live row count instead of the pass's: TENSOR:WORD, a u32 tensor that another step writes; may contain
    {holes}."""
    spill: bool = False
    """Whether its weights may be in host memory where the device's has no room: a token reads few of them."""
    option: Option | None = None
    """Only in plans made with this option; None: in all."""
    alias: dict[str, str] = Field(default_factory=dict)
    """Result -> input that replaces it if the step is omitted. A step is omitted if its option is off; if it picks
    output rows and all rows are output rows; or if it converts a dtype and the readers accept the input's dtype."""
    same: dict[str, str] = Field(default_factory=dict)
    """Result -> tensor of another step that replaces it if all rows are output rows. The other step has then computed
    the same values for all rows."""
    phase: Phase | None = None
    """Only in this phase; None: in both."""
    when: When = ANY
    """Condition for the layers that have it."""

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
        """Whether both may run in the same layer and phase, judged by the text of their conditions."""
        phases = self.phase is None or other.phase is None or self.phase == other.phase
        return phases and (ANY in (self.when, other.when) or self.when == other.when)


def checked_act(value: dict[str, str]) -> dict[str, str]:
    """Validate `act` of a step. ValueError for a type that no matrix input has."""
    for name, dtype in value.items():
        if dtype not in ACTIVATION_TYPES and not re.fullmatch(r"auto:\w+", dtype):
            raise ValueError(f"{name} = {dtype!r}: use one of {', '.join(ACTIVATION_TYPES)} or auto:WEIGHT_ARGUMENT")
    return value
