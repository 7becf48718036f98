"""Anthropic's API: requests of /v1/messages as chat requests, and answers as a message of content blocks, or a stream of
events."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints, Tag, field_validator, model_validator
from starlette.responses import Response

from hybrid.serve.answers import Answer, arguments
from hybrid.serve.errors import ANTHROPIC
from hybrid.serve.forms import Head, PartsForm, named_event
from hybrid.serve.generating import Names, asked_chat, chat_request, continued
from hybrid.serve.http import Json, JsonRoute
from hybrid.serve.service import Service, note
from hybrid.serve.wire import (
    I32,
    MESSAGES,
    ChatRequest,
    Effort,
    FirstError,
    Name,
    Open,
    SamplingFields,
    Stops,
    Text,
    TextOr,
    ToolList,
    by_kind,
    only_type,
    text_part,
    wrong,
)

NAMES = Names(
    {
        "messages": "messages",  # blocks are not numbered as the chat's messages
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "thinking",
    },
    ("tools[{}].input_schema", "output_config.format.schema"),
)
KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class TextBlock(Open):
    type: Literal["text"]
    text: Text

    _validate_type = field_validator("type", mode="before")(text_part)


class ToolUse(Open):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in KINDS else None


Texts = Annotated[TextOr[TextBlock], by_kind("must be a string or an array of blocks of type text")]


class ToolResult(Open):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None

    def text(self) -> str:
        return ("Error: " if self.is_error else "") + _joined(self.content)


class Thought(Open):
    """redacted_thinking has none of its text here, and is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text = ""


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")]
    | Annotated[Thought, Tag("<thinking>")]
    | Annotated[Thought, Tag("<redacted_thinking>")],
    by_kind(f"must be a block of type {', '.join(KINDS[:-1])} or {KINDS[-1]}: this model reads text", _kind),
]
Blocks = Annotated[TextOr[Block], by_kind("must be a string or an array of blocks")]


class Turn(Open):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _validate_blocks(self) -> Turn:
        for n, block in enumerate(self.content if not isinstance(self.content, str) else ()):
            at_home = {ToolUse: "assistant", Thought: "assistant", ToolResult: "user"}.get(type(block), self.role)
            if self.role != at_home:
                wrong(f"content[{n}]", f"a block of type {block.type} belongs to messages of the role {at_home}")
        return self

    def chat(self) -> list[dict[str, Any]]:
        """The turn as messages of a chat request: each result of a tool is one."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        text = _joined([b for b in blocks if isinstance(b, TextBlock)])
        results = [
            {"role": "tool", "tool_call_id": b.tool_use_id, "content": b.text()}
            for b in blocks
            if isinstance(b, ToolResult)
        ]
        if results and not text:
            return results
        turn: dict[str, Any] = {"role": self.role, "content": text}
        if calls := [b for b in blocks if isinstance(b, ToolUse)]:
            written = [{"id": c.id, "function": {"name": c.name, "arguments": json.dumps(c.input)}} for c in calls]
            turn |= {"content": text or None, "tool_calls": written}
        if thought := "\n".join(b.thinking for b in blocks if isinstance(b, Thought) and b.thinking):
            turn["reasoning_content"] = thought
        return [*results, turn]


class ClientTool(Open):
    """A tool of the client. Of other types, which Anthropic's servers run, only the type is read."""

    type: Annotated[str, StringConstraints(max_length=64)] | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_only_the_type(cls, value: Any) -> Any:
        return only_type(value, "custom")

    @model_validator(mode="after")
    def _validate_name(self) -> ClientTool:
        if self.type in (None, "custom") and self.name is None:
            wrong("name", "a tool needs a name")
        return self

    def chat(self) -> dict[str, Any] | None:
        if self.name is None:
            return None
        about = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**about, "parameters": self.input_schema}}


class Choice(Open):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _validate_name(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            wrong("name", "name is needed with type tool, and belongs to it alone")
        return self

    def chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Open):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None


class OutputFormat(Open):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Open):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(SamplingFields, Open):
    """A conversation, whose tokens are to be counted."""

    messages: Annotated[list[Turn], FirstError(), Field(min_length=1, max_length=MESSAGES)]
    model: str | None = None
    system: Texts | None = None
    tools: ToolList[ClientTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Accepted and ignored: no effect on the text.
    cache_control: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def chat(self, **more: Any) -> ChatRequest:
        """The equivalent chat request, with more fields. ApiError if there is none."""
        body: dict[str, Any] = {k: getattr(self, k) for k in (*SamplingFields.model_fields, "model")}
        system = [{"role": "system", "content": _joined(self.system)}] if self.system else []
        body["messages"] = [*system, *(m for turn in self.messages for m in turn.chat())]
        body["tools"] = [t for tool in self.tools or () if (t := tool.chat()) is not None]
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice.chat()
            body["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        asked = self.output_config or OutputConfig()
        if asked.format is not None:
            shape = {"name": "answer", "schema": asked.format.schema_, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        if self.thinking is not None:
            body["reasoning_effort"] = "none" if self.thinking.type == "disabled" else asked.effort or "high"
            body["thinking_token_budget"] = self.thinking.budget_tokens
        return chat_request({**body, **continued(body["messages"]), **more}, NAMES)

    def notes(self) -> list[str]:
        """Notes on ignored parts."""
        others = sorted({t.type for t in self.tools or () if t.name is None and t.type is not None})
        return [*self.ignored(), *(f"tools of type {t} are not offered and left out" for t in others)]


class MessagesRequest(CountRequest):
    """A stateless request: it contains the whole conversation."""

    max_tokens: Annotated[int, Field(ge=1, le=I32)]
    stop_sequences: Stops | None = None
    stream: bool | None = None

    def chat(self, **more: Any) -> ChatRequest:
        return super().chat(max_completion_tokens=self.max_tokens, stop=self.stop_sequences, **more)


def _joined(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(b.text for b in content or ())


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
    """An answer of /v1/messages."""

    api = ANTHROPIC

    def __init__(self, head: Head, reader: Answer) -> None:
        super().__init__(head, reader)
        self._id = f"msg_{secrets.token_hex(12)}"

    def waiting(self) -> bytes:
        return named_event("ping")

    def open(self) -> bytes:
        return named_event("message_start", message=self.whole())

    def close(self) -> bytes:
        ended = named_event("message_delta", delta=self._stop(), usage=self._usage())
        return ended + named_event("message_stop")

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": self.parts,
            **self._stop(),
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, str | None]:
        reason = sequence = None
        if self.done is not None:
            eos = "tool_use" if self.reader.calls else "end_turn"
            known = {"eos": eos, "stop": "stop_sequence", "context": "model_context_window_exceeded"}
            reason = known.get(self.done.finish, "max_tokens")
            sequence = self.done.stopped if self.done.finish == "stop" else None
        return {"stop_reason": reason, "stop_sequence": sequence}

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
