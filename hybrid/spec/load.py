"""Read TOML files into pydantic models; every error is one line with file, key and fix."""

from __future__ import annotations

import os
import stat
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import tomli
from pydantic import BaseModel, ConfigDict, ValidationError

from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.core.places import PACKAGE, ROOT

MAX_BYTES, MAX_DEPTH = 1 << 17, 32
MAX_DOTS = 500  # in a line: the parser is quadratic in a dotted key's length


class Model(BaseModel):
    """Base of declarations: frozen, strict types, unknown keys refused. Validators are built lazily."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True, defer_build=True)


M = TypeVar("M", bound=BaseModel)


def load_toml(path: Path | str, model: type[M]) -> M:
    """Read `path` as an instance of `model`; the validation context's `file` is the path for messages.

    Raises SpecError: `specs/ops/linear.toml: outputs.y.shape[1]: what is wrong; did you mean 'N'?`
    """
    return validate(shown_path(Path(path)), read_toml(path), model)


def read_toml(path: Path | str) -> dict[str, Any]:
    """The tables of a file. SpecError (one line, beginning with the file) if it cannot be read or is not TOML."""
    path = Path(path)
    file = shown_path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SpecError(f"{file}: cannot be read: it is not a file")
        with open(path, "rb") as stream:
            text = stream.read(MAX_BYTES + 1).decode("utf-8")
    except FileNotFoundError:
        raise SpecError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError, ValueError) as e:
        raise SpecError(f"{file}: cannot be read: {e}") from None
    return parse_toml(file, text)


def parse_toml(file: str, text: str) -> dict[str, Any]:
    """The tables of a declaration. SpecError for invalid TOML and for text beyond the size and depth limits."""
    if len(text) > MAX_BYTES:
        raise SpecError(f"{file}: longer than {MAX_BYTES} bytes; a declaration is a few thousand")
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise SpecError(f"{file}: not a declaration: nested too deeply, with a line of more than {MAX_DOTS} dots")
    try:
        data = tomli.loads(text)
        _refuse_depth(data)
    except RecursionError:
        raise SpecError(f"{file}: not a declaration: nested too deeply") from None
    except ValueError as e:  # TOMLDecodeError, and integers with thousands of digits
        raise SpecError(" ".join(f"{file}: not valid TOML: {e}".split())) from None
    return data


def _refuse_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(inner, (dict, list)):
            _refuse_depth(inner, depth + 1)


def validate(file: str, data: dict[str, Any], model: type[M]) -> M:
    """Parsed TOML as an instance of `model`. SpecError messages begin with `file`."""
    try:
        return model.model_validate(_tuples(data), context={"file": file})
    except ValidationError as e:
        first, *more = problems(file, e, model)
        raise SpecError(first + (f" (and {len(more)} more)" if more else ""), more) from None


def shown_path(path: Path) -> str:
    """The path, relative to the project if inside it."""
    place = path.resolve()
    root = next((r for r in (PACKAGE, ROOT) if place.is_relative_to(r)), None)
    return str(path) if root is None else place.relative_to(root).as_posix()


def problems(file: str, error: ValidationError, model: type[BaseModel]) -> list[str]:
    """A line for each problem of a ValidationError. Unknown keys come first: a misspelt key is also a missing one."""
    lines = []
    for found in sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden"):
        key, text = _problem(dict(found), model)
        lines.append(" ".join(f"{file}: {key + ': ' if key else ''}{text}".split()))
    return lines


def _problem(e: dict[str, Any], model: type[BaseModel]) -> tuple[str, str]:
    loc = tuple(p for p in e["loc"] if p != "[key]")
    context, value, kind = e.get("ctx", {}), e["input"], e["type"]
    if kind == "extra_forbidden":
        return key_path(loc), f"unknown key{nearest(loc[-1], _keys(model, loc[:-1]))}"
    if kind == "missing":
        return key_path(loc), "is missing; every table of this kind needs it"
    if isinstance(context.get("error"), FieldError):
        inner = context["error"]
        base = key_path(loc)
        return f"{base}.{inner.key}" if base and inner.key else base or inner.key, inner.message
    if kind == "value_error":
        return key_path(loc), str(context["error"])
    if kind == "literal_error":
        choices = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        wanted = f"is not one of {', '.join(choices)}" if len(choices) > 1 else f"must be {choices[0]}"
        return key_path(loc), f"{value!r} {wanted}{_close(value, choices)}"
    if kind == "too_long" and "max_length" in context:
        return key_path(loc), f"has {len(value)} entries; at most {context['max_length']} are allowed"
    if kind in ("model_type", "dict_type"):
        return key_path(loc), f"expected a table, not {_toml(value)}"
    return key_path(loc), f"{e['msg'][0].lower()}{e['msg'][1:].replace('tuple', 'list')}, not {_toml(value)}"


def _close(value: object, choices: list[str]) -> str:
    hint = nearest(value, choices)
    return hint if hint.startswith("; did") else ""


def _toml(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def key_path(loc: tuple[str | int, ...]) -> str:
    """('outputs', 'y', 'shape', 1) -> outputs.y.shape[1]"""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _keys(model: Any, loc: tuple[str | int, ...]) -> list[str]:
    """Valid keys of the table at `loc`."""
    at: Any = model
    for part in loc:
        at = _bare(at)
        if isinstance(at, type) and issubclass(at, BaseModel):
            fields = {f.alias or n: f for n, f in at.model_fields.items()}
            if part not in fields:
                return []
            at = fields[str(part)].annotation
        else:
            at = typing.get_args(at)[-1 if typing.get_origin(at) is dict else 0]
    at = _bare(at)
    if isinstance(at, type) and issubclass(at, BaseModel):
        return [f.alias or n for n, f in at.model_fields.items()]
    return []


def _bare(annotation: Any) -> Any:
    """Without Optional and Annotated."""
    while True:
        origin = typing.get_origin(annotation)
        if origin in (typing.Union, types.UnionType):
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        elif origin is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        else:
            return annotation


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) if isinstance(v, (dict, list)) else v for k, v in value.items()}
    return (
        tuple([_tuples(v) if isinstance(v, (dict, list)) else v for v in value]) if isinstance(value, list) else value
    )
