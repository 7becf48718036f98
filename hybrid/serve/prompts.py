"""Messages of a request as the token ids that the model continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid.text import chat

if TYPE_CHECKING:
    from hybrid.model import Model


def encode(model: Model, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
    """Takes a while: a template from a file runs in a process of its own. ChatError."""
    checkpoint = model.checkpoint
    return chat.encode(checkpoint.tokenizer, messages, checkpoint.chat_template, tools=tools)
