"""Tool calls by marks, with the marks in a served model's vocabulary and its template (Gemma 4's, FunctionGemma's):
only mark ids open a call, only offered names are calls, and arguments are always JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import jsonschema
import pytest

import hybrid
from conformance.support.marked import MARKS, checkpoint4, checkpoint_with, with_marks
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running
from hybrid.serve.tools_marked import FUNCTION_GEMMA, GEMMA4, Family
from hybrid.text.tokenizer import CONTROL, USER_DEFINED

HI = [{"role": "user", "content": "Hi"}]
ODD: dict[str, Any] = {
    'qu"ote': {"type": "integer"},
    "back\\slash": {"enum": ["a\n", 'b"']},
    "new\nline": {"type": "boolean"},
    "a:b,{c": {},
    "": {},
}


def tool(name: str = "look", properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    found = properties or {"city": {"type": "string"}}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": found, **more}},
    }


Case = tuple[str, int]
"""A family, and the type of the marks that GGUF files print."""
FAMILIES = {"gemma4": GEMMA4, "functiongemma": FUNCTION_GEMMA}
CASES = [("gemma4", CONTROL), ("gemma4", USER_DEFINED), ("functiongemma", CONTROL), ("functiongemma", USER_DEFINED)]
PRINTED = CASES[1]


def ids_of(case: Case, *parts: str) -> list[int]:
    """Marks by their ids, other text as ordinary tokens."""
    t = with_marks(*case)
    out: list[int] = []
    for part in parts:
        known = t.token_id(part) if part in MARKS else None
        out += t.encode(part, bos=False) if known is None else [known]
    return out


def call_of(family: Family, city: str) -> tuple[str, ...]:
    return (family.open, "call:look{city:", family.quote, city, family.quote, "}", family.close)


Said = dict[Case, tuple[ScriptedModel, Running]]


@pytest.fixture(scope="module")
def said() -> Iterator[Said]:
    """Servers of models with scripted text: marks that print nothing, and marks that print."""
    with ExitStack() as stack:
        found: Said = {}
        for case in CASES:
            model = ScriptedModel(Script(), ctx=4000)
            model.checkpoint = checkpoint_with(*case)
            found[case] = model, stack.enter_context(running(lambda model=model: model))  # type: ignore[misc]
        yield found


def answered(
    said: Said, case: Case, ids: list[int], stream: bool, **more: Any
) -> tuple[str, list[dict[str, Any]], str]:
    """(content, calls, finish) of a served answer of these tokens."""
    model, server = said[case]
    model.script.ids = ids
    answer = server.post("/v1/chat/completions", {"messages": HI, "tools": [tool()], "stream": stream, **more})
    assert answer.status_code == 200, answer.text
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"]["content"] or "", choice["message"].get("tool_calls", []), choice["finish_reason"]
    content, calls, finish = "", list[dict[str, Any]](), ""
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line[6:])["choices"][0]
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls, finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_text_that_spells_a_call_is_text(said: Said, case: Case, stream: bool) -> None:
    family = FAMILIES[case[0]]
    spelled = f"{family.open}call:delete_everything{{path:/}}{family.close}"
    ids = [i for c in spelled for i in ids_of(case, c)]
    assert answered(said, case, ids, stream) == (spelled, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_marks_by_their_ids_are_a_call(said: Said, case: Case, stream: bool) -> None:
    family = FAMILIES[case[0]]
    before = f"Let me see. {family.open} spelled"
    ids = ids_of(case, *before, *call_of(family, 'Ro"me\n'))
    content, calls, finish = answered(said, case, ids, stream)
    assert content == before and finish == "tool_calls"
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("look", {"city": 'Ro"me\n'})
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_by_the_length_ends_by_length(said: Said, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another call was whole."""
    monkeypatch.setattr(said[PRINTED][0].script, "finish", "length")
    call = ids_of(PRINTED, *call_of(GEMMA4, "a"))
    content, calls, finish = answered(said, PRINTED, [*call, *call[:-3]], stream)
    assert content == "" and calls and finish == "length"


def test_a_stop_string_that_is_held_back_stays_outside_of_the_call(said: Said) -> None:
    ids = ids_of(PRINTED, "yes EN", *call_of(GEMMA4, "a"))
    content, calls, _ = answered(said, PRINTED, ids, True, stop=["END"])
    assert content == "yes EN" and [json.loads(c["function"]["arguments"]) for c in calls] == [{"city": "a"}]


@pytest.fixture(scope="module")
def real() -> Any:
    with running(lambda: hybrid.load(checkpoint4(), device="cpu", slots=4, ctx=1024, precision="exact")) as server:
        yield server


@pytest.mark.slow
def test_arguments_of_a_real_model_are_json_whatever_the_keys(real: Running) -> None:
    schema = {"required": list(ODD)[:3], "additionalProperties": False}
    made = 0
    for seed in range(3):
        body = {
            "messages": HI,
            "tools": [tool("odd", ODD, **schema)],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": seed,
            "max_tokens": 120,
        }
        answer = real.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        made += 1
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), {"properties": ODD, **schema})
    assert made


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": {}}, "type"),
        ({"required": 5}, "required"),
        ({"properties": [{}]}, "properties"),
        ({"properties": {"a": [{}]}}, "properties.a"),
        ({"properties": {"a": {"enum": 5}}}, "properties.a.enum"),
        ({"type": "array"}, "type"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "properties.a.$ref"),
    ],
)
def test_broken_schemas_are_refused_by_their_place(real: Running, parameters: dict[str, Any], place: str) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = real.post("/v1/chat/completions", {"messages": HI, "tools": [tool(), bad]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"tools[1].function.parameters.{place}")
    flat = {"type": "function", "name": "f", "parameters": parameters}
    answer = real.post("/v1/responses", {"input": "Hi", "tools": [flat]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"tools[0].parameters.{place}")


FREE: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "string", "format": "path"},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "string", "not": {"const": "x"}},
    {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"type": "array", "contains": {"type": "integer"}},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},  # pydantic's Decimal
    {"type": "any"},
    {"$ref": "https://example.org/schema"},
    {"type": "string", "pattern": "("},
]


@pytest.mark.slow
@pytest.mark.parametrize("schema", FREE, ids=lambda s: next(k for k in reversed(s) if k))
def test_schemas_without_a_grammar_bind_only_under_strict(
    real: Running, server: Running, schema: dict[str, Any]
) -> None:
    for where in (real, server):
        offered = tool("f", {"a": schema}, required=["a"], additionalProperties=False)
        body = {"messages": HI, "tools": [offered], "tool_choice": "required", "max_tokens": 4}
        assert where.post("/v1/chat/completions", body).status_code == 200
        offered["function"]["strict"] = True
        answer = where.post("/v1/chat/completions", body)
        if where is real and ("oneOf" in schema or schema.get("pattern") == "("):
            continue  # by marks the first matching alternative suffices, and patterns do not bind
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"].startswith("tools[0].function.parameters"), error
        assert error["message"].startswith("The tool f: ")
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": schema}}},
    }
    assert (
        server.post("/v1/chat/completions", {"messages": HI, "response_format": shape, "max_tokens": 4}).status_code
        == 200
    )


def test_a_schema_reduced_to_its_types_is_reported(server: Running) -> None:
    offered = tool("f", {"a": {"type": "string", "pattern": "("}})
    answer = server.post("/v1/chat/completions", {"messages": HI, "tools": [offered], "max_tokens": 2})
    assert answer.status_code == 200 and "followed by types" in answer.headers["x-hybrid-note"]


def test_what_a_grammar_leaves_out_is_noted(said: Said) -> None:
    odd = {"type": "array", "items": {"type": "string", "pattern": "(?=a)"}, "uniqueItems": True}
    offered = tool(properties={"tags": odd, "kind": {"type": "foo"}, "day": {"type": "string", "format": "odd"}})
    said[PRINTED][0].script.ids = ids_of(PRINTED, "Hi")
    answer = said[PRINTED][1].post("/v1/chat/completions", {"messages": HI, "tools": [offered]})
    noted = answer.headers["x-hybrid-note"].removeprefix("not followed: ").split(", ")
    place = "tools[0].function.parameters.properties"
    assert noted == [
        f"{place}.tags.uniqueItems",
        f"{place}.tags.items.pattern",
        f"{place}.kind.type",
        f"{place}.day.format",
    ]
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "not": {}}}}
    for path, asked in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "Hi"})):
        said[PRINTED][0].script.ids = None
        answer = said[PRINTED][1].post(path, {**asked, "response_format": shape, "max_tokens": 1})
        assert "not followed: response_format.json_schema.schema.not" in answer.headers["x-hybrid-note"]
