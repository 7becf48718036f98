"""/v1/responses with the official client: text, streams, calls of tools, their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import running

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
ASKED: dict[str, Any] = {"model": "demo-gemma3", "input": "Hi"}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running(lambda: ScriptedModel(Script(), ctx=4000)) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


@pytest.mark.slow
def test_text(client: openai.OpenAI) -> None:
    found = client.responses.create(**ASKED, instructions="Be brief.")
    assert found.output_text == "some text." and found.status == "completed"
    assert found.usage is not None and found.usage.input_tokens_details.cached_tokens == 3
    cut = client.responses.create(**ASKED, max_output_tokens=1)
    assert cut.usage is not None and cut.usage.output_tokens == 1
    reply = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=1)
    assert "".join(p.token for p in reply.output[0].content[0].logprobs) == "some text."  # type: ignore[union-attr]


def test_events_build_up_what_the_last_one_holds(client: openai.OpenAI) -> None:
    for seed, more in [
        (1, {}),
        (2, {"tools": [TOOL], "tool_choice": "required"}),
        (5, {"tools": [TOOL], "tool_choice": "required"}),
    ]:
        events: list[Any] = list(client.responses.create(**ASKED, **more, extra_body={"seed": seed}, stream=True))
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
        final = events[-1].response
        assert events[-1].type == "response.completed"
        texts: dict[int, str] = {}
        for e in events:
            if e.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                texts[e.output_index] = texts.get(e.output_index, "") + e.delta
        whole = [o.content[0].text if o.type == "message" else o.arguments for o in final.output]
        assert [texts[i] for i in range(len(whole))] == whole
        added = [e.output_index for e in events if e.type == "response.output_item.added"]
        assert (
            added
            == [e.output_index for e in events if e.type == "response.output_item.done"]
            == list(range(len(whole)))
        )
        with client.responses.stream(
            **ASKED, **more, extra_body={"seed": seed}
        ) as stream:  # the client's own assembly agrees
            assert [o.type for o in stream.get_final_response().output] == [o.type for o in final.output]


def test_tokens_of_a_character_are_told_with_its_text() -> None:
    with (
        running(lambda: ScriptedModel(Script("a 日本 b", pause=0.03), ctx=4000)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as asking,
    ):
        events: list[Any] = list(
            asking.responses.create(**ASKED, include=["message.output_text.logprobs"], stream=True)
        )
    told = [p.bytes for e in events if e.type == "response.output_text.delta" for p in e.logprobs]
    (whole,) = (e.logprobs for e in events if e.type == "response.output_text.done")
    assert told == [p.bytes for p in whole] and bytes(b for one in told for b in one).decode() == "a 日本 b"


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    found = client.responses.create(
        **ASKED, tools=[TOOL], tool_choice={"type": "function", "name": "look"}, extra_body={"seed": 3}
    )
    (call,) = found.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "seen"},
    ]
    assert (
        client.responses.create(model="demo-gemma3", input=items, tools=[TOOL], tool_choice="none").output_text
        == "some text."
    )


def test_a_schema(client: openai.OpenAI) -> None:
    shape: Any = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
    jsonschema.validate(
        json.loads(client.responses.create(**ASKED, text=shape, extra_body={"seed": 4}).output_text), SCHEMA
    )


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"input": []},
        {"input": [{"type": "function_call_output", "call_id": "nobody", "output": "x"}]},
        {"tool_choice": "required"},
        {"background": True},
    ],
)
def test_unsupported_features_are_refused(client: openai.OpenAI, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**{**ASKED, **more})
