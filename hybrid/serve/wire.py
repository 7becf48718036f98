"""Requests of the OpenAI-compatible endpoints, as models: what each field may hold.

Fields that the reference has and that change nothing here are taken and ignored; every other name is refused, as the
reference does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

TOP_LOGPROBS = 20
BIASES = 1024
STOPS = 16
TOOLS = 128
I32 = 2**31 - 1

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Text = Annotated[str, StringConstraints(max_length=1 << 22)]


class Wire(BaseModel):
    """Strict: a number is no text, and an unknown name is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Wire):
    name: Name = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _validate_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and belongs to it alone")
        return self


class Function(Wire):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class NamedFunction(Wire):
    name: Name


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Wire):
    name: Name
    arguments: Text


class ToolCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Part(Wire):
    """Of a message; this model reads text."""

    type: Literal["text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _validate_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, except one of the assistant that calls tools")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant hold tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of the role tool, and only such a one, needs tool_call_id")
        return self

    def text(self) -> str:
        """All of its text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(p.text or p.refusal or "" for p in self.content)


class Sampled(Wire):
    """What completions and chat share. Left out, temperature, top_p and top_k are those that the checkpoint recommends, else the
    reference's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=I32)] | None = None
    """0 and -1: off."""
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=BIASES)] | None = None
    stop: (
        Annotated[str, StringConstraints(max_length=1024)]
        | Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]], Field(max_length=STOPS)]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    user: str | None = None
    # Taken and ignored: they ask for nothing that changes the text.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _validate_stream_options(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belongs to stream: true")
        return self


class ChatRequest(Sampled):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def _validate_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [t.function.name for t in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("two tools have the same name")
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice asks for a call, and there are no tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError("tool_choice names a tool that is not among the tools")
        return self


class CompletionRequest(Sampled):
    prompt: Text | Annotated[list[Text] | list[int] | list[list[int]], Field(min_length=1, max_length=1 << 20)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _validate_best(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n: choices are not ranked here")
        return self


class TokenizeRequest(Wire):
    """Text, or the conversation as the chat template writes it."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _validate_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two")
        return self


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=1 << 20)]
