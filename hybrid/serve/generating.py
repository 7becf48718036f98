"""The core of every endpoint that generates: a chat or completion request, of whatever API, as jobs of the engine and
readers of their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import ValidationError

from hybrid.serve import thinking, tools
from hybrid.serve.answers import Answer
from hybrid.serve.errors import ApiError, bad_request, from_validation
from hybrid.serve.forms import Echo, Head, Tokens
from hybrid.serve.http import until_gone
from hybrid.serve.running import Job
from hybrid.serve.schemas import LOOSER, told
from hybrid.serve.service import Service, Work
from hybrid.serve.structured import Shape, answer_larks, schema_of
from hybrid.serve.wire import ChatRequest, CompletionRequest, Sampled, SamplingFields

if TYPE_CHECKING:
    from hybrid.engine.sampling import Constraint


@dataclass(frozen=True, slots=True)
class Names:
    """An API's names for a chat request's parts. fields: by the chat request's own; schemas: paths of a tool's schema
    (by its index) and of the answer's."""

    fields: Mapping[str, str]
    schemas: tuple[str, str]

    def of(self, param: str | None) -> str | None:
        """The API's name of a chat request's field."""
        first = (param or "").partition("[")[0].partition(".")[0]
        return self.fields.get(first, param)


def chat_request(body: dict[str, Any], names: Names) -> ChatRequest:
    """ApiError if the other API's request means no chat request."""
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        refusal = from_validation(error.errors(include_url=False))
        raise bad_request(refusal.message, names.of(refusal.param), refusal.code) from None


def continued(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields by which the answer continues a last message of the assistant, as these APIs do."""
    last = messages[-1]
    begun = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    return {"continue_final_message": True, "add_generation_prompt": False} if begun else {}


DEFAULT_COMPLETION = 16
"""Default max_tokens of a completion, as in OpenAI's API."""
OPENAI = Names({}, ("tools[{}].function.parameters", "response_format.json_schema.schema"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request. readers: of its choices; notes: its ignored parts; echoes: prompts of a completion's choices."""

    jobs: list[Job]
    head: Head
    readers: list[Answer]
    notes: list[str]
    echoes: list[Echo]


async def asked_chat(service: Service, request: Request, body: ChatRequest, names: Names = OPENAI) -> Asked:
    """Parse a chat request, or another API's as one. ApiError, with that API's names of fields."""
    return await _named(request, names, _chat(service, request, body, *names.schemas))


async def asked_completion(service: Service, request: Request, body: CompletionRequest, names: Names = OPENAI) -> Asked:
    """As asked_chat, for a completion."""
    return await _named(request, names, _completion(service, request, body, names.schemas[1]))


async def _named(request: Request, names: Names, parsed: Awaitable[Asked]) -> Asked:
    try:
        return await until_gone(request, parsed)
    except ApiError as error:
        error.param = names.of(error.param)
        raise


async def _chat(service: Service, request: Request, body: ChatRequest, tool_place: str, answer_place: str) -> Asked:
    """Places: paths of a tool's schema (by its index) and of the answer's."""
    work = await service.use(request, body.model, embeds=False)
    n = body.n or 1
    _check_choices(service, n)
    kind = await work.tool_format()
    schema, left_out = schema_of(body.response_format, answer_place)
    left_out += tools.check_schemas(body.tools, tool_place)
    offered = tools.offer(body.tools, body.tool_choice, body.parallel_tool_calls)
    work.check_length(sum(len(m.text().strip()) for m in body.messages))
    messages, described = kind.turns(body.messages, offered)
    text, guard = await work.written(messages, described, **thinking.template(body))
    ids = await work.encode(text, guard=guard)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    shared = _shared(work, body, asked, top)
    others = sorted({t.type for t in body.tools or () if t.function is None})
    notes = [f"tools of type {t} are not offered and left out" for t in others]
    notes += ["nothing is stored"] if body.store else []
    notes += told(left_out)
    tokenizer = work.model.checkpoint.tokenizer
    channel = thinking.channel_of(tokenizer, ids)
    if channel is None and body.reasoning_effort not in (None, "none"):
        notes.append("this model does not think, whatever the effort")
    if offered is None:
        constraints = await _of_answer(work, schema, n)
    else:
        try:
            constraints = await work.constraints(kind.larks(offered, schema), "tools", n)
        except ApiError as error:
            raise await _of_tool(work, body, offered, tool_place, error) from None
    if constraints[0] is not None and constraints[0].which:
        how = ("", "by types, properties and alternatives alone", "by its type alone")[constraints[0].which % LOOSER]
        notes.append(f"a schema is followed {how}")
    choices = [_choice(shared, i, constraints[i]) for i in range(n)]
    jobs = [Job(ids, own) for own in thinking.bounded(work.model, body, ids, channel, choices)]
    readers = [Answer(tokenizer, copy(channel), None if offered is None else kind.reader(offered)) for _ in range(n)]
    return Asked(jobs, _head(work, body, top, len(ids)), readers, notes, [])


async def _of_answer(work: Work, schema: Shape, n: int) -> list[Any]:
    """Constraints of n answers with a schema; None without one."""
    wanted, strict = schema
    if wanted is None:
        return [None] * n
    return await work.constraints(answer_larks(wanted, strict), "response_format", n)


async def _of_tool(work: Work, body: ChatRequest, offered: tools.Offer, place: str, error: ApiError) -> ApiError:
    """The error of a refused grammar, attributed to the first strict tool with a schema that is refused by itself."""
    for n, tool in enumerate(body.tools or ()):
        if error.code != "invalid_schema" or tool.function is None or not tool.function.strict:
            continue
        alone = tools.Offer([tool.function], required=True, several=offered.several)
        try:
            await work.constraints((await work.tool_format()).larks(alone, (None, False)), "tools", 1)
        except ApiError as found:
            return tools.of_tool(tool.function, found, place.format(n))
    return error


async def _completion(service: Service, request: Request, body: CompletionRequest, answer_place: str) -> Asked:
    work = await service.use(request, body.model, embeds=False)
    n, top = body.n or 1, body.logprobs
    asked = _prompts(body)
    _check_choices(service, n * len(asked))
    schema, left_out = schema_of(body.response_format, answer_place)
    prompts: list[list[int]] = []
    for prompt in asked:
        if isinstance(prompt, str):
            ids = await work.encode(prompt)
        else:
            work.check_ids(prompt, "prompt", most=work.most)
            ids = prompt
        if not ids:
            raise bad_request("a prompt is empty", "prompt", "invalid_value")
        prompts.append(ids)
    jobs: list[Job] = []
    echoes: list[Echo] = []
    for prompt, ids in zip(asked, prompts, strict=True):
        echo = Echo(len(ids))
        if body.echo:
            known = await work.prompt_logprobs(ids, top) if top is not None else []
            echo = Echo(len(ids), prompt if isinstance(prompt, str) else work.model.decode(ids), ids, known)
        echoes += [echo] * n
        if body.max_tokens == 0:
            continue
        shared = _shared(work, body, body.max_tokens, top, DEFAULT_COMPLETION)
        constraints = await _of_answer(work, schema, n)
        jobs += [Job(ids, _choice(shared, i, constraints[i])) for i in range(n)]
    readers = [Answer(work.model.checkpoint.tokenizer, None, None) for _ in jobs]
    return Asked(jobs, _head(work, body, top, sum(map(len, prompts))), readers, told(left_out), echoes)


def _check_choices(service: Service, n: int) -> None:
    most = service.settings.max_choices
    if n > most:
        raise bad_request(f"a request may have {most} choices here (n times its prompts), not {n}", "n")


def _prompts(body: CompletionRequest) -> list[Any]:
    """A request's prompts, as text or ids."""
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def _head(work: Work, body: Sampled, top: int | None, prompt_tokens: int) -> Head:
    asked, model = body.stream_options, work.model
    return Head(
        work.service.name(model),
        work.service.fingerprint(model),
        Tokens(model.checkpoint.tokenizer),
        top,
        frozenset() if body.ignore_eos else model.eos_ids,
        prompt_tokens,
        usage=bool(asked and (asked.include_usage or asked.continuous_usage_stats)),
        every_usage=bool(asked and asked.continuous_usage_stats),
    )


def _shared(
    work: Work, body: Sampled, asked: int | None, top: int | None, default: int | None = None
) -> dict[str, Any]:
    """Options of Model.submit that all choices of a request share. asked: tokens of an answer, within the server's limit;
    without it `default`, or to the end of the context. top: of top_logprobs, None without logprobs."""
    settings, context = work.service.settings, work.model.engine.cache.ctx
    most = settings.max_tokens or context
    wanted = asked if asked is not None else min(default or context, most)
    if wanted > most and settings.max_tokens:
        raise bad_request(f"this server generates at most {most} tokens, not {wanted}", "max_tokens", "invalid_value")
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for said in (work.model.checkpoint.generation, body):  # what the checkpoint recommends, and the request
        given = {name: getattr(said, name, None) for name in SamplingFields.model_fields}
        options |= {name: value for name, value in given.items() if value is not None}
    options["top_k"] = max(options["top_k"], 0)
    options["seed"] = work.service.seeds.getrandbits(63) if body.seed is None else body.seed % 2**64
    options["stop"] = body.stop or ()
    if options["top_p"] == 0:
        options |= {"top_p": 1.0, "temperature": 0.0}
    if body.logit_bias:
        options["logit_bias"] = _biases(body.logit_bias, work.model.hparams.vocab)
    if top is not None:
        options["logprobs"] = max(top, 1)
    return {**options, "max_tokens": min(wanted, context), "deadline": settings.total}


def _choice(options: dict[str, Any], index: int, constraint: Constraint | None = None) -> dict[str, Any]:
    """The options of one choice. Each choice has its own seed, the first the request's. A constraint may end the
    text."""
    own = {**options, "seed": (options["seed"] + index) % 2**64}
    return own if constraint is None else {**own, "constraint": constraint, "ignore_eos": False}


def _biases(biases: dict[str, float], vocab: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
            raise bad_request(f"logit_bias: keys are token ids from 0 to {vocab - 1}", "logit_bias", "invalid_value")
        out[int(key)] = value
    return out
