"""Checkpoints: one class for Hugging Face directories and GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation

if TYPE_CHECKING:
    from hybrid.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "Generation", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    """Lazy exports, so that modules without file access do not import the readers."""
    if name == "open_checkpoint":
        from hybrid.checkpoint.open import open_checkpoint

        return open_checkpoint
    raise AttributeError(f"module 'hybrid.checkpoint' has no attribute {name!r}")
