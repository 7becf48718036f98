"""Anthropic's API: /v1/messages answers with a message of content blocks, or a stream of events."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve.adapter import arguments
from hybrid.serve.answers import Answer
from hybrid.serve.errors import ANTHROPIC
from hybrid.serve.forms import Head, PartsForm, named_event
from hybrid.serve.generating import asked_chat
from hybrid.serve.http import Json, JsonRoute
from hybrid.serve.messages_wire import NAMES, CountRequest, MessagesRequest
from hybrid.serve.service import Service, note

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By the type of a block: a delta's type, and the name of its text."""


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)

    @r.post("/v1/messages", summary="An answer as a message of blocks: text, thinking and uses of tools")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        a = await asked_chat(service, request, body.chat(), NAMES)
        form = MessagesForm(a.head, a.readers[0])
        return await service.answer(request, a.jobs, form, bool(body.stream), [*body.notes(), *a.notes])

    @r.post("/v1/messages/count_tokens", summary="Tokens of a conversation")
    async def count(body: CountRequest, request: Request) -> Response:
        a = await asked_chat(service, request, body.chat(), NAMES)
        return Json({"input_tokens": a.head.prompt_tokens}, headers=note(body.notes()))

    return r


class MessagesForm(PartsForm):
    api = ANTHROPIC

    def __init__(self, head: Head, reader: Answer) -> None:
        super().__init__(head, reader)
        self._id = f"msg_{secrets.token_hex(12)}"

    def waiting(self) -> bytes:
        return named_event("ping")

    def open(self) -> bytes:
        return named_event("message_start", message=self.whole())

    def close(self) -> bytes:
        reason, sequence = self._stop()
        ended = named_event(
            "message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=self._usage()
        )
        return ended + named_event("message_stop")

    def whole(self) -> dict[str, Any]:
        reason, sequence = self._stop()
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": self.parts,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _stop(self) -> tuple[str | None, str | None]:
        """(stop_reason, stop_sequence)."""
        if self.done is None:
            return None, None
        finish = self.done.finish
        if finish == "eos":
            return "tool_use" if self.reader.calls else "end_turn", None
        if finish == "stop":
            return "stop_sequence", self.done.stopped
        return "model_context_window_exceeded" if finish == "context" else "max_tokens", None

    def _usage(self) -> dict[str, int]:
        """Cached tokens, known at the end, are no part of input_tokens."""
        used = self.done.usage if self.done is not None else None
        cached = used.cached_tokens if used is not None else 0
        return {
            "input_tokens": self.head.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used.completion_tokens if used is not None else 0,
        }

    def _begin(self, kind: str, call: dict[str, Any]) -> bytes:
        if call:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        elif kind == "content":
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self.parts.append(block)
        return self._event("start", content_block=block)

    def _more(self, piece: str, logprobs: list[dict[str, Any]]) -> bytes:
        kind, name = _DELTAS[self.parts[-1]["type"]]
        return self._event("delta", delta={"type": kind, name: piece})

    def _end(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """A use of a tool that was cut off has no input."""
        block = self.parts[-1]
        if block["type"] == "tool_use":
            block["input"] = arguments(text) or {}
        else:
            block[block["type"]] = text
        return self._event("stop")

    def _event(self, what: str, **fields: Any) -> bytes:
        """An event of the last block."""
        return named_event(f"content_block_{what}", index=len(self.parts) - 1, **fields)
