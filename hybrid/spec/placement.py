"""Placements: which steps of a schedule go to which device, and in what form. [[placement]] of a schedule that extends
another; the forms (other operations that compute a step) are files of specs/forms."""

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
"""Fields of a placement that hold in one phase or in both."""
MOST = 64
"""Placements of a file, and patterns of one: a stranger's file must not take long to read."""


class FormHead(Model):
    name: Text
    summary: Text


class FormStep(Model):
    """One of the steps that a form has in place of another."""

    op: Text
    suffix: str = ""
    """Follows the name of the step in whose place it is."""
    args: dict[str, str] = Field(default_factory=dict)
    """Operation's tensor name -> tensor name of the operation in whose place it is."""
    own: dict[str, str] = Field(default_factory=dict)
    """Operation's tensor name -> a tensor that only the form has, `NAME.{l}` in a layer."""
    attrs: tuple[str, ...] = ()
    """Attributes that it has from the step in whose place it is."""
    device: Literal["main"] | None = None
    """None: where the placement says."""
    act: dict[str, str] = Field(default_factory=dict)
    """Matrix input -> dtype, as a schedule's step has it."""

    @field_validator("act")
    @classmethod
    def _validate_act(cls, value: dict[str, str]) -> dict[str, str]:
        return checked_act(value)


class Form(Model):
    """One file of specs/forms: operations -> steps of other operations that compute the same."""

    schema_: Literal[1] = Field(alias="schema")
    form: FormHead
    instead: dict[str, tuple[FormStep, ...]] = Field(min_length=1)


class Placement(Model):
    """One [[placement]]."""

    steps: tuple[Text, ...] = Field(min_length=1, max_length=MOST)
    """Patterns (`*.attention`) of step names as the schedule that is extended writes them."""
    phase: Phase | None = None
    """Only in this phase; None: in both. In the other one the step stays as it was."""
    like: Phase | None = None
    """Both phases have the steps that this one has; those only of the other one are left out."""
    device: Text | None = None
    form: Text | None = None
    """A file of specs/forms, by its name: what stands in the place of each step."""
    act: dict[str, str] | None = None
    """Matrix input -> dtype, instead of what the step has."""

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
"""A placement, and its number in the file."""


def placed(
    groups: Mapping[str, Sequence[StepSpec]], placements: Sequence[Placement]
) -> dict[str, tuple[StepSpec, ...]]:
    """The steps before, in and after the layers (`groups`) as the placements have them.

    Raises FieldError for a pattern that no step fits, and for two placements that set one field of a step.
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
    """in_phase: only of placements that are for one phase, and some step must run in it."""
    for i, placement in enumerate(placements):
        if in_phase and placement.phase is None:
            continue
        names = dict.fromkeys(s.name for s in steps if not in_phase or placement.phase in s.phases)
        for k, pattern in enumerate(placement.steps):
            if not any(fnmatchcase(name, pattern) for name in names):
                what = f"no step of {placement.phase}" if in_phase else "no step"
                raise FieldError(f"placement[{i}].steps[{k}]", f"{pattern!r} fits {what}{nearest(pattern, names)}")


def _liked(step: StepSpec, entries: Sequence[Entry]) -> list[StepSpec]:
    """One step, or none, after what `like` says."""
    like = _only(step, [(i, p.like) for i, p in entries], "like")
    if like is None:
        return [step]
    return [step.model_copy(update={"phase": None})] if like in step.phases else []


def _placed(step: StepSpec, entries: Sequence[Entry], layer: bool) -> list[StepSpec]:
    """One step: itself, changed, twice (a phase each), or as the steps of a form."""
    said = {phase: _said(step, entries, phase) for phase in step.phases}
    if len(said) == 2 and said["prefill"] != said["decode"]:
        return [made for phase in said for made in _made(step.model_copy(update={"phase": phase}), said[phase], layer)]
    return _made(step, said[step.phases[0]], layer)


def _said(step: StepSpec, entries: Sequence[Entry], phase: Phase) -> dict[str, Any]:
    """Field -> what a placement says of the step in this phase; index: of the placement that gives the form."""
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
    """The one value that is set; FieldError where two placements set it."""
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
