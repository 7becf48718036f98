"""Ollama's API: requests as chat and completion requests, and answers as an object, or a stream of objects, one a line. Its
servers ignore unknown fields."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, Tag
from starlette.responses import Response

from hybrid.serve import thinking
from hybrid.serve.answers import Answer, arguments
from hybrid.serve.backend import Backend
from hybrid.serve.errors import OLLAMA, bad_request
from hybrid.serve.forms import FINISH, Form, Head, read
from hybrid.serve.generating import Names, asked_chat, asked_completion, chat_request, continued
from hybrid.serve.http import LINES, Json, JsonRoute, packed
from hybrid.serve.running import Item
from hybrid.serve.service import LATEST, Service, note
from hybrid.serve.wire import (
    I32,
    TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    Many,
    Name,
    Open,
    SamplingFields,
    Stop,
    Text,
    ToolList,
    by_kind,
    kind_of,
)

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint
    from hybrid.engine.request import Completion


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
    strict: bool | None = None


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
            {"type": "function", "function": {k: getattr(t.function, k) for k in Function.model_fields}}
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
        raw = (
            ["think: a raw prompt says itself whether the model thinks"] if self.raw and self.think is not None else []
        )
        return [*super().notes(context), *ours, *raw]

    def chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.asking([*system, {"role": "user", "content": self.prompt}], GENERATE)

    def completion(self, most: int) -> CompletionRequest:
        """The request for a raw prompt. most: tokens of an answer without a limit."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        body = {**self.sampled(), "max_tokens": self.most or most, "logprobs": logprobs}
        return CompletionRequest(prompt=self.prompt or "", **body)


class ShowRequest(Open):
    """`name`: as older clients call the model."""

    model: str | None = None
    name: str | None = None


VERSION = "0.12.0"
"""The version of Ollama's API: clients refuse servers of older ones."""
NEVER = "2999-12-31T23:59:59Z"


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)
    known: dict[str, dict[str, Any]] = {}  # by the backend's name

    async def described(request: Request, backend: Backend) -> dict[str, Any]:
        """The model as lists name it."""
        if backend.name not in known:
            known[backend.name] = await service.aside(request, service.models.described, backend, listed)
        found = known[backend.name]
        name = (backend.name or service.name(backend.model)).removesuffix(LATEST) + LATEST
        digest = hashlib.sha256(repr((name, sorted(found.items()))).encode()).hexdigest()
        return {**found, "name": name, "model": name, "digest": digest}

    @r.post("/api/chat", summary="Ollama: an answer to a conversation")
    async def chat(body: OllamaChat, request: Request) -> Response:
        model = (await service.use(request, body.model or None, embeds=False)).model
        if not body.messages:
            return loaded(body.model or service.name(model), chat=True)
        a = await asked_chat(service, request, body.chat(), NAMES)
        form = OllamaForm(a.head, a.readers[0], body.model or a.head.model, chat=True)
        notes = [*body.notes(model.engine.cache.ctx), *a.notes]
        return await service.answer(request, a.jobs, form, body.stream is not False, notes)

    @r.post("/api/generate", summary="Ollama: an answer to a prompt, or its continuation with raw")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        body.check()
        model = (await service.use(request, body.model or None, embeds=False)).model
        if not body.prompt:
            return loaded(body.model or service.name(model), chat=False)
        context = model.engine.cache.ctx
        if body.raw:
            completion = body.completion(min(context, service.settings.max_tokens or context))
            a = await asked_completion(service, request, completion, GENERATE)
        else:
            a = await asked_chat(service, request, body.chat(), GENERATE)
        form = OllamaForm(a.head, a.readers[0], body.model or a.head.model, chat=False)
        notes = [*body.notes(context), *a.notes]
        return await service.answer(request, a.jobs, form, body.stream is not False, notes)

    @r.get("/api/tags", summary="Ollama: the models that are served")
    async def tags(request: Request) -> Response:
        return Json({"models": [await described(request, b) for b in service.models.backends.values()]})

    @r.get("/api/ps", summary="Ollama: the models that are loaded")
    async def ps(request: Request) -> Response:
        found = []
        for backend in service.models.backends.values():
            model = backend.model if service.models.alone else backend.loaded
            if model is not None:
                size = 0 if model.device == "cpu" else model.checkpoint.file_bytes
                more = {"expires_at": NEVER, "size_vram": size, "context_length": model.engine.cache.ctx}
                found.append({**await described(request, backend), **more})
        return Json({"models": found})

    @r.post("/api/show", summary="Ollama: a model's template, sizes and abilities")
    async def show(body: ShowRequest, request: Request) -> Response:
        backend = service.find(body.model or body.name or None)
        answer = await service.aside(request, service.models.described, backend, shown)
        return Json(answer, headers=note(body.ignored()))

    def shown(c: Checkpoint) -> dict[str, Any]:
        h = c.hparams
        thinks = not h.dimensions and thinking.channel_of(c.tokenizer, ()) is not None
        able = ["embedding"] if h.dimensions else ["completion", "tools", *(["thinking"] if thinks else [])]
        sizes = {
            "context_length": h.context_length,
            "embedding_length": h.dimensions or h.hidden,
            "block_count": len(h.layers),
        }
        return {
            "modelfile": "",
            "parameters": "",
            "template": "" if h.dimensions else service.template(c) or "",
            "details": details(c),
            "model_info": {
                "general.architecture": h.family,
                "general.parameter_count": elements(c).total(),
                **{f"{h.family}.{name}": value for name, value in sizes.items()},
            },
            "capabilities": able,
            "modified_at": modified(c),
        }

    @r.get("/api/version", summary="Ollama: the version of its API")
    async def version() -> Response:
        return Json({"version": VERSION})

    return r


def listed(c: Checkpoint) -> dict[str, Any]:
    return {"size": c.file_bytes, "details": details(c), "modified_at": modified(c)}


def modified(c: Checkpoint) -> str:
    return stamp(datetime.fromtimestamp(c.path.stat().st_mtime, timezone.utc))


def elements(c: Checkpoint) -> Counter[str]:
    """Number of parameters of each type."""
    found: Counter[str] = Counter()
    for name in c.names:
        found[c.dtype(name)] += math.prod(c.shape(name))
    return found


def details(c: Checkpoint) -> dict[str, Any]:
    family, types = c.hparams.family, elements(c)
    count = types.total()
    shown = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return {
        "parent_model": "",
        "format": "gguf" if c.path.suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": shown,
        "quantization_level": types.most_common(1)[0][0].upper(),
    }


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
    return {"model": model, "created_at": stamp(datetime.now(timezone.utc)), **said, "done": False}


def loaded(model: str, chat: bool) -> Response:
    """The answer to a request without a prompt, which asks for the model to be loaded."""
    return Json({**answered(model, chat), "done": True, "done_reason": "load"})


class OllamaForm(Form):
    """model: as the request names it. chat: whether of /api/chat."""

    media, api = LINES, OLLAMA

    def __init__(self, head: Head, reader: Answer, model: str, chat: bool) -> None:
        self._head, self._reader, self._model, self._chat = head, reader, model, chat
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._told = 0  # calls that were sent
        self._done: Completion | None = None

    def waiting(self) -> bytes:
        return self._line(answered(self._model, self._chat))

    def push(self, item: Item) -> bytes:
        self._done = item.done
        fresh = self._head.logprobs(item.events, self._reader)
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

    def whole(self) -> dict[str, Any]:
        self._told = 0
        parts = {"thinking": "".join(self._thinking), "tool_calls": self._calls()}
        shown = {"logprobs": self._logprobs} if self._logprobs else {}
        return {**answered(self._model, self._chat, "".join(self._text), **parts), **shown, **self._end()}

    def _line(self, value: dict[str, Any]) -> bytes:
        return packed(value) + b"\n"

    def _calls(self) -> list[dict[str, Any]]:
        """Calls that are complete and were not sent: the last one is at the end. One that was cut off is left out."""
        made = self._reader.calls
        ready = made[: len(made) if self._done is not None else max(0, len(made) - 1)]
        told, self._told = self._told, len(ready)
        return [
            {"id": c["id"], "function": {"index": n, "name": c["function"]["name"], "arguments": found}}
            for n, c in enumerate(ready)
            if n >= told and (found := arguments(c["function"]["arguments"])) is not None
        ]

    def _end(self) -> dict[str, Any]:
        """The last object's own fields; durations in nanoseconds."""
        assert self._done is not None
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
