"""Connections whose clients must say what they want: uvicorn bounds the silence after an answer, this that before a request."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(H11Protocol):
    """A head that is not whole `seconds` after the connection was made, or after the first byte that follows an answer, ends the
    connection, however often a byte of it comes; bodies have limits of their own (guard.py)."""

    seconds = 30.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
