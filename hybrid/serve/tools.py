"""Calls of tools: how they are offered, what an answer that makes them looks like, and how that is read.

A format belongs to a family. `tools_json` is for models that are told of tools in words (Gemma 3, 3n), `tools_marked`
for those whose template writes them (Gemma 4). In both the grammar allows a call only in the one form that the reader
reads. A tool's schema binds whole where the tool is strict, else as far as a grammar can follow it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid.serve.errors import ApiError, bad_request
from hybrid.serve.forms import Reader
from hybrid.serve.schemas import LOOSER, check, loosened
from hybrid.serve.wire import Function, Message, NamedTool, Tool, ToolChoice

MOST_CALLS = 16
"""Calls in one answer."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Functions of a request that may be called. required: at least one is; several: more than one may be; way: how
    loosely the schemas of those that are not strict are followed (schemas.loosened)."""

    tools: Sequence[Function]
    required: bool = False
    several: bool = True
    way: int = 0

    def arguments(self, tool: Function) -> tuple[dict[str, Any], bool]:
        """The schema that a grammar follows for a tool's arguments, and whether whole."""
        if tool.strict:
            return parameters(tool), True
        return {**loosened(parameters(tool), self.way), "type": "object"}, False


@dataclass(frozen=True, slots=True)
class Format:
    """One family's way. turns: messages as the chat template takes them, with what the template gets as `tools`; lark:
    the grammar of an answer; one that calls nothing is JSON of the given schema (with whether it is strict), or without
    one any text."""

    turns: Callable[[Sequence[Message], Offer | None], tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]
    lark: Callable[[Offer, tuple[dict[str, Any] | None, bool]], str]
    reader: Callable[[Offer], Reader]

    def larks(self, offer: Offer, schema: tuple[dict[str, Any] | None, bool]) -> list[str]:
        """Grammars of an answer, the closest first: the looser ones are for schemas that cannot be followed whole."""
        answer, strict = schema
        if all(t.strict for t in offer.tools) and (strict or answer is None):
            return [self.lark(offer, schema)]
        ways = range(LOOSER)
        answers = [answer if strict or answer is None else loosened(answer, way) for way in ways]
        return [self.lark(replace(offer, way=way), (answers[way], strict)) for way in ways]


def offer(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer | None:
    """What a request's fields offer; None where nothing may be called."""
    functions = [t.function for t in tools or () if t.function is not None]
    if not functions or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        return Offer([f for f in functions if f.name == choice.function.name], required=True, several=False)
    return Offer(functions, required=choice == "required", several=parallel is not False)


def check_schemas(tools: Sequence[Tool] | None, place: str) -> None:
    """Check the schemas of tools. ApiError 400 names the tool and the place; `place` has {} for a tool's number."""
    for n, tool in enumerate(tools or ()):
        if tool.function is None or tool.function.parameters is None:
            continue
        schema, at = tool.function.parameters, place.format(n)
        try:
            check(schema, at, bool(tool.function.strict))
        except ApiError as error:
            raise of_tool(tool.function, error) from None
        if schema.get("type", "object") != "object":
            wrong = bad_request(f"Invalid schema: {at}.type must be 'object'.", f"{at}.type", "invalid_schema")
            raise of_tool(tool.function, wrong)


def of_tool(tool: Function, error: ApiError, param: str | None = None) -> ApiError:
    """The refusal of a schema, which names the tool too."""
    return bad_request(f"The tool {tool.name}: {error.message}", param or error.param, error.code)


def left_out(tools: Sequence[Tool] | None) -> list[str]:
    """The types of tools that are not offered, once each."""
    return sorted({t.type for t in tools or () if t.function is None})


def parameters(tool: Function) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, also where none are declared."""
    found = dict(tool.parameters or {})
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


def described(tools: Sequence[Function]) -> list[dict[str, Any]]:
    """Tools as they are shown to a model."""
    out = []
    for f in tools:
        about = {"name": f.name, "description": f.description, "parameters": parameters(f)}
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
