"""The ASGI application: endpoints, guard, errors, OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hybrid import __version__
from hybrid.serve import embeddings, endpoints, messages, ollama, openapi, pages, responses
from hybrid.serve.errors import ApiError, from_validation, of_status
from hybrid.serve.guard import Guard
from hybrid.serve.http import Json, refused
from hybrid.serve.metrics import METRICS_TYPE, Metrics
from hybrid.serve.models import Load, Models
from hybrid.serve.service import Service
from hybrid.serve.settings import Settings


def make_app(load: Load, settings: Settings, end: Callable[[int, str], None]) -> FastAPI:
    """Make the application. load: loads the model, called in a thread at startup; or several models. end(code, line):
    requests the process's exit."""
    models = Models(load, end, settings.on_loss)
    metrics = Metrics(models)
    service = Service(models, metrics, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        models.first.start()
        yield
        service.close()
        await models.close()

    # No documentation pages: they load scripts from other sites. Only the OpenAPI document is served.
    app = FastAPI(
        title="hybrid-kernels",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.backend = models.first
    app.state.service = service
    for api in (endpoints, responses, messages, ollama, embeddings):
        app.include_router(api.router(service))
    app.include_router(pages.router())
    _add_state(app, models, metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send many custom headers
        )
    openapi.install(app, bool(settings.keys))
    return app


def _add_state(app: FastAPI, models: Models, metrics: Metrics) -> None:
    figures = ThreadPoolExecutor(1, "hybrid metrics")

    @app.get("/health", summary="Whether the process is alive")
    async def health() -> Response:
        return Json({"status": "alive"})

    @app.get("/ready", summary="Whether the server accepts requests")
    async def ready() -> Response:
        state = models.state
        return Json({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", summary="Metrics in Prometheus format")
    async def metrics_text() -> Response:
        text = await asyncio.get_running_loop().run_in_executor(figures, metrics.text)
        return Response(text, media_type=METRICS_TYPE)


async def _api_error(request: Request, error: Any) -> Response:
    return refused(error, request.scope["path"])


async def _validation_error(request: Request, error: Any) -> Response:
    return await _api_error(request, from_validation(error.errors()))


async def _http_error(request: Request, error: Any) -> Response:
    response = refused(of_status(error.status_code), request.scope["path"])
    response.headers.update(error.headers or {})
    return response
