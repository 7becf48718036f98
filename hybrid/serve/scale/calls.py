"""Serialisable HTTP requests and responses, for calls between the front and replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request with its complete body."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of a response."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


async def answers(app: ASGIApp, call: Call) -> AsyncIterator[Head | bytes]:
    """Run an application on a request: yields a Head, then pieces of the body. Closing the iterator acts as a client
    disconnect and waits for the application to end."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
    }
    asked, gone = [False], asyncio.Event()
    pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue(maxsize=16)

    async def receive() -> Message:
        if not asked[0]:
            asked[0] = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if gone.is_set():
            return
        if message["type"] == "http.response.start":
            headers = tuple((bytes(k), bytes(v)) for k, v in message.get("headers", ()))
            await pieces.put(Head(message["status"], headers))
        elif message.get("body"):
            await pieces.put(bytes(message["body"]))

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            if not gone.is_set():
                await pieces.put(None)

    task = asyncio.create_task(run())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task  # raises the application's error, if any
    finally:
        gone.set()
        while not pieces.empty():  # unblocks a waiting producer, which then sees the disconnect
            pieces.get_nowait()
        await asyncio.gather(task, return_exceptions=True)
