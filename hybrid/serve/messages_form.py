"""Format answers of /v1/messages: a message of content blocks, or a stream of events."""

from __future__ import annotations

import secrets
from typing import Any

from hybrid.engine.request import Completion
from hybrid.serve.adapter import arguments
from hybrid.serve.errors import ANTHROPIC, ApiError
from hybrid.serve.forms import Events, Head, Reader, read
from hybrid.serve.http import packed
from hybrid.serve.running import Item


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + packed({"type": kind, **fields}) + b"\n\n"


class MessagesForm(Events):
    """An answer of /v1/messages. reader: None if no tools may be called."""

    waiting = _event("ping")

    def __init__(self, head: Head, reader: Reader | None) -> None:
        self._head, self._reader = head, reader
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] | None = None  # of the open block
        self._done: Completion | None = None

    def open(self) -> bytes:
        return _event("message_start", message=self._message())

    def push(self, item: Item) -> bytes:
        out = b""
        for delta in read(self._reader, item):
            if "reasoning_content" in delta:
                out += self._say("thinking", delta["reasoning_content"])
            if "content" in delta:
                out += self._say("text", delta["content"])
            for call in delta.get("tool_calls", ()):
                out += self._call(call)
        if item.done is not None:
            self._done = item.done
            out += self._end_block()
        return out

    def close(self) -> bytes:
        reason, sequence = self._stop()
        ended = _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=self._usage())
        return ended + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return error.ending(ANTHROPIC)

    def whole(self) -> dict[str, Any]:
        return self._message()

    def _message(self) -> dict[str, Any]:
        reason, sequence = self._stop()
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": self._blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _stop(self) -> tuple[str | None, str | None]:
        """(stop_reason, stop_sequence)."""
        if self._done is None:
            return None, None
        finish = self._done.finish
        if finish == "eos":
            return "tool_use" if self._reader is not None and self._reader.calls else "end_turn", None
        if finish == "stop":
            return "stop_sequence", self._done.stopped
        return "model_context_window_exceeded" if finish == "context" else "max_tokens", None

    def _usage(self) -> dict[str, int]:
        """Cached tokens, known at the end, are no part of input_tokens."""
        used = self._done.usage if self._done is not None else None
        cached = used.cached_tokens if used is not None else 0
        return {
            "input_tokens": self._head.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used.completion_tokens if used is not None else 0,
        }

    def _say(self, kind: str, piece: str) -> bytes:
        """More of the open block of a kind, or of a new one."""
        signed = {"signature": ""} if kind == "thinking" else {}
        out = b""
        if self._pieces is None or self._blocks[-1]["type"] != kind:
            out = self._begin({"type": kind, kind: "", **signed})
        return out + self._more({"type": f"{kind}_delta", kind: piece}, piece)

    def _call(self, call: dict[str, Any]) -> bytes:
        out, function = b"", call["function"]
        if "id" in call:
            out = self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        if piece := function["arguments"]:
            out += self._more({"type": "input_json_delta", "partial_json": piece}, piece)
        return out

    def _begin(self, block: dict[str, Any]) -> bytes:
        out = self._end_block()
        self._blocks.append(block)
        self._pieces = []
        return out + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _more(self, delta: dict[str, Any], piece: str) -> bytes:
        assert self._pieces is not None
        self._pieces.append(piece)
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> bytes:
        """Complete the open block, if any. A use of a tool that was cut off has no input."""
        if self._pieces is None:
            return b""
        block, text, self._pieces = self._blocks[-1], "".join(self._pieces), None
        if block["type"] == "tool_use":
            block["input"] = arguments(text) or {}
        else:
            block[block["type"]] = text
        return _event("content_block_stop", index=len(self._blocks) - 1)
