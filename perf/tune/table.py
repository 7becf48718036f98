"""Tables of kernels/vulkan/tuning as text: a section for each family, so that one is renewed and the others stay as
they are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.core.places import ROOT, in_clone
from hybrid.kernels.vulkan.tuning import TABLES, Table, Value, traits
from hybrid.spec.load import parse_toml, shown_path, validate

if TYPE_CHECKING:
    from hybrid.perf.tune import Found

_MARK = "# ---- "


def commit_of() -> str:
    """The checked-out commit, with a + where files differ from it; `unknown` outside of git."""
    try:
        made = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return made.stdout.strip() or "unknown"


def section(family: str, about: Mapping[str, str], found: Sequence[Found], unfit: Sequence[str]) -> str:
    """One family's part of a table."""
    lines = [
        f"{_MARK}{family}",
        f"[measured.{json.dumps(family)}]",
        *(f"{k} = {json.dumps(v)}" for k, v in about.items()),
    ]
    lines += [f"# unfit here: {line}" for line in unfit]
    if not found:
        lines += ["# No candidate gains over the binding's default."]
    for entry in found:
        lines += ["", *(f"# {note}" for note in entry.notes), "[[family]]", f"name = {json.dumps(family)}"]
        lines += [f"when = {_inline(entry.when)}"] if entry.when else []
        lines += [f"use = {_inline(entry.use)}"]
    return "\n".join(lines) + "\n"


def _inline(values: Mapping[str, Value]) -> str:
    return "{ " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in values.items()) + " }"


def merged(old: str, family: str, made: str) -> str:
    """A table's text with the family's section replaced, or put at its end."""
    head, *parts = old.split(_MARK)
    kept = [part for part in parts if part.split("\n", 1)[0] != family]
    blocks = [head.strip() + "\n", *(_MARK + part.strip() + "\n" for part in sorted([*kept, made.removeprefix(_MARK)]))]
    return "\n".join(blocks)


def target(name: str) -> Path:
    """Where table `name` is renewed; an installation keeps the tables that it came with."""
    return (TABLES if in_clone() else Path("tuning")) / f"{name}.toml"


def written(name: str, device: Any, family: str, made: str) -> str:
    """Write a family's section into table `name` (made if it is new); returns the file: the package's in a clone, else
    tuning/NAME.toml in the working folder. SpecError where the result would not be a table: then nothing is written."""
    path, shipped = target(name), TABLES / f"{name}.toml"
    known = path if path.exists() else shipped
    if known.exists():
        old = known.read_text(encoding="utf-8").replace(" Not tuned yet: every kernel takes its binding's default.", "")
    else:
        own = traits(device.report, device.subgroup_size)
        match = "\n".join(f"{k} = {json.dumps(own[k])}" for k in ("vendor", "driver"))
        old = f"# {device.report.driver}\nschema = 1\n\n[match]\n{match}\n"
    text = merged(old, family, made)
    validate(shown_path(path), parse_toml(shown_path(path), text), Table)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return shown_path(path)
