"""Calls of tools: how they are offered, what an answer that makes them looks like, and how that is read.

A format belongs to a family. `json_format` is for models that are told of tools in words (Gemma 3, 3n), `marked_format` for
those whose template writes them (Gemma 4). In both the grammar allows a call only in the one form that the reader reads.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid.serve.errors import bad_request
from hybrid.serve.forms import Reader
from hybrid.serve.wire import Message, NamedTool, Tool, ToolChoice

MOST_CALLS = 16
"""Calls in one answer."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools of a request that may be called. required: at least one is; several: more than one may be."""

    tools: Sequence[Tool]
    required: bool = False
    several: bool = True


@dataclass(frozen=True, slots=True)
class Format:
    """One family's way. turns: messages as the chat template takes them, with what the template gets as `tools`; lark: the
    grammar of an answer; one that calls nothing is JSON of the given schema, or without one any text."""

    turns: Callable[[Sequence[Message], Offer | None], tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]
    lark: Callable[[Offer, dict[str, Any] | None], str]
    reader: Callable[[Offer], Reader]
    silent: Mapping[int, str] = field(default_factory=dict)
    """Tokens that print nothing, and what the reader is to see of them."""


def offer(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer | None:
    """What a request's fields offer; None where nothing may be called."""
    if not tools or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        return Offer([t for t in tools if t.function.name == choice.function.name], required=True, several=False)
    return Offer(tools, required=choice == "required", several=parallel is not False)


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, also where none are declared."""
    found = dict(tool.function.parameters or {})
    if not found:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **found}


def called_names(messages: Sequence[Message]) -> dict[str, str]:
    """Tool call id -> the function's name. ApiError for a result of a call that nobody made."""
    names: dict[str, str] = {}
    for n, m in enumerate(messages):
        names |= {c.id: c.function.name for c in m.tool_calls or ()}
        if m.role == "tool" and m.tool_call_id not in names:
            raise bad_request(
                "a message of the role tool must answer a tool call of a message before it",
                f"messages[{n}].tool_call_id",
                "invalid_value",
            )
    return names


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as they are shown to a model."""
    out = []
    for t in tools:
        f = t.function
        about = {"name": f.name, "description": f.description, "parameters": parameters(t)}
        out.append({k: v for k, v in about.items() if v is not None})
    return out


@dataclass
class Calls:
    """Calls of one answer, as they come: deltas for a stream, and the whole."""

    made: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, name: str) -> dict[str, Any]:
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": ""}}
        self.made.append(call)
        shown = {**call, "function": {"name": name, "arguments": ""}}
        return {"tool_calls": [{"index": len(self.made) - 1, **shown}]}

    def more(self, arguments: str) -> dict[str, Any]:
        self.made[-1]["function"]["arguments"] += arguments
        return {"tool_calls": [{"index": len(self.made) - 1, "function": {"arguments": arguments}}]}


def arguments_of(text: str, param: str) -> dict[str, Any]:
    """A call's arguments, from a client's message."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad_request("arguments of a tool call must be a JSON object", param, "invalid_value")
    return found


def literal(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text)


def names_of(offered: Offer) -> Mapping[str, Tool]:
    return {t.function.name: t for t in offered.tools}
