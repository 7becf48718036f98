"""Messages of a request as the token ids that the model continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid.serve.wire import Message
from hybrid.text import chat

if TYPE_CHECKING:
    from hybrid.model import Model


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates take them: developer is system, neighbours of one role are one turn, since Gemma's roles alternate."""
    out: list[dict[str, Any]] = []
    for m in messages:
        role = "system" if m.role == "developer" else m.role
        if out and out[-1]["role"] == role:
            out[-1]["content"] += "\n\n" + m.text()
        else:
            out.append({"role": role, "content": m.text()})
    return out


def encode(model: Model, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Takes a while: a template from a file runs in a process of its own. ChatError."""
    checkpoint = model.checkpoint
    return chat.encode(checkpoint.tokenizer, messages, checkpoint.chat_template)
