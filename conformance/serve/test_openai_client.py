"""The official client against the server: its types parse what is answered, its errors are those of the reference."""

from __future__ import annotations

from typing import Any

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
    both = client.completions.create(model=MODEL, prompt=[PROMPT, "import "], max_tokens=6, temperature=0, n=2, echo=True)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text and both.choices[0].text.startswith(PROMPT)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    assert both.choices[2].text == "import " + by_ids.choices[0].text
    full = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0).choices[0].text
    stop = full[5:8]
    cut = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop]).choices[0]
    assert cut.text == full[: full.index(stop)] and cut.finish_reason == "stop"


def test_a_seed_repeats_a_text(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=1.5, seed=seed).choices[0].text

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
        ({"messages": [{"role": "user"}]}, 400, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, None, None),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages", None),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, 400, None, "context_length_exceeded"),
        ({"logit_bias": {"70000": 1}}, 400, "logit_bias", "invalid_value"),
        ({"stop": ["a"] * 17}, 400, None, "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, 400, None, None),
        ({"top_logprobs": 3}, 400, None, None),
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
    assert found["tokens"] == model.encode(PROMPT) and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    turn = server.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert turn == chat.encode(model.checkpoint.tokenizer, HI, None)
    assert server.post("/detokenize", {"tokens": [4096]}).status_code == 400
