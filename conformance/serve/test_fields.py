"""Fields that clients send: neutral values are accepted, other values are implemented or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.paths import DEMO
from conformance.support.scripted import ScriptedModel
from conformance.support.server import Running, running
from hybrid.perplexity import Measured, measure

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Look first.",
        "reasoning": "Look first.",
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
        "provider_specific_fields": {"a": 1},
        "tool_calls": [{"id": "a", "type": "function", "index": 0, "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "a", "name": "look", "content": [{"type": "text", "text": "seen"}]},
    {"role": "assistant", "content": ""},
]


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [*HISTORY, *HI["messages"]]},
        {
            name: None
            for name in (
                "background",
                "previous_response_id",
                "conversation",
                "prediction",
                "functions",
                "audio",
                "extra",
            )
        },
        {
            "functions": [],
            "function_call": "none",
            "logit_bias": {},
            "store": False,
            "metadata": {},
            "web_search_options": None,
        },
        {"prompt_cache_retention": "24h", "prompt_cache_key": "k", "safety_identifier": "u", "service_tier": "auto"},
        {"reasoning_effort": "low", "verbosity": "low", "modalities": ["text"], "parallel_tool_calls": True},
        {"top_p": 0},
        {"stop": None, "tools": None, "tool_choice": None, "response_format": None, "stream_options": None},
        {"tools": [], "tool_choice": "none"},
        {"tools": [{**LOOK, "cache_control": {"type": "ephemeral"}}], "tool_choice": "none"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_chat_takes_what_asks_for_nothing(scripted: Running, more: dict[str, Any]) -> None:
    answer = scripted.post("/v1/chat/completions", {**HI, **more})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "more",
    [
        {
            "previous_response_id": None,
            "conversation": None,
            "background": False,
            "prompt": None,
            "max_tool_calls": None,
        },
        {
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
            "include": ["reasoning.encrypted_content"],
        },
        {
            "store": False,
            "stream_options": {"include_obfuscation": False},
            "truncation": "disabled",
            "prompt_cache_retention": None,
        },
        {
            "input": [
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "content": None},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Hm", "annotations": [], "logprobs": []}],
                },
                {"role": "user", "content": [{"type": "input_text", "text": "Well?"}]},
            ]
        },
        {
            "tools": [
                FLAT,
                {"type": "web_search", "external_web_access": True},
                {"type": "local_shell"},
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
                },
            ],
            "tool_choice": "auto",
        },
    ],
    ids=["null", "reasoning", "store", "history", "codex"],
)
def test_responses_takes_what_asks_for_nothing(scripted: Running, more: dict[str, Any]) -> None:
    answer = scripted.post("/v1/responses", {"input": "Hi", "max_output_tokens": 20, **more})
    assert answer.status_code == 200, answer.text
    if "tools" in more:
        assert [t["type"] for t in answer.json()["tools"]] == ["function"]
        said = answer.headers["x-hybrid-note"]
        assert all(f"type {t}" in said for t in ("web_search", "local_shell", "custom")) and "look" not in said


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ("/v1/responses", {"input": 5}, "input"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "bogus"}}, "reasoning.effort"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "a", "conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/v1/responses", {"input": "a", "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema",
        ),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt[1]"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI["messages"]}, "prompt"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    ],
)
def test_refusals_name_the_public_field(scripted: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = scripted.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert "Invalid value for ''" not in error["message"] and "constrained" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_no_response_is_stored_and_that_is_reported(scripted: Running, path: str) -> None:
    answer = scripted.post(
        path, {**HI, "store": True} if "chat" in path else {"input": "Hi", "store": True, "truncation": "auto"}
    )
    assert answer.status_code == 200 and answer.headers["x-hybrid-note"] == "nothing is stored"
    assert answer.json().get("store", False) is False
    assert answer.headers["x-request-id"].startswith("req_")


def test_responses_takes_the_options_of_chat(scripted: Running, model: ScriptedModel) -> None:
    options = {
        "ignore_eos": True,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "priority": 2,
    }
    assert scripted.post("/v1/responses", {"input": "Hi", **options}).status_code == 200
    assert {k: model.script.submitted[-1][k] for k in options} == options


def test_parsed_results_can_be_sent_back(scripted: Running) -> None:
    """The official clients add their parsed results to messages and calls."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}}
    chat = [
        *HI["messages"],
        {"role": "assistant", "content": "{}", "parsed": {"a": 1}, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    assert scripted.post("/v1/chat/completions", {"messages": chat}).status_code == 200
    items = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "{}", "parsed": {"a": 1}}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    assert scripted.post("/v1/responses", {"input": items}).status_code == 200


def test_a_system_message_anywhere_is_taken(scripted: Running, model: ScriptedModel) -> None:
    later = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "Obey."},
    ]
    assert scripted.post("/v1/chat/completions", {"messages": [*later, *HI["messages"]]}).status_code == 200
    assert "Obey.\n\nHi" in model.decode(model.script.submitted[-1]["prompt"])
    assert scripted.post("/v1/responses", {"input": [{"role": "developer", "content": "x"}, *later]}).status_code == 200


def test_a_control_token_by_its_name_is_its_id(scripted: Running) -> None:
    """Clients that tokenize here learn the ids of <bos> and <eos> so; within a text they stay text."""
    for name, ids in {"<bos>": [2], "<eos>": [1]}.items():
        for special in (True, False):
            reply = scripted.post("/tokenize", {"prompt": name, "add_special_tokens": special}).json()
            assert reply["tokens"] == ids
    assert 2 not in scripted.post("/tokenize", {"prompt": "a <bos>", "add_special_tokens": False}).json()["tokens"]


def test_top_p_of_nothing_is_the_most_likely_token(scripted: Running, model: ScriptedModel) -> None:
    assert scripted.post("/v1/chat/completions", {**HI, "top_p": 0, "temperature": 0.7}).status_code == 200
    assert (model.script.submitted[-1]["temperature"], model.script.submitted[-1]["top_p"]) == (0.0, 1.0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_chunk(scripted: Running, path: str) -> None:
    """guidellm requests it."""
    body = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    asked = {**body, **(HI if "chat" in path else {"prompt": "Hi"})}
    chunks = [
        json.loads(line[6:]) for line in scripted.post(path, asked).text.splitlines() if line.startswith("data: {")
    ]
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 1
    assert len({c["usage"]["prompt_tokens"] for c in chunks}) == 1
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + c["usage"]["completion_tokens"] for c in chunks
    )


def test_the_tokenizer_tells_its_names(scripted: Running) -> None:
    reply = scripted.http.get("/tokenizer_info").json()
    assert (reply["bos_token"], reply["eos_token"], reply["model_max_length"]) == ("<bos>", "<eos>", 4000)
    assert "start_of_turn" in reply["chat_template"]


# --------------------------------------------------------------------------------------------- prompts and how likely
# they are

TEXTS = ("def read_file(path):\n    return open(path).read()", "import os", "café ☕ naïve")


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Any, Running]]:
    loaded: list[Any] = []

    def load() -> Any:
        loaded.append(hybrid.load(DEMO, device="cpu", slots=2, ctx=512, precision="exact"))
        return loaded[0]

    with running(load) as server:
        yield loaded[0], server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompt_logprobs_agree_with_perplexity(real: tuple[Any, Running], as_ids: bool, stream: bool) -> None:
    model, server = real
    prompts = [model.encode(t) if as_ids else t for t in TEXTS]
    asked = {"prompt": prompts, "echo": True, "logprobs": 3, "max_tokens": 0, "stream": stream}
    answer = server.post("/v1/completions", asked)
    assert answer.status_code == 200, answer.text
    if stream:
        chunks = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [c for c in chunks if c["finish_reason"] is None]
    else:
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["prompt_tokens"] == sum(len(model.encode(t)) for t in TEXTS)
        assert [c["finish_reason"] for c in choices] == ["length"] * 3
    for text, choice in zip(TEXTS, choices, strict=True):
        ids, reply = model.encode(text), choice["logprobs"]
        assert choice["text"] == text
        assert (
            reply["token_logprobs"][0] is None and reply["top_logprobs"][0] is None and len(reply["tokens"]) == len(ids)
        )
        measured = Measured()
        measure(model, [ids], measured)
        assert -sum(reply["token_logprobs"][1:]) == pytest.approx(measured.nats.total, abs=1e-4)
        for n, (token, logprob, top) in enumerate(
            zip(reply["tokens"], reply["token_logprobs"], reply["top_logprobs"], strict=True)
        ):
            if n and top is not None:
                assert len(top) <= 4 and max(top.values()) >= logprob - 1e-9
                assert top[token] == pytest.approx(logprob)
        offsets = reply["text_offset"]
        assert offsets[0] == 0 and all(
            text.startswith(model.decode(ids[:n]).rstrip("\ufffd")[:at]) for n, at in enumerate(offsets)
        )
        assert offsets == sorted(offsets) and offsets[-1] < len(text)


def test_an_end_of_text_is_an_entry(real: tuple[Any, Running]) -> None:
    """Clients remove the generated tokens' entries by their number: lm-eval one."""
    model, server = real
    end = min(model.eos_ids)
    body = {"prompt": "import os", "max_tokens": 1, "echo": True, "logprobs": 1, "logit_bias": {str(end): 100}}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] == "import os"
    assert len(choice["logprobs"]["tokens"]) == len(model.encode("import os")) + 1


def test_offsets_of_generated_tokens_count_characters(real: tuple[Any, Running]) -> None:
    model, server = real
    body = {
        "prompt": TEXTS[2],
        "max_tokens": 12,
        "logprobs": 1,
        "echo": True,
        "temperature": 1.5,
        "seed": 4,
        "ignore_eos": True,
    }
    choice = server.post("/v1/completions", body).json()["choices"][0]
    reply = choice["logprobs"]
    assert len(reply["tokens"]) == len(model.encode(TEXTS[2])) + 12 and choice["text"].startswith(TEXTS[2])
    whole = [
        (t, at)
        for t, at in zip(reply["tokens"], reply["text_offset"], strict=True)
        if t and "\ufffd" not in t and t != "<bos>"
    ]
    assert all(choice["text"][at : at + len(t)] == t for t, at in whole)


def test_prompt_logprobs_beside_requests_that_fill_every_slot(real: tuple[Any, Running]) -> None:
    model, server = real
    handles = [model.submit("import ", max_tokens=60, ignore_eos=True) for _ in range(4)]
    asked = {"prompt": TEXTS[0], "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = server.post("/v1/completions", asked)
    assert answer.status_code == 200, answer.text
    assert np.isfinite(answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:]).all()
    assert len({h.result(120).text for h in handles}) == 1
