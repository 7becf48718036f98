"""Tool calls as JSON, for families whose template has no tools (Gemma 3, Gemma 3n), as their documentation recommends.

The system prompt describes the tools. A call is an answer {"name": ..., "parameters": ...}, several calls a list of
such objects. A result is a user message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from hybrid.serve.structured import json_rule
from hybrid.serve.tools import MOST_CALLS, Format, Offer, called_names, calls_of, described, literal
from hybrid.serve.tools_written import Form, WrittenReader
from hybrid.serve.wire import Message, content_of

_MIDDLE = '", "parameters": '
FORMS = (Form('{"name": "', _MIDDLE, "}", None), Form('[{"name": "', _MIDDLE, "}]", '}, {"name": "'))


def instructions(offer: Offer) -> str:
    """The tool description in the system prompt."""
    lines = [
        "You can call functions. To call one, write nothing but",
        '{"name": function name, "parameters": {argument name: value}}',
    ]
    if offer.several:
        lines += ["and to call several, nothing but a list of such objects:", '[{"name": ..., "parameters": ...}, ...]']
    lines += ["The functions are:", *(json.dumps(d) for d in described(offer.tools))]
    if offer.required:
        lines.append("Call a function now.")
    return "\n".join(lines)


def turns(messages: Sequence[Message], offer: Offer | None) -> tuple[list[dict[str, Any]], None]:
    names = called_names(messages)
    out: list[dict[str, Any]] = []
    for n, m in enumerate(messages):
        role: str = m.role if m.role == "assistant" else "user"
        if m.role in ("system", "developer") and all(o["role"] == "system" for o in out):
            role = "system"  # later ones join the user's turn: the family's templates know no other place for them
        content = content_of(m.content)
        text = m.text()
        if m.role == "tool":
            content = text = f"Result of {names[n]}:\n{text}"
        elif m.tool_calls:
            content = "\n".join(filter(None, [text, _written(calls_of(m, n))]))
        if out and out[-1]["role"] == role:
            out[-1]["content"] = _with(out[-1]["content"], content)
        else:
            out.append({"role": role, "content": content})
        if thought := m.thought():
            out[-1]["reasoning_content"] = thought
    if offer is not None:
        if out and out[0]["role"] == "system":
            out[0]["content"] = _with(out[0]["content"], instructions(offer))
        else:
            out.insert(0, {"role": "system", "content": instructions(offer)})
    return out, None


def _with(content: str | list[dict[str, str]], more: str | list[dict[str, str]]) -> str:
    """Two messages' contents as one; parts of one message follow each other, as the families' templates write them."""
    texts = (c if isinstance(c, str) else "".join(p["text"] for p in c) for c in (content, more))
    return "\n\n".join(texts)


def _written(calls: Sequence[tuple[str, str, dict[str, Any]]]) -> str:
    """Calls as text in the model's format."""
    objects = [
        f'{{"name": {json.dumps(name)}, "parameters": {json.dumps(found, ensure_ascii=False)}}}'
        for _, name, found in calls
    ]
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def lark(offer: Offer, answer: tuple[dict[str, Any] | None, bool]) -> str:
    """The grammar of an answer. The first terminal of each alternative covers the common prefix of alternatives, since
    the lexer takes the longest match without backtracking. With a schema, calls are JSON with fixed whitespace, so that
    the reader recognises them."""
    schema, strict = answer
    if schema is not None and not offer.required:
        return f"start: {json_rule(_union(offer, schema), exact=True, strict=strict and all(t.strict for t in offer.tools))}"
    number = range(len(offer.tools))
    names = [t.name for t in offer.tools]
    rules = [f'call_{i}: {literal(_opening(names[i]))} args_{i} "}}"' for i in number]
    for i, tool in enumerate(offer.tools):
        followed, whole = offer.arguments(tool)
        rules.append(f"args_{i}: {json_rule(followed, strict=whole)}")
    calls = " | ".join(f"call_{i}" for i in number)
    rules.append(f"call: {calls}")
    if offer.several:
        rules += [f'first_{i}: {literal("[" + _opening(names[i]))} args_{i} "}}"' for i in number]
        firsts = " | ".join(f"first_{i}" for i in number)
        rules += [f"first: {firsts}", f'list: first (", " call){{0,{MOST_CALLS - 1}}} "]"']
    start = "call | list" if offer.several else "call"
    if not offer.required:
        start += " | TEXT"
        rules.append(r'TEXT: /(?s:.*)/ & ~/\[?\{"name": "(?s:.*)/')
    return "\n".join([f"start: {start}", *rules])


def _union(offer: Offer, schema: dict[str, Any]) -> dict[str, Any]:
    """The union schema of a call, a list of calls, and an answer of `schema`."""
    parts = {"answer": schema, **{f"tool_{i}": offer.arguments(t)[0] for i, t in enumerate(offer.tools)}}
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": t.name}, "parameters": {"$ref": f"#/$defs/tool_{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, t in enumerate(offer.tools)
    ]
    several = {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": MOST_CALLS}
    alternatives = [*one, *([several] if offer.several else ()), {"$ref": "#/$defs/answer"}]
    return {"$defs": {name: _moved(part, f"#/$defs/{name}") for name, part in parts.items()}, "anyOf": alternatives}


def _moved(schema: Any, place: str) -> Any:
    """Rebase a schema's references to its root onto its new path in another schema."""
    if isinstance(schema, list):
        return [_moved(s, place) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        k: place + v[1:] if k == "$ref" and isinstance(v, str) and v.startswith("#") else _moved(v, place)
        for k, v in schema.items()
    }


def _opening(name: str) -> str:
    return f'{{"name": "{name}{_MIDDLE}'


JSON = Format(turns, lark, partial(WrittenReader, forms=FORMS, anywhere=False))
