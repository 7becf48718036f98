"""The chat page and the dashboard: static files with a content security policy that allows only the server itself."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from hybrid.serve.errors import ApiError

FOLDER = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",  # of others
    ".svg": "image/svg+xml",
}
HEAD = "head.html"
"""The shared part of the pages' heads; replaces a comment with this name."""


def router() -> APIRouter:
    """Routes of the files, which are read once, now."""
    r = APIRouter(include_in_schema=False)
    mark, head = f"<!-- {HEAD} -->\n".encode(), (FOLDER / HEAD).read_bytes()
    files = {
        p.name: (p.read_bytes().replace(mark, head), TYPES[p.suffix])
        for p in FOLDER.iterdir()
        if p.suffix in TYPES and p.name != HEAD
    }

    @r.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "there is nothing at this address", code="unknown_url")
        body, kind = files[name]
        return Response(body, media_type=kind, headers={"content-security-policy": POLICY, "cache-control": "no-cache"})

    @r.get("/")
    async def chat() -> Response:
        return await file("chat.html")

    @r.get("/dashboard")
    async def dashboard() -> Response:
        return await file("dashboard.html")

    return r
