"""The endpoints of Ollama's API."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve import thinking
from hybrid.serve.backend import Backend
from hybrid.serve.endpoints import asked_chat, asked_completion, named
from hybrid.serve.http import Json, JsonRoute
from hybrid.serve.ollama_form import OllamaForm, answered, stamp
from hybrid.serve.ollama_wire import GENERATE, NAMES, OllamaChat, OllamaGenerate, ShowRequest
from hybrid.serve.service import LATEST, Service, note

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint

VERSION = "0.12.0"
"""The version of Ollama's API: clients refuse servers of older ones."""
NEVER = "2999-12-31T23:59:59Z"


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)
    known: dict[str, dict[str, Any]] = {}  # of several models

    async def described(request: Request, backend: Backend) -> dict[str, Any]:
        """The model as lists name it."""
        found = known.get(backend.name)
        if found is None:
            found = await service.described(request, backend, listed)
            if backend.name:
                known[backend.name] = found
        name = (backend.name or service.name(backend.model)).removesuffix(LATEST) + LATEST
        digest = hashlib.sha256(repr((name, sorted(found.items()))).encode()).hexdigest()
        return {**found, "name": name, "model": name, "digest": digest}

    async def loaded(request: Request, body: OllamaChat | OllamaGenerate, chat: bool) -> Response:
        """The answer to a request without a prompt, which asks for the model to be loaded."""
        model = await service.writer(request, body.model or None)
        return Json({**answered(body.model or service.name(model), chat), "done": True, "done_reason": "load"})

    @r.post("/api/chat", summary="Ollama: an answer to a conversation")
    async def chat(body: OllamaChat, request: Request) -> Response:
        if not body.messages:
            return await loaded(request, body, True)
        model = await service.writer(request, body.model or None)
        a = await named(service, request, NAMES, asked_chat(service, body.chat(), request, NAMES.schemas))
        form = OllamaForm(a.head, body.model or a.head.model, True, a.readers[0])
        notes = note([*body.notes(model.engine.cache.ctx), *a.notes])
        return await service.answer(request, a.jobs, form, body.stream is not False, notes)

    @r.post("/api/generate", summary="Ollama: an answer to a prompt, or its continuation with raw")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        body.check()
        if not body.prompt:
            return await loaded(request, body, False)
        model = await service.writer(request, body.model or None)
        context = model.engine.cache.ctx
        notes = body.notes(context)
        if body.raw:
            completion = body.completion(min(context, service.settings.max_tokens or context))
            jobs, form = await named(service, request, GENERATE, asked_completion(service, completion, request))
            head, reader = form.head, None
        else:
            a = await named(service, request, GENERATE, asked_chat(service, body.chat(), request, GENERATE.schemas))
            jobs, head, reader = a.jobs, a.head, a.readers[0]
            notes += a.notes
        made = OllamaForm(head, body.model or head.model, False, reader)
        return await service.answer(request, jobs, made, body.stream is not False, note(notes))

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
        return Json(await service.described(request, backend, shown), headers=note(body.ignored()))

    def shown(c: Checkpoint) -> dict[str, Any]:
        h = c.hparams
        thinks = not h.dimensions and thinking.channel_of(c.tokenizer, ()) is not None
        able = ["embedding"] if h.dimensions else ["completion", "tools", *(["thinking"] if thinks else [])]
        sizes = {"context_length": h.context_length, "embedding_length": h.hidden, "block_count": len(h.layers)}
        return {
            "modelfile": "",
            "parameters": "",
            "template": "" if h.dimensions else service.template(c) or "",
            "details": details(c),
            "model_info": {
                "general.architecture": h.family,
                "general.parameter_count": parameters(c),
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


def parameters(c: Checkpoint) -> int:
    return sum(math.prod(c.shape(name)) for name in c.names)


def details(c: Checkpoint) -> dict[str, Any]:
    family = c.hparams.family
    elements: Counter[str] = Counter()
    for name in c.names:
        elements[c.dtype(name)] += math.prod(c.shape(name))
    count = elements.total()
    shown = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return {
        "parent_model": "",
        "format": "gguf" if c.path.suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": shown,
        "quantization_level": elements.most_common(1)[0][0].upper(),
    }
