"""NumPy, imported by the first use of it: a command that only plans shapes never does. Modules that plans, specs and
headers of files are read by take `np` from here."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["np"]


class _Later(ModuleType):
    """A module's attributes, each looked up once."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = _Later("numpy")
