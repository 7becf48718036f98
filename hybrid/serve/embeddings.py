"""The endpoints of an embedding model: /v1/embeddings as OpenAI's, /v1/rerank as Cohere's, /api/embed and /api/embeddings
as Ollama's."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from hybrid.serve.errors import bad_request
from hybrid.serve.http import Json, JsonRoute, until_gone
from hybrid.serve.service import Service, Work, note
from hybrid.serve.wire import FirstError, Open, Text, Wire, kind_of

if TYPE_CHECKING:
    from hybrid.embedding import EmbeddingModel

INPUTS = 2048
"""Most texts of a request, as in OpenAI's API."""
Asked = tuple[str | list[int], str | None]
"""A text, or ids that are taken as they are, and its task."""

Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1), FirstError()]
Texts = Annotated[list[Text], Field(min_length=1, max_length=INPUTS), FirstError()]


def _input_kind(value: Any) -> str | None:
    """The discriminator of an input: by its type, and its first item's."""
    if not isinstance(value, list):
        return "<string>" if isinstance(value, str) else None
    first = value[0] if value else ""
    return "<ids>" if isinstance(first, int) else "<lists>" if isinstance(first, list) else "<array>"


Input = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[Texts, Tag("<array>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[list[Ids], Field(max_length=INPUTS), FirstError(), Tag("<lists>")],
    Discriminator(_input_kind),
]


class EmbeddingsRequest(Wire):
    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    task: str | None = None
    """One of the model's tasks, whose prompt stands before each text."""
    prompt_name: str | None = None
    """The same, by sentence-transformers' name."""
    truncate: bool | None = None
    """Cut texts that are too long, instead of refusing them."""


class Document(Wire):
    text: Text


DocumentOrText = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[Document, Tag("<object>")], Discriminator(kind_of)
]


class RerankRequest(Wire):
    query: Text
    documents: Annotated[list[DocumentOrText], Field(min_length=1, max_length=INPUTS), FirstError()]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class OllamaEmbed(Open):
    model: str | None = None
    input: Annotated[Annotated[Text, Tag("<string>")] | Annotated[Texts, Tag("<array>")], Discriminator(_input_kind)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaEmbeddings(Open):
    model: str | None = None
    prompt: Text
    options: dict[str, Any] | None = None
    keep_alive: Any = None


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)

    @r.post("/v1/embeddings", summary="Embeddings of texts")
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        work = await service.use(request, body.model, embeds=True)
        task = _task(work.model, body)
        texts = [(text, task) for text in _listed(body.input)]
        if task is not None and not all(isinstance(text, str) for text, _ in texts):
            raise bad_request("a task puts its prompt before texts, and these are token ids", "task", "invalid_value")
        vectors, tokens = await _embedded(work, texts, body.dimensions, bool(body.truncate))
        shown = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
        data = [{"object": "embedding", "index": i, "embedding": shown(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return Json({"object": "list", "data": data, "model": service.name(work.model), "usage": usage})

    @r.post("/v1/rerank", summary="Documents by their similarity to a query")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        work = await service.use(request, body.model, embeds=True)
        query, document = (task if task in work.model.tasks else None for task in ("query", "document"))
        documents = [d if isinstance(d, str) else d.text for d in body.documents]
        texts = [(body.query, query), *((text, document) for text in documents)]
        vectors, tokens = await _embedded(work, texts)
        scores = vectors[1:] @ vectors[0]
        best = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": float(scores[i])} for i in best]
        for result in results if body.return_documents else ():
            result["document"] = {"text": documents[result["index"]]}
        return Json({"model": service.name(work.model), "results": results, "usage": {"total_tokens": tokens}})

    @r.post("/api/embed", summary="Embeddings of texts, in Ollama's form")
    async def ollama_embed(body: OllamaEmbed, request: Request) -> Response:
        began = time.perf_counter_ns()
        work = await service.use(request, body.model, embeds=True)
        texts = [(text, None) for text in _listed(body.input)]
        vectors, tokens = await _embedded(work, texts, body.dimensions, body.truncate is not False)
        took = {"total_duration": time.perf_counter_ns() - began, "load_duration": 0, "prompt_eval_count": tokens}
        answer = {"model": body.model or service.name(work.model), "embeddings": vectors.tolist(), **took}
        return Json(answer, headers=note(body.ignored()))

    @r.post("/api/embeddings", summary="The embedding of a text, in Ollama's older form")
    async def ollama_embeddings(body: OllamaEmbeddings, request: Request) -> Response:
        work = await service.use(request, body.model, embeds=True)
        vectors, _ = await _embedded(work, [(body.prompt, None)], cut=True)
        return Json({"embedding": vectors[0].tolist()}, headers=note(body.ignored()))

    return r


async def _embedded(
    work: Work, texts: Sequence[Asked], dimensions: int | None = None, cut: bool = False
) -> tuple[np.ndarray, int]:
    """(vectors, tokens) of texts behind their tasks' prompts. ApiError."""
    model: EmbeddingModel = work.model
    try:
        model.check_dimensions(dimensions)
    except ValueError as error:
        raise bad_request(str(error), "dimensions", "invalid_value") from None

    def run() -> tuple[np.ndarray, int]:
        ids = [model.encode(text, task) if isinstance(text, str) else text for text, task in texts]
        ids = [model.cut(one) for one in ids] if cut else ids
        return model.embed(ids, None, dimensions), sum(map(len, ids))

    return await until_gone(work.request, work.embedded(run))


def _listed(given: str | list[Any]) -> list[Any]:
    """The texts of an input: strings, or lists of ids."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _task(model: EmbeddingModel, body: EmbeddingsRequest) -> str | None:
    """The task that a request names. ApiError 400."""
    task, param = (body.task, "task") if body.task is not None else (body.prompt_name, "prompt_name")
    if body.prompt_name not in (None, task):
        raise bad_request("task and prompt_name are two names of one field: give one", "prompt_name", "invalid_value")
    if task is not None and task not in model.tasks:
        known = ", ".join(model.tasks)
        raise bad_request(f"the model knows no task '{task[:64]}'; known: {known}", param, "invalid_value")
    return task


def _base64(vector: np.ndarray) -> str:
    """Little-endian float32, as OpenAI's clients read them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
