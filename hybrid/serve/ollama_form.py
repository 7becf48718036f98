"""Format answers of Ollama's /api/chat and /api/generate: an object, or a stream of objects, one a line."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from hybrid.engine.request import Completion
from hybrid.serve.adapter import arguments
from hybrid.serve.errors import OLLAMA, ApiError
from hybrid.serve.forms import FINISH, Head, Reader, read
from hybrid.serve.http import LINES, packed
from hybrid.serve.running import Item


def now() -> str:
    return stamp(datetime.now(timezone.utc))


def stamp(time: datetime) -> str:
    """A time of UTC as Ollama writes it."""
    return time.replace(tzinfo=None).isoformat() + "Z"


def answered(model: str, chat: bool, text: str = "", **parts: Any) -> dict[str, Any]:
    """An object of an answer. parts: thinking and tool_calls, left out if empty."""
    found = {k: v for k, v in parts.items() if v}
    if chat:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text, **found}}
    else:
        said = {"response": text, **found}
    return {"model": model, "created_at": now(), **said, "done": False}


class OllamaForm:
    """model: as the request names it. chat: whether of /api/chat. reader: None if no tools may be called."""

    media = LINES

    def __init__(self, head: Head, model: str, chat: bool, reader: Reader | None = None) -> None:
        self._head, self._model, self._chat, self._reader = head, model, chat, reader
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._told = 0  # calls that were sent
        self._done: Completion | None = None

    @property
    def waiting(self) -> bytes:
        return self._line(answered(self._model, self._chat))

    def open(self) -> bytes:
        return b""

    def push(self, item: Item) -> bytes:
        self._done = item.done
        fresh = [self._head.tokens.chat(p, self._head.top or 0) for p in self._head.logprobs(item.events, self._reader)]
        text = thinking = ""
        for delta in read(self._reader, item):
            text += delta.get("content", "")
            thinking += delta.get("reasoning_content", "")
        calls = self._calls()
        self._text.append(text)
        self._thinking.append(thinking)
        self._logprobs += fresh
        if not (text or thinking or calls or fresh):
            return b""
        line = answered(self._model, self._chat, text, thinking=thinking, tool_calls=calls)
        return self._line({**line, "logprobs": fresh} if fresh else line)

    def close(self) -> bytes:
        return self._line({**answered(self._model, self._chat), **self._end()})

    def fail(self, error: ApiError) -> bytes:
        return error.ending(OLLAMA)

    def whole(self) -> dict[str, Any]:
        self._told = 0
        parts = {"thinking": "".join(self._thinking), "tool_calls": self._calls()}
        shown = {"logprobs": self._logprobs} if self._logprobs else {}
        return {**answered(self._model, self._chat, "".join(self._text), **parts), **shown, **self._end()}

    def _line(self, value: dict[str, Any]) -> bytes:
        return packed(value) + b"\n"

    def _calls(self) -> list[dict[str, Any]]:
        """Calls that are complete and were not sent: the last one is at the end. One that was cut off is left out."""
        made = self._reader.calls if self._reader is not None else []
        ready = made[: len(made) if self._done is not None else max(0, len(made) - 1)]
        told, self._told = self._told, len(ready)
        return [
            {"id": c["id"], "function": {"index": n, "name": c["function"]["name"], "arguments": found}}
            for n, c in enumerate(ready)
            if n >= told and (found := arguments(c["function"]["arguments"])) is not None
        ]

    def _end(self) -> dict[str, Any]:
        """The last object's own fields; durations in nanoseconds."""
        if self._done is None:
            return {"done": True, "done_reason": "stop"}
        used, took = self._done.usage, self._done.timings
        queued = took.queued or 0.0
        first = took.first_token if took.first_token is not None else took.total
        spans = {
            "total_duration": took.total,
            "load_duration": queued,
            "prompt_eval_duration": first - queued,
            "eval_duration": took.total - first,
        }
        return {
            "done": True,
            "done_reason": FINISH[self._done.finish],
            **{name: round(seconds * 1e9) for name, seconds in spans.items()},
            "prompt_eval_count": used.prompt_tokens,
            "eval_count": used.completion_tokens,
        }
