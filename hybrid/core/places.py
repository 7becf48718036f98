"""Where things lie: the project's files in a clone or an installation, and where commands may write.

A clone keeps its top-level folders; hybrid/ reaches them by links of the same names, so that kernels are
`hybrid.kernels` in a clone as in an installation, where all that the project installs lies in one package.
"""

from __future__ import annotations

import os
from pathlib import Path

from hybrid.core.errors import SpecError

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
"""Of a clone; in an installation the folder that holds the package."""
SPECS = (PACKAGE / "specs").resolve()
MODELS = (PACKAGE / "models").resolve()
DEMO = MODELS / "demo-gemma3-q8_0.gguf"
"""The embedded demonstration model."""


def in_clone() -> bool:
    """Is this a clone of the repository (or an editable installation of one)? Only there are a package's files
    rewritten."""
    return (ROOT / "pyproject.toml").is_file()


def clone(what: str) -> Path:
    """The clone's root. SpecError in an installation, for `what` (a sentence's subject) that is only in a clone."""
    if not in_clone():
        raise SpecError(
            f"{what} only in a clone of the repository, and this is an installation in {ROOT}: run it from a clone"
        )
    return ROOT


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/hybrid-kernels, or the same in ~/.cache; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-kernels"
