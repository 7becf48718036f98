"""Requests of /v1/responses, and the request for chat that asks for the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hybrid.serve.errors import bad_request
from hybrid.serve.wire import I32, TOOLS, TOP_LOGPROBS, ChatRequest, Name, Probability, Text, Wire


class InputPart(Wire):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Wire):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[InputPart]
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


class InputResult(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: Text | list[InputPart]
    id: str | None = None
    status: str | None = None
    caller: dict[str, Any] | None = None


InputItem = InputMessage | InputCall | InputResult


class ResponseTool(Wire):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(Wire):
    type: Literal["function"]
    name: Name


class TextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Wire):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Wire):
    """Nothing is stored: each request holds its whole conversation."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=4096)]
    model: str | None = None
    instructions: Text | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=I32)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    # Taken and ignored: they ask for nothing that changes the text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _validate_format(self) -> ResponsesRequest:
        f = self.text.format if self.text else None
        if f is not None and (f.type == "json_schema") != (f.schema_ is not None):
            raise ValueError("text.format: schema is needed with type json_schema, and belongs to it alone")
        return self

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def chat(self) -> ChatRequest:
        """The request for chat that asks for the same. ApiError for what has no such form."""
        copied = ("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls")
        body: dict[str, Any] = {k: getattr(self, k) for k in copied}
        body["messages"] = [*([{"role": "system", "content": self.instructions}] if self.instructions else ()), *self._messages()]
        body["max_completion_tokens"] = self.max_output_tokens
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tools:
            body["tools"] = [{"type": "function", "function": t.model_dump(exclude={"type"})} for t in self.tools]
        if isinstance(self.tool_choice, NamedResponseTool):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        else:
            body["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            f = self.text.format
            shape: dict[str, Any] = {"type": f.type}
            if f.schema_ is not None:
                shape["json_schema"] = {"name": f.name or "answer", "schema": f.schema_}
            body["response_format"] = shape
        try:
            return ChatRequest.model_validate(body)
        except ValueError as error:
            said = " ".join(str(error).split())
            raise bad_request(f"the input cannot be used: {said.rpartition('Value error, ')[2][:200]}", "input") from None

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        out: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, InputMessage):
                out.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, InputResult):
                out.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
                if not out or out[-1]["role"] != "assistant":
                    out.append({"role": "assistant", "content": None, "tool_calls": []})
                out[-1].setdefault("tool_calls", []).append(call)
        return out


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(p.text or p.refusal or "" for p in content)
