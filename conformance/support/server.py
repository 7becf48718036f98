"""Servers for tests: in this process, in a thread of their own, on a free port of the loopback address."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn

from hybrid.serve.app import make_app
from hybrid.serve.process import configured, listen
from hybrid.serve.settings import Settings

UNTOUCHED = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
"""A server has its process to itself and puts its objects in order before requests come, which takes half a second where
the suite lives; conformance/serve/test_process.py has it do so."""


class Running:
    """A server that answers. `app.state` has its backend; `ended` what it asked the process for."""

    def __init__(self, app: Any, port: int, ended: list[tuple[int, str]]) -> None:
        self.app, self.port, self.ended = app, port, ended
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False)  # which would read certificates

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more) if body is not None else self.http.post(path, **more)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def running(load: Callable[[], Any], settings: Settings | None = None, wait: bool = True) -> Iterator[Running]:
    """`wait`: until the model is loaded."""
    ended: list[tuple[int, str]] = []
    settings = settings or Settings()
    app = make_app(load, settings, lambda code, line: ended.append((code, line)))
    server = uvicorn.Server(configured(app, settings, drain=5))
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    found = Running(app, listening.getsockname()[1], ended)
    with patch("hybrid.serve.backend.gc", UNTOUCHED):
        thread.start()
        try:
            until(lambda: server.started)
            if wait:
                until(lambda: app.state.backend.state == "ready")
            yield found
        finally:
            found.http.close()
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server did not end"


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits for a condition; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
