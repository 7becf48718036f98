"""Checks of every request (Host header, origin, API key, size and timeout of the body) and headers of every
response."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid.serve.errors import ApiError, internal, unavailable
from hybrid.serve.http import STREAMED, refused
from hybrid.serve.metrics import Metrics
from hybrid.serve.settings import Settings

OPEN = ("/", "/dashboard", "/health", "/ready")
"""Paths without an API key, besides those under /page/: static pages and health checks."""
EMBEDDING = ("/v1/embeddings", "/v1/rerank", "/api/embed", "/api/embeddings")
COUNTED = (*STREAMED, *EMBEDDING, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
"""Paths whose requests are counted."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
BEGAN, OUTCOME, USE = "hybrid.began", "hybrid.outcome", "hybrid.use"
"""Keys of the ASGI scope: time.perf_counter() at arrival; the outcome of a stream, set by its endpoint; the request's use
of a model (hybrid/serve/models.py), ended with the request."""


def admit(scope: Scope, settings: Settings) -> None:
    """Check the Host header, the origin of a web page and the API key of one HTTP request. ApiError 400, 401 or 403."""
    headers, path = Headers(scope=scope), scope["path"]
    if len(headers.getlist("host")) > 1:
        raise ApiError(400, "the request has two Host headers", code="host")
    host = headers.get("host", "").lower()
    if settings.hosts and (host if host.endswith("]") else host.rsplit(":", 1)[0]) not in settings.hosts:
        raise ApiError(403, "this server is not known by that Host name: start it with --allow-host NAME", code="host")
    if path in OPEN or path.startswith("/page/"):
        return
    if not settings.keys:
        _check_origin(headers, host, settings.cors)
    elif scope["method"] != "OPTIONS":
        _check_key(headers, settings.keys)


def _check_origin(headers: Headers, host: str, cors: Sequence[str]) -> None:
    """Refuse cross-origin web pages if there is no API key: a browser sends their requests even if it hides the
    responses."""
    origins = headers.getlist("origin")
    if origins and all(origin in cors for origin in origins):
        return
    foreign = any(origin.lower().partition("://")[2] != host for origin in origins)
    if foreign or (not origins and headers.get("sec-fetch-site") in ("cross-site", "same-site")):
        raise ApiError(403, "cross-origin request: start the server with --cors ORIGIN to allow it", code="origin")


def key_of(headers: Headers) -> str:
    """The request's key, as OpenAI's and Ollama's clients send it or as Anthropic's do; "" without one."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _check_key(headers: Headers, keys: Sequence[str]) -> None:
    given = key_of(headers).encode("utf-8", "surrogateescape")
    known = [hmac.compare_digest(given, k.encode()) for k in keys]  # compare with all keys: constant time
    if not any(known):
        missing = "You didn't provide an API key: send Authorization: Bearer KEY."
        raise ApiError(401, "Incorrect API key provided." if given else missing, code="invalid_api_key")


class Guard:
    """ASGI middleware, inside CORS only. metrics: counts requests; None if another process counts them."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics | None) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[BEGAN] = time.perf_counter()
        status = 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("x-request-id", f"req_{secrets.token_hex(12)}")
            await send(message)
            status = message.get("status", status)  # after sending: an invalid head is replaced by an error response

        # The application handles HEAD as GET; uvicorn omits the body.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            admit(scope, self._settings)
            await self._app(asked, self._bounded(scope, receive), sent)
        except ApiError as error:
            await refused(error, scope["path"])(scope, receive, sent)
        except asyncio.CancelledError:  # drain timeout; re-raising would log a traceback
            scope[OUTCOME] = "cancelled"
            if not status:
                stopping = unavailable("the server is stopping: send the request elsewhere", "stopping")
                await refused(stopping, scope["path"])(scope, receive, sent)
        except Exception as error:
            if os.environ.get("HYBRID_DEBUG") == "1":
                raise
            answer = internal(error)
            if not status:
                await refused(answer, scope["path"])(scope, receive, sent)
        finally:
            if USE in asked:
                asked[USE].end()
            if self._metrics is not None and scope["path"] in COUNTED:
                _count(self._metrics, scope, status)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Wrap `receive` with size and time limits of the body. Raises HTTPException, the only type that the framework
        propagates."""
        most, idle = self._settings.max_body, self._settings.idle
        end = time.monotonic() + self._settings.total
        length = Headers(scope=scope).get("content-length", "0")
        taken, complete = 0, False

        async def bounded() -> Message:
            nonlocal taken, complete
            if complete:
                return await receive()
            if length.isdigit() and int(length) > most:
                raise HTTPException(413)
            try:
                message = await asyncio.wait_for(receive(), max(0.0, min(idle, end - time.monotonic())))
            except asyncio.TimeoutError:
                raise HTTPException(408) from None
            taken += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if taken > most:
                raise HTTPException(413)
            return message

        return bounded


def _count(metrics: Metrics, scope: MutableMapping[str, Any], status: int) -> None:
    outcome = scope.get(OUTCOME) or outcome_of(status)
    metrics.requests.labels(scope["path"], outcome).inc()
    if outcome == "ok":
        metrics.whole.observe(time.perf_counter() - scope[BEGAN])


def outcome_of(status: int) -> str:
    """ok, cancelled, busy, refused, unavailable or failed."""
    named: Mapping[int, str] = {499: "cancelled", 429: "busy", 503: "unavailable"}
    return named.get(status) or ("ok" if status < 400 else "refused" if status < 500 else "failed")
