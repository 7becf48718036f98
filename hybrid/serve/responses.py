"""/v1/responses of OpenAI's API: requests as chat requests, and answers as an object with a list of items, or a stream of
events."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, Tag, model_validator
from starlette.responses import Response

from hybrid.serve.answers import Answer
from hybrid.serve.errors import ApiError, bad_request
from hybrid.serve.forms import FINISH, Head, PartsForm, named_event, usage
from hybrid.serve.generating import Names, asked_chat, chat_request
from hybrid.serve.http import JsonRoute, packed
from hybrid.serve.service import Service
from hybrid.serve.wire import (
    I32,
    TOP_LOGPROBS,
    AnyTool,
    ChatRequest,
    Choice,
    Content,
    Effort,
    Many,
    Name,
    SamplingFields,
    Text,
    ToolList,
    Unused,
    Verbosity,
    Wire,
    by_kind,
    content_of,
    wrong,
)

NAMES = Names(
    {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"},
    ("tools[{}].parameters", "text.format.schema"),
)


class InputMessage(Wire):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Wire):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: Text
    id: str | None = None
    status: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    parsed_arguments: Any = None


class InputResult(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None
    caller: dict[str, Any] | None = None


class ThoughtPart(Wire):
    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Wire):
    """A thought that clients send back. Its other fields are ignored: summaries and encrypted thoughts are of other
    models."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    content: Many[ThoughtPart] | None = None


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("message", "function_call", "function_call_output", "reasoning") else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputResult, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    by_kind(
        "must be a message, a function_call, a function_call_output or reasoning: nothing else is kept here", _item_kind
    ),
]
Input = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[Many[InputItem], Field(min_length=1), Tag("<array>")],
    by_kind("must be a string or an array of items"),
]


class ResponseTool(AnyTool):
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _validate_name(self) -> ResponseTool:
        if self.type == "function" and self.name is None:
            wrong("name", "a tool of type function needs a name")
        return self


class NamedResponseTool(Wire):
    type: Literal["function"]
    name: Name


class TextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _validate_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            wrong("schema", "schema is needed with type json_schema, and belongs to it alone")
        return self


class TextOptions(Wire):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(Wire):
    """`effort` is reasoning_effort of chat; the others are validated as in OpenAI's API, and ignored."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None


SHARED = ("model", "stream", "parallel_tool_calls", "store", "chat_template_kwargs", "thinking_token_budget")
"""Fields of chat requests with the same name and meaning, beside those of sampling."""
REPEATED = ("instructions", "max_output_tokens", "metadata", "reasoning", "text", "tool_choice", "tools", "user")
"""Fields that the answer repeats, beside those of sampling."""


class ResponsesRequest(SamplingFields, Unused):
    """A stateless request: it contains the whole conversation."""

    input: Input
    model: str | None = None
    instructions: Text | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    tools: ToolList[ResponseTool] | None = None
    tool_choice: Choice[NamedResponseTool] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=I32)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Ignored: prompts that are too long are refused."""
    # Accepted and ignored: no effect on the text.
    stream_options: dict[str, Any] | None = None

    def repeated(self) -> dict[str, Any]:
        """Fields that the answer repeats. ApiError 400 for non-finite numbers."""
        found = self.model_dump(include={*REPEATED, "temperature", "top_p"}, by_alias=True)
        try:
            packed(found)
        except ValueError:
            raise bad_request("a number in metadata or tools is too large", "metadata", "invalid_value") from None
        return found | {
            "tools": [t for t in found["tools"] or [] if t["type"] == "function"],
            "tool_choice": found["tool_choice"] or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def chat(self) -> ChatRequest:
        """The equivalent chat request. ApiError if there is none."""
        copied = (*SamplingFields.model_fields, *SHARED)
        body: dict[str, Any] = {k: getattr(self, k) for k in copied}
        body["messages"] = [
            *([{"role": "system", "content": self.instructions}] if self.instructions else ()),
            *self._messages(),
        ]
        body["max_completion_tokens"] = self.max_output_tokens
        body["reasoning_effort"] = self.reasoning.effort if self.reasoning is not None else None
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tools:
            functions = [t.model_dump(exclude={"type"}) if t.type == "function" else None for t in self.tools]
            body["tools"] = [{"type": t.type, "function": f} for t, f in zip(self.tools, functions, strict=True)]
        if isinstance(self.tool_choice, NamedResponseTool):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        else:
            body["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            f = self.text.format
            shape: dict[str, Any] = {"type": f.type}
            if f.schema_ is not None:
                shape["json_schema"] = {"name": f.name or "answer", "schema": f.schema_, "strict": f.strict}
            body["response_format"] = shape
        return chat_request(body, NAMES)

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        out: list[dict[str, Any]] = []
        thought = ""  # before the next item of the assistant
        for item in self.input:
            if isinstance(item, InputReasoning):
                thought = "".join(p.text for p in item.content or ())
                continue
            if isinstance(item, InputMessage):
                out.append({"role": item.role, "content": content_of(item.content)})
            elif isinstance(item, InputResult):
                out.append({"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)})
            elif isinstance(item, InputCall):
                call = {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
                if not out or out[-1]["role"] != "assistant" or thought:
                    out.append({"role": "assistant", "content": None, "tool_calls": []})
                out[-1].setdefault("tool_calls", []).append(call)
            if thought and out[-1]["role"] == "assistant":
                out[-1]["reasoning_content"], thought = thought, ""
        return out


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
    """An answer of /v1/responses. asked: request fields that it repeats."""

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
        return b"".join(self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress"))

    def close(self) -> bytes:
        whole = self.whole()
        return self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def whole(self) -> dict[str, Any]:
        self.end()
        return self._object(self._status())

    def _status(self) -> str:
        """Status of an ended item or response."""
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
