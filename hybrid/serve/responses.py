"""/v1/responses: an answer as an object with a list of items, or a stream of events."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve.answers import Answer
from hybrid.serve.errors import ApiError
from hybrid.serve.forms import FINISH, Head, PartsForm, named_event, usage
from hybrid.serve.generating import asked_chat
from hybrid.serve.http import JsonRoute
from hybrid.serve.responses_wire import NAMES, ResponsesRequest
from hybrid.serve.service import Service


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)

    @r.post("/v1/responses", summary="An answer as a list of items: text and calls of tools")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        repeated = body.repeated()
        a = await asked_chat(service, request, body.chat(), NAMES)
        form = ResponsesForm(a.head, a.readers[0], repeated)
        return await service.answer(request, a.jobs, form, bool(body.stream), a.notes)

    return r


class ResponsesForm(PartsForm):
    """asked: request fields that the answer repeats."""

    def __init__(self, head: Head, reader: Answer, asked: dict[str, Any]) -> None:
        super().__init__(head, reader)
        self._same: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": head.model,
            "error": None,
            "previous_response_id": None,
            "store": False,
            **asked,
        }
        self._number = 0

    def open(self) -> bytes:
        response = self._object("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def close(self) -> bytes:
        whole = self.whole()
        return self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def whole(self) -> dict[str, Any]:
        self.end()
        return self._object(self._status())

    def _status(self) -> str:
        """Of what has ended."""
        cut = self.done is not None and FINISH[self.done.finish] == "length"
        return "incomplete" if cut else "completed"

    def _object(self, status: str) -> dict[str, Any]:
        counted = None
        if self.done is not None:
            u = usage([self.done], [0], [self.reader])
            counted = {
                "input_tokens": u["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": u["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": u["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": u["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": u["total_tokens"],
            }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._same, "status": status, "incomplete_details": why, "output": self.parts, "usage": counted}

    def _begin(self, kind: str, call: dict[str, Any]) -> bytes:
        if call:
            about = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
            return self._add("fc", {"type": "function_call", **about})
        if kind == "content":
            added = self._add("msg", {"type": "message", "role": "assistant", "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            added = self._add("rs", {"type": "reasoning", "summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
        self.parts[-1]["content"].append(part)
        return added + self._of_item("response.content_part.added", content_index=0, part=part)

    def _add(self, prefix: str, item: dict[str, Any]) -> bytes:
        self.parts.append({"id": f"{prefix}_{secrets.token_hex(12)}", "status": "in_progress", **item})
        return self._event("response.output_item.added", output_index=len(self.parts) - 1, item=self.parts[-1])

    def _more(self, piece: str, logprobs: list[dict[str, Any]]) -> bytes:
        item = self.parts[-1]
        if item["type"] == "function_call":
            return self._of_item("response.function_call_arguments.delta", delta=piece)
        more = {"logprobs": logprobs} if item["type"] == "message" else {}
        kind = item["content"][0]["type"]
        return self._of_item(f"response.{kind}.delta", content_index=0, delta=piece, **more)

    def _end(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        item = self.parts[-1]
        item["status"] = self._status()
        if item["type"] == "function_call":
            item["arguments"] = text
            out = self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = item["content"][0]
            said = {"text": text, "logprobs": logprobs} if item["type"] == "message" else {"text": text}
            part.update(said)
            out = self._of_item(f"response.{part['type']}.done", content_index=0, **said)
            out += self._of_item("response.content_part.done", content_index=0, part=part)
        return out + self._event("response.output_item.done", output_index=len(self.parts) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event within the last item."""
        return self._event(kind, item_id=self.parts[-1]["id"], output_index=len(self.parts) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, sequence_number=self._number - 1, **fields)
