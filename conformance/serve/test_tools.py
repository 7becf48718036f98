"""Tool calls: every call that the grammars allow is parsed whole, however it is cut; and conversations with results."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import jsonschema
import openai
import pytest

from conformance.support.marked import TEMPLATES, with_marks
from conformance.support.paths import DEMO
from conformance.support.scripted import Script, ScriptedModel, walk
from conformance.support.server import running
from hybrid.checkpoint import open_checkpoint
from hybrid.serve.answers import Answer
from hybrid.serve.errors import ApiError
from hybrid.serve.grammars import Grammars
from hybrid.serve.responses import ResponsesRequest
from hybrid.serve.tools import Format, Offer, parameters
from hybrid.serve.tools_json import JSON
from hybrid.serve.tools_marked import FUNCTION_GEMMA, GEMMA4, marked
from hybrid.serve.tools_written import written
from hybrid.serve.wire import Message, Tool
from hybrid.text.tokenizer import USER_DEFINED, StreamDecoder, Tokenizer


def tool(name: str, properties: dict[str, Any], required: list[str], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "description": f"About {name}.", "parameters": schema}}


KIND = {"enum": ["dry", 'we"t', 3, None]}
RAW = [
    tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}, "kind": KIND}, ["city", "kind"]),
    tool(
        "plan",
        {"steps": {"type": "array", "items": {"$ref": "#/$defs/step"}}, "ok": {"type": "boolean"}},
        [],
        **{
            "$defs": {
                "step": {
                    "type": "object",
                    "properties": {"s": {"type": "string"}, "then": {"$ref": "#/$defs/step"}},
                    "additionalProperties": False,
                }
            }
        },
    ),
    {"type": "function", "function": {"name": "now"}},
]
TOOLS = [f for t in RAW if (f := Tool.model_validate(t).function)]


FAMILIES = {"gemma4": GEMMA4, "functiongemma": FUNCTION_GEMMA}


@cache
def family(name: str) -> tuple[Tokenizer, Grammars, Format]:
    """The embedded tokenizer, of FAMILIES with the marks of tool calls."""
    tokenizer = with_marks(name, USER_DEFINED) if name in FAMILIES else open_checkpoint(DEMO).tokenizer
    kind = JSON if name == "json" else (marked if name in FAMILIES else written)(tokenizer, TEMPLATES[name])
    assert kind is not None
    return tokenizer, Grammars(tokenizer, tokenizer.n_rows), kind


def read(
    kind: Format, offered: Offer, tokenizer: Tokenizer, ids: list[int], seed: int
) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """(content, the reader's calls, the calls that the deltas build) of tokens whose text comes late, cut at random."""
    reader, cut, deltas = Answer(tokenizer, None, kind.reader(offered)), random.Random(seed), list[dict[str, Any]]()
    text, decoder = "", StreamDecoder(tokenizer)
    for token in ids:
        text += decoder.push(token)
        n = cut.randint(0, len(text))
        deltas += reader.push(text[:n], (token,))
        text = text[n:]
    deltas += [*reader.push(text + decoder.flush(), ()), *reader.end()]
    joined: list[dict[str, Any]] = []
    for call in (c for d in deltas for c in d.get("tool_calls", ())):
        if call["index"] == len(joined):
            assert call["id"] and call["type"] == "function"
            joined.append(
                {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}
            )
        joined[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return "".join(d.get("content", "") for d in deltas), reader.calls, joined


@pytest.mark.parametrize("name", ["json", "gemma3_tools", *FAMILIES])
@pytest.mark.parametrize(
    ("offered", "least", "most"),
    [
        (Offer(TOOLS), 0, 16),
        (Offer(TOOLS, required=True), 1, 16),
        (Offer(TOOLS[:1], required=True, several=False), 1, 1),
    ],
    ids=["auto", "required", "named"],
)
def test_calls_that_the_grammar_allows_are_parsed(name: str, offered: Offer, least: int, most: int) -> None:
    tokenizer, grammars, kind = family(name)
    begun = {"json": "[", "gemma3_tools": 'As follows: <tool_call>\n{"name": "' if least == 0 else ""}
    begin = tokenizer.encode(begun[name], bos=False) if name in begun else [tokenizer.token_id(FAMILIES[name].open)]
    ended = 0
    for seed in range(14):
        constraint = grammars.constraint(kind.larks(offered, (None, False)), "tools")
        ids = list(islice(walk(constraint, tokenizer, seed, begin if seed % 2 and offered.several else ()), 1500))
        if len(ids) == 1500:
            continue
        ended += 1
        text = tokenizer.decode(ids)
        content, calls, joined = read(kind, offered, tokenizer, ids, seed)
        assert calls == joined and least <= len(calls) <= most
        assert content == ("" if calls and name == "json" else content)
        if not calls:
            assert content == text
        for call in calls:
            made = {t.name: t for t in offered.tools}[call["function"]["name"]]
            jsonschema.validate(json.loads(call["function"]["arguments"]), parameters(made))
    assert ended > 10


def one_tool(schema: dict[str, Any]) -> Offer:
    """A strict function with a parameter of the schema."""
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": whole, "strict": True}})
    assert tool.function is not None
    return Offer([tool.function], required=True, several=False)


FOLLOWED: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^[a-c]{2,4}/x$", "maxLength": 5},
    {"type": "string", "pattern": "[$^|]b\\$|c\n", "maxLength": 9},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "maxLength": 0},
    {"type": "integer", "minimum": 0, "exclusiveMaximum": 9},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"type": "null"}, "maxItems": 0},
    {"type": ["object", "null"], "additionalProperties": {"type": "boolean"}},
    {"type": "object", "additionalProperties": False},
]


@pytest.mark.parametrize("schema", FOLLOWED, ids=lambda schema: json.dumps(schema)[:60])
def test_strict_schemas_are_followed_between_marks(schema: dict[str, Any]) -> None:
    tokenizer, grammars, kind = family("gemma4")
    ended, offered = 0, one_tool(schema)
    for seed in range(6):
        constraint = grammars.constraint(kind.larks(offered, (None, False)), "tools")
        ids = list(islice(walk(constraint, tokenizer, seed), 300))
        if len(ids) < 300:
            ended += 1
            _, calls, _ = read(kind, offered, tokenizer, ids, seed)
            jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), parameters(offered.tools[0]))
    assert ended > 2


def test_a_function_without_parameters_gets_none() -> None:
    tokenizer, grammars, kind = family("gemma4")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    function = Tool.model_validate(tool).function
    assert function is not None
    offered = Offer([function], required=True, several=False)
    for seed in range(4):
        constraint = grammars.constraint(kind.larks(offered, (None, False)), "tools")
        ids = list(islice(walk(constraint, tokenizer, seed), 300))
        _, calls, _ = read(kind, offered, tokenizer, ids, seed)
        assert calls[0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "format": "date"}, "x.format"),
        ({"type": "string", "pattern": "^a|b$"}, "x.pattern"),
        ({"type": "string", "maxLength": 5000}, "x.maxLength"),
        ({"type": "array", "items": {"type": "string", "format": "date"}}, "x.items.format"),
        ({"type": "array", "prefixItems": [{}]}, "x.prefixItems"),
        ({"type": "object", "required": ["y"]}, "x.required"),
        ({"anyOf": [{"type": "null"}, {"minimum": 3}]}, "x.anyOf[1].minimum"),
        ({"allOf": [{"type": "string"}]}, "x.allOf"),
    ],
)
def test_strict_schemas_that_no_grammar_follows_are_refused(schema: dict[str, Any], place: str) -> None:
    _, grammars, kind = family("gemma4")
    with pytest.raises(ApiError, match=re.escape(f"parameters.properties.{place} cannot be followed by this model")):
        kind.larks(one_tool(schema), (None, False))
    loose = Offer([one_tool(schema).tools[0].model_copy(update={"strict": False})])
    grammars.constraint(kind.larks(loose, (None, False)), "tools")


def test_calls_beside_a_schema() -> None:
    """An answer may be JSON of a schema or a call; references of both still resolve."""
    tokenizer, grammars, kind = family("json")
    schema = {
        "$defs": {"n": {"type": "string", "maxLength": 4}},
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/n"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    seen = set()
    for seed in range(16):
        constraint = grammars.constraint(kind.larks(Offer(TOOLS), (schema, True)), "tools")
        ids = list(islice(walk(constraint, tokenizer, seed), 1500))
        content, calls, _ = read(kind, Offer(TOOLS), tokenizer, ids, seed)
        seen.add(bool(calls))
        if not calls:
            jsonschema.validate(json.loads(content), schema)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "text", ["plain", '{"nam', '{"name": "nobody", "parameters": {}}', "[1, 2]", "", '{"name": "weather']
)
def test_text_that_calls_nothing_is_content(text: str) -> None:
    tokenizer = open_checkpoint(DEMO).tokenizer
    content, calls, _ = read(JSON, Offer(TOOLS), tokenizer, tokenizer.encode(text, bos=False), 1)
    assert (content, calls) == (text, [])


ROME = '{"city": "Rome", "kind": "dry"}'
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ROME}},
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
]


def test_a_conversation_that_ends_on_results() -> None:
    messages = [Message.model_validate(m) for m in CONVERSATION]
    turns, tools = JSON.turns(messages, Offer(TOOLS))
    assert tools is None and [t["role"] for t in turns] == ["system", "user", "assistant", "user"]
    assert turns[3]["content"] == "Result of weather:\nsunny\n\nResult of now:\nnoon"
    constraint = family("json")[1].constraint(JSON.larks(Offer(TOOLS), (None, False)), "tools")
    for token in family("json")[0].encode(
        turns[2]["content"], bos=False
    ):  # it is written as the model itself writes it
        assert family("json")[0] and (constraint.mask()[token // 32] >> (token % 32)) & 1  # type: ignore[index]
        constraint.accept(token)
    _, _, kind = family("gemma4")
    turns, tools = kind.turns(messages, Offer(TOOLS))
    assert tools is not None and [t["function"]["name"] for t in tools] == ["weather", "plan", "now"]
    assert turns[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "kind": "dry"}
    assert turns[3] == {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "a"}


@pytest.mark.parametrize("name", ["json", "gemma4"])
def test_an_id_used_again_names_the_call_nearest_before(name: str) -> None:
    def called(function: str) -> dict[str, Any]:
        call = {"id": "call_0", "type": "function", "function": {"name": function, "arguments": "{}"}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def answered(text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "call_0", "content": text}

    given = [called("weather"), answered("sunny"), called("now"), answered("noon")]
    turns, _ = family(name)[2].turns([Message.model_validate(m) for m in given], None)
    if name == "json":
        assert [t["content"] for t in turns[1::2]] == ["Result of weather:\nsunny", "Result of now:\nnoon"]
    else:
        assert [t["name"] for t in turns if t["role"] == "tool"] == ["weather", "now"]


@pytest.mark.parametrize("name", ["json", "gemma4"])
def test_parts_reach_the_template(name: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns, _ = family(name)[2].turns([Message.model_validate({"role": "user", "content": parts})], None)
    assert turns == [{"role": "user", "content": parts}]
    asked = ResponsesRequest.model_validate(
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]}
    )
    assert family(name)[2].turns(asked.chat().messages, None)[0] == turns


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "tool_call_id": "x", "content": "y"}], "messages[0].tool_call_id"),
        (
            [
                *CONVERSATION[:2],
                {**CONVERSATION[2], "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1"}}]},
            ],
            None,
        ),
    ],
)
def test_results_and_arguments_that_cannot_be(messages: list[Any], param: str | None) -> None:
    with running(lambda: ScriptedModel(Script())) as server:
        answer = server.post("/v1/chat/completions", {"messages": messages})
        assert answer.status_code == 400
        assert param is None or answer.json()["error"]["param"] == param


@pytest.mark.slow
def test_the_official_client_gets_calls_whole_and_streamed() -> None:
    asked: dict[str, Any] = {
        "model": "demo-gemma3",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": RAW,
        "max_tokens": 400,
    }
    with (
        running(lambda: ScriptedModel(Script(), ctx=4000)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
    ):
        found = 0
        for seed in range(8):
            choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
            more: dict[str, Any] = {**asked, "seed": seed, "tool_choice": choices[seed % 2]}
            whole = client.chat.completions.create(**more).choices[0]
            if whole.finish_reason == "length":
                continue
            found += 1
            assert whole.finish_reason == "tool_calls" and whole.message.content is None
            streamed: dict[int, list[str]] = {}
            finish = None
            for chunk in client.chat.completions.create(**more, stream=True):
                for call in chunk.choices[0].delta.tool_calls or ():
                    name, arguments = streamed.setdefault(call.index, ["", ""])
                    assert call.function is not None
                    streamed[call.index] = [
                        name + (call.function.name or ""),
                        arguments + (call.function.arguments or ""),
                    ]
                finish = chunk.choices[0].finish_reason or finish
            calls = whole.message.tool_calls
            assert calls and finish == "tool_calls"
            assert list(streamed.values()) == [[c.function.name, c.function.arguments] for c in calls]  # type: ignore[union-attr]
            back: Callable[..., Any] = client.chat.completions.create
            turns = [
                *asked["messages"],
                whole.message,
                *({"role": "tool", "tool_call_id": c.id, "content": "4"} for c in calls),
            ]
            assert (
                back(**{**asked, "messages": turns, "tool_choice": "none"}).choices[0].message.content == "some text."
            )
        assert found > 3
