"""/v1/messages with Anthropic's client, and as coding tools send it: text, thinking, uses of tools, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running, until
from hybrid.engine.request import Completion, Event, Timings, Usage
from hybrid.serve.forms import Head, Tokens
from hybrid.serve.messages import MessagesForm
from hybrid.serve.running import Item
from hybrid.serve.settings import Settings

anthropic = pytest.importorskip("anthropic")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": SCHEMA, "strict": True}
HI: list[Any] = [{"role": "user", "content": "What is a file?"}]
ASKED: dict[str, Any] = {"model": "demo-gemma3", "max_tokens": 400, "messages": HI}


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel(Script(), ctx=16_000)


@pytest.fixture(scope="module")
def scripted(model: ScriptedModel) -> Iterator[Running]:
    with running(lambda: model) as found:
        yield found


@pytest.fixture(scope="module")
def client(scripted: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as found:
        yield found


def prompt(model: ScriptedModel) -> str:
    return model.decode(model.script.submitted[-1]["prompt"])


def test_text_and_what_it_cost(client: Any) -> None:
    found = client.messages.create(**ASKED, system="Be brief.")
    assert [b.to_dict() for b in found.content] == [{"type": "text", "text": "some text."}]
    assert (found.stop_reason, found.stop_sequence, found.role) == ("end_turn", None, "assistant")
    counted = client.messages.count_tokens(model="demo-gemma3", messages=HI, system="Be brief.").input_tokens
    assert found.usage.cache_read_input_tokens == 3 and found.usage.input_tokens == counted - 3
    assert found.usage.output_tokens > 1


def test_why_an_answer_stops(server: Running) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked = {**ASKED, "max_tokens": 20, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**asked)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 20)
        text = whole.content[0].text
        cut = client.messages.create(**asked, stop_sequences=["nowhere", text[5:9]])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", text[5:9])
        assert "".join(b.text for b in cut.content) == text[: text.index(text[5:9])]
        long = [{"role": "user", "content": "word " * 490}]
        full = client.messages.create(**{**asked, "max_tokens": 400, "messages": long}, stop_sequences=["\0"])
        assert full.stop_reason == "model_context_window_exceeded" and full.usage.output_tokens < 30


def test_events_build_up_the_message(client: Any) -> None:
    for seed, more, stops in [
        (1, {}, "end_turn"),
        (2, {"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_use"),
        (5, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}, "tool_use"),
    ]:
        asked = {**ASKED, **more, "extra_body": {"seed": seed}}
        events = [e.to_dict() for e in client.messages.create(**asked, stream=True)]
        assert [e["type"] for e in events[:2]] == ["message_start", "content_block_start"]
        assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
        blocks: list[str] = []
        for e in events:
            if e["type"] == "content_block_start":
                assert e["index"] == len(blocks)
                blocks.append("")
            elif e["type"] == "content_block_delta":
                assert e["index"] == len(blocks) - 1
                blocks[-1] += e["delta"].get("text") or e["delta"].get("partial_json")
        whole = client.messages.create(**asked)
        parts = [b.text if b.type == "text" else b.input for b in whole.content]
        assert [b if stops == "end_turn" else json.loads(b) for b in blocks] == parts
        with client.messages.stream(**asked) as stream:  # the client's own assembly agrees
            final = stream.get_final_message()
        assert [b.text if b.type == "text" else b.input for b in final.content] == parts
        assert final.stop_reason == whole.stop_reason == stops
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.usage.cache_read_input_tokens == 3


def test_uses_of_tools_and_their_results(client: Any, model: ScriptedModel) -> None:
    one = {"type": "any", "disable_parallel_tool_use": True}
    found = client.messages.create(**ASKED, tools=[TOOL], tool_choice=one, extra_body={"seed": 3})
    (use,) = found.content
    jsonschema.validate(use.input, SCHEMA)
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "gone"}], "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    turns = [*HI, {"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    asked = {**ASKED, "messages": turns, "tools": [TOOL], "tool_choice": {"type": "none"}}
    assert client.messages.create(**asked).content[0].text == "some text."
    said = prompt(model)
    assert "Error: gone" in said and said.index("look") < said.index("gone") < said.index("And now?")


def test_structured_output(client: Any) -> None:
    shape = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = client.messages.create(**ASKED, output_config=shape, extra_body={"seed": 4})
    jsonschema.validate(json.loads(found.content[0].text), SCHEMA)


def test_thinking_is_a_block_before_the_text() -> None:
    """Also what a reader says of an answer is told in order."""

    class Thinks:
        calls: list[Any] = []  # noqa: RUF012

        def push(self, text: str, ids: Any) -> list[dict[str, Any]]:
            return [{"reasoning_content" if ids[0] < 2 else "content": text}]

        def end(self) -> list[dict[str, Any]]:
            return []

    tokens = Tokens(ScriptedModel(Script()).checkpoint.tokenizer)
    form = MessagesForm(Head("m", "f", tokens, None, frozenset(), 5), Thinks())
    done = Completion("", (0, 1, 2), "eos", None, Usage(5, 0, 3), Timings(0.0, 0.1, 0.2))
    sent = form.open()
    for n, piece in enumerate(("Let me ", "think.", "Yes.")):
        sent += form.push(Item(0, [Event(piece, (n,))], done if n == 2 else None))
    events = [json.loads(line[6:]) for line in (sent + form.close()).decode().splitlines() if line[:5] == "data:"]
    assert [e["content_block"]["type"] for e in events if "content_block" in e] == ["thinking", "text"]
    assert [e["delta"] for e in events if e["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "Let me "},
        {"type": "thinking_delta", "thinking": "think."},
        {"type": "text_delta", "text": "Yes."},
    ]
    assert form.whole()["content"] == [
        {"type": "thinking", "thinking": "Let me think.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]


CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_coding_tools_request(scripted: Running, model: ScriptedModel, stream: bool) -> None:
    """System blocks, many tools, results of tools, thinking sent back, beta fields and headers."""
    tools = [{"name": f"mcp__files__{n:02}{'x' * 60}", "input_schema": {**SCHEMA, "$schema": "s"}} for n in range(40)]
    body = {
        **ASKED,
        "stream": stream,
        "system": [{"type": "text", "text": "You write code.", **CACHED}, {"type": "text", "text": "Be exact."}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Read it."}, {"type": "text", "text": "Now.", **CACHED}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A file.", "signature": "abc"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "I read it."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"}, **CACHED},
                    {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "import os", **CACHED},
                    {"type": "tool_result", "tool_use_id": "toolu_2"},
                ],
            },
        ],
        "tools": [
            {"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}, **CACHED},
            *tools,
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b-2025-05-14", "x-app": "cli"}
    answer = scripted.http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "context_management" in answer.headers["x-hybrid-note"] and "web_search" in answer.headers["x-hybrid-note"]
    said = prompt(model)
    assert all(part in said for part in ("You write code.\nBe exact.", "Read it.\nNow.", "import os", "a.py"))
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert scripted.http.post("/v1/messages/count_tokens?beta=true", json=body).json()["input_tokens"] == len(
        model.script.submitted[-1]["prompt"]
    )


def test_tools_of_anthropics_servers_alone_are_left_out(scripted: Running) -> None:
    answer = scripted.post("/v1/messages", {**ASKED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    assert answer.json()["content"] == [{"type": "text", "text": "some text."}]
    assert answer.headers["x-hybrid-note"] == "tools of type web_search_20250305 are not offered and left out"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "content[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
                ]
            },
            "content[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "nobody"}]}]}, "messages"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"system": 5}, "system"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": 5}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "bogus"}}, "output_config.effort"),
        ({"stream": 1}, "stream"),
        ({"metadata": []}, "metadata"),
    ],
)
def test_refusals_name_the_field(scripted: Running, more: dict[str, Any], field: str) -> None:
    answer = scripted.post("/v1/messages", {k: v for k, v in {**ASKED, **more}.items() if v is not None})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and field in error["message"], error


def test_errors_are_of_anthropics_types(model: ScriptedModel, scripted: Running, client: Any) -> None:
    for kind, more in ((anthropic.NotFoundError, {"model": "claude"}), (anthropic.BadRequestError, {"max_tokens": 0})):
        with pytest.raises(kind) as caught:
            client.messages.create(**{**ASKED, **more})
        assert caught.value.body["type"] == "error" and set(caught.value.body["error"]) == {"type", "message"}
    model.script.queue = 0
    try:
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(**ASKED)
    finally:
        model.script.queue = 1000
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "word " * 20_000}]})
    for sent, status, kind in (
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_request_error"),
        ({"content": b"{}"}, 400, "invalid_request_error"),
        ({"content": b"[" * (5 << 20), "headers": {"content-type": "application/json"}}, 413, "request_too_large"),
    ):
        answer = scripted.http.post("/v1/messages", **sent)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_a_key_is_taken_as_anthropics_clients_send_it() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(keys=("k",))) as server:
        for sent, right in (({"api_key": "k"}, True), ({"auth_token": "k"}, True), ({"api_key": "other"}, False)):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **sent) as client:
                if right:
                    assert client.messages.create(**ASKED).content[0].text == "some text."
                    continue
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    client.messages.create(**ASKED)
                assert caught.value.body["error"]["type"] == "authentication_error"


def test_streams_that_fail_and_clients_that_leave(model: ScriptedModel, scripted: Running, client: Any) -> None:
    script = model.script
    script.error, script.after = (lambda: RuntimeError("x")), 2
    try:
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(client.messages.create(**ASKED, stream=True))
        assert caught.value.body["error"]["type"] == "api_error"
        script.error, script.text, script.pause = None, "word " * 3000, 0.01
        with client.messages.create(**ASKED, stream=True) as stream:
            assert next(iter(stream)).type == "message_start" and model.open == 1
        until(lambda: model.open == 0)
    finally:
        script.error, script.text, script.pause = None, "some text.", 0.0
