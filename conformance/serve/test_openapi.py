"""The OpenAPI document and the server agree: whatever is sent, declared or not, no answer is a 5xx and each is as
declared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.support.profile import LONG
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running
from hybrid.serve.errors import ANTHROPIC, OLLAMA
from hybrid.serve.openapi import ANTHROPIC_ERROR, ERROR, OLLAMA_ERROR

POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/tokenize",
    "/detokenize",
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: ScriptedModel(Script(text="ok"), ctx=2000)) as found:
        yield found


def schemas(server: Running) -> dict[str, Any]:
    document = server.app.openapi()
    parts = document["components"]["schemas"]
    out = {}
    for path in POSTS:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        out[path] = {
            **json.loads(json.dumps(body).replace("#/components/schemas/", "#/$defs/")),
            "$defs": json.loads(json.dumps(parts).replace("#/components/schemas/", "#/$defs/")),
        }
    return out


def values(schema: Any, parts: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Small values of a schema of the document; any value where the schema does not restrict it."""
    if not isinstance(schema, dict) or depth > 12:
        return junk
    if "$ref" in schema:
        return values(parts[schema["$ref"].rpartition("/")[2]], parts, depth + 1)
    if "anyOf" in schema:
        return st.one_of([values(s, parts, depth + 1) for s in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {k: values(v, parts, depth + 1) for k, v in schema["properties"].items()}
        required = {k: v for k, v in fields.items() if k in schema.get("required", ())}
        optional = {k: v for k, v in fields.items() if k not in required}
        chosen = st.sets(st.sampled_from(sorted(optional)), max_size=3) if optional else st.just(set())
        return chosen.flatmap(lambda names: st.fixed_dictionaries({**required, **{n: optional[n] for n in names}}))
    if kind == "object":
        return st.dictionaries(
            st.text(max_size=5), values(schema.get("additionalProperties"), parts, depth + 1), max_size=3
        )
    if kind == "array":
        low = schema.get("minItems", 0)
        return st.lists(values(schema.get("items"), parts, depth + 1), min_size=low, max_size=low + 2)
    if kind == "string":
        return (
            st.from_regex(schema["pattern"], fullmatch=True)
            if "pattern" in schema
            else st.text(min_size=schema.get("minLength", 0), max_size=9)
        )
    if kind == "integer":
        top = schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1)
        return st.integers(int(schema.get("minimum", -9)), int(top))
    if kind == "number":
        return st.floats(
            schema.get("minimum", schema.get("exclusiveMinimum", -9)),
            schema.get("maximum", 9),
            exclude_min="exclusiveMinimum" in schema,
        )
    return st.booleans() if kind == "boolean" else st.none() if kind == "null" else junk


def error_of(path: str) -> dict[str, Any]:
    """The declared refusal of an address."""
    return ANTHROPIC_ERROR if path.startswith(ANTHROPIC) else OLLAMA_ERROR if path.startswith(OLLAMA) else ERROR


def check(server: Running, path: str, body: Any) -> int:
    """The status of an answer, which must be as declared."""
    answer = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    declared = server.app.openapi()["paths"][path]["post"]["responses"]
    assert answer.status_code < 500, (answer.text, body)
    assert str(answer.status_code) in declared, (answer.status_code, body)
    assert "Traceback" not in answer.text and "/hybrid/" not in answer.text
    if answer.status_code >= 400:
        jsonschema.validate(answer.json(), error_of(path))
    elif answer.headers["content-type"].startswith("application/json"):
        assert isinstance(answer.json(), dict)
    return answer.status_code


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_declared_requests_are_never_a_5xx(server: Running, path: str) -> None:
    seen: set[int] = set()

    @settings(max_examples=120 if LONG else 12)
    @given(values(schemas(server)[path], schemas(server)[path]["$defs"]))
    def each(body: Any) -> None:
        seen.add(check(server, path, body))

    each()
    assert seen


VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 2}},
    "/api/show": {"model": "demo-gemma3"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}


@pytest.mark.parametrize("path", POSTS)
def test_one_field_of_a_good_request_that_is_anything(server: Running, path: str) -> None:
    names = sorted(schemas_of(server, path))
    assert check(server, path, VALID[path]) == 200

    @settings(max_examples=200 if LONG else 25)
    @given(st.sampled_from(names), junk)
    def each(name: str, value: Any) -> None:
        check(server, path, {**VALID[path], name: value})

    each()


def schemas_of(server: Running, path: str) -> dict[str, Any]:
    schema = schemas(server)[path]
    name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else None
    return (schema["$defs"][name] if name else schema)["properties"]


def test_the_document_names_every_endpoint(server: Running) -> None:
    document = server.http.get("/openapi.json").json()
    lists = ("/v1/models", "/api/tags", "/api/ps", "/api/version")
    assert {*lists, "/health", "/ready", "/metrics", *POSTS} <= set(document["paths"])
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"], path
    assert "security" not in document
