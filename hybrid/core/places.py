"""Paths of the project's files in a clone or an installation, and of the cache folder.

In a clone hybrid/ has symlinks to top-level folders such as kernels/. In an installation these folders are in the
package. Both import `hybrid.kernels`.
"""

from __future__ import annotations

import os
from pathlib import Path

from hybrid.core.errors import SpecError

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
"""The clone's root; in an installation the folder that contains the package."""
SPECS = (PACKAGE / "specs").resolve()
MODELS = (PACKAGE / "models").resolve()
DEMO = MODELS / "demo-gemma3-q8_0.gguf"
"""The embedded demonstration model."""


def in_clone() -> bool:
    """Whether this is a clone (or its editable installation). Only there may tools rewrite the package's files."""
    return (ROOT / "pyproject.toml").is_file()


def clone(what: str) -> Path:
    """The clone's root. SpecError in an installation; `what` is the subject of its sentence."""
    if not in_clone():
        raise SpecError(
            f"{what} only in a clone of the repository, and this is an installation in {ROOT}: run it from a clone"
        )
    return ROOT


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/hybrid-kernels, default ~/.cache/hybrid-kernels. May not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-kernels"
