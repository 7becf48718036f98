"""Where things lie: the project's files in a clone or an installation, and where commands may write."""

from __future__ import annotations

import os
from pathlib import Path

from hybrid.core.errors import SpecError
from hybrid.spec.load import ROOT


def in_clone() -> bool:
    """Is this a clone of the repository (or an editable installation of one)? Only there are a package's files rewritten."""
    return (ROOT / "pyproject.toml").is_file()


def clone(what: str) -> Path:
    """The clone's root. SpecError in an installation, for `what` (a sentence's subject) that is only in a clone."""
    if not in_clone():
        raise SpecError(f"{what} only in a clone of the repository, and this is an installation in {ROOT}: run it from a clone")
    return ROOT


def pages_root() -> Path:
    """The folder whose docs/ a command renews: the clone, else the working folder."""
    return ROOT if in_clone() else Path.cwd()


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/hybrid-kernels, or the same in ~/.cache; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-kernels"
