"""The OpenAPI document, with this server's error responses instead of the framework's."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from hybrid.serve.errors import ANTHROPIC, OLLAMA
from hybrid.serve.http import STREAMED


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


TEXT = {"type": "string"}
TEXT_OR_NULL = {"type": ["string", "null"]}
ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))
OLLAMA_ERROR = _object(error=TEXT)
REFUSALS = {
    "400": "The request is invalid",
    "401": "The key is missing or wrong",
    "403": "Unknown Host",
    "404": "No such model",
    "405": "Another method",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "The queue is full; Retry-After says when to try again",
    "499": "The client disconnected",
    "503": "The model is being loaded or cannot be, its device was lost, or the server is stopping",
}


def install(app: FastAPI, keys: bool) -> None:
    """Make `app.openapi` return the document."""
    made = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = amended(made(), keys)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def amended(document: dict[str, Any], keys: bool) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "OllamaError": OLLAMA_ERROR}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, methods in document["paths"].items():
        named = "Anthropic" if path.startswith(ANTHROPIC) else "Ollama" if path.startswith(OLLAMA) else ""
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{named}Error"}}}
        for operation in methods.values():
            operation["responses"].pop("422", None)
            for status, about in REFUSALS.items():
                operation["responses"].setdefault(status, {"description": about, "content": body})
            if path in STREAMED:
                operation["responses"]["200"]["content"][STREAMED[path]] = {"schema": TEXT}
            if path == "/metrics":
                operation["responses"]["200"]["content"] = {"text/plain": {"schema": TEXT}}
            if path == "/ready":
                not_yet = {"description": "Not yet, or no longer", "content": {"application/json": {}}}
                operation["responses"]["503"] = not_yet
    if keys:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
    return document
