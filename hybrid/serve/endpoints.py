"""The endpoints for text: completions, chat, tokens, models."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve import options, prompts, tools
from hybrid.serve.errors import bad_request
from hybrid.serve.forms import ChatForm, CompletionForm, Reader
from hybrid.serve.http import Json
from hybrid.serve.responses_form import ResponsesForm
from hybrid.serve.responses_wire import ResponsesRequest
from hybrid.serve.running import Job
from hybrid.serve.service import Service, aside
from hybrid.serve.structured import answer_lark, schema_of
from hybrid.serve.wire import ChatRequest, CompletionRequest, DetokenizeRequest, Sampled, TokenizeRequest

if TYPE_CHECKING:
    from hybrid.model import Model

DEFAULT_COMPLETION = 16
"""Tokens of a completion that names no length: the reference's."""


def router(service: Service) -> APIRouter:
    r = APIRouter()
    began = int(time.time())

    def described(model: Model) -> dict[str, Any]:
        return {
            "id": service.name(model),
            "object": "model",
            "created": began,
            "owned_by": "hybrid-kernels",
            "context_length": model.engine.cache.ctx,
            "vocabulary": min(model.hparams.vocab, model.checkpoint.tokenizer.n_tokens),
            "device": model.device,
        }

    @r.get("/v1/models", summary="The model that is served")
    async def models() -> Response:
        return Json({"object": "list", "data": [described(service.backend.model)]})

    @r.get("/v1/models/{name:path}", summary="The same, by its name")
    async def one_model(name: str) -> Response:
        return Json(described(service.model(name)))

    @r.post("/v1/chat/completions", summary="An answer to a conversation")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answer_chat(service, body, request)

    @r.post("/v1/completions", summary="Text that continues a prompt")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await answer_completion(service, body, request)

    @r.post("/v1/responses", summary="An answer as a list of items: text and calls of tools")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        return await answer_responses(service, body, request)

    @r.post("/tokenize", summary="Token ids of a text or a conversation")
    async def tokenize(body: TokenizeRequest) -> Response:
        model = service.model(body.model)
        if body.messages is not None:
            messages, _ = service.tool_format(model).turns(body.messages, None)
            ids = await aside(prompts.encode, model, messages)
        else:
            ids = await aside(model.encode, body.prompt, body.add_special_tokens)
        out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.engine.cache.ctx}
        if body.return_token_strs:
            out["token_strs"] = [service.tokens(model).name(i) for i in ids]
        return Json(out)

    @r.post("/detokenize", summary="Text of token ids")
    async def detokenize(body: DetokenizeRequest) -> Response:
        model = service.model(body.model)
        check_ids(body.tokens, model, "tokens")
        return Json({"prompt": await aside(model.decode, body.tokens)})

    return r


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for chat, understood."""

    model: Model
    jobs: list[Job]
    top: int | None
    kind: tools.Format
    readers: list[Reader | None]


async def asked_chat(service: Service, body: ChatRequest) -> Asked:
    model = service.model(body.model)
    n = body.n or 1
    service.count(n)
    kind = service.tool_format(model)
    offered = tools.offer(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages, described = kind.turns(body.messages, offered)
    ids = await aside(prompts.encode, model, messages, described)
    top = (body.top_logprobs or 0) if body.logprobs else None
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    shared = _shared(service, model, body, top, options.lengths(asked, None, len(ids), model.engine.cache.ctx, service.settings))
    constraints: list[Any] = [None] * n
    schema = schema_of(body.response_format)
    if offered is not None:
        lark = await aside(kind.lark, offered, schema)
        constraints = await aside(service.constraints, model, lark, "tools", n)
    elif schema is not None:
        constraints = await aside(service.constraints, model, answer_lark(schema), "response_format", n)
    jobs = [Job(ids, options.choice(shared, i, constraints[i])) for i in range(n)]
    return Asked(model, jobs, top, kind, [None if offered is None else kind.reader(offered) for _ in range(n)])


async def answer_chat(service: Service, body: ChatRequest, request: Request) -> Response:
    a = await asked_chat(service, body)
    form = ChatForm(
        service.name(a.model),
        len(a.jobs),
        include_usage(body),
        service.fingerprint(a.model),
        service.tokens(a.model),
        a.top,
        shown(a.model, body),
        a.readers,
        a.kind.silent,
    )
    return await service.answer(request, a.jobs, form, bool(body.stream))


async def answer_responses(service: Service, body: ResponsesRequest, request: Request) -> Response:
    chat = body.chat()
    a = await asked_chat(service, chat)
    repeated = body.model_dump(
        include={"instructions", "max_output_tokens", "metadata", "text", "tool_choice", "tools", "top_p", "temperature", "user"},
        by_alias=True,
    )
    repeated |= {
        "tools": repeated["tools"] or [],
        "tool_choice": repeated["tool_choice"] or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
    form = ResponsesForm(
        service.name(a.model),
        repeated,
        service.tokens(a.model),
        a.top,
        shown(a.model, chat),
        a.readers[0],
        dict(a.kind.silent),
    )
    return await service.answer(request, a.jobs, form, bool(body.stream))


async def answer_completion(service: Service, body: CompletionRequest, request: Request) -> Response:
    model = service.model(body.model)
    n = body.n or 1
    asked = _prompts(body)
    service.count(n * len(asked))
    if body.echo and body.logprobs is not None:
        raise bad_request("logprobs of the prompt are not computed: leave out echo or logprobs", "echo", "unsupported_value")
    schema = schema_of(body.response_format)
    jobs: list[Job] = []
    echoes: list[str] = []
    firsts: list[int] = []
    for prompt in asked:
        if isinstance(prompt, str):
            ids = await aside(model.encode, prompt)
        else:
            check_ids(prompt, model, "prompt")
            ids = prompt
        if not ids:
            raise bad_request("a prompt is empty", "prompt", "invalid_value")
        length = options.lengths(body.max_tokens, DEFAULT_COMPLETION, len(ids), model.engine.cache.ctx, service.settings)
        shared = _shared(service, model, body, body.logprobs, length)
        firsts.append(len(jobs))
        constraints: list[Any] = [None] * n
        if schema is not None:
            constraints = await aside(service.constraints, model, answer_lark(schema), "response_format", n)
        jobs += [Job(ids, options.choice(shared, i, constraints[i])) for i in range(n)]
        echoes += [(prompt if isinstance(prompt, str) else model.decode(ids)) if body.echo else ""] * n
    form = CompletionForm(
        service.name(model),
        firsts,
        include_usage(body),
        service.fingerprint(model),
        service.tokens(model),
        body.logprobs,
        shown(model, body),
        echoes,
    )
    return await service.answer(request, jobs, form, bool(body.stream))


def _shared(service: Service, model: Model, body: Sampled, top: int | None, length: dict[str, Any]) -> dict[str, Any]:
    """Options of every choice of a request."""
    found = options.sampling(body, model.checkpoint.generation, service.seeds, model.hparams.vocab)
    more = {} if top is None else {"logprobs": max(top, 1)}
    return {**found, **length, **more}


def include_usage(body: Sampled) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def shown(model: Model, body: Sampled) -> Any:
    """Whether logprobs name a token: those that end a text are no part of it."""
    ends = frozenset() if body.ignore_eos else model.eos_ids
    return lambda token: token not in ends


def check_ids(ids: list[int], model: Model, param: str) -> None:
    vocab = model.hparams.vocab
    if any(not 0 <= i < vocab for i in ids):
        raise bad_request(f"token ids are 0 to {vocab - 1}", param, "invalid_value")


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Each prompt of a request: text, or ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
