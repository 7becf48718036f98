"""OpenAI's endpoints of chats and completions, and those of models and tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve import thinking
from hybrid.serve.backend import Backend
from hybrid.serve.forms import ChatForm, CompletionForm, Tokens
from hybrid.serve.generating import asked_chat, asked_completion
from hybrid.serve.http import Json, JsonRoute, packed
from hybrid.serve.service import Service
from hybrid.serve.wire import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from hybrid.model import Model


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)
    began = int(time.time())

    def described(backend: Backend) -> dict[str, Any]:
        model = backend.loaded
        about: dict[str, Any] = {
            "id": backend.name or service.name(backend.model),
            "object": "model",
            "created": began,
            "owned_by": "hybrid-kernels",
            "loaded": model is not None,
            "embeds": service.models.embeds(backend),
        }
        if model is not None:
            vocabulary = min(model.hparams.vocab, model.checkpoint.tokenizer.n_tokens)
            about |= {"context_length": model.engine.cache.ctx, "vocabulary": vocabulary, "device": model.device}
        return about

    @r.get("/v1/models", summary="The models that are served")
    async def models() -> Response:
        return Json({"object": "list", "data": [described(b) for b in service.models.backends.values()]})

    @r.get("/v1/models/{name:path}", summary="A model by its name")
    async def one_model(name: str) -> Response:
        return Json(described(service.find(name)))

    @r.post("/v1/chat/completions", summary="An answer to a conversation")
    async def chat(body: ChatRequest, request: Request) -> Response:
        a = await asked_chat(service, request, body)
        return await service.answer(request, a.jobs, ChatForm(a.head, a.readers), bool(body.stream), a.notes)

    @r.post("/v1/completions", summary="Text that continues a prompt")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        a = await asked_completion(service, request, body)
        form = CompletionForm(a.head, body.n or 1, a.echoes, begun=bool(a.jobs))
        return await service.answer(request, a.jobs, form, bool(body.stream), a.notes)

    @r.post("/tokenize", summary="Token ids of a text or a conversation")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        work = await service.use(request, body.model)
        if body.messages is not None:
            messages, _ = (await work.tool_format()).turns(body.messages, None)
            text, guard = await work.written(messages, **thinking.template(body))
            ids = await work.encode(text, guard=guard, bounded=False)
        else:
            ids = await work.encode(body.prompt or "", bos=body.add_special_tokens, bounded=False)
            if (named := work.model.checkpoint.tokenizer.token_id(body.prompt or "")) is not None:
                ids = [named]  # clients look up the ids of <bos> and <eos> this way
        answer = await work.aside(_tokens, work.model, ids, body.return_token_strs)
        return Response(answer, media_type="application/json")

    @r.post("/detokenize", summary="Text of token ids")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        work = await service.use(request, body.model)
        work.check_ids(body.tokens, "tokens")
        return Json({"prompt": await work.aside(work.model.decode, body.tokens)})

    @r.get("/tokenizer_info", summary="Names of the tokenizer's special tokens, and the chat template")
    async def tokenizer_info(request: Request, model: str | None = None) -> Response:
        used: Model = (await service.use(request, model)).model
        t = used.checkpoint.tokenizer
        named = {f"{n}_token": getattr(t.vocabulary, f"{n}_id") for n in ("bos", "eos", "pad", "unk")}
        about = {
            "tokenizer_class": "GemmaTokenizer",
            **{name: None if i is None else t.vocabulary.pieces[i] for name, i in named.items()},
            "add_bos_token": t.bos_id is not None,
            "model_max_length": used.engine.cache.ctx,
            "chat_template": service.template(used.checkpoint),
        }
        return Json(about)

    return r


def _tokens(model: Model, ids: list[int], names: bool) -> bytes:
    out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.engine.cache.ctx}
    if names:
        tokens = Tokens(model.checkpoint.tokenizer)
        out["token_strs"] = [tokens.name(i) for i in ids]
    return packed(out)
