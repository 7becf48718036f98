"""Ollama's API: an answer is an object, or a stream of objects, one a line."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve import thinking
from hybrid.serve.adapter import arguments
from hybrid.serve.answers import Answer
from hybrid.serve.backend import Backend
from hybrid.serve.errors import OLLAMA
from hybrid.serve.forms import FINISH, Form, Head, read
from hybrid.serve.generating import asked_chat, asked_completion
from hybrid.serve.http import LINES, Json, JsonRoute, packed
from hybrid.serve.ollama_wire import GENERATE, NAMES, OllamaChat, OllamaGenerate, ShowRequest
from hybrid.serve.running import Item
from hybrid.serve.service import LATEST, Service, note

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint
    from hybrid.engine.request import Completion

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
        model = await service.writer(request, body.model or None)
        if not body.messages:
            return loaded(body.model or service.name(model), chat=True)
        a = await asked_chat(service, request, body.chat(), NAMES)
        form = OllamaForm(a.head, a.readers[0], body.model or a.head.model, chat=True)
        notes = [*body.notes(model.engine.cache.ctx), *a.notes]
        return await service.answer(request, a.jobs, form, body.stream is not False, notes)

    @r.post("/api/generate", summary="Ollama: an answer to a prompt, or its continuation with raw")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        body.check()
        model = await service.writer(request, body.model or None)
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
        thinks = not h.dense and thinking.channel_of(c.tokenizer, ()) is not None
        able = ["embedding"] if h.dense else ["completion", "tools", *(["thinking"] if thinks else [])]
        sizes = {"context_length": h.context_length, "embedding_length": h.hidden, "block_count": len(h.layers)}
        return {
            "modelfile": "",
            "parameters": "",
            "template": "" if h.dense else service.template(c) or "",
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
