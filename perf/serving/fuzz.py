"""python -m perf.serving.fuzz: fuzz a server with malformed requests and check that it survives.

Bodies grow from valid ones of every endpoint: values of another kind, keys that are gone, doubled or renamed, depth,
length, odd numbers and texts, parts of other bodies, schemas with hostile keywords. Some are then sent in an odd way:
cut, with a wrong length, in chunks, by other methods and versions, with odd heads, by clients that leave. All are drawn
from a seed. No answer may be an error of the server, each refusal must be the declared object, /health must answer at
all times, and in the end nothing may run and memory must be where it was after the first fifth of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import copy
import http.client
import itertools
import json
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hybrid.cli import Parser, UsageError, amount, positive, run

FIFTHS = 5
GROWTH = 64 << 20
"""Bytes that memory may be greater after the last fifth than after the first."""
PATIENCE = 90.0
"""Seconds in which an answer must be whole."""
LARGEST = 4 << 20
"""Bytes of a body that a server takes."""
SETTLING = 10.0
"""Seconds that running requests get to end."""
ENOUGH = 1000
"""Things that are wrong after which nothing more is sent."""
MANY = 40
"""Schemas that take the place of all that a server keeps compiled, so that its memory can be compared."""

# ------------------------------------------------------------------------------------------------------------ valid
# bodies

SAY = {"role": "user", "content": "What is a file?"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 200, "multipleOf": 1},
        "size": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 3},
        "born": {"type": "string", "format": "date"},
        "kind": {"enum": ["a", 1, None, True, [1], {"a": 1}]},
        "one": {"const": "x"},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "minItems": 0, "maxItems": 3},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "boolean"}], "items": False},
        "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "some": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
        "all": {"allOf": [{"type": "object"}, {"properties": {"a": {"type": "string"}}}]},
    },
    "patternProperties": {"^x_": {"type": "string"}},
    "additionalProperties": False,
    "required": ["name", "age"],
    "$defs": {"friend": {"type": "object", "properties": {"of": {"$ref": "#/$defs/friend"}}, "minProperties": 0}},
}
LOOSE = {
    "type": "object",
    "title": "t",
    "default": {},
    "not": {"type": "string"},
    "if": {"required": ["a"]},
    "then": {"minProperties": 1},
    "else": True,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"type": "object"}},
    "propertyNames": {"pattern": "^[a-z]"},
    "properties": {
        "a": {"type": "array", "contains": {"type": "integer"}, "minContains": 1, "maxContains": 2, "uniqueItems": True}
    },
    "unevaluatedProperties": True,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["place"],
        },
    },
}
SEARCH = {"type": "web_search", "user_location": {"country": "IT"}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
HISTORY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "And in Rome?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "12"},
]
USUAL = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 5}
RARE = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "77": -100},
    "stop": ["\n\n", "end"],
    "ignore_eos": True,
    "priority": 3,
    "user": "u",
    "metadata": {"a": "b"},
}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def _format(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
    }


def _item(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as responses have it."""
    return {"type": "function", **tool["function"]}


CHAT, TEXT, RESPONSES, MESSAGES, IDS, BACK = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)
OLLAMA_CHAT, OLLAMA_TEXT = "/api/chat", "/api/generate"
CACHED = {"cache_control": {"type": "ephemeral"}}
READ = {"name": "weather", "description": "Of a place.", "input_schema": WEATHER["function"]["parameters"], **CACHED}
USED = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"place": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12"}], "is_error": False}
CORPUS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [SAY], **USUAL}),
    (CHAT, {"messages": [SAY], **USUAL, **RARE, "n": 2, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": [SAY], **STREAM, "max_completion_tokens": 2}),
    (CHAT, {"messages": HISTORY, "tools": [WEATHER, SEARCH], "tool_choice": "auto", "max_tokens": 2, **STREAM}),
    (
        CHAT,
        {
            "messages": [SAY],
            "tools": [WEATHER],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 2,
        },
    ),
    (
        CHAT,
        {"messages": [SAY], "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    (CHAT, {"messages": [SAY], "max_tokens": 2, **_format(PERSON, True)}),
    (CHAT, {"messages": [SAY], "max_tokens": 2, **_format(LOOSE, False), "stream": True}),
    (CHAT, {"messages": [SAY], "max_tokens": 2, "response_format": {"type": "json_object"}, "tools": [WEATHER]}),
    (
        CHAT,
        {
            "messages": [SAY, {"role": "assistant", "content": "It is", "reasoning_content": "Files."}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": True, "lists": ["a", {"b": 1.5}]},
            "reasoning_effort": "low",
            "thinking_token_budget": 1,
            "max_tokens": 2,
        },
    ),
    (TEXT, {"prompt": "def read_file(path):", **USUAL, **RARE}),
    (TEXT, {"prompt": ["a list", "a file"], "n": 2, "max_tokens": 1, "echo": True, "logprobs": 2}),
    (TEXT, {"prompt": [5, 77, 1000], "max_tokens": 0, "echo": True, "logprobs": 0}),
    (TEXT, {"prompt": [[5, 77], [6]], "best_of": 1, "max_tokens": 2, **STREAM}),
    (TEXT, {"prompt": "import os", "max_tokens": 2, **_format(PERSON, False)}),
    (RESPONSES, {"input": "What is a file?", "instructions": "Be short.", "max_output_tokens": 2, "store": False}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "And in Rome?"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "12"},
            ],
            "tools": [_item(WEATHER)],
            "tool_choice": {"type": "function", "name": "weather"},
            "max_output_tokens": 2,
            "stream": True,
        },
    ),
    (
        RESPONSES,
        {
            "input": [{"type": "message", "role": "user", "content": "A person."}],
            "text": {
                "format": {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True},
                "verbosity": "low",
            },
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "reasoning": {"effort": "low", "summary": "auto"},
            "max_output_tokens": 2,
        },
    ),
    (
        MESSAGES,
        {"messages": [SAY], "max_tokens": 2, "system": "Be short.", "temperature": 0.7, "stop_sequences": ["e"]},
    ),
    (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "Be short.", **CACHED}],
            "messages": [
                SAY,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, USED]},
                {"role": "user", "content": [RESULT, {"type": "text", "text": "And now?"}]},
            ],
            "tools": [READ, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
            "max_tokens": 2,
            "stream": True,
        },
    ),
    (
        f"{MESSAGES}/count_tokens",
        {"messages": [SAY], "output_config": {"format": {"type": "json_schema", "schema": PERSON}, "effort": "low"}},
    ),
    (
        OLLAMA_CHAT,
        {
            "messages": [
                SAY,
                {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "x"}}}]},
                {"role": "tool", "tool_name": "weather", "content": "12"},
            ],
            "tools": [WEATHER],
            "options": {"num_predict": 2, "temperature": 0.7, "num_ctx": 2048, "stop": ["e"], "repeat_penalty": 1.1},
            "keep_alive": "5m",
            "think": False,
        },
    ),
    (OLLAMA_CHAT, {"messages": [SAY], "format": PERSON, "options": {"num_predict": 2}, "stream": False}),
    (OLLAMA_TEXT, {"prompt": "import os", "raw": True, "options": {"num_predict": 2, "seed": 5}, "logprobs": True}),
    (OLLAMA_TEXT, {"prompt": "A person.", "system": "Be short.", "format": "json", "options": {"num_predict": 2}}),
    ("/api/show", {"model": ""}),
    (IDS, {"prompt": "def f():\n    return 'é'", "add_special_tokens": False, "return_token_strs": True}),
    (IDS, {"messages": HISTORY}),
    (BACK, {"tokens": [5, 77, 1000]}),
)

# --------------------------------------------------------------------------------------------------------- odd values,
# words

TEXTS = (
    "",
    "\0",
    "\x07\x1b[2J\x7f\x85",
    "\ud800",
    "a\udfff\ud800b",
    "\ufeff\u200b\u2028\u202e",
    "e\u0301" * 50,
    "👩‍👩‍👧‍👦" * 20,
    "\U0010ffff\uffff\ufffe",
    "<start_of_turn>model\n",
    "<end_of_turn>",
    "<bos><eos><pad><unk>",
    '<|tool_call>call:weather{place:<|"|>x<|"|>}<tool_call|>',
    '{"name": "weather", "parameters": {"place": "x"}}',
    '[{"name": "weather", "parameters": ',
    "{{ 7 * 7 }}{% for a in b %}",
    "%s%n{0}{message}",
    "../../etc/passwd",
    "a\r\nX-Injected: 1\r\n\r\n",
    "null",
    "#/$defs/a",
    "data: [DONE]\n\n",
    "한국어 العربية ไทย",
    " " * 3000,
    "\n" * 3000,
    "ab" * 20_000,
    "9" * 5000,
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    2**31,
    -(2**31),
    2**63,
    2**64,
    -(2**63) - 1,
    2**200,
    1e308,
    -1e308,
    5e-324,
    4096,
    1_000_000,
)
TOKENS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1E400",
    "9" * 5000,
    "0." + "3" * 4000,
    "-0",
    "01",
    "1.",
    "+1",
    "0x10",
)
"""Of numbers that are no JSON, or more than a float holds."""
KINDS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    "",
    "a",
    [],
    {},
    [[]],
    [None],
    {"a": None},
    [1, "a"],
    {"type": "object"},
)
KEYS = (
    "",
    "a",
    "type",
    "messages",
    "$ref",
    "schema",
    "stream",
    "name",
    "content",
    "\0",
    "é" * 100,
    "__class__",
    "model_config",
    "k" * 300,
)
PATTERNS = (
    "(a{1000}){1000}",
    "(a|aa)+$",
    "^(?:(?:(?:a*)*)*)*$",
    "[",
    "(",
    "a{2,1}",
    "(?=a)b",
    "(a)\\1",
    "\\p{L}+",
    "\\u0000",
    "(?P<n>a)",
    "[^\\s\\S]",
    "^$",
    "",
    ".*" * 500,
    "(" * 300 + "a" + ")" * 300,
    "|".join(f"w{i}" for i in range(2000)),
    "\\",
    "a{999999999}",
    "(?i)straße",
)
REFERENCES = (
    "#",
    "#/",
    "#/$defs/a",
    "#/$defs/none",
    "#/$defs/a~",
    "#/$defs/%41",
    "#//",
    "",
    "a",
    "http://localhost/a",
    "#/anyOf/0",
    "#/properties",
    "#/$ref",
    "#/enum/0",
    "#/required",
    "#/$defs/a~2b",
    "#" * 3000,
)
TYPES: tuple[Any, ...] = (
    "string",
    "number",
    "integer",
    "boolean",
    "null",
    "array",
    "object",
    "any",
    "",
    ["string", "null"],
    ["object"] * 9,
    [],
)
FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "regex",
    "x",
    "",
)
COUNTS = (0, 1, 2, 1000, 10**6, 10**9, 2**64, -1, 1.0, 1.5)

# ------------------------------------------------------------------------------------------------------------------
# schemas

Draw = random.Random


def _small(draw: Draw) -> dict[str, Any]:
    kind = draw.choice(TYPES)
    return draw.choice(
        (
            {},
            {"type": kind},
            {"$ref": draw.choice(REFERENCES)},
            {"enum": [1, "a"]},
            {"properties": {"a": {"type": kind}}},
        )
    )


def _several(draw: Draw) -> list[Any]:
    return [_small(draw) for _ in range(draw.choice((0, 1, 2, 5)))]


def _named(draw: Draw) -> dict[str, Any]:
    return {
        draw.choice(("a", "b", "", "\ud800", "a~/b", "é", "$ref", "type")): _small(draw)
        for _ in range(draw.choice((0, 1, 3)))
    }


WORDS: dict[str, Callable[[Draw], Any]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _named),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _several),
    **dict.fromkeys(
        ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"), _small
    ),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "unevaluatedItems", "contentSchema"), _small),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), lambda d: d.choice(COUNTS)),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), lambda d: d.choice(COUNTS)),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), lambda d: d.choice(NUMBERS)
    ),
    "type": lambda d: d.choice(TYPES),
    "pattern": lambda d: d.choice(PATTERNS),
    "format": lambda d: d.choice(FORMATS),
    "$ref": lambda d: d.choice(REFERENCES),
    "$dynamicRef": lambda d: d.choice(REFERENCES),
    "$id": lambda d: d.choice(REFERENCES),
    "$schema": lambda d: d.choice(("http://json-schema.org/draft-07/schema#", "x", "")),
    "$anchor": lambda d: d.choice(TEXTS),
    "enum": lambda d: [d.choice((*KINDS, *TEXTS, *NUMBERS)) for _ in range(d.choice((1, 3, 200)))],
    "const": lambda d: d.choice((*KINDS, *TEXTS, *NUMBERS)),
    "required": lambda d: [d.choice(("a", "name", "", "\ud800", "nobody")) for _ in range(3)],
    "dependentRequired": lambda d: {"a": [d.choice(TEXTS)]},
    "uniqueItems": lambda d: d.random() < 0.5,
    "nullable": lambda d: True,
    "x-guidance": lambda d: d.choice(({"whitespace_pattern": "("}, {"lenient": False}, {"item_separator": 5}, 5, {})),
}
"""Keywords of schemas, with values of their kind."""


def _chain(n: int) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)}
    return {"$defs": {**links, f"a{n}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def _nested(n: int, word: str) -> dict[str, Any]:
    """word: a keyword of a list of schemas, of one, or else a property's name."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        inner: Any = [schema] if word.endswith(("Of", "Items")) else schema
        schema = {word: inner} if word in WORDS else {"properties": {word: inner}}
    return schema


def _product(wide: int, long: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": {}}} for j in range(wide)]} for i in range(long)]}


MUTUAL = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
MUTUAL_PARTS = {
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
    },
    "$ref": "#/$defs/a",
}
HOSTILE: tuple[Callable[[Draw], Any], ...] = (
    lambda d: MUTUAL,
    lambda d: MUTUAL_PARTS,
    lambda d: {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    lambda d: {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    lambda d: {"not": {"$ref": "#"}},
    lambda d: {"enum": [f"{i:05}" for i in range(d.choice((100, 2000)))]},
    lambda d: {"enum": list(range(d.choice((500, 2000))))},
    lambda d: _chain(d.choice((5, 90, 110))),
    lambda d: _nested(d.choice((20, 60, 99, 101)), d.choice(("items", "a", "anyOf", "allOf", "oneOf", "prefixItems"))),
    lambda d: _product(d.choice((2, 3)), d.choice((3, 5))),
    lambda d: {"type": "string", "pattern": d.choice(PATTERNS)},
    lambda d: {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(d.choice((50, 600)))}},
    lambda d: {"type": "integer", "minimum": d.choice(NUMBERS), "maximum": d.choice(NUMBERS)},
    lambda d: {"type": "number", "multipleOf": d.choice(NUMBERS), "exclusiveMinimum": d.choice(NUMBERS)},
    lambda d: {"type": "array", "minItems": d.choice(COUNTS), "maxItems": d.choice(COUNTS), "items": {"const": 1}},
    lambda d: {"type": "string", "minLength": d.choice(COUNTS), "maxLength": d.choice(COUNTS)},
    lambda d: {"oneOf": [{"type": "object", "properties": {"k": {"const": i}}} for i in range(d.choice((3, 60)))]},
)
HEAVY: tuple[Callable[[Draw], Any], ...] = (
    lambda d: {"enum": [f"{i:06}" * 6 for i in range(d.choice((19_000, 21_000)))]},
    lambda d: _product(6, 6),
    lambda d: _chain(3000),
    lambda d: {"properties": {f"p{i}": {} for i in range(21_000)}},
    lambda d: {"type": "string", "pattern": ".*".join("abcdefghij") + "(.{500}x){40}"},
)
"""Schemas that cost a server seconds."""

# ----------------------------------------------------------------------------------------------------------------
# mutations


class Slot(NamedTuple):
    """Where a value of a body is."""

    within: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.within[self.key]

    @value.setter
    def value(self, value: Any) -> None:
        self.within[self.key] = value


def slots(body: Any, most: int = 2000) -> list[Slot]:
    """Every place of a body that holds a value."""
    out, left = list[Slot](), [body]
    while left and len(out) < most:
        here = left.pop()
        keys = list(here) if isinstance(here, dict) else range(min(len(here), 100)) if isinstance(here, list) else ()
        out += [Slot(here, k) for k in keys]
        left += [here[k] for k in keys]
    return out


MARK = "\ue000"
MARKED = re.compile(r'"\\ue000([0-9]+)\\ue000"')


class Draft:
    """A body that is being changed. `raw` holds what stands in its text where JSON could not be made from values."""

    def __init__(self, draw: Draw, body: dict[str, Any]) -> None:
        self.draw, self.body, self.raw = draw, copy.deepcopy(body), list[str]()

    def token(self, text: str) -> str:
        """A value or key that becomes `text` in the body's text."""
        self.raw.append(text)
        return f"{MARK}{len(self.raw) - 1}{MARK}"

    def slot(self, wanted: Callable[[Slot], bool] = lambda s: True) -> Slot:
        """A place, one that is wanted if there is any."""
        found = slots(self.body) or [Slot([self.body], 0)]
        return self.draw.choice([s for s in found if wanted(s)] or found)

    def written(self, value: Any) -> str:
        """A value as it is sent."""
        found = json.dumps(value)
        while MARKED.search(found):
            found = MARKED.sub(lambda m: self.raw[int(m[1])], found)
        return found


def kind(d: Draft) -> None:
    d.slot().value = copy.deepcopy(d.draw.choice(KINDS))


def number(d: Draft) -> None:
    slot = d.slot(lambda s: type(s.value) in (int, float))
    slot.value = d.token(d.draw.choice(TOKENS)) if d.draw.random() < 0.3 else d.draw.choice(NUMBERS)


def text(d: Draft) -> None:
    slot, odd = d.slot(lambda s: isinstance(s.value, str)), d.draw.choice(TEXTS)
    if isinstance(slot.value, str) and not slot.value.startswith(MARK) and d.draw.random() < 0.5:
        at = d.draw.randint(0, len(slot.value))
        odd = slot.value[:at] + odd + slot.value[at:]
    slot.value = odd


def delete(d: Draft) -> None:
    slot = d.slot()
    del slot.within[slot.key]


def double(d: Draft) -> None:
    slot = d.slot()
    other = copy.deepcopy(slot.value if d.draw.random() < 0.5 else d.draw.choice(KINDS))
    if isinstance(slot.within, dict):
        slot.within[d.token(d.written(slot.key))] = other
    else:
        slot.within.insert(slot.key, other)


def rename(d: Draft) -> None:
    slot = d.slot(lambda s: isinstance(s.within, dict))
    if isinstance(slot.within, dict):
        key = str(slot.key)
        slot.within[d.draw.choice((*KEYS, key.upper(), key + " ", key[:-1], key.replace("_", "-")))] = slot.within.pop(
            slot.key
        )


def deep(d: Draft) -> None:
    slot, n = d.slot(), d.draw.choice((1, 2, 10, 90, 180, 250, 1200, 20_000))
    begin, end = d.draw.choice((("[", "]"), ('{"a":', "}"), ('[{"items":', "}]"), ('{"$defs":{"a":', "}}")))
    slot.value = d.token(begin * n + d.written(slot.value) + end * n)


def long(d: Draft) -> None:
    slot, n = d.slot(lambda s: isinstance(s.value, list)), d.draw.choice((2, 17, 129, 1025, 4097, 30_000))
    item = d.written(slot.value[0] if isinstance(slot.value, list) and slot.value else slot.value)
    slot.value = d.token("[" + ",".join([item] * max(1, min(n, LARGEST // 4 // len(item)))) + "]")


def wide(d: Draft) -> None:
    slot, n = d.slot(lambda s: isinstance(s.value, dict)), d.draw.choice((10, 200, 1100, 10_000))
    if isinstance(slot.value, dict):
        slot.value = {
            **slot.value,
            **{f"{d.draw.choice(('', 'a'))}{i}": d.draw.choice((0, None, "a")) for i in range(n)},
        }


def graft(d: Draft) -> None:
    """A part of another body, in the place of one or beside it."""
    other = d.draw.choice(slots(d.draw.choice(CORPUS)[1]))
    slot = d.slot()
    if isinstance(slot.within, dict) and isinstance(other.key, str) and d.draw.random() < 0.6:
        slot.within[other.key] = copy.deepcopy(other.value)
    else:
        slot.value = copy.deepcopy(other.value)


def swap(d: Draft) -> None:
    one, two = d.slot(), d.slot()
    one.value, two.value = copy.deepcopy(two.value), copy.deepcopy(one.value)


def _schemas(d: Draft) -> list[Slot]:
    """Where a body has schemas, those within others first as often as they come."""
    roots = [s for s in slots(d.body) if s.key in ("schema", "parameters") and isinstance(s.value, dict)]
    return roots + [s for root in roots for s in slots(root.value) if isinstance(s.value, dict)]


def keyword(d: Draft) -> None:
    if found := _schemas(d):
        word = d.draw.choice(list(WORDS))
        value = d.draw.choice(KINDS) if d.draw.random() < 0.2 else WORDS[word](d.draw)
        d.draw.choice(found).value[word] = copy.deepcopy(value)


def hostile(d: Draft) -> None:
    if found := _schemas(d):
        made = copy.deepcopy(d.draw.choice(HEAVY if d.draw.random() < 0.01 else HOSTILE)(d.draw))
        slot = d.draw.choice(found)
        slot.value = (
            made if slot.key != "parameters" or d.draw.random() < 0.5 else {"type": "object", "properties": {"a": made}}
        )


MUTATIONS: dict[Callable[[Draft], None], int] = {
    kind: 16,
    number: 10,
    text: 14,
    delete: 10,
    double: 6,
    rename: 6,
    deep: 3,
    long: 3,
    wide: 1,
    graft: 12,
    swap: 4,
    keyword: 10,
    hostile: 5,
}
"""Ways to change a body, and how often in a hundred."""


def body_of(draw: Draw) -> tuple[str, str, list[str]]:
    """An address, a body's text, and how it was changed: not at all in one of twenty."""
    path, body = draw.choice(CORPUS)
    draft, done = Draft(draw, body), list[str]()
    for mutation in draw.choices(
        list(MUTATIONS), list(MUTATIONS.values()), k=draw.choice((0, *[1] * 8, *[2] * 6, 3, 3, 4, 4, 8))
    ):
        if isinstance(draft.body, dict) and draft.body:
            mutation(draft)
            done.append(mutation.__name__)
    if draw.random() < 0.005:
        draft.body, done = draw.choice(KINDS), ["whole"]
    return path, draft.written(draft.body), done


# --------------------------------------------------------------------------------------------------------------- on the
# wire


@dataclass(frozen=True)
class Request:
    """sent: pieces, with a short pause between; answers: how many are asked for; leave: bytes of the answer after which
    the client leaves (None: it takes all), after `pause` seconds, by a reset where `reset`; valid: 200 is the only
    right answer."""

    about: str
    sent: tuple[bytes, ...]
    answers: int = 1
    leave: int | None = None
    pause: float = 0.0
    reset: bool = False
    valid: bool = False
    bodiless: bool = False
    """Answers have heads alone: of HEAD."""

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "sent": [base64.b64encode(s).decode() for s in self.sent]}

    @staticmethod
    def of(record: dict[str, Any]) -> Request:
        return Request(**{**record, "sent": tuple(base64.b64decode(s) for s in record["sent"])})


Lines = Sequence[tuple[str, str]]
HOST, CLOSE, JSON = ("Host", "localhost"), ("Connection", "close"), ("Content-Type", "application/json")


def head(method: str, path: str, lines: Lines, version: str = "HTTP/1.1") -> bytes:
    written = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in lines)]
    return ("\r\n".join(written) + "\r\n\r\n").encode("utf-8", "surrogateescape")


def _post(path: str, body: bytes, *more: tuple[str, str], close: bool = True) -> bytes:
    lines = [HOST, *([CLOSE] if close else []), JSON, ("Content-Length", str(len(body))), *more]
    return head("POST", path, lines) + body


def _cut(draw: Draw, data: bytes, most: int = 5) -> tuple[bytes, ...]:
    """Data in some pieces."""
    places = sorted(draw.randint(0, len(data)) for _ in range(draw.randint(1, most)))
    return tuple(data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True))


def plain(draw: Draw, path: str, body: bytes) -> Request:
    return Request("plain", (_post(path, body),))


def pieces(draw: Draw, path: str, body: bytes) -> Request:
    return Request("pieces", _cut(draw, _post(path, body)))


def two(draw: Draw, path: str, body: bytes) -> Request:
    """Two on one connection, the second sent before the first is answered, or at once behind it."""
    first, second = _post(path, body, close=False), _post(path, body)
    return Request("two", (first + second,) if draw.random() < 0.5 else (first, second), answers=2)


def _chunks(draw: Draw, body: bytes) -> list[bytes]:
    return [p for p in _cut(draw, body, draw.choice((1, 3, 30))) if p]


def chunked(draw: Draw, path: str, body: bytes) -> Request:
    more = draw.choice((b"", b";a=b", b';a="' + b"x" * 200 + b'"'))
    end = draw.choice((b"0\r\n\r\n", b"000\r\n\r\n", b"0\r\nX-Trailer: 1\r\n\r\n", b"0;x\r\n\r\n"))
    sent = b"".join(b"%x%b\r\n%b\r\n" % (len(p), more, p) for p in _chunks(draw, body)) + end
    return Request("chunked", (head("POST", path, [HOST, CLOSE, JSON, ("Transfer-Encoding", "chunked")]) + sent,))


def broken_chunks(draw: Draw, path: str, body: bytes) -> Request:
    size = draw.choice(
        (b"-1", b"g", b"", b"0x5", b"ffffffffffffffff", b"fffffffffffffffffffff", b"5 ", b"\0", b"1" * 5000)
    )
    coding = draw.choice(("chunked", "Chunked", "gzip, chunked", "chunked, chunked", "identity", "chunked\x0b", "x"))
    sent = head("POST", path, [HOST, CLOSE, JSON, ("Transfer-Encoding", coding)])
    good = b"%x\r\n%b\r\n" % (len(body), body) if draw.random() < 0.5 else b""
    return _left(draw, "broken chunks", (sent + good + size + b"\r\n" + body[:100] + b"\r\n0\r\n\r\n",))


def length(draw: Draw, path: str, body: bytes) -> Request:
    n = len(body)
    wrong = [
        [draw.choice((str(n + 1), str(n + 3000), str(max(0, n - 1)), str(n // 2), "0"))],
        [
            draw.choice(
                (
                    "-1",
                    "+5",
                    "1e3",
                    "",
                    "a",
                    "0x10",
                    str(n) + " ",
                    "0" * 30 + str(n),
                    "9" * 30,
                    "1, 2",
                    str(5 << 20),
                    str(2**63),
                )
            )
        ],
        [str(n), str(n)],
        [str(n), str(n + 1)],
    ]
    lines = [HOST, CLOSE, JSON, *(("Content-Length", w) for w in draw.choice(wrong))]
    both = [("Transfer-Encoding", "chunked")] if draw.random() < 0.1 else []
    return _left(draw, "length", (head("POST", path, [*lines, *both]) + body,))


def cut(draw: Draw, path: str, body: bytes) -> Request:
    data = _post(path, body)
    whole = data[: draw.randint(0, len(data) - 1)]
    return _left(draw, "cut", _cut(draw, whole), patient=0.02)


def _left(draw: Draw, about: str, sent: tuple[bytes, ...], patient: float = 0.1) -> Request:
    """Sent mostly by clients that do not wait for an answer."""
    if draw.random() < patient:
        return Request(about, sent)
    return Request(about, sent, leave=0, pause=draw.choice((0.0, 0.0, 0.01, 0.05)), reset=draw.random() < 0.3)


METHODS = (
    "GET",
    "HEAD",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "post",
    "FOO",
    "PROPFIND",
    "M" * 300,
    "GE\tT",
    "",
)


def method(draw: Draw, path: str, body: bytes) -> Request:
    name = draw.choice(METHODS)
    path = draw.choice((path, "/health", "/ready", "/v1/models", "/", "/metrics", "/openapi.json", "/tokenizer_info"))
    more = ("Content-Length", str(len(body))) if draw.random() < 0.5 else ("Accept", "*/*")
    sent = head(name, path, [HOST, CLOSE, JSON, more]) + (body if more[0] == "Content-Length" else b"")
    return Request("method", (sent,), bodiless=name == "HEAD")


ADDRESSES = (
    "/",
    "//",
    "/v1",
    "/v1/",
    "/v1/models/",
    "/v1/models/a",
    "/v1/models/%ff%00",
    "/v1/models/../models",
    "/v1/models/" + "a" * 5000,
    "/page/../../../etc/passwd",
    "/page/..%2f..%2fetc%2fpasswd",
    "/page/%2e%2e/app.js",
    "/page/\\..\\a",
    "/docs",
    "/redoc",
    "/favicon.ico",
    "/health?a=" + "b" * 9000,
    "/health#a",
    "/HEALTH",
    "/health/",
    "/health%20",
    "/%68ealth",
    "*",
    "http://localhost/health",
    "http://elsewhere/health",
    "health",
    "/v1/models/é",
    "/v1/models/\ud83d",
    "/a b",
    "/\x01",
    "/?" + "&".join(f"a{i}=1" for i in range(2000)),
)


def address(draw: Draw, path: str, body: bytes) -> Request:
    odd = draw.choice(
        (*ADDRESSES, path + "/", "/" + path, path + "?stream=true", path.upper(), path + "%00", path + ";a", "." + path)
    )
    odd = odd.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    if draw.random() < 0.5:
        return Request("address", (head("GET", odd, [HOST, CLOSE]),))
    return Request("address", (_post(odd, body),))


HEADS: tuple[Lines, ...] = (
    [("Content-Type", "text/plain")],
    [("Content-Type", "application/json; charset=utf-16")],
    [("Content-Type", "multipart/form-data; boundary=x")],
    [("Content-Type", "application/x-www-form-urlencoded")],
    [("Content-Type", "APPLICATION/JSON;;;")],
    [("Content-Type", "\udcff\udcfe")],
    [("Content-Encoding", "gzip")],
    [("Expect", "100-continue")],
    [("Expect", "anything")],
    [("Upgrade", "websocket"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="), ("Sec-WebSocket-Version", "13")],
    [("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAAP__")],
    [("Host", "elsewhere")],
    [("Origin", "http://elsewhere")],
    [("Origin", "null")],
    [("Origin", "\udcff://\udcff")],
    [("Sec-Fetch-Site", "cross-site")],
    [("Authorization", "Bearer")],
    [("Authorization", "Bearer \udcff\udc80")],
    [("Authorization", "Basic " + "A" * 4000)],
    [("Cookie", "a=" + "b" * 60_000)],
    [("X-Long", "a" * 70_000)],
    [(f"X-{i}", "a") for i in range(300)],
    [(f"X-{i}", "a" * 100) for i in range(900)],
    [("X-Control", "a\x01b")],
    [("X-Zero", "a\0b")],
    [("X-Folded", "a\r\n b")],
    [("X Space", "a")],
    [("", "a")],
    [("X-Return", "a\rb")],
    [("Connection", "keep-alive, close, upgrade")],
    [("Accept", "text/event-stream"), ("Accept-Encoding", "gzip, br"), ("Range", "bytes=0-5"), ("If-None-Match", "*")],
    [("X-Forwarded-For", "203.0.113.9"), ("X-Forwarded-Host", "elsewhere"), ("Forwarded", "for=a")],
    [("Priority", "u=9999"), ("TE", "trailers"), ("Trailer", "Host")],
)


def headers(draw: Draw, path: str, body: bytes) -> Request:
    odd = draw.choice(HEADS)
    names = {name for name, _ in odd}
    usual = [h for h in (HOST, CLOSE, JSON) if h[0] not in names or draw.random() < 0.3]
    lines = [*usual, ("Content-Length", str(len(body)))]
    at = draw.randint(0, len(lines))
    if draw.random() < 0.1:
        lines.pop(draw.randrange(len(lines)))
    return _left(draw, "headers", (head("POST", path, [*lines[:at], *odd, *lines[at:]]) + body,), patient=0.9)


VERSIONS = (
    "HTTP/1.0",
    "HTTP/1.0",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/1.2",
    "HTTP/2.0",
    "HTTP/3",
    "HTTP/1.1 ",
    "http/1.1",
    "HTTP/11",
    "",
)


def version(draw: Draw, path: str, body: bytes) -> Request:
    lines = [
        *([HOST] if draw.random() < 0.5 else []),
        *([CLOSE] if draw.random() < 0.7 else [("Connection", "keep-alive")]),
    ]
    sent = head("POST", path, [*lines, JSON, ("Content-Length", str(len(body)))], draw.choice(VERSIONS)) + body
    return Request("version", (sent,))


NOISE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    b"\r\n\r\n\r\n",
    b"\0" * 300,
    b"GET /\r\n\r\n",
    b"SSH-2.0-x\r\n\r\n",
    b"{}\r\n\r\n",
)


def noise(draw: Draw, path: str, body: bytes) -> Request:
    """Bytes that are no request, or one with some bytes that are others."""
    if draw.random() < 0.3:
        return _left(draw, "noise", (draw.choice(NOISE),), patient=0.3)
    data = bytearray(_post(path, body))
    for _ in range(draw.choice((1, 1, 2, 10))):
        data[draw.randrange(min(len(data), draw.choice((200, len(data)))))] = draw.randrange(256)
    return _left(draw, "noise", (bytes(data),), patient=0.3)


def leaving(draw: Draw, path: str, body: bytes) -> Request:
    """Leaves in the middle of an answer, or while it is made."""
    after = draw.choice((0, 1, 200, 600, 1500))
    return Request(
        "leaving", (_post(path, body),), leave=after, pause=draw.choice((0.0, 0.002, 0.02)), reset=draw.random() < 0.5
    )


def encoding(draw: Draw, path: str, body: bytes) -> Request:
    said = json.dumps(json.loads(body), ensure_ascii=False) if _is_object(body) else body.decode("utf-8", "replace")
    name = draw.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1"))
    made = said.encode(name, "surrogatepass" if name.startswith("utf") else "replace")
    return Request(
        "encoding", (_post(path, draw.choice((made, made + b"\n\n", made + b"\0", made + made, b" " * 2000 + made))),)
    )


def large(draw: Draw, path: str, body: bytes) -> Request:
    """More than a server takes, said before or found out."""
    body = b" " * LARGEST + body
    if draw.random() < 0.5:
        return Request("large", (_post(path, body),))
    sent = b"%x\r\n%b\r\n" % (len(body), body) + b"0\r\n\r\n"
    return Request("large", (head("POST", path, [HOST, CLOSE, JSON, ("Transfer-Encoding", "chunked")]) + sent,))


FORMS: dict[Callable[[Draw, str, bytes], Request], int] = {
    plain: 700,
    pieces: 30,
    two: 30,
    chunked: 40,
    broken_chunks: 15,
    length: 25,
    cut: 20,
    method: 20,
    address: 25,
    headers: 50,
    version: 15,
    noise: 20,
    leaving: 60,
    encoding: 15,
    large: 1,
}
"""Ways to send a body, and how often in about a thousand."""


def request_of(seed: int, n: int) -> Request:
    """The request of a number: the same for the same seed."""
    draw = random.Random(f"{seed} {n}")
    path, said, done = body_of(draw)
    form = draw.choices(list(FORMS), list(FORMS.values()))[0]
    made = form(draw, path, said.encode())
    about = f"{n} of seed {seed}: {path}, {made.about}{''.join(f', {word}' for word in done)}"
    return Request(
        **{**vars(made), "about": about, "valid": made.about in ("plain", "pieces", "chunked", "two") and not done}
    )


# ------------------------------------------------------------------------------------------------------------------
# answers


class Answer(NamedTuple):
    status: int
    head: str
    body: bytes

    def header(self, name: str) -> str:
        found = re.search(rf"^{name}:[ \t]*(.*?)\r?$", self.head, re.I | re.M)
        return found[1] if found else ""


class Broken(Exception):
    """An answer that is none, or not whole."""


async def _answer(reader: asyncio.StreamReader, bodiless: bool) -> Answer:
    """The next answer on a connection."""
    status = 100
    while status < 200:
        said = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        found = re.match(r"HTTP/1\.1 ([1-9][0-9]{2}) ", said)
        if found is None:
            raise Broken(f"this is no head of an answer: {said[:100]!r}")
        status = int(found[1])
    answer = Answer(status, said, b"")
    if bodiless or status in (204, 304):
        return answer
    if answer.header("transfer-encoding") == "chunked":
        return answer._replace(body=await _joined(reader))
    length = answer.header("content-length")
    return answer._replace(body=await (reader.readexactly(int(length)) if length else reader.read()))


async def _joined(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


async def ask(host: str, port: int, request: Request) -> list[Answer] | None:
    """What came; None to a client that left. Broken, OSError or asyncio's own errors where the answers are not
    whole."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    sending = asyncio.ensure_future(_send(writer, request.sent))
    try:
        if request.leave is None:
            return [await _answer(reader, request.bodiless) for _ in range(request.answers)]
        await sending
        if request.leave:
            await reader.read(request.leave)
        await asyncio.sleep(request.pause)
        return None
    except OSError:
        if request.leave is None:
            raise
        return None  # it was gone before the client was
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        if request.reset:
            with contextlib.suppress(OSError):  # closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


async def _send(writer: asyncio.StreamWriter, sent: Sequence[bytes]) -> None:
    for n, piece in enumerate(sent):
        if n:
            await asyncio.sleep(0.002)
        writer.write(piece)
        with contextlib.suppress(ConnectionError):  # what was answered meanwhile can still be read
            await writer.drain()


# ---------------------------------------------------------------------------------------------------------------
# judgements

BUSY = (429, 503)
REFUSALS = (400, 401, 403, 404, 405, 408, 413, 429, 431, 503)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error", "message_stop")
"""Of the last event of a response or a message."""
UNINFORMATIVE = "the body must be one JSON object"
FAILED = "the server failed"
"""Begins the message of an internal error."""


LEAKS = (
    "Traceback (most recent call last)",
    "site-packages",
    'File "',
    "<state>",
    sys.prefix,
    str(Path(__file__).resolve().parents[2]),
)
"""Text that appears only in a traceback, a local path or a parser's internals."""


def _is_object(body: bytes) -> bool:
    """Whether a body is one JSON object, as JSON is defined."""

    def refused(token: str) -> Any:
        raise ValueError(token)

    try:
        return isinstance(json.loads(body.decode(), parse_constant=refused), dict)
    except (ValueError, RecursionError):
        return False


_ODD_HEAD = re.compile(r"(?i)x-injected|[^\t\r\n -~]|\r(?!\n)|(?<!\r)\n")
"""What a head holds that somebody else wrote."""
LONGEST = 4096
"""Bytes of a refusal, which does not grow with what is refused."""


def judged(request: Request, answers: Sequence[Answer]) -> str | None:
    """What is wrong about the answers to a request."""
    for answer in answers:
        if request.valid and answer.status != 200 and answer.status not in BUSY:
            return f"a valid request was answered {answer.status} {answer.body[:300]!r}"
        if (what := _judged(request, answer)) is not None:
            return f"{answer.status}: {what}"
    return None


def _judged(request: Request, answer: Answer) -> str | None:
    if odd := _ODD_HEAD.search(answer.head):
        return f"the head holds {odd[0]!r}"
    if answer.status in BUSY and not answer.header("retry-after").isdigit():
        return "no Retry-After"
    if answer.status >= 400 and answer.status not in REFUSALS:
        return f"no declared refusal: {answer.body[:300]!r}"
    if request.bodiless:
        return None
    if answer.status >= 400:
        return _refused(request, answer)
    if answer.status == 200 and answer.header("content-type").startswith("text/event-stream"):
        return _streamed(request, answer.body)
    if answer.status == 200 and answer.header("content-type") == "application/x-ndjson":
        return _lines(answer.body)
    if answer.header("content-type") == "application/json":
        return None if _is_object(answer.body) else f"no JSON object: {answer.body[:200]!r}"
    return None


def _refused(request: Request, answer: Answer) -> str | None:
    if answer.header("content-type") != "application/json":
        return f"a refusal of type {answer.header('content-type')!r}"
    if len(answer.body) > LONGEST:
        return f"a refusal of {len(answer.body)} bytes: {answer.body[:200]!r}"
    try:
        said = json.loads(answer.body)
    except ValueError:
        return f"a refusal that is no JSON: {answer.body[:200]!r}"
    if answer.status == 503 and isinstance(said, dict) and list(said) == ["status"]:  # of /ready
        return None
    return _error(request, said)


def _error(request: Request, said: Any) -> str | None:
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, str) and len(said) == 1:  # Ollama's
        error = {"message": error, "type": "error", "param": None, "code": None}
    elif isinstance(error, dict) and set(error) == {"type", "message"} and said.get("type") == "error":  # Anthropic's
        error = {**error, "param": None, "code": None}
    elif isinstance(said, dict) and len(said) > 1:
        error = None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return f"not the declared error: {str(said)[:300]}"
    named = isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    if not named or not all(isinstance(error[k], str | None) for k in ("param", "code")):
        return f"an error of other kinds: {error}"
    if leak := next((leak for leak in LEAKS if leak in str(error)), None):
        return f"an error tells {leak!r}: {error}"
    if error["message"].startswith(UNINFORMATIVE) and ", plain" in request.about:
        body = b"".join(request.sent).partition(b"\r\n\r\n")[2]
        return f"an object is refused with {error['message']!r}" if _is_object(body) else None
    return None


def _streamed(request: Request, body: bytes) -> str | None:
    """What is wrong about a stream's events."""
    last: Any = None
    for event in (line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")):
        if event == b"[DONE]":
            return None
        try:
            last = json.loads(event)
        except ValueError:
            return f"an event is no JSON: {event[:200]!r}"
    if not isinstance(last, dict) or not ("error" in last or last.get("type") in ENDS):
        return f"a stream ended with {body[-200:]!r}"
    error = last.get("error", last) if last.get("type") == "error" else last.get("error")
    if error is None:
        return None
    if error.get("code") == "internal_error" or error.get("type") == "api_error":
        return f"a stream failed: {error}"
    return _error(
        request, {"error": {"type": "error", **{k: error.get(k) for k in ("message", "type", "param", "code")}}}
    )


def _lines(body: bytes) -> str | None:
    """What is wrong about a stream of objects, one a line."""
    try:
        said = [json.loads(line) for line in body.splitlines()]
    except ValueError:
        return f"a line is no JSON: {body[-200:]!r}"
    if not said or not all(isinstance(s, dict) for s in said) or not (said[-1].get("done") or "error" in said[-1]):
        return f"a stream ended with {body[-200:]!r}"
    if str(said[-1].get("error")).startswith(FAILED):
        return f"a stream failed: {said[-1]}"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# runs


@dataclass
class Found:
    """What was seen. wrong: (what, requests to see it again)."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, list[Request]]] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    memory: list[int] = field(default_factory=list)
    requests: int = 0
    asked: int = 0
    """Times that /health was asked, and the longest wait for it."""
    longest: float = 0.0
    recent: deque[tuple[float, Request]] = field(default_factory=lambda: deque(maxlen=1000))
    """When requests ended, as time.perf_counter() has it."""
    open: set[Request] = field(default_factory=set)


@dataclass(frozen=True)
class Server:
    """Where a server listens. process, log: of one that this command started."""

    host: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None


class Health(threading.Thread):
    """Asks /health all the time."""

    def __init__(self, to: Server, stall: float, found: Found) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection(to.host, to.port, timeout=PATIENCE)
        self._stall, self._found, self._ended = stall, found, threading.Event()
        self.longest, self.asked = 0.0, 0

    def run(self) -> None:
        while not self._ended.wait(0.01):
            began = time.perf_counter()
            try:
                self._connection.request("GET", "/health")
                answer = self._connection.getresponse()
                answer.read()
                what = f"/health answered {answer.status}" if answer.status != 200 else None
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                what = f"/health: {type(error).__name__}: {error}"
            waited, self.asked = time.perf_counter() - began, self.asked + 1
            if waited > self._stall and waited > self.longest:
                what = f"/health took {waited:.2f} s"
            self.longest = max(self.longest, waited)
            if what:
                beside = [r for ended, r in list(self._found.recent) if ended >= began] + list(self._found.open)
                self._found.wrong.append((what, beside))

    def end(self) -> None:
        self._ended.set()
        self.join()
        self._connection.close()


async def _one(to: Server, request: Request, found: Found) -> None:
    began = time.perf_counter()
    found.requests += 1
    found.open.add(request)
    try:
        answers = await asyncio.wait_for(ask(to.host, to.port, request), PATIENCE)
        for status in ["left"] if answers is None else [str(a.status) for a in answers]:
            found.statuses[status] += 1
        what = judged(request, answers or ())
    except (Broken, OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError) as error:
        found.statuses["broken"] += 1
        what = f"no whole answer: {type(error).__name__}: {error}"
    ended = time.perf_counter()
    found.open.discard(request)
    found.recent.append((ended, request))
    found.slowest = max(found.slowest, (ended - began, request.about))
    if what is not None:
        found.wrong.append((what, [request]))


async def _all(to: Server, requests: Iterator[Request], at_a_time: int, found: Found) -> None:
    async def work() -> None:
        for request in requests:
            if len(found.wrong) < ENOUGH:
                await _one(to, request, found)

    await asyncio.gather(*(work() for _ in range(at_a_time)))


async def _get(host: str, port: int, path: str) -> Answer:
    answers = await ask(host, port, Request(path, (head("GET", path, [HOST, CLOSE]),)))
    assert answers is not None
    return answers[0]


async def _figures(host: str, port: int) -> dict[str, float]:
    """Of /metrics, those without labels."""
    said = (await _get(host, port, "/metrics")).body.decode()
    return {m[1]: float(m[2]) for m in re.finditer(r"^(\w+) (\S+)$", said, re.M)}


async def _settled(host: str, port: int) -> dict[str, float]:
    """The figures once nothing runs or waits; those after SETTLING seconds where that does not happen."""
    until = time.monotonic() + SETTLING
    while True:
        figures = await _figures(host, port)
        if not figures["hybrid_running"] + figures["hybrid_waiting"] or time.monotonic() > until:
            return figures
        await asyncio.sleep(0.05)


async def _memory(to: Server) -> int:
    """Resident bytes once nothing runs: of the process and those below it, or where its number is not known what
    /metrics says."""
    if to.process is None:
        return int((await _settled(to.host, to.port)).get("process_resident_memory_bytes", 0))
    for n in range(MANY):
        body = json.dumps({"messages": [SAY], "max_tokens": 1, **_format({"const": n}, True)}).encode()
        await ask(to.host, to.port, Request("", (_post(CHAT, body),)))
    await _settled(to.host, to.port)
    return sum(map(_resident, _tree(to.process.pid)))


def _tree(pid: int) -> list[int]:
    """A process and those below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for process in found:
        found += [p for p, parent in parents.items() if parent == process]
    return found


def _resident(pid: int) -> int:
    """Bytes of a process, those that it shares with others by share."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        return int(found[1]) << 10 if found else 0
    return 0


async def _rounds(to: Server, rounds: Sequence[Sequence[Request | int]], args: argparse.Namespace) -> Found:
    """Rounds of requests, each as it is or as its number; memory is read after each."""
    found = Found()
    before = await _ready(to.host, to.port)
    health = Health(to, args.stall, found)
    health.start()
    try:
        for asked in rounds:
            requests = (r if isinstance(r, Request) else request_of(args.seed, r) for r in asked)
            await _all(to, requests, args.most, found)
            found.memory.append(await _memory(to))
        _compare(found, before, await _settled(to.host, to.port))
    except (Broken, OSError, EOFError, KeyError) as error:
        found.wrong.append((f"the server does not tell its figures: {type(error).__name__}: {error}", []))
    finally:
        health.end()
        found.asked, found.longest = health.asked, health.longest
    return found


async def _ready(host: str, port: int) -> dict[str, float]:
    """The figures of a server that takes requests. RuntimeError where it does not take a valid one."""
    while (await _get(host, port, "/ready")).status == 503:
        await asyncio.sleep(0.1)
    for path, body in CORPUS:
        answers = await ask(host, port, Request("", (_post(path, json.dumps(body).encode()),))) or []
        if [a.status for a in answers] != [200]:
            raise RuntimeError(f"{path} refuses a valid body: {answers[0].body[:300]!r} for {json.dumps(body)[:300]}")
    return await _figures(host, port)


def _compare(found: Found, before: dict[str, float], after: dict[str, float]) -> None:
    if after["hybrid_running"] or after["hybrid_waiting"]:
        found.wrong.append(
            (f"{after['hybrid_running']:.0f} requests still run and {after['hybrid_waiting']:.0f} wait", [])
        )
    if before.get("process_start_time_seconds") != after.get("process_start_time_seconds"):
        found.wrong.append(("the process is another one than before", []))
    if found.memory and found.memory[-1] - found.memory[0] > GROWTH:
        shown = ", ".join(f"{m / 2**20:.0f}" for m in found.memory)
        found.wrong.append((f"memory grew by round, MiB: {shown}", []))


@contextlib.contextmanager
def _server() -> Iterator[Server]:
    """A server of its own, with the embedded model."""
    options = [
        "--device",
        "cpu",
        "--slots",
        "8",
        "--ctx",
        "512",
        "--queue",
        "64",
        "--max-tokens",
        "2",
        "--idle",
        "5",
        "--total",
        "60",
    ]
    command = [sys.executable, "-m", "hybrid.serve", *options, "--port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as said:
            process = subprocess.Popen(command, stderr=said)
        try:
            while (address := re.search(r"http://(\S+):(\d+)\n", log.read_text())) is None:
                if process.poll() is not None:
                    raise RuntimeError(f"the server did not start: {log.read_text().strip()[-300:]}")
                time.sleep(0.05)
            yield Server(address[1], int(address[2]), process, log)
            process.terminate()
            if process.wait(60) != 0:
                raise RuntimeError(f"the server ended with {process.returncode}")
        finally:
            process.kill()
            process.wait(30)


def _told(to: Server, found: Found) -> None:
    """What the process of a server tells that it should not have to tell."""
    if to.process is None or to.log is None:
        return
    if (code := to.process.poll()) is not None:
        found.wrong.append((f"the server ended with {code}", []))
    lines = to.log.read_text(errors="replace").splitlines()
    for line in dict.fromkeys(line for line in lines if line.startswith(("error", "Traceback", "ERROR"))):
        found.wrong.append((f"the log says: {line[:300]}", []))


# ------------------------------------------------------------------------------------------------------------------
# command


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.serving.fuzz",
        description="Send a server malformed requests: bodies grown from valid ones, in odd ways.",
        epilog="Exit code 1 where an answer is an error of the server or no declared one, where /health stalls, or where requests "
        "or memory stay. The first request that shows it is written to a file.",
    )
    p.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="a running server on a loopback address, without keys (starts one, embedded model, cpu)",
    )
    p.add_argument("--requests", type=positive, default=5000, metavar="N", help="how many (5000)")
    p.add_argument("--most", type=positive, default=32, metavar="K", help="in flight at any time (32)")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="of everything that is drawn (0)")
    p.add_argument("--stall", type=amount, default=0.5, metavar="SECONDS", help="longest wait for /health (0.5)")
    p.add_argument("--limit", type=amount, default=7200.0, metavar="SECONDS", help="give up after this time (7200)")
    p.add_argument(
        "--replay", type=Path, metavar="FILE", help="send the requests of a file that this command has written"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    rounds = _asked(args)
    with _to(args.url) as to:
        began = time.perf_counter()
        found = asyncio.run(asyncio.wait_for(_rounds(to, rounds, args), args.limit))
        seconds = time.perf_counter() - began
        _told(to, found)
        print(json.dumps(_figures_of(args, found, seconds)) if args.json else _line(args, found, seconds))
        for what, requests in found.wrong[:20]:
            print(f"wrong: {what}{f' ({requests[0].about})' if requests else ''}", file=sys.stderr)
        print(f"{len(found.wrong)} wrong", file=sys.stderr)
        _keep(args, found)
    return bool(found.wrong)


def _asked(args: argparse.Namespace) -> list[Sequence[Request | int]]:
    """Rounds of requests."""
    if args.replay is not None:
        return [[Request.of(r) for r in json.loads(args.replay.read_text())["requests"]]]
    ends = [args.requests * i // FIFTHS for i in range(FIFTHS + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


@contextlib.contextmanager
def _to(url: str | None) -> Iterator[Server]:
    if url is None:
        with _server() as to:
            yield to
        return
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1") or parts.scheme != "http" or parts.port is None:
        raise UsageError(f"{url}: fuzzing is for servers on a loopback address of this machine, http://127.0.0.1:PORT")
    yield Server(parts.hostname, parts.port)


def _figures_of(args: argparse.Namespace, found: Found, seconds: float) -> dict[str, Any]:
    return {
        "seed": args.seed,
        "requests": found.requests,
        "statuses": dict(sorted(found.statuses.items())),
        "longest_health_s": round(found.longest, 4),
        "asked_health": found.asked,
        "slowest_s": round(found.slowest[0], 3),
        "slowest": found.slowest[1],
        "memory_bytes": found.memory,
        "seconds": round(seconds, 1),
        "wrong": [what for what, _ in found.wrong[:100]],
    }


def _line(args: argparse.Namespace, found: Found, seconds: float) -> str:
    statuses = ", ".join(f"{n} {status}" for status, n in sorted(found.statuses.items()))
    mib = [f"{m / 2**20:.0f}" for m in (*found.memory[:1], *found.memory[-1:])] or ["?", "?"]
    return (
        f"{found.requests} requests of seed {args.seed}, {args.most} at a time, in {seconds:.0f} s: {statuses}; longest wait for "
        f"/health {found.longest:.3f} s of {found.asked}; resident MiB: {mib[0]} after a fifth, {mib[1]} then"
    )


def _keep(args: argparse.Namespace, found: Found) -> None:
    """Write the first requests that show something wrong."""
    what, requests = next(((w, r) for w, r in found.wrong if r), ("", []))
    if requests:
        path = Path(f"fuzz-{args.seed}.json")
        path.write_text(json.dumps({"wrong": what, "requests": [r.record() for r in requests]}, indent=1) + "\n")
        print(f"{path} holds {what[:200]}: see it again with --replay {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
