"""One replacement in a source file, for mutants of kernels (mutate.py) and of host code (hosts.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli


class StaleMutant(ValueError):
    """A mutant whose text is no longer in the source."""


def edited(path: Path, find: str, replace: str, label: str) -> str:
    """The file's text with `find`, which must occur once, replaced. StaleMutant names the mutant, `label`."""
    text = path.read_text()
    if text.count(find) != 1:
        raise StaleMutant(
            f"{label}: {find!r} occurs {text.count(find)} times in {path.name}, not once: renew the mutant"
        )
    return text.replace(find, replace)


def tables(path: Path) -> Mapping[str, list[dict[str, Any]]]:
    """The tables of a file of mutants."""
    return tomli.loads(path.read_text())
