"""Error responses in the form of each address's API, OpenAI's {"error": {"message", "type", "param", "code"}} unless it
is another, and the status of each engine error.

No response has a traceback or a local path: internal errors are described in the server's log only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.core.errors import ContextExceeded, DeviceLost, NoFreeSlot, QueueFull
from hybrid.text.chat_template import ChatError

LONGEST_NAME = 64
"""Most characters of a client's field name in a message."""


ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
"""Beginnings of the addresses of these APIs."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class InvalidSchema(ValueError):
    """A schema that cannot be compiled, or failed during generation."""


class ApiError(Exception):
    """An error response: status and error object. `retry_after`: seconds, for 429 and 503."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after = retry_after

    def body(self, path: str = "") -> dict[str, Any]:
        """The error object of the address's API."""
        said = self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"
        if path.startswith(ANTHROPIC):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            if self.code == "context_length_exceeded":
                said = f"prompt is too long: {said}"  # clients that shorten conversations look for these words
            return {"type": "error", "error": {"type": kind, "message": said}}
        if path.startswith(OLLAMA):
            return {"error": said}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def text(self, path: str = "") -> bytes:
        """The body as ASCII JSON, which can encode any client text."""
        return json.dumps(self.body(path)).encode()

    def ending(self, path: str = "") -> bytes:
        """The end of a failed stream."""
        if path.startswith(OLLAMA):
            return self.text(path) + b"\n"
        named = b"event: error\n" if path.startswith(ANTHROPIC) else b""
        return named + b"data: " + self.text(path) + b"\n\n"


_OF_STATUS = {
    400: ("the body could not be read as JSON in UTF-8, or is nested too deep", "invalid_json"),
    404: ("there is nothing at this address", "unknown_url"),
    405: ("this address takes another method", "method_not_allowed"),
    408: ("the body did not arrive in time", "timeout"),
    413: ("the body is larger than this server takes", "body_too_large"),
}


def of_status(status: int) -> ApiError:
    """The error response for a status that the framework or the guard raises."""
    message, code = _OF_STATUS.get(status, ("the request cannot be answered", None))
    return ApiError(status, message, code=code)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: float = 5.0) -> ApiError:
    return ApiError(503, message, "server_error", code=code, retry_after=retry_after)


def busy(message: str, retry_after: float) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="queue_full", retry_after=retry_after)


def from_engine(error: BaseException) -> ApiError:
    """The error response for an exception of submit or of a running request. Prints internal errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DeviceLost):
        return unavailable("the device was lost while this request ran: send it again", "device_lost")
    if isinstance(error, QueueFull):
        return busy("more requests wait than the queue holds: try again later", error.retry_after)
    if isinstance(error, NoFreeSlot):
        return busy("all slots of the model are in use: try again later", 1.0)
    if isinstance(error, ContextExceeded):
        return bad_request(str(error), code="context_length_exceeded")
    if isinstance(error, InvalidSchema):
        return bad_request(str(error), code="invalid_schema")
    if isinstance(error, ValueError):
        return bad_request(str(error), "messages" if isinstance(error, ChatError) else None)
    return internal(error)


def log(line: str) -> None:
    """Write a line of the server's log, which is standard error."""
    print(line, file=sys.stderr, flush=True)


def printable(text: str, most: int = 500) -> str:
    """Text for one log line, without line breaks and control characters."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.split())[:most])


def internal(error: BaseException) -> ApiError:
    """A 500 response; logs the error."""
    log(f"error: internal: {type(error).__name__}: {printable(str(error))}")
    return ApiError(500, "the server failed on this request; its log says how", "server_error", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The response for the first validation error, with its path as in OpenAI's API: messages[0].content."""
    first = errors[0]
    place = [p for p in first["loc"] if p not in ("body", "query", "path") and not _is_tag(p)]
    shown = "".join(f"[{p}]" if isinstance(p, int) else f".{str(p)[:LONGEST_NAME]}" for p in place).lstrip(".")
    if first["type"] == "rule":
        context = first["ctx"]
        return bad_request(f"{context['message']}.", f"{shown}.{context['param']}".lstrip("."), "invalid_value")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unknown parameter: '{shown}'.", shown, "unknown_parameter")
    if first["type"] == "missing" and place:
        return bad_request(f"Missing required parameter: '{shown}'.", shown, "missing_required_parameter")
    if first["type"].startswith("json_") or not place:
        return bad_request("the body must be one JSON object, sent as application/json", None, "invalid_json")
    message = str(first["msg"])[:300]
    return bad_request(f"Invalid value for '{shown}': {message}.", shown, "invalid_value")


def _is_tag(part: object) -> bool:
    """Whether a part of an error's path is a union tag (wire.kind_of) rather than a field."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")
