"""Requests that could stall or end a server: each affects only itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import hybrid
from conformance.support.paths import DEMO
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import running, until
from hybrid.checkpoint import open_checkpoint
from hybrid.serve import grammars as module
from hybrid.serve import pools
from hybrid.serve.errors import ApiError, InvalidSchema, from_validation
from hybrid.serve.grammars import Grammars
from hybrid.serve.pools import FairPool
from hybrid.serve.schemas import ALTERNATIVES, DEPTH, PARTS, REFERENCES, VALUES, check, loosened
from hybrid.serve.structured import answer_larks
from hybrid.serve.wire import ChatRequest, CompletionRequest, DetokenizeRequest

HI = [{"role": "user", "content": "Hi"}]
MANY = 300_000
BRACE = open_checkpoint(DEMO).tokenizer.encode("{", bos=False)[0]
CHAIN = {"$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(3000)} | {"a3000": {}}, "$ref": "#/$defs/a0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# ------------------------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}, "prompt"),
        (CompletionRequest, {"prompt": [1] * MANY + [1.5]}, f"prompt[{MANY}]"),
        (CompletionRequest, {"prompt": [[1.5] * 1000] * 300}, "prompt[0][0]"),
        (CompletionRequest, {"prompt": ["a"] * MANY}, "prompt"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "x"}] * 95}] * 3000},
            "messages[0].content[0].type",
        ),
        (ChatRequest, {"messages": HI, "stop": [1] * MANY}, "stop[0]"),
        (ChatRequest, {"messages": HI, "tools": [1] * MANY}, "tools[0]"),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}, "tokens[0]"),
    ],
)
def test_validation_ends_at_the_first_wrong_item(model: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1
    assert from_validation(caught.value.errors(include_url=False)).param == param


def test_json_of_any_shape_is_read_or_refused() -> None:
    with running(lambda: ScriptedModel(Script())) as server:
        for body in (
            b'{"prompt": "a", "temperature": NaN}',
            b'{"prompt": "a", "temperature": 1e999}',
            b'{"input": "a", "metadata": {"a": 1e999}}',
            b'{"prompt": "a", "metadata": {"a": ' + b"1" * 400 + b".0}}",
            b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
            b'{"prompt": ' + b"[" * 100_000,
            b'{"response_format": ' + json.dumps(nested(450)).encode() + b"}",
            b'{"prompt": "\\ud800"}',
            b"\xef\xbb\xbf{}",
        ):
            for path in ("/v1/completions", "/v1/responses", "/v1/chat/completions", "/v1/messages"):
                answer = server.post(path, content=body, headers={"content-type": "application/json"})
                ignored = path == "/v1/completions" and body.startswith(b'{"prompt": "a", "metadata"')
                assert answer.status_code == (200 if ignored else 400), (body[:60], answer.text)
                assert "Infinity" not in answer.text


# ------------------------------------------------------------------------------------------------------------- texts


def test_a_text_that_is_too_long_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel(Script(), ctx=500)
    tokenizer, parts = model.checkpoint.tokenizer, list[int]()
    encode = tokenizer.encode_parts

    def counted(*args: Any, **more: Any) -> Iterator[list[int]]:
        for part in encode(*args, **more):
            parts.append(len(part))
            yield part

    monkeypatch.setattr(tokenizer, "encode_parts", counted)
    with running(lambda: model) as server:
        long = "word " * 200_000
        for path, body in {
            "/v1/completions": {"prompt": long},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
            "/v1/responses": {"input": long},
        }.items():
            answer = server.post(path, body)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert not parts, "refused by the length"
        assert server.post("/v1/completions", {"prompt": "ab " * 6000}).status_code == 400
        assert sum(parts) < 6000, "encoding stops at the limit"


def test_parts_of_a_text_are_the_whole() -> None:
    tokenizer = open_checkpoint(DEMO).tokenizer
    for text in (
        "",
        "def f():\n    return 'é'",
        "ab" * 9000,
        "\n" * 9000,
        "日本語 " * 3000,
        "word " * 9000,
        " " * 9000,
    ):
        parts = list(tokenizer.encode_parts(text))
        assert [i for part in parts for i in part] == tokenizer.encode(text)
        assert len(parts) > 1 or len(text) < 5000
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_clients_are_served_fairly_and_short_work_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "QUANTUM", 0.0)
    done: list[str] = []

    def work(name: str, parts: int) -> Any:
        for _ in range(parts):
            yield
        done.append(name)
        return name

    async def main() -> None:
        pool, first = FairPool("test"), threading.Event()
        asked = [pool.run("a", iter_wait(first), 0)]  # so that all the others wait before one begins
        asked += [pool.run("a", work(f"long {n}", 50), pools.LONG + 5 - n) for n in range(3)]
        asked += [pool.run("a", work("short", 5), 10), pool.run("b", work("other", 30), pools.LONG)]
        tasks = [asyncio.ensure_future(a) for a in asked]
        await asyncio.sleep(0)
        tasks[2].cancel()
        first.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    def iter_wait(event: threading.Event) -> Any:
        event.wait(30)
        yield

    asyncio.run(main())
    assert done == ["short", "other", "long 0", "long 2"]


def test_work_that_fails_is_refused_and_the_pool_continues() -> None:
    async def main() -> None:
        pool = FairPool("test")
        with pytest.raises(ApiError, match="no") as caught:
            await pool.call("a", lambda: (_ for _ in ()).throw(ValueError("no")))
        assert caught.value.status == 400
        assert await pool.call("a", lambda: 5) == 5

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (CHAIN, "s.$defs.a"),
        (nested(DEPTH + 1), "s.items"),
        ({"properties": {f"a{n}": {} for n in range(PARTS + 1)}}, "s.properties.a"),
        ({"anyOf": [{}] * (ALTERNATIVES + 1)}, "s.anyOf"),
        ({"enum": list(range(VALUES + 1))}, "s.enum"),
        ({"items": [{"$ref": "#"}] * (REFERENCES + 1)}, "s.items"),
        ({"type": {}}, "s.type"),
        ({"properties": {"a": {"required": 5}}}, "s.properties.a.required"),
        ({"$defs": {"a": 5}}, "s.$defs.a"),
        ({"allOf": []}, "s.allOf"),
        ({"minLength": -1}, "s.minLength"),
        ({"minimum": "a"}, "s.minimum"),
        ({"minimum": 1e999}, "s.minimum"),
        ({"maxItems": 1e999}, "s.maxItems"),
        ({"maxItems": 1.5}, "s.maxItems"),
        ({"pattern": 5}, "s.pattern"),
        ({"$ref": "#/a/b"}, "s.$ref"),
        ({"properties": {"a": {"default": [1e999]}}}, "s"),
    ],
)
def test_schemas_have_limits_and_a_shape(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as caught:
        check(schema, "s")
    assert caught.value.status == 400 and (caught.value.param or "").startswith(place)


def test_objects_are_closed_by_default() -> None:
    inner = {"properties": {"a": {}}}
    assert (
        loosened({"properties": {"o": inner}, "type": "object"}, 0)["properties"]["o"]["additionalProperties"] is False
    )
    for open_ in (
        {"additionalProperties": True, **inner},
        {"patternProperties": {"x": {}}, **inner},
        {"type": "object"},
        {"properties": {}},
    ):
        assert loosened(open_, 0) == open_
    assert loosened({"allOf": [inner, {"properties": {"b": {}}}]}, 0) == {"allOf": [inner, {"properties": {"b": {}}}]}
    assert loosened(inner, 1) == inner


def test_whole_numbers_of_any_form_and_size_are_numbers() -> None:
    check(
        {"maxItems": 3.0, "maximum": 10**400, "minLength": 10**400, "multipleOf": 0.5, "exclusiveMinimum": True},
        "s",
        True,
    )


def test_a_schema_that_refers_to_itself_is_no_loop() -> None:
    check(
        {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a", "items": {"$ref": "#"}},
        "s",
        True,
    )


def test_a_server_lives_on_whatever_schema_comes() -> None:
    wide = {"allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": {}}} for j in range(4)]} for i in range(6)]}
    with running(lambda: ScriptedModel(Script())) as server:
        for schema in (CHAIN, nested(150), wide, {"pattern": "(a{1000}){1000}", "type": "string"}):
            for asked in (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
                {
                    "tools": [
                        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
                    ]
                },
            ):
                answer = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2, **asked})
                assert answer.status_code in (200, 400), answer.text
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    tokenizer = open_checkpoint(DEMO).tokenizer
    found = Grammars(tokenizer, tokenizer.n_rows)
    yield found
    found.close()


def test_a_grammar_that_ends_its_process_costs_itself_alone(grammars: Grammars) -> None:
    other = grammars.constraint(answer_larks({"type": "array"}, True), "x")
    with pytest.raises(ApiError, match="more time, memory or nesting"):
        grammars.constraint(answer_larks(CHAIN, True), "x")  # the stack of its process
    killed = grammars.constraint(answer_larks({"type": "object"}, True), "x")
    os.kill(killed._grammar._pid, signal.SIGKILL)
    killed.accept(BRACE)
    until(killed.ready)
    with pytest.raises(ValueError, match="more time, memory or nesting"):
        killed.mask()
    again = grammars.constraint(answer_larks({"type": "object"}, True), "x")
    assert again.mask().any() and other.mask().any()
    source = grammars._source
    assert source is not None
    os.kill(source._process.pid, signal.SIGKILL)
    source._process.wait()
    assert grammars.constraint(answer_larks({"type": "integer"}, True), "x").mask().any(), (
        "the source of processes is renewed"
    )


def test_a_mask_that_does_not_come_in_time_ends_its_sequence(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = grammars.constraint(answer_larks({"type": "object"}, True), "x")
    other = grammars.constraint(answer_larks({"type": "array"}, True), "x")
    os.kill(slow._grammar._pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "MASK_SECONDS", 0.2)
    slow.accept(BRACE)
    began = time.monotonic()
    assert not slow.ready(0.01) and other.ready()
    until(slow.ready)
    assert time.monotonic() - began >= 0.1
    with pytest.raises(ValueError, match="more time"):
        slow.mask()
    assert other.mask().any()


def test_memory_of_grammars_is_returned(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MEMORY", 40 << 20)
    held = grammars.constraint(answer_larks({"type": "array"}, True), "x")
    pids = set()
    for n in range(6):
        made = grammars.constraint(answer_larks({"enum": [f"{n}{i:06}" * 6 for i in range(12_000)]}, True), "x")
        pids.add(made._grammar._pid)
        del made
    assert len(pids) == 6
    grammars.constraint(answer_larks({"type": "null"}, True), "x")
    assert grammars.memory() <= 50 << 20
    assert held.mask().any(), "a grammar in use is kept"
    monkeypatch.setattr(module, "LIVE_MEMORY", 1)
    with pytest.raises(ApiError) as caught:
        grammars.constraint(answer_larks({"type": "boolean"}, True), "x")
    assert caught.value.status == 429


def test_copies_and_sequences_of_one_grammar_are_independent(grammars: Grammars) -> None:
    tokenizer = open_checkpoint(DEMO).tokenizer
    larks = answer_larks({"enum": ["ab", "cd"]}, True)
    one, two = grammars.constraint(larks, "x"), grammars.constraint(larks, "x")
    assert one._grammar is two._grammar and np.array_equal(one.mask(), two.mask())
    one.accept(tokenizer.encode('"a', bos=False)[0])
    three = one.copy()
    assert np.array_equal(one.mask(), three.mask()) and not np.array_equal(one.mask(), two.mask())
    assert one._grammar.sequences == 3
    del three
    two.accept(tokenizer.encode('"', bos=False)[0])
    assert one._grammar.sequences == 2
    for _ in range(20):  # dropped while a mask is awaited
        other = grammars.constraint(larks, "x")
        other.accept(tokenizer.encode('"', bos=False)[0])
        del other
    until(lambda: one.copy().ready(0.1))
    assert len(one._grammar._answers) <= 4


def test_threads_share_a_grammar(grammars: Grammars) -> None:
    larks, found = answer_larks({"type": "array", "items": {"type": "integer"}}, True), list[int]()
    tokenizer = open_checkpoint(DEMO).tokenizer

    def steps() -> None:
        one = grammars.constraint(larks, "x")
        for _ in range(40):
            token = next(
                i
                for i in np.flatnonzero(np.unpackbits(one.mask().view(np.uint8), bitorder="little"))
                if i not in tokenizer.eos_ids
            )
            one.accept(int(token))
        found.append(1)

    threads = [threading.Thread(target=steps) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(found) == 8


# ------------------------------------------------------------------------------------------------------- whole server


@pytest.mark.slow
def test_requests_do_not_wait_for_hostile_ones() -> None:
    """While long texts and large schemas are processed, the server answers other requests."""
    with running(lambda: ScriptedModel(Script(), ctx=1 << 20)) as server:
        answered: list[int] = []

        def hostile(path: str, body: Any) -> None:
            answered.append(server.post(path, body).status_code)

        words = {"prompt": "qwerty asdf " * 60_000}
        schema = {"enum": [f"{i:06}" * 6 for i in range(VALUES)]}
        asked = {
            "messages": HI,
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        }
        work = [("/tokenize", words)] * 4 + [("/v1/chat/completions", asked)] * 2
        threads = [threading.Thread(target=hostile, args=w) for w in work]
        for t in threads:
            t.start()
        between = 0
        while any(t.is_alive() for t in threads):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            assert server.http.get("/metrics").status_code == 200
            between += any(t.is_alive() for t in threads)
        assert between >= 3
        assert answered == [200] * 6


def test_client_supplied_names_cannot_break_response_headers() -> None:
    with running(lambda: ScriptedModel(Script())) as server:
        for name in ("a\nb", "a\r\nx-forged: 1", "a\x00b", "\u00e9\u2028"):
            tools = [{"type": "function", "function": {"name": "f"}}, {"type": name}]
            answer = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1, "tools": tools})
            assert answer.status_code == 200 and "x-forged" not in answer.headers


def test_refusals_of_grammars_are_one_line(grammars: Grammars) -> None:
    with pytest.raises(ApiError, match="regex parse error: unclosed character class"):
        grammars.constraint(answer_larks({"type": "string", "pattern": "["}, True), "x")
    wide = {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(3)]} for i in range(5)]}
    one = grammars.constraint(answer_larks(wide, True), "x")
    one.accept(BRACE)
    with pytest.raises(InvalidSchema, match="cannot be followed further") as caught:
        one.mask()
    said = str(caught.value)
    assert "\n" not in said and "state" not in said and "items" in said


def test_an_answer_that_has_ended_keeps_no_grammar() -> None:
    """Requests have deadlines, so the engine keeps them for a while after their end, but not their constraints."""
    with hybrid.load(DEMO, device="cpu", slots=2, ctx=128, precision="exact") as model:
        found = Grammars(model.checkpoint.tokenizer, model.hparams.vocab)
        try:
            for n in range(3):
                constraint = found.constraint(answer_larks({"enum": [f"{n}"]}, True), "x")
                assert model.submit("a", max_tokens=8, constraint=constraint, deadline=600.0).result(60).finish == "eos"
                del constraint
            until(lambda: all(g.sequences == 0 for g in found._all))
        finally:
            found.close()
