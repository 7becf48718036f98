"""Tools by marks, for families whose template writes tools itself (Gemma 4): a call is

    <|tool_call>call:NAME{key:value,...}<tool_call|>

with bare keys, strings between two <|"|>, and numbers, true, false, null, lists and objects as in JSON. Marks are tokens of
their own, so text cannot hold one by accident; calls may follow text. The reader writes the arguments as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid.serve.structured import json_rule
from hybrid.serve.tools import MOST_CALLS, Calls, Format, Offer, arguments_of, called_names, described, literal, parameters
from hybrid.serve.wire import Message

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_MARK = re.compile("|".join(map(re.escape, (OPEN, CLOSE, QUOTE))))
_LONGEST = max(map(len, (OPEN, CLOSE, QUOTE)))
_MOST_RULES = 2000
_COMMA = ' "," '


def turns(messages: Sequence[Message], offer: Offer | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    names = called_names(messages)
    out: list[dict[str, Any]] = []
    for n, m in enumerate(messages):
        turn: dict[str, Any] = {"role": "system" if m.role == "developer" else m.role, "content": m.text()}
        if m.tool_calls:
            found = [(c.id, c.function.name, arguments_of(c.function.arguments, f"messages[{n}].tool_calls")) for c in m.tool_calls]
            turn["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": given}} for i, name, given in found
            ]
        if m.role == "tool":
            turn |= {"name": names[str(m.tool_call_id)], "tool_call_id": m.tool_call_id}
        out.append(turn)
    tools = None if offer is None else [{"type": "function", "function": d} for d in described(offer.tools)]
    return out, tools


class _Rules:
    """Rules of one grammar: a schema's values in the family's form. What a schema says beyond types, properties, required,
    items, enum, const and alternatives does not bind here."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self.lines = [
            f"quote: <[{marks[QUOTE]}]>",
            "text: quote STRING quote",
            r"STRING: /(?s:.*)/",
            r"NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,3})?/",
            r"INTEGER: /-?(0|[1-9][0-9]{0,18})/",
            r"KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
            'any: text | NUMBER | "true" | "false" | "null" | any_list | any_object',
            'any_list: "[" "]" | "[" any ("," any)* "]"',
            'any_object: "{" "}" | "{" KEY ":" any ("," KEY ":" any)* "}"',
        ]
        self._known: dict[str, str] = {}
        self._root: dict[str, Any] = {}

    def of(self, schema: dict[str, Any]) -> str:
        self._root = schema
        self._known = {}
        return self._value(schema)

    def _add(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        if len(self.lines) > _MOST_RULES:
            raise ValueError("the tools' parameters have too many parts")
        self.lines.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return "any"
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            return self._add(" | ".join(self._written(v) for v in values) or "any")
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return self._add(" | ".join(self._value(s) for s in schema[name]))
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return self._add(" | ".join(self._value({**schema, "type": k}) for k in kind))
        simple = {"string": "text", "number": "NUMBER", "integer": "INTEGER", "null": '"null"'}
        if kind == "boolean":
            return self._add('"true" | "false"')
        if kind in simple:
            return simple[str(kind)]
        if kind == "array":
            item = self._value(schema.get("items"))
            return self._add(f'"[" "]" | "[" {item} ("," {item})* "]"')
        if kind == "object":
            return self._object(schema) if isinstance(schema.get("properties"), dict) else "any_object"
        return "any"

    def _object(self, schema: dict[str, Any]) -> str:
        """Properties in their order, those that are not required may be left out."""
        members = list(schema["properties"].items())
        required = set(schema.get("required") or ())
        first = rest = self._add('""')
        for key, value in reversed(members):
            pair = f"{literal(key + ':')} {self._value(value)}"
            skip = f" | {first}" if key not in required else ""
            skip_rest = f" | {rest}" if key not in required else ""
            first, rest = self._add(f"{pair} {rest}{skip}"), self._add(f'"," {pair} {rest}{skip_rest}')
        return self._add(f'"{{" {first} "}}"')

    def _reference(self, ref: str) -> str:
        if ref not in self._known:
            found: Any = self._root
            for part in ref.removeprefix("#").split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                found = found.get(key) if isinstance(found, dict) else None
            if not ref.startswith("#") or found is None:
                raise ValueError(f"the reference {ref[:100]!r} leads nowhere")
            name = self._known[ref] = f"ref{len(self._known)}_{len(self.lines)}"
            body = self._value(found)
            self.lines.append(f"{name}: {body}")
        return self._known[ref]

    def _written(self, value: Any) -> str:
        """One value as a sequence of literals."""
        if isinstance(value, str):
            return f"quote {literal(value)} quote" if value else "quote quote"
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._written, value))} "]"'
        if isinstance(value, dict):
            pairs = [f"{literal(k + ':')} {self._written(v)}" for k, v in value.items()]
            return f'"{{" {_COMMA.join(pairs)} "}}"'
        return literal(json.dumps(value))


def lark_with(marks: Mapping[str, int]) -> Any:
    """The grammar's maker for a tokenizer that has the marks at these ids."""

    def lark(offer: Offer, schema: dict[str, Any] | None) -> str:
        rules = _Rules(marks)
        calls = []
        for t in offer.tools:
            arguments = rules.of(parameters(t))
            calls.append(rules._add(f"{literal('call:' + t.function.name)} {arguments}"))
        rules.lines.append(f"call: <[{marks[OPEN]}]> ({' | '.join(calls)}) <[{marks[CLOSE]}]>")
        several = f"call{{1,{MOST_CALLS}}}" if offer.several else "call"
        if offer.required:
            start = several
        elif schema is None:
            start = f"TEXT ({several})?"
            rules.lines.append(r"TEXT: /(?s:.*)/")
        else:
            start = f"{several} | answer"
            rules.lines.append(f"answer: {json_rule(schema)}")
        return "\n".join([f"start: {start}", *rules.lines])

    return lark


class MarkedReader:
    """Reads an answer that follows the grammar; marks come as their text."""

    def __init__(self, _offer: Offer) -> None:
        self._calls = Calls()
        self._held = ""
        self._mode = "text"  # head: before the arguments; arguments; tail: after them
        self._name = ""
        self._stack: list[str] = []  # open objects and lists of the arguments
        self._quoted = self._key = False  # within a string; within a key
        self._was = ""  # the character before, but for blanks

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self._calls.made

    def push(self, text: str) -> list[dict[str, Any]]:
        self._held += text
        deltas: list[dict[str, Any]] = []
        while (found := _MARK.search(self._held)) is not None:
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            self._take(before, deltas)
            self._mark(found[0], deltas)
        keep = next((n for n in range(min(_LONGEST - 1, len(self._held)), 0, -1) if _begins_mark(self._held[-n:])), 0)
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        self._take(ready, deltas)
        return deltas

    def end(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        rest, self._held = self._held, ""
        self._take(rest, deltas)
        return deltas

    def _mark(self, mark: str, deltas: list[dict[str, Any]]) -> None:
        if mark == OPEN:
            self._mode, self._name, self._stack, self._was = "head", "", [], ""
            self._quoted = self._key = False
        elif mark == CLOSE:
            self._mode = "text"
        elif self._mode == "arguments":
            self._quoted, self._was = not self._quoted, '"'
            deltas.append(self._calls.more('"'))

    def _take(self, text: str, deltas: list[dict[str, Any]]) -> None:
        if self._mode == "head":
            self._name += text
            head, brace, rest = self._name.partition("{")
            if not brace:
                return
            deltas.append(self._calls.begin(head.removeprefix("call:").strip()))
            self._mode, text = "arguments", brace + rest
        if self._mode == "text" and text:
            deltas.append({"content": text})
        if self._mode == "arguments" and text:
            written = json.dumps(text)[1:-1] if self._quoted else "".join(map(self._json, text))
            if written:
                deltas.append(self._calls.more(written))

    def _json(self, c: str) -> str:
        """A character outside strings, as JSON has it: keys get quotes. Nothing for what follows the arguments."""
        if self._mode != "arguments":
            return ""
        if c in " \n":
            return c
        was, self._was = self._was, c
        if self._key:
            self._key = c != ":"
            return c if self._key else '":'
        if c in "{[":
            self._stack.append(c)
        elif c in "}]":
            self._stack.pop()
            if not self._stack:
                self._mode = "tail"
        elif self._stack[-1] == "{" and was in "{,":
            self._key = True
            return '"' + c
        return c


def _begins_mark(text: str) -> bool:
    return any(m.startswith(text) for m in (OPEN, CLOSE, QUOTE))


def marked(marks: Mapping[str, int], printed: Callable[[int], bytes]) -> Format:
    """The format for a tokenizer that has the marks at these ids; printed: what a token prints."""
    return Format(turns, lark_with(marks), MarkedReader, {i: m for m, i in marks.items() if not printed(i)})
