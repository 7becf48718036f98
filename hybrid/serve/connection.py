"""HTTP connections on top of uvicorn: time and size limits of a request's head, coalesced writes, no chunked encoding
for HTTP/1.0, and error objects for malformed requests."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hybrid.serve.errors import ApiError

HEAD = 64 << 10
"""Most bytes of a request's head, counted in whole socket reads."""
FULL = 64 << 10
"""Buffered bytes that are written before the end of the event-loop iteration."""


def _refusal(status: int, reason: str, message: str, code: str) -> bytes:
    """A response that closes its connection."""
    body = ApiError(status, message, code=code).text()
    lines = [
        f"HTTP/1.1 {status} {reason}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


LATE = _refusal(408, "Request Timeout", "the head of the request did not arrive in time", "timeout")
LARGE = _refusal(431, "Request Header Fields Too Large", f"the head is larger than {HEAD >> 10} KiB", "head_too_large")
BROKEN = _refusal(400, "Bad Request", "this is no HTTP request", "invalid_http")


class Gathered:
    """A transport wrapper that coalesces the writes of an event-loop iteration; other methods are the transport's."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._kept: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._kept:
            self._loop.call_soon(self._flush)  # empty if FULL was reached meanwhile
        self._kept.append(data)
        self._size += len(data)
        if self._size >= FULL:  # applies flow control if the client does not read
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        kept, self._kept, self._size = self._kept, [], 0
        if kept and not self._transport.is_closing():
            self._transport.write(b"".join(kept))


class Unframed(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunked encoding: closing the connection ends the body."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """Closes the connection if a head is incomplete `seconds` after connecting, or after the first byte of the next
    request. guard.py limits bodies."""

    seconds = 30.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._late: asyncio.TimerHandle | None = None
        self._whole = False  # whether the last head is complete
        self._came = 0  # bytes of an incomplete head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        gathered: Any = Gathered(transport, self.loop)
        super().connection_made(gathered)
        self._late = self.loop.call_later(self.seconds, self._end, LATE)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._whole:
            self._in_time()
            return
        if self._late is None:
            self._late = self.loop.call_later(self.seconds, self._end, LATE)
        self._came += len(data)
        if self._came > HEAD:
            self._end(LARGE)

    def on_message_begin(self) -> None:
        self._whole, self._came = False, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._whole = True
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.__class__ = Unframed

    def send_400_response(self, msg: str) -> None:
        self.transport.write(BROKEN)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self, said: bytes) -> None:
        self._in_time()
        if not self._whole and not self.transport.is_closing():
            if self._came:
                self.transport.write(said)
            self.transport.close()


def connection(seconds: float) -> type[Connection]:
    """A protocol class for uvicorn's configuration. seconds: time limit of a head."""
    return type("BoundedConnection", (Connection,), {"seconds": seconds})
