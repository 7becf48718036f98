"""Checkpoints: Hugging Face directories and GGUF files behind one class. Dialects end here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation

if TYPE_CHECKING:
    from hybrid.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "Generation", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    """The readers of files are imported by the first use of `open_checkpoint`: what a size is called needs none of
    them."""
    if name == "open_checkpoint":
        from hybrid.checkpoint.open import open_checkpoint

        return open_checkpoint
    raise AttributeError(f"module 'hybrid.checkpoint' has no attribute {name!r}")
