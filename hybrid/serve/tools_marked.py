"""Tool calls with special tokens, for families whose template has tools (Gemma 4, FunctionGemma). A call is

    <|tool_call>call:NAME{key:value,...}<tool_call|>

with the family's marks and bare keys. Strings, and keys that are not plain words, are between two marks <|"|>; numbers,
true, false, null, lists and objects are as in JSON. Marks are recognised by token id only, never by their text. Calls
may follow text. The reader converts arguments to JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from hybrid.serve.answers import Parser
from hybrid.serve.errors import bad_request
from hybrid.serve.schemas import NUMBERS, resolve
from hybrid.serve.structured import json_rule
from hybrid.serve.tools import MOST_CALLS, TEXT, Format, Offer, called_names, calls_of, described, in_slashes, literal
from hybrid.serve.wire import Message, content_of
from hybrid.text.marks import ids_of
from hybrid.text.tokenizer import Tokenizer


class Family(NamedTuple):
    """The marks around a call, and around a string."""

    open: str
    close: str
    quote: str


GEMMA4 = Family("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Family("<start_function_call>", "<end_function_call>", "<escape>")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MOST_RULES = 2000
_COMMA = ' "," '


def turns(messages: Sequence[Message], offer: Offer | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    names = called_names(messages)
    out: list[dict[str, Any]] = []
    for n, m in enumerate(messages):
        turn: dict[str, Any] = {"role": "system" if m.role == "developer" else m.role}
        if m.content is not None or not m.tool_calls:
            turn["content"] = content_of(m.content)
        if m.tool_calls:
            turn["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": given}}
                for i, name, given in calls_of(m, n)
            ]
        if m.role == "tool":
            turn |= {"name": names[n], "tool_call_id": m.tool_call_id, "content": m.text()}
        if thought := m.thought():
            turn["reasoning_content"] = thought
        out.append(turn)
    tools = None if offer is None else [{"type": "function", "function": d} for d in described(offer.tools)]
    return out, tools


_LIMITS: Mapping[str, Sequence[str]] = {
    "string": ("format",),
    "array": ("prefixItems",),
    "object": ("patternProperties", "minProperties", "maxProperties"),
}
"""Keywords that are not followed, by type."""
_ALTERNATIVES = ("anyOf", "oneOf")
_OF_TEXTS = ("pattern", "minLength", "maxLength")
_OF_TYPES = (
    *_OF_TEXTS,
    "properties",
    "required",
    "items",
    "minItems",
    "maxItems",
    *NUMBERS,
    *chain.from_iterable(_LIMITS.values()),
)
_MOST = 1000
"""Most items of an array, or characters of a text, whose number is followed."""


class _Rules:
    """Grammar rules of a schema's values in the family's format. Follows types, properties, required, items and their number,
    limits of numbers, patterns and lengths of texts, enum, const and alternatives. Other keywords are ignored, or under
    `strict` refused."""

    def __init__(self, quote: int) -> None:
        self.lines = [
            f"quote: <[{quote}]>",
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
        self._strict = False

    def of(self, schema: dict[str, Any], strict: bool) -> str:
        self._root, self._strict = schema, strict
        self._known = {}
        return self._value(schema, "parameters")

    def _add(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        if len(self.lines) > _MOST_RULES:
            raise bad_request("the tools' parameters have too many parts", "tools", "invalid_schema")
        self.lines.append(f"{name}: {body}")
        return name

    def _refuse(self, schema: Mapping[str, Any], keywords: Iterable[str], place: str) -> None:
        """ApiError for the first of the keywords that a strict schema has."""
        found = next((key for key in keywords if key in schema), None)
        if self._strict and found is not None:
            what = f"{place[:160]}.{found} cannot be followed by this model: leave it out, or send strict: false"
            raise bad_request(f"Invalid schema: {what}.", "tools", "invalid_schema")

    def _value(self, schema: Any, place: str) -> str:
        if not isinstance(schema, dict):
            return "any"
        self._refuse(schema, ("allOf",), place)
        if "$ref" in schema:
            self._refuse(schema, (*_OF_TYPES, *_ALTERNATIVES), place)
            return self._reference(str(schema["$ref"]), place)
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            return self._add(" | ".join(self._written(v) for v in values) or "any")
        for name in _ALTERNATIVES:
            if isinstance(schema.get(name), list) and schema[name]:
                self._refuse(schema, _OF_TYPES, place)
                ways = enumerate(schema[name])
                return self._add(" | ".join(self._value(s, f"{place}.{name}[{n}]") for n, s in ways))
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return self._add(" | ".join(self._value({**schema, "type": k}, place) for k in kind))
        self._refuse(schema, _OF_TYPES if kind is None else _LIMITS.get(str(kind), ()), place)
        simple = {"string": "text", "number": "NUMBER", "integer": "INTEGER", "null": '"null"'}
        if kind == "boolean":
            return self._add('"true" | "false"')
        if kind in ("number", "integer") and (limits := {k: schema[k] for k in NUMBERS if k in schema}):
            return self._add(json_rule({"type": kind, **limits}, strict=self._strict))
        if kind == "string" and any(key in schema for key in _OF_TEXTS):
            return self._text(schema, place)
        if kind in simple:
            return simple[str(kind)]
        if kind == "array":
            return self._array(schema, place)
        return self._object(schema, place) if kind == "object" else "any"

    def _numbers(self, schema: dict[str, Any], of: str, place: str) -> tuple[int, int | None]:
        """(least, most) of what keywords such as `minItems` limit; no limits for numbers that are too large for a grammar."""
        least, most = int(schema.get(f"min{of}", 0)), schema.get(f"max{of}")
        if max(least, most or 0) <= _MOST:
            return least, None if most is None else int(most)
        self._refuse(schema, (f"min{of}", f"max{of}"), place)
        return 0, None

    def _text(self, schema: dict[str, Any], place: str) -> str:
        least, most = self._numbers(schema, "Length", place)
        parts = [f"/(?s:.{{{least},{'' if most is None else most}}})/"]
        if "pattern" in schema:
            found = _whole_pattern(schema["pattern"])
            if found is None:
                self._refuse(schema, ("pattern",), place)
            parts += [] if found is None else [f"/{found}/"]
        name = f"STRING{len(self.lines)}"
        self.lines.append(f"{name}: {' & '.join(parts)}")
        return self._add(f"quote {name} quote")

    def _array(self, schema: dict[str, Any], place: str) -> str:
        item = self._value(schema.get("items"), f"{place}.items")
        least, most = self._numbers(schema, "Items", place)
        if most == 0:
            return self._add('"[" "]"')
        after = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        empty = '"[" "]" | ' if least == 0 else ""
        return self._add(f'{empty}"[" {item} ("," {item}){after} "]"')

    def _object(self, schema: dict[str, Any], place: str) -> str:
        """Properties in declared order; optional ones may be missing. Without any: of any names."""
        required, others = set(schema.get("required") or ()), schema.get("additionalProperties", True)
        members, free = list(schema.get("properties", {}).items()), "properties" not in schema
        if not required <= dict(members).keys():
            self._refuse(schema, ("required",), place)
        if free and others is True:
            return "any_object"
        if free and others is not False:
            value = self._value(others, f"{place}.additionalProperties")
            return self._add(f'"{{" "}}" | "{{" KEY ":" {value} ("," KEY ":" {value})* "}}"')
        first = rest = self._add('""')
        for key, value in reversed(members):
            pair = f"{_key(key)} {self._value(value, f'{place}.properties.{key}')}"
            skip = f" | {first}" if key not in required else ""
            skip_rest = f" | {rest}" if key not in required else ""
            first, rest = self._add(f"{pair} {rest}{skip}"), self._add(f'"," {pair} {rest}{skip_rest}')
        return self._add(f'"{{" {first} "}}"')

    def _reference(self, ref: str, place: str) -> str:
        if ref not in self._known:
            found = resolve(self._root, ref)
            name = self._known[ref] = f"ref{len(self._known)}_{len(self.lines)}"
            self.lines.append(f"{name}: {'any' if found is None else self._value(found, f'{place}.$ref')}")
        return self._known[ref]

    def _written(self, value: Any) -> str:
        """A value as a sequence of literals."""
        if isinstance(value, str):
            return _quoted(value)
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._written, value))} "]"'
        if isinstance(value, dict):
            pairs = [f"{_key(k)} {self._written(v)}" for k, v in value.items()]
            return f'"{{" {_COMMA.join(pairs)} "}}"'
        return literal(json.dumps(value, allow_nan=False))


def _whole_pattern(pattern: str) -> str | None:
    """The regular expression of a whole text in which a pattern is found, within slashes; None where anchors are not at the
    ends of the pattern."""
    begins = pattern.startswith("^")
    ends = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    body = pattern[begins : len(pattern) - ends]
    rest = re.sub(r"\\.|\[(\\.|[^\]])*\]", "", body)  # without what is escaped, and sets
    if "^" in rest or "$" in rest:
        return None
    while (found := re.sub(r"\([^()]*\)", "", rest)) != rest:
        rest = found
    if "|" in rest and (begins or ends):
        return None  # an anchor of one alternative alone
    anything = r"(?s:.*)"
    return in_slashes(f"{'' if begins else anything}({body}){'' if ends else anything}")


def _key(key: str) -> str:
    """A property's name and colon, as a sequence of literals."""
    return literal(key + ":") if _PLAIN_KEY.fullmatch(key) else f'{_quoted(key)} ":"'


def _quoted(text: str) -> str:
    return f"quote {literal(text)} quote" if text else "quote quote"


def lark(offer: Offer, answer: tuple[dict[str, Any] | None, bool], family: Family, marks: Mapping[str, int]) -> str:
    """The grammar of an answer, for a tokenizer with the family's marks at these ids."""
    rules = _Rules(marks[family.quote])
    calls = []
    for t in offer.tools:
        arguments = rules.of(*offer.arguments(t))
        calls.append(rules._add(f"{literal('call:' + t.name)} {arguments}"))
    begin, end = marks[family.open], marks[family.close]
    rules.lines.append(f"call: <[{begin}]> ({' | '.join(calls)}) <[{end}]>")
    several = f"call{{1,{MOST_CALLS}}}" if offer.several else "call"
    schema, strict = answer
    if offer.required:
        start = several
    elif schema is None:
        start = f"TEXT ({several})?"
        rules.lines.append(TEXT)
    else:
        start = f"{several} | answer"
        rules.lines.append(f"answer: {json_rule(schema, strict=strict)}")
    return "\n".join([f"start: {start}", *rules.lines])


class MarkedReader(Parser):
    """Streaming parser of answers of the grammar. marks: ids of the family's."""

    def __init__(self, offer: Offer, family: Family, marks: Mapping[str, int]) -> None:
        super().__init__()
        self.marks, self._family, self._names = marks, family, {t.name for t in offer.tools}
        self._mode = "text"  # head: before the arguments; arguments; tail: after them; nothing: in an invalid call
        self._head = ""
        self._stack: list[str] = []  # open objects and lists of the arguments
        self._quoted = self._key = False  # within a string; within a key without quotes
        self._was = ""  # the previous non-blank character

    def take(self, mark: str, text: str) -> list[dict[str, Any]]:
        return self._mark(mark) if mark else self._take(text)

    def _mark(self, mark: str) -> list[dict[str, Any]]:
        if mark == self._family.open:
            self._mode, self._head, self._stack, self._was = "head", "", [], ""
            self._quoted = self._key = False
        elif mark == self._family.close:
            self._mode = "text"
        elif self._mode == "arguments":
            self._quoted, self._was = not self._quoted, '"'
            return [self.more('"')]
        return []

    def _take(self, text: str) -> list[dict[str, Any]]:
        if self._mode == "text":
            return [{"content": text}]
        deltas = []
        if self._mode == "head":
            self._head += text
            head, brace, rest = self._head.partition("{")
            if not brace:
                return []
            name = head.strip().removeprefix("call:").strip()
            self._mode, text = "arguments" if name in self._names else "nothing", brace + rest
            if name in self._names:
                deltas.append(self.begin(name))
        if self._mode == "arguments":
            written = json.dumps(text)[1:-1] if self._quoted else "".join(map(self._json, text))
            if written:
                deltas.append(self.more(written))
        return deltas

    def _json(self, c: str) -> str:
        """Convert a character outside strings to JSON: quotes keys. Empty after the end of the arguments."""
        if self._mode != "arguments":
            return ""
        if c in " \n":
            return c
        was, self._was = self._was, c
        if self._key:
            self._key = c != ":"
            return json.dumps(c)[1:-1] if self._key else '":'
        if c in "{[":
            self._stack.append(c)
        elif c in "}]":
            self._stack.pop()
            if not self._stack:
                self._mode = "tail"
        elif self._stack[-1] == "{" and was in ("{", ","):
            self._key = True
            return '"' + json.dumps(c)[1:-1]
        return c


def marked(tokenizer: Tokenizer, template: str) -> Format | None:
    """The format of the family whose marks the vocabulary has and whose calls the template writes; None for others."""
    for family in (GEMMA4, FUNCTION_GEMMA):
        marks = ids_of(tokenizer, family)
        if len(marks) == len(family) and family.open in template:
            of: dict[str, Any] = {"family": family, "marks": marks}
            return Format(turns, partial(lark, **of), partial(MarkedReader, **of))
    return None
