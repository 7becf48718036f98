"""Replicas through Ray Serve: one deployment for each device with one engine in it, and one for the front. Ray starts them,
looks whether they live, and replaces those that do not."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import Response

from hybrid.serve.app import make_app
from hybrid.serve.process import listen
from hybrid.serve.scale.calls import Call, Head, answers
from hybrid.serve.scale.front import Front, ReplicaGone
from hybrid.serve.settings import Settings

NAME = "hybrid"
HEALTH = 5.0  # seconds between Ray's looks at a replica


class Engine:
    """A replica: the server's application with one model, in a process of its own."""

    def __init__(self, options: Mapping[str, Any], settings: Settings) -> None:
        self._ended: str | None = None
        self._stack: AsyncExitStack | None = None

        def load() -> Any:
            import hybrid

            return hybrid.load(**options)

        def end(_code: int, line: str) -> None:
            self._ended = line
            print(line, file=sys.stderr, flush=True)

        self._app = make_app(load, settings, end)

    async def _begin(self) -> None:
        if self._stack is None:
            self._stack = AsyncExitStack()
            await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        await self._begin()
        async for piece in answers(self._app, call):
            yield piece

    async def ready(self) -> bool:
        await self._begin()
        return bool(self._app.state.backend.state == "ready")

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    async def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        await self._begin()
        if self._ended is not None:
            raise RuntimeError(self._ended)


class Remote:
    """A replica as the front reaches it (hybrid/serve/scale/front.py:Replica)."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        pieces = self._handle.options(stream=True).answer.remote(call)
        whole = False
        try:
            async for piece in pieces:
                yield piece
            whole = True
        except TaskCancelledError:
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaGone(str(error)) from None
        finally:
            if not whole:
                pieces.cancel()

    async def ready(self) -> bool:
        try:
            return bool(await self._handle.ready.remote())
        except (RayError, RayServeException) as error:
            raise ReplicaGone(str(error)) from None


class Ingress:
    """What Ray's HTTP proxy asks."""

    def __init__(self, replicas: Sequence[Any], settings: Settings) -> None:
        self._replicas, self._settings = [Remote(r) for r in replicas], settings
        self._front: Front | None = None

    async def __call__(self, request: Request) -> Response:
        if self._front is None:
            self._front = Front(self._replicas, self._settings)
        return await self._front.respond(request)


def application(options: Mapping[str, Any], settings: Settings, devices: Sequence[str], drain: float) -> serve.Application:
    """options: of hybrid.load, without the device. One replica for each of `devices`."""
    common: dict[str, Any] = {"graceful_shutdown_timeout_s": drain, "health_check_period_s": HEALTH,
                              "ray_actor_options": {"num_cpus": 0}}  # fmt: skip
    most = int(options["slots"]) + int(options["queue"]) + 64
    engine = serve.deployment(Engine, num_replicas=1, max_ongoing_requests=most, **common)
    replicas = [engine.options(name=f"engine-{i}").bind({**options, "device": d}, settings) for i, d in enumerate(devices)]
    front = serve.deployment(Ingress, name="front", num_replicas=1, max_ongoing_requests=most * len(devices), **common)
    return front.bind(replicas, settings)


def run(options: Mapping[str, Any], settings: Settings, devices: Sequence[str], *, host: str, port: int, drain: float,
        address: str | None = None) -> int:  # fmt: skip
    """Until a signal; the exit code. address: a running Ray cluster's (default: one of this machine's own, ended with this
    process). OSError where the port cannot be had."""
    listening = listen(host, port)
    port = listening.getsockname()[1]
    listening.close()  # Ray's proxy takes it
    stop = threading.Event()

    def signalled(number: int, _frame: Any) -> None:
        if stop.is_set():
            os.write(2, b"ended at once\n")
            os._exit(128 + number)
        stop.set()
        os.write(2, b"stopping: running requests are let end\n")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host=host, port=port))
            serve.run(application(options, settings, devices, drain), name=NAME, route_prefix="/")
            for number in before:  # only now: Ray has set handlers of its own
                signal.signal(number, signalled)
            print(f"serving http://{host}:{port} with {len(devices)} replicas: {', '.join(devices)}", file=sys.stderr, flush=True)
            while not stop.wait(1.0):  # in pieces: a signal is handled between two of them
                pass
            serve.shutdown()
        finally:
            ray.shutdown()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
