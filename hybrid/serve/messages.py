"""The endpoints of Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hybrid.serve.endpoints import asked_chat, named
from hybrid.serve.http import Json, JsonRoute
from hybrid.serve.messages_form import MessagesForm
from hybrid.serve.messages_wire import NAMES, CountRequest, MessagesRequest
from hybrid.serve.service import Service, note


def router(service: Service) -> APIRouter:
    r = APIRouter(route_class=JsonRoute)

    @r.post("/v1/messages", summary="An answer as a message of blocks: text, thinking and uses of tools")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        a = await named(service, request, NAMES, asked_chat(service, body.chat(), request, NAMES.schemas))
        form = MessagesForm(a.head, a.readers[0])
        return await service.answer(request, a.jobs, form, bool(body.stream), note([*body.notes(), *a.notes]))

    @r.post("/v1/messages/count_tokens", summary="Tokens of a conversation")
    async def count(body: CountRequest, request: Request) -> Response:
        a = await named(service, request, NAMES, asked_chat(service, body.chat(), request, NAMES.schemas))
        return Json({"input_tokens": a.head.prompt_tokens}, headers=note(body.notes()))

    return r
