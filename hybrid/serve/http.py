"""JSON request bodies, and responses that are cancelled on disconnect: a JSON object or server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from hybrid.serve.errors import ApiError, bad_request

T = TypeVar("T")


class JsonRequest(Request):
    """A request with a JSON body of bounded depth without NaN and Infinity (numbers may still overflow a float)."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError:
            raise HTTPException(400) from None


class JsonRoute(APIRoute):
    """Requires Content-Type: application/json. Web pages can send other types to a local server without CORS."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                raise bad_request("send the body with Content-Type: application/json", code="invalid_content_type")
            return await handler(JsonRequest(request.scope, request.receive))

        return checked


def packed(value: Any) -> bytes:
    """Compact ASCII JSON, which can encode lone surrogates. ValueError for a non-finite number."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return packed(content)


def refused(error: ApiError, path: str) -> Response:
    """An error response in the form of the address's API."""
    return Json(error.body(path), error.status, error.headers())


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def gone() -> ApiError:
    """The refusal of a request whose client disconnected before its answer was ready."""
    return ApiError(499, "the client went away", code="cancelled")


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, cancelled if the client disconnects first. ApiError 499."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise gone()
        return task.result()
    finally:
        await _end(task, left)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


EVENTS, LINES = "text/event-stream", "application/x-ndjson"
"""Media types of streams: server-sent events, and JSON objects one a line."""
STREAMED = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"), EVENTS),
    **dict.fromkeys(("/api/chat", "/api/generate"), LINES),
}
"""The endpoints that stream, with the type of their streams."""


class EventStream(StreamingResponse):
    """A stream of `chunks`. Ends if the client disconnects or reads nothing for `idle` seconds. Always
    calls `ended(whole)`; whole: everything was sent."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        idle: float,
        ended: Callable[[bool], None],
        headers: Mapping[str, str] | None = None,
        media: str = EVENTS,
    ) -> None:
        own = {"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(chunks, media_type=media, headers=own)
        self._chunks, self._idle, self._ended = chunks, idle, ended
        self._since: float | None = None  # start of the current send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time

        async def timed(message: Message) -> None:
            self._since = now()
            await send(message)
            self._since = None

        writer = asyncio.ensure_future(self.stream_response(timed))
        left = asyncio.ensure_future(_gone(receive))
        try:
            while not writer.done() and not left.done():
                await asyncio.wait({writer, left}, timeout=self._idle / 4, return_when=asyncio.FIRST_COMPLETED)
                if self._since is not None and now() - self._since > self._idle:
                    break
        finally:
            whole = writer.done() and not writer.cancelled() and writer.exception() is None
            await _end(writer, left)
            await self._chunks.aclose()
            self._ended(whole)
