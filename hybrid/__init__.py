"""Run Gemma models with declared, verified kernels.

import hybrid
with hybrid.load("model.gguf") as model:
    for piece in model.generate("The asyncio module provides", max_tokens=64):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Read by NumPy's BLAS on import: its idle threads spin for 2**n cycles, 26 by default. On a busy host the scheduler
# preempts spinning threads when they get work.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "18")

if TYPE_CHECKING:
    from hybrid.core.errors import ContextExceeded, DeviceLost, NoFreeSlot, QueueFull
    from hybrid.engine.handle import Handle
    from hybrid.engine.request import Completion, Event
    from hybrid.model import Model, load

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "ContextExceeded",
    "DeviceLost",
    "Event",
    "Handle",
    "Model",
    "NoFreeSlot",
    "QueueFull",
    "__version__",
    "load",
]


# Lazy exports: `import hybrid` imports no backend, no NumPy and no file reader.
_LATER = {
    "Completion": "hybrid.engine.handle",
    "ContextExceeded": "hybrid.core.errors",
    "DeviceLost": "hybrid.core.errors",
    "Event": "hybrid.engine.handle",
    "Handle": "hybrid.engine.handle",
    "Model": "hybrid.model",
    "NoFreeSlot": "hybrid.core.errors",
    "QueueFull": "hybrid.core.errors",
    "load": "hybrid.model",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'hybrid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
