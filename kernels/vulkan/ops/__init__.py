"""Bindings: how each operation becomes dispatches. One module per operation, `record(recorder, step, tensors)`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

BINDINGS: dict[str, Callable[..., Any]] = {
    m.name: importlib.import_module(f"{__name__}.{m.name}").record
    for m in pkgutil.iter_modules(__path__)
    if not m.name.startswith("_")
}
