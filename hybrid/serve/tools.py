"""Tool calls: prompt, grammar and parser.

`tools_marked` is the format of Gemma 4's and FunctionGemma's templates, `tools_written` that of other templates with
tools, `tools_json` that of models whose template has none (Gemma 3, 3n). The grammar allows a call only in the form that
the reader parses. A strict tool's schema is enforced in full, other schemas as far as grammars support them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid.serve.answers import Parser
from hybrid.serve.errors import ApiError, bad_request
from hybrid.serve.schemas import LOOSER, check, loosened
from hybrid.serve.wire import Function, Message, NamedTool, Tool, ToolChoice

MOST_CALLS = 16
"""Most calls in an answer."""
TEXT = r"TEXT: /(?s:.*)/"
"""Grammar rule of any text."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Callable functions of a request. required: at least one call; several: more than one call allowed; way:
    relaxation of non-strict schemas (schemas.loosened)."""

    tools: Sequence[Function]
    required: bool = False
    several: bool = True
    way: int = 0

    def arguments(self, tool: Function) -> tuple[dict[str, Any], bool]:
        """(schema of a tool's arguments in the grammar, whether it is strict)."""
        if tool.strict:
            return parameters(tool), True
        return {**loosened(parameters(tool), self.way), "type": "object"}, False


@dataclass(frozen=True, slots=True)
class Format:
    """A family's tool format. turns: converts messages for the chat template, and the template's `tools`. lark: makes
    the grammar of an answer; an answer without calls is JSON of the given (schema, strict), or any text."""

    turns: Callable[[Sequence[Message], Offer | None], tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]
    lark: Callable[[Offer, tuple[dict[str, Any] | None, bool]], str]
    reader: Callable[[Offer], Parser]

    def larks(self, offer: Offer, schema: tuple[dict[str, Any] | None, bool]) -> list[str]:
        """Grammars of an answer, strictest first; later ones have relaxed schemas."""
        answer, strict = schema
        if all(t.strict for t in offer.tools) and (strict or answer is None):
            return [self.lark(offer, schema)]
        ways = range(LOOSER)
        answers = [answer if strict or answer is None else loosened(answer, way) for way in ways]
        return [self.lark(replace(offer, way=way), (answers[way], strict)) for way in ways]


def offer(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer | None:
    """The callable functions by a request's fields; None if no call is allowed."""
    functions = [t.function for t in tools or () if t.function is not None]
    if not functions or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        return Offer([f for f in functions if f.name == choice.function.name], required=True, several=False)
    return Offer(functions, required=choice == "required", several=parallel is not False)


def check_schemas(tools: Sequence[Tool] | None, place: str) -> list[str]:
    """Check the schemas of tools: the paths that their grammars leave out. ApiError 400 names the tool and the path; `place`
    has {} for a tool's index."""
    left_out: list[str] = []
    for n, tool in enumerate(tools or ()):
        if tool.function is None or tool.function.parameters is None:
            continue
        schema, at = tool.function.parameters, place.format(n)
        try:
            left_out += check(schema, at, bool(tool.function.strict))
            if schema.get("type", "object") != "object":
                raise bad_request(f"Invalid schema: {at}.type must be 'object'.", f"{at}.type", "invalid_schema")
        except ApiError as error:
            raise of_tool(tool.function, error) from None
    return left_out


def of_tool(tool: Function, error: ApiError, param: str | None = None) -> ApiError:
    """A schema's error response, with the tool's name."""
    return bad_request(f"The tool {tool.name}: {error.message}", param or error.param, error.code)


def parameters(tool: Function) -> dict[str, Any]:
    """The schema of a tool's arguments; an empty object schema if undeclared."""
    found = dict(tool.parameters or {})
    if not found:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **found}


def called_names(messages: Sequence[Message]) -> dict[int, str]:
    """Index of a tool's result -> name of the function: the nearest call before it with its id. ApiError for a result
    without one."""
    names: dict[int, str] = {}
    called: dict[str | None, str] = {}
    for n, m in enumerate(messages):
        called |= {c.id: c.function.name for c in m.tool_calls or ()}
        if m.role != "tool":
            continue
        if m.tool_call_id not in called:
            raise bad_request(
                "a message of the role tool must answer a tool call of a message before it",
                f"messages[{n}].tool_call_id",
                "invalid_value",
            )
        names[n] = called[m.tool_call_id]
    return names


def described(tools: Sequence[Function]) -> list[dict[str, Any]]:
    """Tool descriptions for the prompt."""
    out = []
    for f in tools:
        about = {"name": f.name, "description": f.description, "parameters": parameters(f)}
        out.append({k: v for k, v in about.items() if v is not None})
    return out


def calls_of(message: Message, n: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(id, function, arguments) of the calls in a client's message, the n-th. ApiError."""
    calls = []
    for call in message.tool_calls or ():
        try:
            found = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            param = f"messages[{n}].tool_calls"
            raise bad_request("arguments of a tool call must be a JSON object", param, "invalid_value")
        calls.append((call.id, call.function.name, found))
    return calls


def in_slashes(expression: str) -> str:
    """A regular expression as Lark takes it, without the slashes around it."""
    changed = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"(?s)\\.|[/\n]", lambda found: changed.get(found[0], found[0]), expression)


def literal(text: str) -> str:
    """A Lark string literal."""
    return json.dumps(text)
