"""The endpoints of Ollama's API for the one model that is served."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve import thinking
from hybrid.serve.endpoints import asked_chat, asked_completion, named
from hybrid.serve.http import Json, JsonRoute
from hybrid.serve.ollama_form import OllamaForm, answered, stamp
from hybrid.serve.ollama_wire import GENERATE, NAMES, OllamaChat, OllamaGenerate, ShowRequest
from hybrid.serve.service import LATEST, Service, note

if TYPE_CHECKING:
    from hybrid.model import Model

VERSION = "0.12.0"
"""The version of Ollama's API: clients refuse servers of older ones."""
NEVER = "2999-12-31T23:59:59Z"


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)

    def described(model: Model) -> dict[str, Any]:
        """The model as lists name it."""
        c, name = model.checkpoint, service.name(model)
        about = {"name": name + LATEST, "size": c.file_bytes, "details": details(model)}
        digest = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()
        return {**about, "model": about["name"], "digest": digest}

    def modified(model: Model) -> str:
        return stamp(datetime.fromtimestamp(model.checkpoint.path.stat().st_mtime, timezone.utc))

    def loaded(body: OllamaChat | OllamaGenerate, chat: bool) -> Response:
        """The answer to a request without a prompt, which asks for the model to be loaded."""
        model = service.model(body.model or None)
        return Json({**answered(body.model or service.name(model), chat), "done": True, "done_reason": "load"})

    @r.post("/api/chat", summary="Ollama: an answer to a conversation")
    async def chat(body: OllamaChat, request: Request) -> Response:
        if not body.messages:
            return loaded(body, True)
        model = service.model(body.model or None)
        a = await named(service, request, NAMES, asked_chat(service, body.chat(), request, NAMES.schemas))
        form = OllamaForm(a.head, body.model or a.head.model, True, a.readers[0])
        notes = note([*body.notes(model.engine.cache.ctx), *a.notes])
        return await service.answer(request, a.jobs, form, body.stream is not False, notes)

    @r.post("/api/generate", summary="Ollama: an answer to a prompt, or its continuation with raw")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        body.check()
        if not body.prompt:
            return loaded(body, False)
        model = service.model(body.model or None)
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

    @r.get("/api/tags", summary="Ollama: the model that is served")
    async def tags() -> Response:
        model = service.backend.model
        return Json({"models": [{**described(model), "modified_at": modified(model)}]})

    @r.get("/api/ps", summary="Ollama: the model that is loaded")
    async def ps() -> Response:
        model = service.backend.model
        size = 0 if model.device == "cpu" else model.checkpoint.file_bytes
        more = {"expires_at": NEVER, "size_vram": size, "context_length": model.engine.cache.ctx}
        return Json({"models": [{**described(model), **more}]})

    @r.post("/api/show", summary="Ollama: the model's template, sizes and abilities")
    async def show(body: ShowRequest) -> Response:
        model = service.served(body.model or body.name or None)
        h, thinks = model.hparams, thinking.channel_of(model, ()) is not None
        able = ["embedding"] if h.dense else ["completion", "tools", *(["thinking"] if thinks else [])]
        sizes = {"context_length": h.context_length, "embedding_length": h.hidden, "block_count": len(h.layers)}
        return Json(
            {
                "modelfile": "",
                "parameters": "",
                "template": "" if h.dense else service.template(model) or "",
                "details": details(model),
                "model_info": {
                    "general.architecture": h.family,
                    "general.parameter_count": parameters(model),
                    **{f"{h.family}.{name}": value for name, value in sizes.items()},
                },
                "capabilities": able,
                "modified_at": modified(model),
            },
            headers=note(body.ignored()),
        )

    @r.get("/api/version", summary="Ollama: the version of its API")
    async def version() -> Response:
        return Json({"version": VERSION})

    return r


def parameters(model: Model) -> int:
    c = model.checkpoint
    return sum(math.prod(c.shape(name)) for name in c.names)


def details(model: Model) -> dict[str, Any]:
    c, family = model.checkpoint, model.hparams.family
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
