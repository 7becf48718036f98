"""Servers for tests: in this process, each in its own thread, on a free port of the loopback address."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn

from conformance.support.garbage import UNTOUCHED
from hybrid.serve.app import make_app
from hybrid.serve.models import Several
from hybrid.serve.process import configured, listen
from hybrid.serve.settings import Settings


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection at the start of a server; conformance/serve/test_process.py runs the real one."""
    with patch("hybrid.serve.backend.gc", UNTOUCHED), patch("hybrid.core.garbage.gc", UNTOUCHED):
        yield


class Running:
    """A running server. `app.state` has its backend; `ended` the exit status it requested."""

    def __init__(
        self, app: Any, server: uvicorn.Server, address: tuple[str, int], ended: list[tuple[int, str]]
    ) -> None:
        self.app, self._server, self.port, self.ended = app, server, address[1], ended
        self.url = "http://{}:{}".format(*address)
        self.http = httpx.Client(
            base_url=self.url, timeout=60, trust_env=False, verify=False
        )  # certificates are not read

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more) if body is not None else self.http.post(path, **more)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def break_off(self) -> None:
        """Close every connection in the middle of its response."""
        for connection in list(self._server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)


@contextmanager
def running(
    load: Callable[[], Any] | Several,
    settings: Settings | None = None,
    wait: bool = True,
    listening: socket.socket | None = None,
) -> Iterator[Running]:
    """`wait`: until the model is loaded. `listening`: in place of a free port of the loopback address."""
    ended: list[tuple[int, str]] = []
    settings = settings or Settings()
    app = make_app(load, settings, lambda code, line: ended.append((code, line)))
    server = uvicorn.Server(configured(app, settings, drain=5))
    listening = listening or listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    found = Running(app, server, listening.getsockname(), ended)
    with without_collections():
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


@contextmanager
def listening_elsewhere() -> Iterator[socket.socket]:
    """A socket that listens in a separate network namespace, at an address reachable through a pair of interfaces.
    OSError where that cannot be created."""
    name, number = f"page{os.getpid()}", os.getpid() % (1 << 14)
    network = f"10.203.{number >> 6}.{{}}".format
    here, there = network(((number & 63) << 2) + 1), network(((number & 63) << 2) + 2)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        _ip("address", "add", f"{here}/30", "dev", f"{name}a")
        _ip("link", "set", f"{name}a", "up")
        _ip("-n", name, "address", "add", f"{there}/30", "dev", f"{name}b")
        _ip("-n", name, "link", "set", f"{name}b", "up")
        with ThreadPoolExecutor(
            1
        ) as thread:  # only this thread enters; a socket stays in the namespace that created it
            listening = thread.submit(_listen_in, name, there).result()
        with listening:
            yield listening
    finally:
        subprocess.run(
            ["ip", "link", "delete", f"{name}a"], capture_output=True
        )  # the namespace would keep it for a while
        _ip("netns", "delete", name)


def _listen_in(namespace: str, host: str) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    return listen(host, 0)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits for a condition; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
