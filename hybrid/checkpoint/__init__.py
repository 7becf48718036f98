"""Checkpoints: Hugging Face directories and GGUF files behind one class. Dialects end here."""

from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation
from hybrid.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "Generation", "open_checkpoint"]
