"""The front of several replicas: routes each request to a replica and forwards the response. Retries on another replica
if the first is lost before its response begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, Protocol

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid.serve.errors import of_status, unavailable
from hybrid.serve.guard import Guard
from hybrid.serve.http import EVENTS, LINES, EventStream, Json, gone, until_gone
from hybrid.serve.metrics import METRICS_TYPE, add_samples
from hybrid.serve.scale.calls import Call, Head
from hybrid.serve.scale.routing import Routes, beginning, keys_of
from hybrid.serve.settings import Settings

PROBE, SLOWEST = 0.5, 10.0
"""Seconds until the first health check of a lost replica, and most seconds between checks; also each check's
timeout."""
HOPS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}  # hop-by-hop headers


class ReplicaGone(Exception):
    """A replica was lost. A request whose response has not begun may be retried on another."""


class Replica(Protocol):
    """The front's connection to a replica."""

    def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """Yield a Head, then the body. Raises ReplicaGone; closing the iterator cancels the request."""
        ...

    async def ready(self) -> bool:
        """Whether it accepts requests. Raises ReplicaGone."""
        ...


class Front:
    """The ASGI application of the front, for every path; use it behind `guarded`."""

    def __init__(self, replicas: Sequence[Replica], settings: Settings, imbalance: int = 8) -> None:
        self._replicas, self._settings = list(replicas), settings
        self._routes = Routes(len(self._replicas), imbalance=imbalance)
        self._open = [0] * len(self._replicas)
        self._down: dict[int, asyncio.Task[None]] = {}
        self.rerouted = 0
        """Requests of lost replicas that were retried on another."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await until_gone(request, self._respond(request, await request.body()))
        except HTTPException as error:
            raise of_status(error.status_code) from None
        except ClientDisconnect:
            raise gone() from None
        await response(scope, receive, send)

    async def _respond(self, request: Request, body: bytes) -> Response:
        path: str = request.scope["path"]
        if request.method == "GET" and path == "/health":
            return Json({"status": "alive", "replicas": len(self._replicas), "down": sorted(self._down)})
        if request.method == "GET" and path == "/metrics":
            return await self._metrics(request)
        headers = tuple(request.headers.raw)
        return await self._forward(Call(request.method, path, request.scope["query_string"], headers, body))

    async def close(self) -> None:
        for task in self._down.values():
            task.cancel()
        await asyncio.gather(*self._down.values(), return_exceptions=True)

    async def _forward(self, call: Call) -> Response:
        keys = keys_of(beginning(call.path, call.body)) if call.method == "POST" else ()
        for attempt in range(len(self._replicas) + 1):
            load = [None if i in self._down else n for i, n in enumerate(self._open)]
            replica = self._routes.choose(keys, load)
            if replica is None:
                break
            answer = self._counted(replica, call)
            try:
                head = await anext(answer)
            except ReplicaGone:
                continue  # _counted has marked it as lost
            except StopAsyncIteration:
                raise unavailable("the replica ended without an answer: try again", "replica_lost") from None
            assert isinstance(head, Head)
            if head.status == 503 and attempt < len(self._replicas) and any(i != replica for i in self._up()):
                self._lost(replica)  # it is loading or stopping: prefer ready replicas
                await answer.aclose()
                continue
            if attempt:
                self.rerouted += 1
            if head.status != 200:
                return _whole([head, *[piece async for piece in answer]])
            self._routes.ran(keys, replica)
            return _headers(EventStream(answer, self._settings.idle, lambda whole: None), head)  # type: ignore[arg-type]
        raise unavailable("no replica takes requests at present: try again", "not_ready")

    async def _counted(self, replica: int, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """A replica's response. Marks a lost replica; if the head was sent, ends a stream with an error event."""
        self._open[replica] += 1
        begun: Head | None = None
        try:
            async with aclosing(self._replicas[replica].answer(call)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    if isinstance(piece, Head):
                        begun = piece
                    yield piece
        except ReplicaGone:
            self._lost(replica)
            if begun is None:
                raise
            kind = next((v.decode("latin-1") for k, v in begun.headers if k.lower() == b"content-type"), "")
            if kind.startswith((EVENTS, LINES)):
                lost = unavailable("the replica was lost in the middle of this answer", "replica_lost")
                yield lost.ending(call.path)
        finally:
            self._open[replica] -= 1

    def _up(self) -> list[int]:
        return [i for i in range(len(self._replicas)) if i not in self._down]

    def _lost(self, replica: int) -> None:
        if replica not in self._down:
            self._routes.forget(replica)
            self._down[replica] = asyncio.get_running_loop().create_task(self._until_ready(replica))

    async def _until_ready(self, replica: int) -> None:
        pause = PROBE
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, SLOWEST)
            try:
                ready = await asyncio.wait_for(self._replicas[replica].ready(), SLOWEST)
            except (ReplicaGone, asyncio.TimeoutError):
                continue
            if ready:
                del self._down[replica]
                return

    async def _metrics(self, request: Request) -> Response:
        """Metrics of all responding replicas, labelled by replica."""
        found: dict[str, Metric] = {}
        for i in self._up():
            call = Call("GET", "/metrics", headers=tuple(request.headers.raw))
            try:
                pieces = [p async for p in self._counted(i, call)]
            except ReplicaGone:
                continue
            head = pieces[0] if pieces else None
            if not isinstance(head, Head) or head.status != 200:
                return _whole(pieces) if isinstance(head, Head) else Json({}, 503)
            text = b"".join(p for p in pieces if isinstance(p, bytes)).decode()
            add_samples(found, text_string_to_metric_families(text), replica=str(i))
        collected: Any = SimpleNamespace(collect=found.values)
        return Response(generate_latest(collected), media_type=METRICS_TYPE)


def _headers(response: Response, head: Head) -> Response:
    response.raw_headers = [(k, v) for k, v in head.headers if k.lower() not in HOPS]
    return response


def _whole(pieces: Sequence[Head | bytes]) -> Response:
    head = pieces[0]
    assert isinstance(head, Head)
    return _headers(Response(b"".join(p for p in pieces if isinstance(p, bytes)), head.status), head)


def guarded(front: Front, settings: Settings) -> ASGIApp:
    """The front behind the guard's checks: Host header, origin, key, body size and timeout."""

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        yield
        await front.close()

    return Guard(Router(default=front, lifespan=lifespan), settings, None)  # replicas count requests
