"""Pydantic models of requests of the OpenAI-compatible endpoints.

Unknown fields with a neutral value (null, false, empty) are ignored; other unknown fields are refused, as by OpenAI.
Lists stop at the first invalid item and unions are discriminated by type, so that the time and the message of a refusal
do not grow with the body.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

TOP_LOGPROBS = 20
BIASES = 1024
STOPS = 16
TOOLS = 128
I32 = 2**31 - 1
MESSAGES = 4096

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
Text = Annotated[str, StringConstraints(max_length=1 << 22)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class FirstError(FailFast):
    """Stop validating a list at its first invalid item. Hashable, as unions require."""

    __hash__ = object.__hash__


def wrong(param: str, message: str) -> NoReturn:
    """Raise a validation error of a rule over several fields; `param` is the field to report."""
    raise PydanticCustomError("rule", "{message}", {"message": message, "param": param})


def kind_of(value: Any) -> str | None:
    """Discriminator of unions by JSON type; errors.py removes these tags from paths."""
    if isinstance(value, BaseModel):
        return "<object>"
    kinds: dict[type, str] = {str: "<string>", list: "<array>", dict: "<object>"}
    return kinds.get(type(value))


def by_kind(must: str, kind: Callable[[Any], str | None] = kind_of) -> Discriminator:
    """Chooses one of a union's types by its tag. must: what the message of a value of none of them says."""
    return Discriminator(kind, custom_error_type="kind", custom_error_message=must)


T = TypeVar("T")
Many = Annotated[list[T], FirstError(), Field(max_length=MESSAGES)]
ToolList = Annotated[list[T], FirstError(), Field(max_length=TOOLS)]
TextOr = Annotated[Text, Tag("<string>")] | Annotated[Many[T], Tag("<array>")]
"""A text or a list. Annotate it with by_kind."""


class Wire(BaseModel):
    """Base model: strict types; refuses unknown fields unless their value is neutral."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = _names(cls)
        return {k: v for k, v in value.items() if k in known or not (v is None or v is False or v in ("", [], {}))}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """JSON names of a model's fields."""
    return frozenset(f.alias or name for name, f in model.model_fields.items())


class Open(Wire):
    """Base of requests whose APIs ignore unknown fields."""

    model_config = ConfigDict(extra="allow")

    def ignored(self) -> list[str]:
        """A note that names the unknown fields; empty if there are none."""
        names = sorted(self.model_extra or ())
        return [f"ignored: {', '.join(names)}"] if names else []


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage in every chunk."""
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
        if self.type == "json_schema" and self.json_schema is None:
            wrong("json_schema", "type json_schema needs json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            wrong("json_schema", f"json_schema belongs to type json_schema, and the type is {self.type}")
        return self


class Function(Wire):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class AnyTool(Wire):
    """A tool of any type. Of types other than function, which are ignored if there are functions, only the type is read."""

    type: Annotated[str, StringConstraints(max_length=64)]

    @model_validator(mode="before")
    @classmethod
    def _take_only_the_type(cls, value: Any) -> Any:
        return only_type(value, "function")


def only_type(tool: Any, known: str) -> Any:
    """A tool of the known type, or of none, unchanged; of other tools only the type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind != known else tool


class Tool(AnyTool):
    function: Function | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _validate_function(self) -> Tool:
        if self.type == "function" and self.function is None:
            wrong("function", "a tool of type function needs function")
        return self


class NamedFunction(Wire):
    name: Name


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[T, Tag("<object>")],
    by_kind("must be 'none', 'auto', 'required' or an object that names a function"),
]
ToolChoice = Choice[NamedTool]


class CalledFunction(Wire):
    name: Name
    arguments: Text
    parsed_arguments: Any = None


class ToolCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


def text_part(value: Any) -> Any:
    """Validate that a message part is text."""
    if isinstance(value, str) and value not in ("text", "input_text", "output_text", "refusal"):
        raise PydanticCustomError("part", "this model reads text, not a part of type {type}", {"type": value[:40]})
    return value


class Part(Wire):
    """A text part of a message. Further fields are for the chat template."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None
    refusal: Text | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    parsed: Any = None

    _validate_type = field_validator("type", mode="before")(text_part)


Content = Annotated[TextOr[Part], by_kind("must be a string or an array of parts")]


def content_of(content: str | list[Part] | None) -> str | list[dict[str, Any]]:
    """A message's content for the chat template: a text, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{**(p.model_extra or {}), "type": "text", "text": p.text or p.refusal or ""} for p in content]


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None
    reasoning_content: Text | None = None
    """The thought before an answer, for the chat template; `reasoning`, if a text, is another name."""
    reasoning: Any = None
    # Accepted and ignored: response fields that clients send back.
    reasoning_details: Any = None
    thinking_blocks: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _validate_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            wrong("content", f"a message of the role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            wrong("tool_calls", "only messages of the assistant hold tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            wrong("tool_call_id", "a message of the role tool needs tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            wrong("tool_call_id", "tool_call_id belongs to messages of the role tool")
        return self

    def text(self) -> str:
        """The message's text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(p.text or p.refusal or "" for p in self.content)

    def thought(self) -> str:
        """What the assistant thought before it."""
        other = self.reasoning if isinstance(self.reasoning, str) else ""
        return (self.reasoning_content or other) if self.role == "assistant" else ""


Messages = Annotated[list[Message], FirstError(), Field(min_length=1, max_length=MESSAGES)]
Stops = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]], FirstError(), Field(max_length=STOPS)
]
Stop = Annotated[
    Annotated[str, StringConstraints(max_length=1024), Tag("<string>")] | Annotated[Stops, Tag("<array>")],
    by_kind("must be a string or an array of strings"),
]


class SamplingFields(Wire):
    """Options of hybrid.engine.request.Options with the same names, for all generating endpoints. Defaults of
    temperature, top_p and top_k are the checkpoint's recommended values, else OpenAI's."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    """0: greedy, as with temperature 0."""
    top_k: Annotated[int, Field(ge=-1, le=I32)] | None = None
    """0 and -1: off."""
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None


class Unused(Wire):
    """Accepted and ignored: no effect on the text, and nothing is stored."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Sampled(SamplingFields, Unused):
    """Fields that completions and chat share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=BIASES)] | None = None
    stop: Stop | None = None
    max_tokens: Annotated[int, Field(ge=0, le=I32)] | None = None

    @model_validator(mode="after")
    def _validate_stream_options(self) -> Any:
        if self.stream_options is not None and not self.stream:
            wrong("stream_options", "stream_options belongs to stream: true")
        return self


RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
"""Names that are no variables of a client, beside those of special tokens (bos_token)."""


class Templated(Wire):
    """How a conversation is written."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the model's turn is begun; not with continue_final_message."""
    continue_final_message: bool | None = None
    """Continue the last message, the assistant's, instead of answering it."""

    @model_validator(mode="after")
    def _validate_template(self) -> Any:
        for name in self.chat_template_kwargs or ():
            if name in RESERVED or name.endswith("_token") or not (name.isascii() and name.isidentifier()):
                param = "chat_template_kwargs"
                wrong(param, f"{param} cannot set {name[:64]!r}: it is no variable of a client")
        if self.continue_final_message:
            name = "continue_final_message"
            if self.add_generation_prompt:
                wrong(name, f"{name} needs add_generation_prompt: false")
            last = (getattr(self, "messages", None) or [None])[-1]
            if last is None or last.role != "assistant" or last.content is None or last.tool_calls:
                wrong(name, f"{name} needs a last message of the assistant, with text")
        return self


class ChatRequest(Sampled, Templated):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None
    """none: without thinking; others: with thinking, and a budget (thinking.EFFORTS)."""
    thinking_token_budget: Annotated[int, Field(ge=0, le=I32)] | None = None
    """Most tokens of thoughts."""
    # Validated as in OpenAI's API, and ignored.
    verbosity: Verbosity | None = None
    function_call: Literal["none"] | None = None

    @model_validator(mode="after")
    def _validate_together(self) -> ChatRequest:
        if self.max_tokens == 0:
            wrong("max_tokens", "an answer has at least one token")
        if self.top_logprobs and not self.logprobs:
            wrong("top_logprobs", "top_logprobs needs logprobs: true")
        choice = self.tool_choice
        _check_tools(self.tools or [], choice.function.name if isinstance(choice, NamedTool) else choice)
        return self


def _check_tools(tools: list[Tool], choice: str | None) -> None:
    """Refuse duplicate functions, tools without any function, and an impossible choice: a keyword or a function's name."""
    names = [t.function.name for t in tools if t.function]
    if len(set(names)) != len(names):
        wrong("tools", "two tools have the same name")
    if tools and not names:
        wrong("tools[0].type", f"this server offers tools of type function, not {tools[0].type}")
    if choice in (None, "none", "auto"):
        return
    if not names:
        wrong("tool_choice", "tool_choice asks for a call, and there are no tools")
    if choice != "required" and choice not in names:
        wrong("tool_choice", "tool_choice names a tool that is not among the tools")


def prompt_kind(value: Any) -> str | None:
    if isinstance(value, list) and value:
        kinds: dict[type, str] = {str: "<strings>", int: "<tokens>", list: "<lists>"}
        return kinds.get(type(value[0]))
    return kind_of(value)


Ids = Annotated[list[int], FirstError(), Field(max_length=1 << 20)]
Prompt = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[list[Text], FirstError(), Field(max_length=1 << 10), Tag("<strings>")]
    | Annotated[Ids, Tag("<tokens>")]
    | Annotated[list[Ids], FirstError(), Field(max_length=1 << 10), Tag("<lists>")],
    by_kind(
        "must be a string, an array of strings, an array of token ids or an array of such arrays, not empty",
        prompt_kind,
    ),
]


class CompletionRequest(Sampled):
    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _validate_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            wrong("best_of", "best_of must equal n: choices are not ranked here")
        if self.max_tokens == 0 and not self.echo:
            wrong("max_tokens", "max_tokens: 0 asks for the prompt alone, and needs echo: true")
        return self


class TokenizeRequest(Templated):
    """A text, or a conversation for the chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _validate_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            wrong("prompt", "give prompt or messages, one of the two")
        return self


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Ids
