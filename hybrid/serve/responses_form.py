"""Format answers of /v1/responses: an object with a list of items, or a stream of events."""

from __future__ import annotations

import secrets
import time
from typing import Any

from hybrid.engine.request import Completion
from hybrid.serve.errors import ApiError
from hybrid.serve.forms import FINISH, Events, Head, Reader, read, usage
from hybrid.serve.http import packed
from hybrid.serve.running import Item

_TEXTS = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}
"""Items of text: beginning of the id, type of the part."""


class ResponsesForm(Events):
    """An answer of /v1/responses. asked: request fields that it repeats. reader: None if it can only be text."""

    def __init__(self, head: Head, asked: dict[str, Any], reader: Reader | None) -> None:
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": head.model,
            "error": None,
            "previous_response_id": None,
            "store": False,
            **asked,
        }
        self._of, self._reader = head, reader
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self._done: Completion | None = None

    def open(self) -> bytes:
        response = self._object("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def push(self, item: Item) -> bytes:
        said = self._of.logprobs(item.events, self._reader)
        logprobs = [self._of.tokens.chat(p, self._of.top or 0) for p in said]
        out = b""
        for delta in read(self._reader, item):
            if "reasoning_content" in delta:
                out += self._say("reasoning", delta["reasoning_content"], {})
            if "content" in delta:
                out += self._say("message", delta["content"], {"logprobs": logprobs})
                logprobs = []
            for call in delta.get("tool_calls", ()):
                out += self._call(call)
        if logprobs and self._items and self._items[-1]["type"] == "message":
            self._items[-1]["content"][0]["logprobs"] += logprobs
        if item.done is not None:
            self._done = item.done
            out += self._end_item()
        return out

    def close(self) -> bytes:
        whole = self.whole()
        return self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def whole(self) -> dict[str, Any]:
        self._end_item()
        cut = self._done is not None and FINISH[self._done.finish] == "length"
        return self._object("incomplete" if cut else "completed")

    def _object(self, status: str) -> dict[str, Any]:
        counted = None
        if self._done is not None:
            u = usage([self._done], [0], [self._reader])
            counted = {
                "input_tokens": u["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": u["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": u["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": u["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": u["total_tokens"],
            }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "incomplete_details": why,
            "output": list(self._items),
            "usage": counted,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = packed({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def _say(self, kind: str, text: str, more: dict[str, Any]) -> bytes:
        """Text of a message, or of a thought. more: lists that the part collects beside it."""
        out = b""
        if not self._items or self._items[-1]["type"] != kind:
            out += self._end_item()
            prefix, text_type = _TEXTS[kind]
            item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
            item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
            out += self._event(
                "response.output_item.added", output_index=len(self._items), item={**item, "content": []}
            )
            part: dict[str, Any] = {"type": text_type, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            self._items.append({**item, "content": [part]})
            out += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        for key, values in more.items():
            part[key] += values
        return out + self._event(f"response.{part['type']}.delta", **self._place(), content_index=0, delta=text, **more)

    def _call(self, call: dict[str, Any]) -> bytes:
        out, function = b"", call["function"]
        if "id" in call:
            out += self._end_item()
            self._items.append(
                {
                    "id": f"fc_{secrets.token_hex(12)}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call["id"],
                    "name": function["name"],
                    "arguments": "",
                }
            )
            out += self._event(
                "response.output_item.added", output_index=len(self._items) - 1, item=dict(self._items[-1])
            )
        if function["arguments"]:
            self._items[-1]["arguments"] += function["arguments"]
            out += self._event("response.function_call_arguments.delta", **self._place(), delta=function["arguments"])
        return out

    def _end_item(self) -> bytes:
        """Complete the last item, if it is open."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item = self._items[-1]
        cut = self._done is not None and FINISH[self._done.finish] == "length"
        item["status"] = "incomplete" if cut else "completed"
        out = b""
        if item["type"] in _TEXTS:
            part = item["content"][0]
            said = {key: part[key] for key in ("text", "logprobs") if key in part}
            out += self._event(f"response.{part['type']}.done", **self._place(), content_index=0, **said)
            out += self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        else:
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            out += self._event("response.function_call_arguments.done", **self._place(), **arguments)
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
