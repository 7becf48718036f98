"""The server process: socket, signals, exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from hybrid.serve.app import make_app
from hybrid.serve.connection import connection
from hybrid.serve.errors import log
from hybrid.serve.grammars import missing
from hybrid.serve.models import Load
from hybrid.serve.settings import Settings

BACKLOG = 1024


def serve(load: Load, settings: Settings, *, host: str, port: int, drain: float, access_log: bool = False) -> int:
    """Serve until a signal or a fatal error; returns the exit code. OSError if the address cannot be bound."""
    listening = listen(host, port)
    ended: list[tuple[int, str]] = []

    def end(code: int, line: str) -> None:
        ended.append((code, line))
        log(line)
        server.begin_to_stop()

    app = make_app(load, settings, end)
    server = Server(configured(app, settings, drain, access_log), app.state.service.models.stop)
    if (what := missing()) is not None:
        log(f"note: {what}")
    announce(host, listening, settings)
    asyncio.run(server.serve([listening]))
    return ended[0][0] if ended else 0


def announce(host: str, listening: socket.socket, settings: Settings, more: str = "") -> None:
    """Print the server's address, with a warning if it is open to the network."""
    if not settings.hosts and not settings.keys:
        log(f"warning: this server on {host} has no authentication: add --api-key-file FILE")
    name = f"[{host}]" if ":" in host else host
    log(f"serving http://{name}:{listening.getsockname()[1]}{more}")


def configured(app: ASGIApp, settings: Settings, drain: float, access_log: bool = False) -> uvicorn.Config:
    """uvicorn's configuration. drain: seconds for running requests at shutdown."""
    return uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        lifespan="on",
        http=connection(settings.idle),
        ws="none",
        timeout_keep_alive=int(max(1, settings.idle)),
        timeout_graceful_shutdown=max(1, round(drain)),
        server_header=False,
        proxy_headers=False,  # log the peer's address, not a header's
        backlog=BACKLOG,
    )


class Server(uvicorn.Server):
    """A uvicorn server: the first signal drains, a second one exits at once."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _frame: Any) -> None:
        if self.should_exit:
            os.write(2, b"ended at once\n")
            os._exit(128 + number)
        self.begin_to_stop()
        os.write(2, b"stopping: running requests are let end\n")

    def begin_to_stop(self) -> None:
        self._stop()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the model is loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    s = socket.socket(family, socket.SOCK_STREAM)
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((host, port))
        s.listen(BACKLOG)
    except OSError as error:
        s.close()
        why = error.strerror or error
        raise OSError(f"cannot listen on {host} port {port}: {why}; see --host and --port") from None
    return s
