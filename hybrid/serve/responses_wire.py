"""Request models of /v1/responses, and their conversion to chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, model_validator

from hybrid.serve.adapter import Names, chat_request
from hybrid.serve.errors import bad_request
from hybrid.serve.http import packed
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
    check_tools,
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

    @model_validator(mode="after")
    def _validate_tools(self) -> ResponsesRequest:
        check_tools([t.name for t in self.tools or ()], [t.type for t in self.tools or ()])
        return self

    def repeated(self) -> dict[str, Any]:
        """Fields that the answer repeats. ApiError 400 for non-finite numbers."""
        fields = {
            "instructions",
            "max_output_tokens",
            "metadata",
            "reasoning",
            "text",
            "tool_choice",
            "tools",
            "top_p",
            "temperature",
            "user",
        }
        found = self.model_dump(include=fields, by_alias=True)
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
