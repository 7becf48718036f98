"""The answer of /v1/responses: one object with a list of items, or the events that build it up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from hybrid.engine.handle import Completion, Event
from hybrid.serve.errors import ApiError
from hybrid.serve.forms import FINISH, Reader, Tokens, usage
from hybrid.serve.http import packed
from hybrid.serve.running import Item


class ResponsesForm:
    """asked: fields of the request that the answer repeats. top, shown, reader, silent: as of ChatForm."""

    def __init__(
        self,
        model: str,
        asked: dict[str, Any],
        tokens: Tokens,
        top: int | None,
        shown: Callable[[int], bool],
        reader: Reader | None,
        silent: dict[int, str],
    ) -> None:
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "previous_response_id": None,
            "store": False,
            **asked,
        }
        self._tokens, self._top, self._shown, self._reader, self._silent = tokens, top, shown, reader, silent
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self._done: Completion | None = None

    def open(self) -> bytes:
        response = self._object("in_progress")
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def push(self, item: Item) -> bytes:
        text = "".join(e.text + "".join(self._silent.get(i, "") for i in e.ids) for e in item.events)
        reader = self._reader
        if reader is None:
            deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        else:
            deltas = [*(reader.push(text) if text else ()), *(reader.end() if item.done is not None else ())]
        logprobs = self._logprobs(item.events)
        out = b""
        for delta in deltas:
            if "content" in delta:
                out += self._say(delta["content"], logprobs)
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
            u = usage([self._done], [0])
            counted = {
                "input_tokens": u["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": u["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": u["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": u["total_tokens"],
            }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._head, "status": status, "incomplete_details": why, "output": list(self._items), "usage": counted}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = packed({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def _logprobs(self, events: list[Event]) -> list[dict[str, Any]]:
        if self._top is None:
            return []
        return [self._tokens.chat(p, self._top) for e in events for p in e.logprobs or () if self._shown(p.id)]

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        out = b""
        if not self._items or self._items[-1]["type"] != "message":
            out += self._end_item()
            item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": "in_progress"}
            out += self._event("response.output_item.added", output_index=len(self._items), item={**item, "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items.append({**item, "content": [part]})
            out += self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part, logprobs=[]))
        part = self._items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return out + self._event("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs)

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
            out += self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(self._items[-1]))
        if function["arguments"]:
            self._items[-1]["arguments"] += function["arguments"]
            out += self._event("response.function_call_arguments.delta", **self._place(), delta=function["arguments"])
        return out

    def _end_item(self) -> bytes:
        """The last item is complete, if it was not."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item = self._items[-1]
        cut = self._done is not None and FINISH[self._done.finish] == "length"
        item["status"] = "incomplete" if cut else "completed"
        out = b""
        if item["type"] == "message":
            part = item["content"][0]
            out += self._event(
                "response.output_text.done", **self._place(), content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
            out += self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        else:
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            out += self._event("response.function_call_arguments.done", **self._place(), **arguments)
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
