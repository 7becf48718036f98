"""Connections whose clients must say what they want, and whose streams are cheap to write. uvicorn bounds the silence after an
answer, this that before a request. Of what a stream's piece costs the loop, h11's states and the system's call for each write were
the largest parts."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD = 64 << 10
"""Bytes of a request's head at most."""
FULL = 64 << 10
"""Bytes that are not kept for the end of a turn."""
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Wire(h11.Connection):
    """h11 with a short way for pieces of a chunked body, which change none of its states."""

    _chunked = False  # the answer that is being sent

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]
        if self._chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent = super().send(event)
        if type(event) is h11.Response:
            self._chunked = sent is not None and b"transfer-encoding: chunked\r\n" in sent.lower()
        return sent


class Gathered:
    """A transport that writes once for all that a turn of the event loop brings. What is not here is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._kept: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._kept:
            self._loop.call_soon(self._flush)  # finds nothing where there has been more than FULL
        self._kept.append(data)
        self._size += len(data)
        if self._size >= FULL:  # so that a writer whose client does not read is told to wait
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        kept, self._kept, self._size = self._kept, [], 0
        if kept and not self._transport.is_closing():
            self._transport.write(b"".join(kept))


class Connection(H11Protocol):
    """A head that is not whole `seconds` after the connection was made, or after the first byte that follows an answer, ends the
    connection, however often a byte of it comes; bodies have limits of their own (guard.py)."""

    seconds = 30.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._late: asyncio.TimerHandle | None = None
        self.conn = Wire(h11.SERVER, HEAD)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        gathered: Any = Gathered(transport, self.loop)
        super().connection_made(gathered)
        self._late = self.loop.call_later(self.seconds, self._end)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(self.seconds, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self.conn.trailing_data[0]:
                self.transport.write(LATE)
            self.transport.close()


def connection(seconds: float) -> type[Connection]:
    """A protocol for uvicorn's configuration."""
    return type("BoundedConnection", (Connection,), {"seconds": seconds})
