"""Run Gemma models with declared, verified kernels.

import hybrid
with hybrid.load("model.gguf") as model:
    for piece in model.generate("The asyncio module provides", max_tokens=64):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import os
import sys

# A command's modules take a while to load: Ctrl-C ends it meanwhile without a traceback. hybrid.cli.run undoes this. It
# comes before any import that Python has not made itself.
_COMMANDS = ("bench", "convert", "doctor", "embed", "generate", "inspect", "perplexity", "prove", "schedule", "serve")


def _is_command() -> bool:
    called = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if called == "-m":  # runpy is looking for the module
        words = sys.orig_argv[1:]
        return "-m" in words[:-1] and words[words.index("-m") + 1] in [f"hybrid.{name}" for name in _COMMANDS]
    return called.partition(".")[0] in [f"hybrid-{name}" for name in _COMMANDS]


if _is_command():
    import _signal  # type: ignore[import-not-found]

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

# Read by NumPy's BLAS on import: its idle threads spin for 2**n cycles, 26 by default. On a busy host the scheduler
# preempts spinning threads when they get work.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "18")

if TYPE_CHECKING:
    from hybrid.checkpoint.base import CheckpointError
    from hybrid.core.errors import ContextExceeded, DeviceLost, NoFreeSlot, QueueFull
    from hybrid.embedding import EmbeddingModel, load_embedder
    from hybrid.engine.handle import Handle
    from hybrid.engine.request import Completion, Event
    from hybrid.model import Model, load

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Completion",
    "ContextExceeded",
    "DeviceLost",
    "EmbeddingModel",
    "Event",
    "Handle",
    "Model",
    "NoFreeSlot",
    "QueueFull",
    "__version__",
    "load",
    "load_embedder",
]


# Lazy exports: `import hybrid` imports no backend, no NumPy and no file reader.
_LATER = {
    "CheckpointError": "hybrid.checkpoint.base",
    "Completion": "hybrid.engine.handle",
    "ContextExceeded": "hybrid.core.errors",
    "DeviceLost": "hybrid.core.errors",
    "EmbeddingModel": "hybrid.embedding",
    "Event": "hybrid.engine.handle",
    "Handle": "hybrid.engine.handle",
    "Model": "hybrid.model",
    "NoFreeSlot": "hybrid.core.errors",
    "QueueFull": "hybrid.core.errors",
    "load": "hybrid.model",
    "load_embedder": "hybrid.embedding",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'hybrid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
