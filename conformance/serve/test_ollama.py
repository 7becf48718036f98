"""Ollama's API with its own client, and as web front ends send it: chat, generate, lists, errors."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running, until
from hybrid.serve.settings import Settings

ollama = pytest.importorskip("ollama")

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 6}}, "required": ["a"]}
LOOK: Any = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
HI: list[Any] = [{"role": "user", "content": "What is a file?"}]
NAME = "demo-gemma3"


@pytest.fixture(scope="module")
def client(scripted: Running) -> Any:
    return ollama.Client(scripted.url)


def prompt(model: ScriptedModel) -> str:
    return model.decode(model.script.submitted[-1]["prompt"])


def test_a_chat_streamed_and_whole(client: Any, model: ScriptedModel) -> None:
    model.script.pause = 0.01
    whole = client.chat(NAME, HI)
    assert (whole.message.content, whole.done, whole.done_reason) == ("some text.", True, "stop")
    parts = list(client.chat(f"{NAME}:latest", HI, stream=True))
    model.script.pause = 0.0
    assert "".join(p.message.content for p in parts) == "some text."
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 2
    for last in (whole, parts[-1]):
        assert last.prompt_eval_count > 3 and last.eval_count > 1
        spans = (last.load_duration, last.prompt_eval_duration, last.eval_duration)
        assert all(s >= 0 for s in spans) and sum(spans) == pytest.approx(last.total_duration, abs=3)


def test_streams_are_lines_unless_they_are_not_wanted(scripted: Running) -> None:
    body = {"model": NAME, "messages": HI}
    answer = scripted.post("/api/chat", body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1] is True
    answer = scripted.post("/api/chat", {**body, "stream": False})
    assert answer.headers["content-type"] == "application/json" and answer.json()["done"]


def test_options_reach_the_model(scripted: Running, model: ScriptedModel) -> None:
    options = {
        "num_predict": 5,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 11,
        "stop": ["x"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    more = {"num_ctx": 100_000, "mirostat": 2, "use_mmap": True}
    body = {"model": NAME, "messages": HI, "options": {**options, **more}, "keep_alive": "5m", "unheard": 1}
    answer = scripted.post("/api/chat", body)
    got = model.script.submitted[-1]
    renamed = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
    assert {k: got[renamed.get(k, k)] for k in options} == options
    said = answer.headers["x-hybrid-note"]
    assert all(word in said for word in ("mirostat", "use_mmap", "unheard", "num_ctx is 4000 here"))
    assert not scripted.post("/api/chat", {**body, "options": {"num_predict": -1}, "unheard": None}).headers.get(
        "x-hybrid-note"
    )
    assert model.script.submitted[-1]["max_tokens"] == 4000


def test_calls_and_their_results(client: Any, model: ScriptedModel) -> None:
    """Results without an identifier belong to the calls in order, or by name."""
    model.script.text = '[{"name": "look", "parameters": {"a": "x"}}, {"name": "look", "parameters": {"a": "y"}}]'
    model.script.ids = model.encode(model.script.text, bos=False)
    try:
        whole = client.chat(NAME, HI, tools=[LOOK])
        parts = list(client.chat(NAME, HI, tools=[LOOK], stream=True))
        model.script.ids = model.script.ids[:-8]
        cut = client.chat(NAME, HI, tools=[LOOK])
    finally:
        model.script.ids, model.script.text = None, "some text."
    given = [c.function.arguments for c in whole.message.tool_calls]
    assert given == [{"a": "x"}, {"a": "y"}] and not whole.message.content
    assert [c.function.arguments for p in parts for c in p.message.tool_calls or ()] == given
    assert [c.function.arguments for c in cut.message.tool_calls] == [{"a": "x"}]
    results = [{"role": "tool", "content": "first"}, {"role": "tool", "tool_name": "look", "content": "second"}]
    assert client.chat(NAME, [*HI, whole.message, *results], tools=[LOOK]).message.content is not None
    assert "first" in prompt(model) and "second" in prompt(model)


def test_generate(client: Any, scripted: Running, model: ScriptedModel) -> None:
    found = client.generate(NAME, "What is a file?", system="Be brief.", template="{{ .Prompt }}")
    assert found.response == "some text." and prompt(model).startswith("user\nBe brief.")
    parts = list(client.generate(NAME, "import ", raw=True, stream=True, options={"num_predict": 2}))
    assert "".join(p.response for p in parts) == "some text" and parts[-1].done
    assert model.script.submitted[-1]["prompt"] == model.encode("import ")
    client.generate(NAME, "import ", raw=True)
    assert model.script.submitted[-1]["max_tokens"] == 4000
    for form in ("json", SCHEMA):
        found = client.generate(NAME, "A person.", format=form, options={"seed": 4, "num_predict": 2000})
        jsonschema.validate(json.loads(found.response), SCHEMA if form != "json" else {"type": "object"})
    template = {"model": NAME, "prompt": "a", "template": "t", "stream": False}
    assert "template" in scripted.post("/api/generate", template).headers["x-hybrid-note"]


def test_nothing_to_answer_asks_for_the_model(client: Any, model: ScriptedModel) -> None:
    before = len(model.script.submitted)
    assert client.chat(NAME).done_reason == client.generate(NAME, keep_alive=0).done_reason == "load"
    assert [p.done_reason for p in client.generate(NAME, stream=True)] == ["load"]
    assert len(model.script.submitted) == before


def test_what_front_ends_ask_first(client: Any, scripted: Running) -> None:
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == f"{NAME}:latest" and listed.digest == loaded.digest
    assert listed.details.family == "gemma3" and listed.details.quantization_level == "Q8_0"
    assert listed.size > 0 and loaded.context_length == 4000
    shown = client.show(NAME)
    assert shown.modelinfo["gemma3.context_length"] > 0 and "completion" in shown.capabilities and shown.template
    assert scripted.http.get("/api/version").json()["version"][0].isdigit()
    assert scripted.http.head("/").status_code == 200


def test_logprobs(client: Any) -> None:
    found = client.chat(NAME, HI, logprobs=True, top_logprobs=2)
    assert "".join(p.token for p in found.logprobs) == "some text." and len(found.logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("path", "more", "word"),
    [
        ("chat", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "tool", "content": "a"}]}, "tool"),
        ("chat", {"tools": [{"type": "web"}]}, "tools[0].type"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ("chat", {"tools": [LOOK, LOOK]}, "tools"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("chat", {"options": [1]}, "options"),
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"format": {"type": 5}}, "format.type"),
        ("chat", {"think": "hardly"}, "think"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"model": 5}, "model"),
        ("generate", {"prompt": 5}, "prompt"),
        ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("generate", {"prompt": "a", "context": [1]}, "context"),
        ("generate", {"prompt": "a", "images": ["aa"]}, "images"),
        ("generate", {"prompt": "a", "raw": True, "format": {"type": 5}}, "format"),
        ("show", {"model": []}, "model"),
    ],
)
def test_refusals_name_the_field(scripted: Running, path: str, more: dict[str, Any], word: str) -> None:
    answer = scripted.post(f"/api/{path}", {**({"messages": HI} if path == "chat" else {}), **more})
    assert answer.status_code == 400 and set(answer.json()) == {"error"} and word in answer.json()["error"], answer.text


def test_errors_keys_and_clients_that_leave(client: Any, model: ScriptedModel) -> None:
    for call, status in ((lambda: client.chat("another", HI), 404), (lambda: client.pull("another"), 404)):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status and "{" not in caught.value.error
    script = model.script
    script.error, script.after = (lambda: RuntimeError("x")), 2
    try:
        with pytest.raises(ollama.ResponseError, match="the server failed"):
            list(client.chat(NAME, HI, stream=True))
        script.error, script.text, script.pause = None, "word " * 3000, 0.01
        stream = client.chat(NAME, HI, stream=True)
        assert next(stream).message.content and model.open == 1
        stream.close()
        until(lambda: model.open == 0)
    finally:
        script.error, script.text, script.pause = None, "some text.", 0.0
    with running(lambda: ScriptedModel(Script()), Settings(keys=("k",))) as server:
        assert ollama.Client(server.url, headers={"authorization": "Bearer k"}).chat(NAME, HI).done
        with pytest.raises(ollama.ResponseError, match="API key"):
            ollama.Client(server.url).chat(NAME, HI)


def test_a_quiet_stream_stays_readable(client: Any, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep-alive lines are valid JSON lines."""
    monkeypatch.setattr("hybrid.serve.running.HEARTBEAT", 0.05)
    model.script.pause = 0.2
    try:
        parts = list(client.chat(NAME, HI, stream=True, options={"num_predict": 2}))
    finally:
        model.script.pause = 0.0
    assert "".join(p.message.content for p in parts) == "some text" and len(parts) > 4
