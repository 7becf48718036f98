"""Request models of Ollama's API, and their conversion to chat and completion requests. Its servers ignore unknown
fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from hybrid.serve.adapter import Names, Open, chat_request, continued
from hybrid.serve.errors import bad_request
from hybrid.serve.wire import (
    I32,
    TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    Many,
    Name,
    SamplingFields,
    Stop,
    Text,
    ToolList,
    by_kind,
    kind_of,
)

NAMES = Names(
    {
        "max_completion_tokens": "options.num_predict",
        "max_tokens": "options.num_predict",
        "response_format": "format",
        "reasoning_effort": "think",
        "tool_choice": "tools",
    },
    ("tools[{}].function.parameters", "format"),
)
GENERATE = Names({**NAMES.fields, "messages": "prompt"}, NAMES.schemas)


class Called(Open):
    name: Name
    arguments: dict[str, Any] | None = None


class Call(Open):
    id: str | None = None
    function: Called


class Turn(Open):
    """tool_call_id and tool_name: of a result; without them it is the next call's that has none."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: list[Any] | None = None
    tool_calls: Many[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(Open):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Open):
    type: Literal["function"] = "function"
    function: Function


class Options(SamplingFields, Open):
    num_predict: Annotated[int, Field(ge=-2, le=I32)] | None = None
    """0 and below: no limit."""
    num_ctx: Annotated[int, Field(ge=0, le=I32)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    stop: Stop | None = None


Shape = Annotated[
    Annotated[Literal["", "json"], Tag("<string>")] | Annotated[dict[str, Any], Tag("<object>")],
    by_kind("must be 'json' or a JSON schema"),
]


def _think_kind(value: Any) -> str | None:
    return "<boolean>" if isinstance(value, bool) else kind_of(value)


Think = Annotated[
    Annotated[bool, Tag("<boolean>")] | Annotated[Literal["low", "medium", "high", "max"], Tag("<string>")],
    by_kind("must be true, false, 'low', 'medium', 'high' or 'max'", _think_kind),
]


class Generating(Open):
    """Fields that both endpoints share."""

    model: str | None = None
    stream: bool | None = None
    """Unlike elsewhere, true unless it is false."""
    format: Shape | None = None
    options: Options | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    keep_alive: Any = None
    """Accepted and ignored: the model stays loaded."""

    @property
    def asked(self) -> Options:
        return self.options or Options()

    def notes(self, context: int) -> list[str]:
        """Notes on ignored parts. context: most positions of the server."""
        notes = [*self.ignored(), *self.asked.ignored()]
        if (self.asked.num_ctx or 0) > context:
            notes.append(f"num_ctx is {context} here")
        return notes

    def sampled(self) -> dict[str, Any]:
        """The fields of a chat or completion request besides its text and length."""
        o = self.asked
        body: dict[str, Any] = {k: getattr(o, k) for k in (*SamplingFields.model_fields, "stop")}
        if o.repeat_penalty is not None:
            body["repetition_penalty"] = o.repeat_penalty
        if self.format == "json":
            body["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        return body

    @property
    def most(self) -> int | None:
        """Most tokens of an answer; None without a limit."""
        wanted = self.asked.num_predict
        return wanted if wanted is not None and wanted > 0 else None

    def asking(self, messages: list[dict[str, Any]], names: Names, **more: Any) -> ChatRequest:
        body = {**self.sampled(), "messages": messages, "max_completion_tokens": self.most, **more}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.think is not None:
            body["reasoning_effort"] = self.think if isinstance(self.think, str) else "medium" if self.think else "none"
        return chat_request({**body, **continued(messages)}, names)


class OllamaChat(Generating):
    messages: Many[Turn] | None = None
    tools: ToolList[Tool] | None = None

    def chat(self) -> ChatRequest:
        """The equivalent chat request. ApiError if there is none."""
        described = [
            {"type": "function", "function": {k: getattr(t.function, k) for k in ("name", "description", "parameters")}}
            for t in self.tools or ()
        ]
        return self.asking(self._messages(), NAMES, tools=described)

    def _messages(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        waiting: dict[str, str] = {}  # identifiers of calls without a result, and their functions
        for n, turn in enumerate(self.messages or ()):
            if turn.images:
                raise bad_request("this model reads text, not images", f"messages[{n}].images", "invalid_value")
            message: dict[str, Any] = {"role": turn.role, "content": turn.content or ""}
            if turn.tool_calls:
                calls = [(c.id or f"call_{n}_{i}", c.function) for i, c in enumerate(turn.tool_calls)]
                waiting |= {name: f.name for name, f in calls}
                message["tool_calls"] = [
                    {"id": name, "function": {"name": f.name, "arguments": json.dumps(f.arguments or {})}}
                    for name, f in calls
                ]
            if turn.thinking and turn.role == "assistant":
                message["reasoning_content"] = turn.thinking
            if turn.role == "tool":
                named = (i for i, function in waiting.items() if turn.tool_name in (None, function))
                message["tool_call_id"] = turn.tool_call_id or next(named, "")
                waiting.pop(message["tool_call_id"], None)
            out.append(message)
        return out


class OllamaGenerate(Generating):
    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    """The prompt as it is, without the template."""
    template: str | None = None
    """Ignored: the checkpoint has its own."""
    # Refused: they would change the answer.
    suffix: str | None = None
    context: list[Any] | None = None
    images: list[Any] | None = None

    def check(self) -> None:
        """ApiError for fields that cannot be followed."""
        for name, why in (
            ("suffix", "this model continues a text, and fills no gap before a suffix"),
            ("context", "no context is kept here: send the conversation to /api/chat"),
            ("images", "this model reads text, not images"),
        ):
            if getattr(self, name):
                raise bad_request(why, name, "invalid_value")

    def notes(self, context: int) -> list[str]:
        ours = ["template: the checkpoint's is used"] if self.template else []
        return [*super().notes(context), *ours]

    def chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.asking([*system, {"role": "user", "content": self.prompt}], GENERATE)

    def completion(self, most: int) -> CompletionRequest:
        """The request for a raw prompt. most: tokens of an answer without a limit."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return CompletionRequest(
            prompt=self.prompt or "", max_tokens=self.most or most, logprobs=logprobs, **self.sampled()
        )


class ShowRequest(Open):
    """`name`: as older clients call the model."""

    model: str | None = None
    name: str | None = None
