"""NumPy, imported lazily on first use, so that commands which only plan shapes start fast. Modules that read plans,
specs and file headers import `np` from here."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["np"]


class _Later(ModuleType):
    """A lazy module that caches each attribute."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = _Later("numpy")
