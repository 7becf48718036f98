"""The endpoints: completions, chat, responses, tokens, models."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve import options, thinking, tools
from hybrid.serve.adapter import Names
from hybrid.serve.answers import Answer
from hybrid.serve.backend import Backend
from hybrid.serve.errors import ApiError, bad_request
from hybrid.serve.forms import ChatForm, CompletionForm, Echo, Head, Reader
from hybrid.serve.http import Json, JsonRoute, packed
from hybrid.serve.responses_form import ResponsesForm
from hybrid.serve.responses_wire import NAMES, ResponsesRequest
from hybrid.serve.running import Job
from hybrid.serve.schemas import LOOSER
from hybrid.serve.service import Service, note
from hybrid.serve.structured import answer_larks, schema_of
from hybrid.serve.wire import ChatRequest, CompletionRequest, DetokenizeRequest, Sampled, TokenizeRequest

if TYPE_CHECKING:
    from hybrid.model import Model

T = TypeVar("T")
DEFAULT_COMPLETION = 16
"""Default max_tokens of a completion, as in OpenAI's API."""

CHAT = ("tools[{}].function.parameters", "response_format.json_schema.schema")


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)
    began = int(time.time())

    def described(backend: Backend) -> dict[str, Any]:
        model = backend.loaded
        about = {
            "id": backend.name or service.name(backend.model),
            "object": "model",
            "created": began,
            "owned_by": "hybrid-kernels",
            "loaded": model is not None,
        }
        if model is None:
            return about
        return {
            **about,
            "context_length": model.engine.cache.ctx,
            "vocabulary": min(model.hparams.vocab, model.checkpoint.tokenizer.n_tokens),
            "device": model.device,
        }

    @r.get("/v1/models", summary="The models that are served")
    async def models() -> Response:
        return Json({"object": "list", "data": [described(b) for b in service.models.backends.values()]})

    @r.get("/v1/models/{name:path}", summary="A model by its name")
    async def one_model(name: str) -> Response:
        return Json(described(service.find(name)))

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
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        model = await service.use(request, body.model)
        if body.messages is not None:
            messages, _ = (await service.tool_format(request, model)).turns(body.messages, None)
            text, guard = await service.written(request, model, messages, **thinking.template(body))
            ids = await service.tokenize(request, model, text, True, guard)
        else:
            ids = await service.tokenize(request, model, body.prompt or "", body.add_special_tokens)
            if (named := model.checkpoint.tokenizer.token_id(body.prompt or "")) is not None:
                ids = [named]  # clients look up the ids of <bos> and <eos> this way
        answer = await service.aside(request, _tokens, service, model, ids, body.return_token_strs)
        return Response(answer, media_type="application/json")

    @r.post("/detokenize", summary="Text of token ids")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        model = await service.use(request, body.model)
        check_ids(body.tokens, model, "tokens")
        return Json({"prompt": await service.aside(request, model.decode, body.tokens)})

    @r.get("/tokenizer_info", summary="Names of the tokenizer's special tokens, and the chat template")
    async def tokenizer_info(request: Request, model: str | None = None) -> Response:
        used = await service.use(request, model)
        t = used.checkpoint.tokenizer
        named = {f"{n}_token": getattr(t.vocabulary, f"{n}_id") for n in ("bos", "eos", "pad", "unk")}
        return Json(
            {
                "tokenizer_class": "GemmaTokenizer",
                **{name: None if i is None else t.vocabulary.pieces[i] for name, i in named.items()},
                "add_bos_token": t.bos_id is not None,
                "model_max_length": used.engine.cache.ctx,
                "chat_template": service.template(used.checkpoint),
            }
        )

    return r


def _tokens(service: Service, model: Model, ids: list[int], names: bool) -> bytes:
    out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.engine.cache.ctx}
    if names:
        tokens = service.tokens(model)
        out["token_strs"] = [tokens.name(i) for i in ids]
    return packed(out)


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed chat request. notes: its ignored parts."""

    model: Model
    jobs: list[Job]
    head: Head
    readers: list[Reader | None]
    notes: list[str] = field(default_factory=list)


async def asked_chat(service: Service, body: ChatRequest, request: Request, places: tuple[str, str] = CHAT) -> Asked:
    """Parse a chat request. places: paths of a tool's schema (by its index) and of the response schema."""
    model = await service.writer(request, body.model)
    n = body.n or 1
    service.count(n)
    kind = await service.tool_format(request, model)
    schema = schema_of(body.response_format, places[1])
    tools.check_schemas(body.tools, places[0])
    offered = tools.offer(body.tools, body.tool_choice, body.parallel_tool_calls)
    service.check_length(model, sum(len(m.text().strip()) for m in body.messages))
    messages, described = kind.turns(body.messages, offered)
    text, guard = await service.written(request, model, messages, described, **thinking.template(body))
    ids = await service.encode(request, model, text, guard=guard)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    shared = _shared(
        service, model, body, top, options.lengths(asked, None, len(ids), model.engine.cache.ctx, service.settings)
    )
    notes = [f"tools of type {t} are not offered and left out" for t in tools.left_out(body.tools)]
    notes += ["nothing is stored"] if body.store else []
    channel = thinking.channel_of(model.checkpoint.tokenizer, ids)
    if channel is None and body.reasoning_effort not in (None, "none"):
        notes.append("this model does not think, whatever the effort")
    constraints: list[Any] = [None] * n
    if offered is not None:
        try:
            constraints = await service.constraints(request, model, kind.larks(offered, schema), "tools", n)
        except ApiError as error:
            raise await _of_tool(service, request, body, kind, offered, places[0], error) from None
    elif schema[0] is not None:
        constraints = await service.constraints(
            request, model, answer_larks(schema[0], schema[1]), "response_format", n
        )
    if constraints[0] is not None and constraints[0].which:
        how = ("", "by types, properties and alternatives alone", "by its type alone")[constraints[0].which % LOOSER]
        notes.append(f"a schema is followed {how}")
    choices = [options.choice(shared, i, constraints[i]) for i in range(n)]
    jobs = [Job(ids, own) for own in thinking.bounded(model, body, ids, channel, choices)]
    readers: list[Reader | None] = [None] * n
    if channel is not None or offered is not None:
        parsers = [None if offered is None else kind.reader(offered) for _ in range(n)]
        readers = [Answer(model.checkpoint.tokenizer, copy(channel), parser) for parser in parsers]
    return Asked(model, jobs, _head(service, model, body, top, len(ids)), readers, notes)


async def _of_tool(
    service: Service,
    request: Request,
    body: ChatRequest,
    kind: tools.Format,
    offered: tools.Offer,
    place: str,
    error: ApiError,
) -> ApiError:
    """The error of a refused grammar, attributed to the first strict tool with a schema that is refused by itself."""
    model = await service.use(request, body.model)
    for n, tool in enumerate(body.tools or ()):
        if error.code != "invalid_schema" or tool.function is None or not tool.function.strict:
            continue
        alone = tools.Offer([tool.function], required=True, several=offered.several)
        try:
            await service.constraints(request, model, kind.larks(alone, (None, False)), "tools", 1)
        except ApiError as found:
            return tools.of_tool(tool.function, found, place.format(n))
    return error


async def answer_chat(service: Service, body: ChatRequest, request: Request) -> Response:
    a = await service.unless_gone(request, asked_chat(service, body, request))
    return await service.answer(request, a.jobs, ChatForm(a.head, a.readers), bool(body.stream), note(a.notes))


async def named(service: Service, request: Request, names: Names, work: Awaitable[T]) -> T:
    """The parsed request of another API. Errors have that API's names of fields."""
    try:
        return await service.unless_gone(request, work)
    except ApiError as error:
        error.param = names.of(error.param)
        raise


async def answer_responses(service: Service, body: ResponsesRequest, request: Request) -> Response:
    repeated = body.repeated()
    a = await named(service, request, NAMES, asked_chat(service, body.chat(), request, NAMES.schemas))
    form = ResponsesForm(a.head, repeated, a.readers[0])
    return await service.answer(request, a.jobs, form, bool(body.stream), note(a.notes))


async def answer_completion(service: Service, body: CompletionRequest, request: Request) -> Response:
    jobs, form = await service.unless_gone(request, asked_completion(service, body, request))
    return await service.answer(request, jobs, form, bool(body.stream))


async def asked_completion(
    service: Service, body: CompletionRequest, request: Request
) -> tuple[list[Job], CompletionForm]:
    model = await service.writer(request, body.model)
    n = body.n or 1
    asked = _prompts(body)
    service.count(n * len(asked))
    schema = schema_of(body.response_format, CHAT[1])
    prompts: list[list[int]] = []
    for prompt in asked:
        if isinstance(prompt, str):
            ids = await service.encode(request, model, prompt)
        else:
            service.check_count(model, len(prompt))
            check_ids(prompt, model, "prompt")
            ids = prompt
        if not ids:
            raise bad_request("a prompt is empty", "prompt", "invalid_value")
        prompts.append(ids)
    jobs: list[Job] = []
    echoes: list[Echo] = []
    for prompt, ids in zip(asked, prompts, strict=True):
        echo = Echo(len(ids))
        if body.echo:
            known = (
                await service.prompt_logprobs(request, model, ids, body.logprobs) if body.logprobs is not None else []
            )
            echo = Echo(len(ids), prompt if isinstance(prompt, str) else model.decode(ids), ids, known)
        echoes += [echo] * n
        if body.max_tokens == 0:
            continue
        length = options.lengths(
            body.max_tokens, DEFAULT_COMPLETION, len(ids), model.engine.cache.ctx, service.settings
        )
        shared = _shared(service, model, body, body.logprobs, length)
        constraints: list[Any] = [None] * n
        if schema[0] is not None:
            constraints = await service.constraints(
                request, model, answer_larks(schema[0], schema[1]), "response_format", n
            )
        jobs += [Job(ids, options.choice(shared, i, constraints[i])) for i in range(n)]
    head = _head(service, model, body, body.logprobs, sum(map(len, prompts)))
    return jobs, CompletionForm(head, n, echoes, begun=bool(jobs))


def _shared(service: Service, model: Model, body: Sampled, top: int | None, length: dict[str, Any]) -> dict[str, Any]:
    """Options that all choices of a request share."""
    found = options.sampling(body, model.checkpoint.generation, service.seeds, model.hparams.vocab)
    more = {} if top is None else {"logprobs": max(top, 1)}
    return {**found, **length, **more}


def _head(service: Service, model: Model, body: Sampled, top: int | None, prompt_tokens: int) -> Head:
    ends = frozenset() if body.ignore_eos else model.eos_ids
    asked = body.stream_options
    return Head(
        service.name(model),
        service.fingerprint(model),
        service.tokens(model),
        top,
        ends,
        prompt_tokens,
        usage=bool(asked and (asked.include_usage or asked.continuous_usage_stats)),
        every_usage=bool(asked and asked.continuous_usage_stats),
    )


def check_ids(ids: list[int], model: Model, param: str) -> None:
    vocab = model.hparams.vocab
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        raise bad_request(f"token ids are 0 to {vocab - 1}", param, "invalid_value")


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """A request's prompts, as text or ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
