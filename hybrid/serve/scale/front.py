"""The front of several replicas: takes a request, chooses a replica, passes its answer on; tries another one where the first was
lost before it began to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hybrid.serve.errors import ApiError, unavailable
from hybrid.serve.forms import event
from hybrid.serve.http import Json
from hybrid.serve.scale.calls import Call, Head
from hybrid.serve.scale.routing import Routes, beginning, keys_of
from hybrid.serve.settings import Settings

PROBE, SLOWEST = 0.5, 10.0
"""Seconds until a lost replica is looked at first, and at most from one look to the next; each look may take as long."""
HOPS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}  # of one connection only


class ReplicaGone(Exception):
    """A replica was lost: what it had not begun to answer may be run elsewhere."""


class Replica(Protocol):
    """How the front reaches one engine."""

    def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """A Head, then the body. ReplicaGone; closing it cancels the request."""
        ...

    async def ready(self) -> bool:
        """Does it take requests? ReplicaGone."""
        ...


class Front:
    """Belongs to one event loop. `respond` is a handler for every path."""

    def __init__(self, replicas: Sequence[Replica], settings: Settings, imbalance: int = 8) -> None:
        self._replicas, self._settings = list(replicas), settings
        self._routes = Routes(len(self._replicas), imbalance=imbalance)
        self._open = [0] * len(self._replicas)
        self._down: dict[int, asyncio.Task[None]] = {}
        self.rerouted = 0
        """Requests that a lost replica had not begun and another one took."""

    async def respond(self, request: Request) -> Response:
        path = request.url.path
        try:
            if path == "/health":
                return Json({"status": "alive", "replicas": len(self._replicas), "down": sorted(self._down)})
            if path == "/metrics":
                return await self._metrics(request)
            body = await self._body(request)
            call = Call(request.method, path, request.scope["query_string"], tuple(request.headers.raw), body)
            return await self._forward(call)
        except ApiError as error:
            return Json(error.body(), error.status, error.headers())
        except HTTPException as error:
            refusal = ApiError(error.status_code, str(error.detail), code="body")
            return Json(refusal.body(), refusal.status)

    async def close(self) -> None:
        for task in self._down.values():
            task.cancel()
        await asyncio.gather(*self._down.values(), return_exceptions=True)

    async def _body(self, request: Request) -> bytes:
        taken = bytearray()
        async with aclosing(request.stream()) as stream:
            async for piece in stream:
                taken += piece
                if len(taken) > self._settings.max_body:
                    raise HTTPException(413, "the body is larger than this server takes")
        return bytes(taken)

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
                continue  # _counted has marked it
            except StopAsyncIteration:
                raise unavailable("the replica ended without an answer: try again", "replica_lost") from None
            assert isinstance(head, Head)
            if head.status == 503 and attempt < len(self._replicas) and any(i != replica for i in self._up()):
                self._lost(replica)  # it loads its model, or stops: not lost, but others are ready
                await answer.aclose()
                continue
            if attempt:
                self.rerouted += 1
            self._routes.ran(keys, replica)
            return _answer(head, answer)
        raise unavailable("no replica takes requests at present: try again", "not_ready")

    async def _counted(self, replica: int, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """A replica's answer. One that is lost is marked so; after the head, a stream then ends with an error event."""
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
            if any(v.startswith(b"text/event-stream") for k, v in begun.headers if k.lower() == b"content-type"):
                yield event(unavailable("the replica was lost in the middle of this answer", "replica_lost").body())
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
        """The figures of all replicas that answer, each with its number as a label."""
        found: dict[str, Metric] = {}
        for i in self._up():
            call = Call("GET", "/metrics", headers=tuple(request.headers.raw))
            pieces = [p async for p in self._counted(i, call)]
            head = pieces[0] if pieces else None
            if not isinstance(head, Head) or head.status != 200:
                return _whole(pieces) if isinstance(head, Head) else Json({}, 503)
            for family in text_string_to_metric_families(b"".join(p for p in pieces if isinstance(p, bytes)).decode()):
                kept = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for s in family.samples:
                    kept.add_sample(s.name, {**s.labels, "replica": str(i)}, s.value)
        return Response(generate_latest(_Collected(found)), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Collected:
    def __init__(self, found: dict[str, Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        return list(self._found.values())


def _headers(response: Response, head: Head) -> Response:
    response.raw_headers = [(k, v) for k, v in head.headers if k.lower() not in HOPS]
    return response


def _answer(head: Head, rest: AsyncGenerator[Head | bytes, None]) -> Response:
    async def body() -> AsyncIterator[bytes]:
        async with aclosing(rest) as pieces:
            async for piece in pieces:
                assert isinstance(piece, bytes)
                yield piece

    return _headers(StreamingResponse(body(), head.status), head)


def _whole(pieces: Sequence[Head | bytes]) -> Response:
    head = pieces[0]
    assert isinstance(head, Head)
    return _headers(Response(b"".join(p for p in pieces if isinstance(p, bytes)), head.status), head)
