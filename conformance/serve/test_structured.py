"""Structured output: every text that a grammar allows validates, and whitespace is bounded."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from itertools import islice
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.support.paths import DEMO
from conformance.support.profile import LONG
from conformance.support.scripted import Script, ScriptedModel, walk
from conformance.support.server import running
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.sampling import ids_of
from hybrid.serve import grammars as processes
from hybrid.serve.errors import ApiError
from hybrid.serve.grammars import Grammars
from hybrid.serve.structured import answer_larks
from hybrid.text.tokenizer import Tokenizer


@cache
def grammars() -> tuple[Tokenizer, Grammars]:
    tokenizer = open_checkpoint(DEMO).tokenizer
    return tokenizer, Grammars(tokenizer, tokenizer.n_rows)


def text_of(schema: dict[str, Any], seed: int, most: int = 3000) -> str | None:
    """One text that the schema's grammar allows; None if it did not end."""
    tokenizer, made = grammars()
    constraint = made.constraint(answer_larks(schema, True), "response_format")
    ids = list(islice(walk(constraint, tokenizer, seed), most))
    return tokenizer.decode(ids) if len(ids) < most else None


scalars = st.one_of(
    st.builds(
        lambda a, b: {"type": "string", "minLength": min(a, b), "maxLength": max(a, b)},
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    st.just({"type": "string"}),
    st.just({"type": "string", "pattern": "^[a-z]{1,6}-[0-9]{2}$"}),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "uuid", "ipv4", "time")]),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-99, 99),
        st.integers(-99, 99),
    ),
    st.builds(lambda a: {"type": "number", "exclusiveMinimum": a, "maximum": a + 7}, st.integers(-50, 50)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(
        st.one_of(st.text('ab"\\\n\u00e9', max_size=4), st.integers(-5, 5), st.none()), min_size=1, max_size=4
    ).map(lambda v: {"enum": v}),
    st.one_of(st.integers(), st.text(max_size=3), st.booleans()).map(lambda v: {"const": v}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def objects(draw: Any) -> dict[str, Any]:
        properties = draw(st.dictionaries(st.text('abcxyz_"', min_size=1, max_size=4), inner, max_size=4))
        required = [k for k in properties if draw(st.booleans())]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    @st.composite
    def lists(draw: Any) -> dict[str, Any]:
        low = draw(st.integers(0, 2))
        return {"type": "array", "items": draw(inner), "minItems": low, "maxItems": low + draw(st.integers(0, 2))}

    return st.one_of(objects(), lists(), st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s}))


SCHEMAS = st.recursive(scalars, containers, max_leaves=8)


@settings(max_examples=200 if LONG else 25)
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_answer_validates(schema: dict[str, Any], seed: int) -> None:
    text = text_of(schema, seed)
    assert text is not None, "a bounded schema's text has an end"
    jsonschema.validate(json.loads(text), schema)


def test_references_and_free_objects() -> None:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    for seed in range(10):
        for schema in (tree, {"type": "object"}):
            text = text_of(schema, seed)
            if text is not None:
                jsonschema.validate(json.loads(text), schema)


def test_whitespace_is_bounded() -> None:
    """Wherever blanks are allowed, at most a new line and sixteen spaces come before another character."""
    tokenizer, made = grammars()
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraint = made.constraint(answer_larks(schema, True), "x")
    for token in tokenizer.encode("{", bos=False):
        constraint.accept(token)
    blanks = ""
    while True:
        blank = [i for i in ids_of(constraint.mask()) if re.fullmatch(rb"\s+", tokenizer.token_bytes(int(i)))]  # type: ignore[arg-type]
        if not blank:
            break
        token = min(blank, key=lambda i: len(tokenizer.token_bytes(int(i))))
        constraint.accept(int(token))
        blanks += tokenizer.decode([int(token)])
        assert len(blanks) <= 17
    assert blanks


def test_masks_are_rows_of_the_matrix_and_copies_are_independent() -> None:
    tokenizer, _ = grammars()
    wide = Grammars(tokenizer, tokenizer.n_rows + 100)
    one = wide.constraint(answer_larks({"enum": ["ab", "ac"]}, True), "x")
    mask = one.mask()
    assert mask is not None and mask.dtype == np.uint32 and len(mask) == -(-(tokenizer.n_rows + 100) // 32)
    other = one.copy()
    for token in tokenizer.encode('"ab"', bos=False):
        one.accept(token)
    assert set(ids_of(one.mask())) == set(tokenizer.eos_ids)  # type: ignore[arg-type]
    assert np.array_equal(other.mask(), mask)  # type: ignore[arg-type]


def test_a_grammar_expects_what_must_follow_and_what_was_chosen_before() -> None:
    """Each token that alone is allowed, and after two texts the blanks of both. What a copy tries is no choice."""
    tokenizer, _ = grammars()
    made = Grammars(tokenizer, tokenizer.n_rows)
    names = {name: {"type": "integer"} for name in ("width", "height", "optional")}
    schema = {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}

    def expected(text: str, way: str = "") -> list[bool]:
        """For each token of the text: the constraint expected it. way `copy`: a copy of the constraint takes the text."""
        constraint = made.constraint(answer_larks(schema, True), "x")
        constraint = constraint.copy() if way else constraint
        found = []
        for token in tokenizer.encode(text, bos=False):
            allowed, likely = ids_of(constraint.mask()), list(constraint.likely())
            assert token in allowed and (len(allowed) > 1 or likely[0] == token)
            found.append(likely[:1] == [token])
            constraint.accept(token)
        return found

    close, wide = (json.dumps(dict.fromkeys(names, 123456789), indent=indent) for indent in (None, 1))
    first = expected(close, "copy")
    assert 0 < sum(first) < len(first) and all(expected(close, "copy") == first for _ in range(2))
    once, twice = (sum(expected(close)) for _ in range(2))
    assert sum(first) < once < twice and sum(expected(close, "copy")) >= twice
    once, twice = (sum(expected(wide)) for _ in range(2))
    assert sum(first) < once < twice
    made.close()


@pytest.mark.parametrize(
    "schema",
    [{"type": "nothing"}, {"$ref": "#/no/where"}, {"$ref": "http://x.example/s"}, {"type": "string", "pattern": "("}],
)
def test_schemas_that_cannot_be_used_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="the schema cannot be used") as caught:
        text_of(schema, 0)
    assert caught.value.status == 400 and caught.value.param == "response_format"


def test_over_http() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    hi = {"messages": [{"role": "user", "content": "Hi"}]}
    with running(lambda: ScriptedModel(Script())) as server:
        for seed in range(5):
            asked = {
                **hi,
                "seed": seed,
                "n": 2,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            }
            for choice in server.post("/v1/chat/completions", asked).json()["choices"]:
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        answer = server.post(
            "/v1/chat/completions", {**hi, "seed": 1, "response_format": {"type": "json_object"}}
        ).json()["choices"][0]
        if answer["finish_reason"] == "stop":
            assert isinstance(json.loads(answer["message"]["content"]), dict)
        shape = {"name": "s", "schema": {"type": "nothing"}, "strict": True}
        refused = server.post(
            "/v1/chat/completions", {**hi, "response_format": {"type": "json_schema", "json_schema": shape}}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "response_format.json_schema.schema.type",
        )


def test_a_server_without_llguidance_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install" in (processes.missing() or "")
    with running(lambda: ScriptedModel(Script())) as server:
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
        for more in (
            {"response_format": {"type": "json_object"}},
            {"tools": [{"type": "function", "function": {"name": "look"}}]},
        ):
            answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **more})
            assert answer.status_code == 400 and "llguidance" in answer.json()["error"]["message"]
