"""Replicas as Ray Serve applications, one engine for each device. Ray starts, health-checks and replaces them. They do
not listen for HTTP: the front is another process (hybrid/serve/scale/ray.py)."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException

from hybrid.serve.app import make_app
from hybrid.serve.errors import log
from hybrid.serve.scale.calls import Call, Head, answers
from hybrid.serve.scale.front import ReplicaGone
from hybrid.serve.settings import Settings

NAME = "hybrid"
HEALTH = 5.0  # seconds between Ray's health checks of a replica


class Engine:
    """A replica: the server's application with one model in a separate process."""

    def __init__(self, options: Mapping[str, Any], settings: Settings) -> None:
        self._ended: str | None = None
        self._stack: AsyncExitStack | None = None

        def load() -> Any:
            import hybrid

            return hybrid.load(**options)

        def end(_code: int, line: str) -> None:
            self._ended = line
            log(line)

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
        """The process id."""
        return os.getpid()

    async def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        await self._begin()
        if self._ended is not None:
            raise RuntimeError(self._ended)


class Remote:
    """The front's handle of a replica (hybrid/serve/scale/front.py:Replica)."""

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


@contextmanager
def replicas(
    options: Mapping[str, Any], settings: Settings, devices: Sequence[str], drain: float
) -> Iterator[list[Remote]]:
    """Context manager of running replicas, one for each device. options: of hybrid.load, without the device."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    engine = serve.deployment(
        Engine,
        name="engine",
        num_replicas=1,
        max_ongoing_requests=int(options["slots"]) + int(options["queue"]) + 64,
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.1,  # the front has already drained requests
        health_check_period_s=HEALTH,
        ray_actor_options={"num_cpus": 0},
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    names = [f"{NAME}-{i}" for i in range(len(devices))]
    targets = [
        serve.RunTarget(engine.bind({**options, "device": device}, settings), name=name, route_prefix=None)
        for name, device in zip(names, devices, strict=True)
    ]
    try:
        yield [Remote(handle) for handle in serve.run_many(targets)]
    finally:
        for name in names:
            serve.delete(name)  # only this one: a shared cluster may serve other applications
