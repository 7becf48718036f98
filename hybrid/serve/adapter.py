"""Requests of other APIs as chat requests: what their models share."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError

from hybrid.serve.errors import bad_request, from_validation
from hybrid.serve.wire import ChatRequest, Wire


class Open(Wire):
    """Base of requests whose APIs ignore unknown fields."""

    model_config = ConfigDict(extra="allow")

    def ignored(self) -> list[str]:
        """A note that names the unknown fields; empty if there are none."""
        names = sorted(self.model_extra or ())
        return [f"ignored: {', '.join(names)}"] if names else []


@dataclass(frozen=True, slots=True)
class Names:
    """An API's names for a chat request's parts. fields: by the chat request's own; schemas: paths of a tool's schema
    (by its index) and of the answer's."""

    fields: Mapping[str, str]
    schemas: tuple[str, str]

    def of(self, param: str | None) -> str | None:
        """The API's name of a chat request's field."""
        first = (param or "").partition("[")[0].partition(".")[0]
        return self.fields.get(first, param)


def chat_request(body: dict[str, Any], names: Names) -> ChatRequest:
    """ApiError if the other API's request means no chat request."""
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        refusal = from_validation(error.errors(include_url=False))
        raise bad_request(refusal.message, names.of(refusal.param), refusal.code) from None


def continued(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields by which the answer continues a last message of the assistant, as these APIs do."""
    last = messages[-1]
    begun = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    return {"continue_final_message": True, "add_generation_prompt": False} if begun else {}


def arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call in an answer; None if they were cut off. Numbers too large for a float are its largest."""
    try:
        found: dict[str, Any] = json.loads(text or "{}", parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return found


def _finite(number: str) -> float:
    most = sys.float_info.max
    return max(-most, min(most, float(number)))
