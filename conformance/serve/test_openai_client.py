"""The official client against the server: its types parse the answers, its errors match the reference."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from conformance.support.server import Running
from hybrid.text import chat

PROMPT = "def read_file(path):"
MODEL = "demo-gemma3"
HI: list[Any] = [{"role": "user", "content": "What is a file?"}]


def model_of(server: Running) -> Any:
    return server.app.state.backend.model


def test_models(client: openai.OpenAI) -> None:
    (only,) = client.models.list().data
    assert only.id == MODEL and client.models.retrieve(MODEL).id == MODEL


def test_a_completion_is_the_models_own_text(client: openai.OpenAI, server: Running) -> None:
    text = "".join(model_of(server).generate(PROMPT, 12))
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == text
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(model_of(server).encode(PROMPT))
    assert answer.choices[0].finish_reason == "length"


def test_streamed_pieces_join_to_the_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 12, "temperature": 0.8, "seed": 7, "n": 2}
    whole = client.chat.completions.create(**asked)
    pieces: dict[int, str] = {0: "", 1: ""}
    finishes, usage = {}, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for c in chunk.choices:
            pieces[c.index] += c.delta.content or ""
            finishes[c.index] = c.finish_reason or finishes.get(c.index)
    assert [pieces[0], pieces[1]] == [c.message.content for c in whole.choices]
    assert pieces[0] != pieces[1], "each choice has a seed of its own"
    assert finishes == {0: "length", 1: "length"}
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_chat_uses_the_template(client: openai.OpenAI, server: Running) -> None:
    model = model_of(server)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HI]
    ids = chat.encode(model.checkpoint.tokenizer, messages, model.checkpoint.chat_template)
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == "".join(model.generate(ids, 8))
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


def test_several_prompts_stop_and_echo(client: openai.OpenAI, server: Running) -> None:
    ids = model_of(server).encode("import ")
    both = client.completions.create(
        model=MODEL, prompt=[PROMPT, "import "], max_tokens=6, temperature=0, n=2, echo=True
    )
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text and both.choices[0].text.startswith(PROMPT)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    assert both.choices[2].text == "import " + by_ids.choices[0].text
    full = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0).choices[0].text
    stop = full[5:8]
    cut = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop]).choices[0]
    assert cut.text == full[: full.index(stop)] and cut.finish_reason == "stop"


@pytest.mark.slow
def test_a_seed_repeats_a_text(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return (
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=1.5, seed=seed)
            .choices[0]
            .text
        )

    assert text(3) == text(3)
    assert len({text(s) for s in (3, 4, -5)}) > 1


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "another"}, 404, "model", "model_not_found"),
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"temperature": "hot"}, 400, "temperature", "invalid_value"),
        ({"n": 0}, 400, "n", "invalid_value"),
        ({"n": 9}, 400, "n", None),
        ({"tempreature": 1}, 400, "tempreature", "unknown_parameter"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content[0].type",
            "invalid_value",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "invalid_value"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, 400, "messages[1].tool_call_id", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x", "cache_control": 5}]},
            400,
            "messages[0].cache_control",
            "invalid_value",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages", None),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, 400, None, "context_length_exceeded"),
        ({"logit_bias": {"70000": 1}}, 400, "logit_bias", "invalid_value"),
        ({"stop": ["a"] * 17}, 400, "stop", "invalid_value"),
        ({"stop": ["a", 5]}, 400, "stop[1]", "invalid_value"),
        ({"stop": 5}, 400, "stop", "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "invalid_value"),
        ({"tool_choice": "required"}, 400, "tool_choice", "invalid_value"),
        ({"tool_choice": 5}, 400, "tool_choice", "invalid_value"),
        (
            {"tool_choice": {"type": "function", "function": {"name": 5}}},
            400,
            "tool_choice.function.name",
            "invalid_value",
        ),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type", "invalid_value"),
        ({"reasoning_effort": "bogus"}, 400, "reasoning_effort", "invalid_value"),
        ({"verbosity": "bogus"}, 400, "verbosity", "invalid_value"),
        ({"prediction": {"type": "content", "content": "x"}}, 400, "prediction", "unknown_parameter"),
        ({"audio": {"voice": "x"}}, 400, "audio", "unknown_parameter"),
        ({"functions": [{"name": "f"}]}, 400, "functions", "unknown_parameter"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "invalid_value"),
    ],
)
def test_errors_are_the_references(
    client: openai.OpenAI, body: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    asked = {"model": MODEL, "messages": HI, "max_tokens": 2, **body}
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", body=asked, cast_to=object)
    error = caught.value
    assert error.status_code == status
    assert isinstance(error.body, dict) and {"message", "type", "param", "code"} == set(error.body)
    assert param is None or error.param == param
    assert code is None or error.code == code


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=1, user="u", metadata={"a": "b"}, store=False, service_tier="auto"
    )
    client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1, extra_body={"top_k": 3, "min_p": 0.1})


def test_tokenize_and_back(server: Running) -> None:
    model = model_of(server)
    found = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == model.encode(PROMPT) and found["count"] == len(found["tokens"]) == len(
        found["token_strs"]
    )
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    turn = server.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert turn == chat.encode(model.checkpoint.tokenizer, HI, None)
    assert server.post("/detokenize", {"tokens": [4096]}).status_code == 400


SHAPE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def test_logprobs_are_the_models(client: openai.OpenAI, server: Running) -> None:
    model = model_of(server)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2).choices[0]
    assert (
        answer.logprobs is not None
        and answer.logprobs.token_logprobs is not None
        and answer.logprobs.tokens is not None
    )
    ids = model.encode(PROMPT)
    logits = model.logits([*ids, *model.encode(answer.text, bos=False)])[len(ids) - 1 : len(ids) + 3].astype(np.float64)
    wanted = (logits - logits.max(1, keepdims=True)) - np.log(
        np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)
    )
    assert "".join(answer.logprobs.tokens) == answer.text
    np.testing.assert_allclose(answer.logprobs.token_logprobs, wanted.max(1), atol=0.05)
    assert all(len(top) == 2 for top in answer.logprobs.top_logprobs or ())
    chat_answer = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=3, logprobs=True, top_logprobs=3
    ).choices[0]
    assert (
        chat_answer.logprobs is not None
        and [len(t.top_logprobs) for t in chat_answer.logprobs.content or ()] == [3] * 3
    )


@pytest.mark.slow
def test_structured_output_of_the_model_itself(client: openai.OpenAI) -> None:
    """The embedded model, trained on hardly any JSON, can only write what the schema allows."""
    shape: Any = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SHAPE}}
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 80, "response_format": shape}
    for more in ({"temperature": 0}, {"temperature": 1.3, "seed": 5, "n": 2}):
        for choice in client.chat.completions.create(**asked, **more).choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), SHAPE)


def test_calls_by_the_model_itself(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SHAPE}}]
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=80, tools=tools, tool_choice="required"
    ).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    for call in answer.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SHAPE)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_bias_forbids_and_a_penalty_changes(client: openai.OpenAI, server: Running) -> None:
    first = (
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1).choices[0].text
    )
    (token,) = model_of(server).encode(first, bos=False)
    other = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0, logit_bias={str(token): -100}
    ).choices[0]
    assert other.text != first
    asked: dict[str, Any] = {"model": MODEL, "prompt": "a a a a a a", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, frequency_penalty=2.0, presence_penalty=2.0).choices[0].text != plain


def test_a_conversation_finds_its_beginning_in_the_cache(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "The asyncio module provides what, and since which version? " * 3}]
    first = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=20, temperature=0)
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2, temperature=0)
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 16
