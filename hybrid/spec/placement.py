"""Placements: the [[placement]] tables of an extension, which move steps to devices and replace them by forms. A form,
a file of specs/forms, is a sequence of other operations that computes a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from hybrid.core.errors import FieldError, nearest
from hybrid.core.places import SPECS
from hybrid.spec.load import Model, load_toml
from hybrid.spec.step import Phase, StepSpec, Text, checked_act

FORMS = SPECS / "forms"
PLACES = ("device", "form", "act")
"""Fields of a placement that may be limited to a phase."""
MOST = 64
"""Most placements of a file, and most patterns of a placement: bounds the time to read an untrusted file."""


class FormHead(Model):
    name: Text
    summary: Text


class FormStep(Model):
    """One step of a form."""

    op: Text
    suffix: str = ""
    """Appended to the replaced step's name."""
    args: dict[str, str] = Field(default_factory=dict)
    """Operation's tensor name -> tensor name of the replaced operation."""
    own: dict[str, str] = Field(default_factory=dict)
    """Operation's tensor name -> an intermediate tensor of the form, `NAME.{l}` in a layer."""
    attrs: tuple[str, ...] = ()
    """Attributes copied from the replaced step."""
    device: Literal["main"] | None = None
    """None: the placement's device."""
    act: dict[str, str] = Field(default_factory=dict)
    """Matrix input -> dtype, as in a schedule's step."""

    @field_validator("act")
    @classmethod
    def _validate_act(cls, value: dict[str, str]) -> dict[str, str]:
        return checked_act(value)


class Form(Model):
    """One file of specs/forms: operation -> equivalent steps of other operations."""

    schema_: Literal[1] = Field(alias="schema")
    form: FormHead
    instead: dict[str, tuple[FormStep, ...]] = Field(min_length=1)


class Placement(Model):
    """One [[placement]]."""

    steps: tuple[Text, ...] = Field(min_length=1, max_length=MOST)
    """Patterns (`*.attention`) of step names as written in the base schedule."""
    phase: Phase | None = None
    """The phase that it applies to, leaving the other unchanged; None: both."""
    like: Phase | None = None
    """Use this phase's steps in both phases, and drop the other phase's."""
    device: Text | None = None
    form: Text | None = None
    """Name of a file of specs/forms whose steps replace each step."""
    act: dict[str, str] | None = None
    """Matrix input -> dtype; overrides the step's."""

    @field_validator("act")
    @classmethod
    def _validate_act(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return None if value is None else checked_act(value)

    def model_post_init(self, context: Any) -> None:
        if self.like is None and all(getattr(self, field) is None for field in PLACES):
            raise FieldError("steps", "nothing is said of them; give device, form, like or act")
        if self.like is not None and self.phase is not None:
            raise FieldError("phase", "has no meaning beside like, which is for both phases; remove one")
        if self.form is not None and self.act is not None:
            raise FieldError("act", "the steps of a form have their own operations; remove act or form")


Entry = tuple[int, Placement]
"""(index in the file, placement)."""


def placed(
    groups: Mapping[str, Sequence[StepSpec]], placements: Sequence[Placement]
) -> dict[str, tuple[StepSpec, ...]]:
    """Apply placements to the steps before, in and after the layers (`groups`).

    Raises FieldError for a pattern that matches no step, and for two placements that set one field of a step.
    """
    steps = [s for group in groups.values() for s in group]
    _every_pattern_fits(steps, placements, in_phase=False)
    said: dict[str, list[Entry]] = {s.name: [] for s in steps}
    for i, placement in enumerate(placements):
        for name in {name for pattern in placement.steps for name in said if fnmatchcase(name, pattern)}:
            said[name].append((i, placement))
    liked = {key: [new for s in group for new in _liked(s, said[s.name])] for key, group in groups.items()}
    _every_pattern_fits([s for group in liked.values() for s in group], placements, in_phase=True)
    return {
        key: tuple(new for s in group for new in _placed(s, said[s.name], key == "layer"))
        for key, group in liked.items()
    }


def _every_pattern_fits(steps: Sequence[StepSpec], placements: Sequence[Placement], in_phase: bool) -> None:
    """Check that every pattern matches a step. in_phase: only placements for one phase, with a step in that phase."""
    for i, placement in enumerate(placements):
        if in_phase and placement.phase is None:
            continue
        names = dict.fromkeys(s.name for s in steps if not in_phase or placement.phase in s.phases)
        for k, pattern in enumerate(placement.steps):
            if not any(fnmatchcase(name, pattern) for name in names):
                what = f"no step of {placement.phase}" if in_phase else "no step"
                raise FieldError(f"placement[{i}].steps[{k}]", f"{pattern!r} fits {what}{nearest(pattern, names)}")


def _liked(step: StepSpec, entries: Sequence[Entry]) -> list[StepSpec]:
    """Apply `like` to a step: one step or none."""
    like = _only(step, [(i, p.like) for i, p in entries], "like")
    if like is None:
        return [step]
    return [step.model_copy(update={"phase": None})] if like in step.phases else []


def _placed(step: StepSpec, entries: Sequence[Entry], layer: bool) -> list[StepSpec]:
    """Apply placements to a step: unchanged, changed, split by phase, or replaced by a form."""
    said = {phase: _said(step, entries, phase) for phase in step.phases}
    if len(said) == 2 and said["prefill"] != said["decode"]:
        return [made for phase in said for made in _made(step.model_copy(update={"phase": phase}), said[phase], layer)]
    return _made(step, said[step.phases[0]], layer)


def _said(step: StepSpec, entries: Sequence[Entry], phase: Phase) -> dict[str, Any]:
    """Fields that placements set for the step in this phase; `index`: the placement that sets the form."""
    here = [(i, p) for i, p in entries if p.phase in (None, phase)]
    values = {field: _only(step, [(i, getattr(p, field)) for i, p in here], field) for field in PLACES}
    found = {field: value for field, value in values.items() if value is not None}
    if "form" in found:
        index = next(i for i, p in here if p.form is not None)
        if "act" in found:
            raise FieldError(
                f"placement[{index}].form", f"another placement gives {step.name} an act; remove one of them"
            )
        found["index"] = index
    return found


def _only(step: StepSpec, values: Sequence[tuple[int, Any]], field: str) -> Any:
    """The value that placements set for a field; FieldError if two set it."""
    found = [(i, value) for i, value in values if value is not None]
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise FieldError(
            f"placement[{second}].{field}", f"placement[{first}] sets it for {step.name} already; remove one of them"
        )
    return found[0][1] if found else None


def _made(step: StepSpec, said: dict[str, Any], layer: bool) -> list[StepSpec]:
    device = said.get("device", step.device)
    if "form" not in said:
        return [step.model_copy(update={"device": device, "act": said.get("act", step.act)})]
    form = _form(said["form"], f"placement[{said['index']}].form")
    if step.op not in form.instead:
        what = f"{said['form']} has nothing in place of {step.op} ({step.name}); it has {', '.join(form.instead)}"
        raise FieldError(f"placement[{said['index']}].form", what)
    lost = step.attrs.keys() - {name for new in form.instead[step.op] for name in new.attrs}
    if lost:
        what = (
            f"{said['form']} computes {step.op} without {min(lost)}, which {step.name} has; give the step another form"
        )
        raise FieldError(f"placement[{said['index']}].form", what)
    made = []
    for new in form.instead[step.op]:
        attrs = {name: step.attrs[name] for name in new.attrs if name in step.attrs}
        args = {key: step.args.get(name, name) for key, name in new.args.items()}
        args |= {key: f"{name}.{{l}}" if layer else name for key, name in new.own.items()}
        made.append(
            StepSpec(
                name=step.name + new.suffix,
                op=new.op,
                args=args,
                device=new.device or device,
                attrs=attrs,
                act=new.act,
                extent=step.extent,
                phase=step.phase,
                when=step.when,
            )
        )
    return made


def _form(name: str, key: str) -> Form:
    known = sorted(p.stem for p in FORMS.glob("*.toml"))
    if name not in known:
        raise FieldError(key, f"no form is called {name!r}{nearest(name, known)}")
    return _read(FORMS / f"{name}.toml")


@lru_cache(maxsize=16)
def _read(path: Path) -> Form:
    return load_toml(path, Form)
