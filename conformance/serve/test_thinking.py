"""Thoughts: turned on by a request's fields, apart from the answer in every form, within their budget, and never part
of what a grammar, a stop string or a log-probability is about."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

import hybrid
from conformance.support.marked import MARKS, TEMPLATES, checkpoint4, gemma4
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running
from hybrid.engine.request import Options, Request
from hybrid.serve.answers import Answer
from hybrid.serve.thinking import ThoughtConstraint
from hybrid.text import chat
from hybrid.text.marks import CLOSE, OPEN, Channel
from hybrid.text.tokenizer import CONTROL, USER_DEFINED, StreamDecoder, Tokenizer

HI = [{"role": "user", "content": "Hi"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}},
}
BOOLEAN = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}, "strict": True}}


def ids_of(t: Tokenizer, *parts: str) -> list[int]:
    """Marks by their ids, other text as bytes or pieces."""
    known = {m: i for m in MARKS if (i := t.token_id(m)) is not None}
    return [i for p in parts for i in ([known[p]] if p in known else t.encode(p, bos=False))]


def said(t: Tokenizer, ids: list[int]) -> str:
    return "".join(t.vocabulary.pieces[i] if t.vocabulary.pieces[i] in MARKS else t.decode([i]) for i in ids)


def marks_of(t: Tokenizer) -> tuple[int, int]:
    opening, closing = ids_of(t, OPEN, CLOSE)
    return opening, closing


Scripted = tuple[ScriptedModel, Running]


@contextmanager
def serving(printed: int) -> Iterator[Scripted]:
    model = ScriptedModel(Script(), ctx=4000)
    model.checkpoint = checkpoint4(printed)
    with running(lambda: model) as server:
        yield model, server


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    """A model whose file calls the marks user defined."""
    with serving(USER_DEFINED) as found:
        yield found


@pytest.fixture(scope="module", params=[CONTROL, USER_DEFINED], ids=["special", "user defined"])
def either(request: pytest.FixtureRequest, scripted: Scripted) -> Iterator[Scripted]:
    """Models whose files call the marks special, and user defined."""
    if request.param == USER_DEFINED:
        yield scripted
    else:
        with serving(CONTROL) as found:
            yield found


def answered(scripted: Scripted, *parts: str, to: str = CHAT, **more: Any) -> Any:
    """The whole answer to a request that the script answers with these parts."""
    model, server = scripted
    model.script.ids = ids_of(model.checkpoint.tokenizer, *parts)
    asked = {"messages": HI} if to == CHAT else {"input": "Hi"}
    answer = server.post(to, {**asked, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(scripted: Scripted, *parts: str, to: str = CHAT, **more: Any) -> list[dict[str, Any]]:
    model, server = scripted
    model.script.ids = ids_of(model.checkpoint.tokenizer, *parts)
    asked = {"messages": HI} if to == CHAT else {"input": "Hi"}
    answer = server.post(to, {**asked, "stream": True, **more})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def joined(chunks: list[dict[str, Any]], key: str) -> str:
    return "".join(c["choices"][0]["delta"].get(key) or "" for c in chunks if c["choices"])


THOUGHT = (OPEN, "thought\nHm… ", "é", CLOSE, "Yes ", "ü")


def test_a_thought_is_apart_from_the_answer(either: Scripted) -> None:
    answer = answered(either, *THOUGHT)
    message, counted = answer["choices"][0]["message"], answer["usage"]
    assert (message["reasoning_content"], message["content"]) == ("Hm… é", "Yes ü")
    own = len(ids_of(either[0].checkpoint.tokenizer, "thought\nHm… ", "é"))
    assert counted["completion_tokens_details"]["reasoning_tokens"] == own
    chunks = streamed(either, *THOUGHT, stream_options={"include_usage": True})
    assert (joined(chunks, "reasoning_content"), joined(chunks, "content")) == ("Hm… é", "Yes ü")
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == own


def test_a_thought_in_the_other_apis(scripted: Scripted) -> None:
    """Asked for, bounded, told apart, and sent back."""
    model, server = scripted
    model.script.ids = ids_of(model.checkpoint.tokenizer, *THOUGHT)
    asked = {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 20}}
    blocks = server.post("/v1/messages", {"messages": HI, **asked}).json()["content"]
    assert blocks == [{"type": "thinking", "thinking": "Hm… é", "signature": ""}, {"type": "text", "text": "Yes ü"}]
    assert "<|think|>" in said(model.checkpoint.tokenizer, model.script.submitted[-1]["prompt"])
    message = server.post("/api/chat", {"messages": HI, "think": True, "stream": False}).json()["message"]
    assert message == {"role": "assistant", "content": "Yes ü", "thinking": "Hm… é"}
    lines = server.post("/api/generate", {"prompt": "Hi", "think": "low"}).text.splitlines()
    assert "".join(json.loads(line).get("thinking", "") for line in lines) == "Hm… é"
    assert "thinking" in server.post("/api/show", {}).json()["capabilities"]
    off = {"messages": HI, "max_tokens": 50, "thinking": {"type": "disabled"}}
    for path, body in (("/v1/messages", off), ("/api/chat", {"messages": HI, "think": False})):
        assert server.post(path, body).status_code == 200
        assert "<|think|>" not in said(model.checkpoint.tokenizer, model.script.submitted[-1]["prompt"])


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_the_other_apis_continue_a_begun_answer(scripted: Scripted, path: str) -> None:
    model, server = scripted
    body = {"messages": [*HI, {"role": "assistant", "content": "It is {"}], "max_tokens": 50}
    assert server.post(path, body).status_code == 200
    assert model.decode(model.script.submitted[-1]["prompt"]).endswith("It is {")


@pytest.mark.parametrize(
    ("parts", "thought", "text"),
    [
        ((OPEN, "thought\nnever closed"), "never closed", ""),
        ((OPEN, "thou"), "", ""),
        ((OPEN, CLOSE, "a"), "", "a"),
        ((OPEN, "thought\n", CLOSE, "a"), "", "a"),
        ((OPEN, "other", CLOSE, "a"), "other", "a"),
        ((OPEN, "thought\n", "\n", "x\n", "\n", CLOSE, "a"), "\nx\n", "a"),
        (("a", CLOSE, "b"), "", "ab"),
        ((OPEN, "x", OPEN, "y", CLOSE, "a"), f"x{OPEN}y", "a"),
        ((OPEN, "thought\nx", CLOSE, "a", OPEN, "thought\ny", CLOSE, "b"), "xy", "ab"),
        ((*f"{OPEN}thought\nno mark{CLOSE}",), "", f"{OPEN}thought\nno mark{CLOSE}"),
    ],
)
def test_odd_thoughts(either: Scripted, parts: tuple[str, ...], thought: str, text: str) -> None:
    message = answered(either, *parts)["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, text)


@pytest.mark.parametrize("printed", [CONTROL, USER_DEFINED])
def test_a_reader_gets_the_same_however_a_stream_is_cut(printed: int) -> None:
    t = gemma4(printed)
    ids = ids_of(t, OPEN, "thought\n", *"a…\né<\n", CLOSE, *"ü<|ch", OPEN, "b", CLOSE, "c")
    for seed in range(40):
        cut, text, decoder = random.Random(seed), "", StreamDecoder(t)
        reader, deltas = Answer(t, Channel(*marks_of(t)), None), list[dict[str, Any]]()
        for token in ids:
            text += decoder.push(token)
            n = cut.randint(0, len(text))  # text may come after its tokens
            deltas += reader.push(text[:n], (token,))
            text = text[n:]
        deltas += [*reader.push(text, ()), *reader.end()]
        found = ["".join(d.get(key, "") for d in deltas) for key in ("reasoning_content", "content")]
        assert found == ["a…\né<b", "ü<|chc"], seed


def test_logprobs_are_of_the_answer_alone(either: Scripted) -> None:
    choice = answered(either, *THOUGHT, logprobs=True, top_logprobs=1)["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert bytes(b for p in tokens for b in p["bytes"]).decode() == choice["message"]["content"] == "Yes ü"
    chunks = streamed(either, *THOUGHT, logprobs=True, top_logprobs=1)
    with_logprobs = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["logprobs"]]
    assert [p for c in with_logprobs for p in c["logprobs"]["content"]] == tokens
    assert all("reasoning_content" not in c["delta"] for c in with_logprobs)


def test_every_choice_has_its_own_thought(scripted: Scripted) -> None:
    answer = answered(scripted, *THOUGHT, n=3)
    assert [c["message"]["reasoning_content"] for c in answer["choices"]] == ["Hm… é"] * 3
    once = answered(scripted, *THOUGHT)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * once


def test_a_call_after_a_thought(either: Scripted) -> None:
    quote = '<|"|>'
    call = ("<|tool_call>", "call:look{city:", quote, "Rome", quote, "}", "<tool_call|>")
    parts = (OPEN, "thought\nLet me <|tool_call> see", CLOSE, *call)
    choice = answered(either, *parts, tools=[TOOL], reasoning_effort="low")["choices"][0]
    assert choice["message"]["reasoning_content"] == "Let me <|tool_call> see" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"city":"Rome"}'}
    items = answered(
        either, *parts, to=RESPONSES, tools=[{"type": "function", **TOOL["function"]}], reasoning={"effort": "low"}
    )  # type: ignore[dict-item]
    assert [i["type"] for i in items["output"]] == ["reasoning", "function_call"]


def test_responses_have_reasoning_items(scripted: Scripted) -> None:
    answer = answered(scripted, *THOUGHT, to=RESPONSES)
    thought, message = answer["output"]
    assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "completed")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm… é"}]
    assert message["content"][0]["text"] == "Yes ü"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    model, server = scripted
    plain = openai.DefaultHttpxClient(verify=False)  # reading every certificate takes longer than a request
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=plain) as client:
        events = list(client.responses.create(model=model.checkpoint.name, input="Hi", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hm… é"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Yes ü"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    (done,) = [e for e in events if e.type == "response.reasoning_text.done"]
    assert done.text == "Hm… é" and events[-1].type == "response.completed"
    assert [i.type for i in events[-1].response.output] == ["reasoning", "message"]


def test_a_thought_that_the_template_opens(scripted: Scripted) -> None:
    with written_by(scripted[0], f"{OPEN}thought\n"):
        message = answered(scripted, "Hm", CLOSE, "Yes")["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")
        scripted[0].script.ids, spent = None, set()  # what the constraint allows, at random
        for seed in range(8):
            body = {
                "messages": HI,
                "thinking_token_budget": 2,
                "response_format": BOOLEAN,
                "seed": seed,
                "max_tokens": 40,
            }
            answer = scripted[1].post(CHAT, body).json()
            assert json.loads(answer["choices"][0]["message"]["content"]) in (True, False)
            spent.add(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])
        assert max(spent) == 2


@contextmanager
def written_by(model: ScriptedModel, template: str) -> Iterator[None]:
    """The model with another template."""
    was, model.checkpoint = model.checkpoint, replace(model.checkpoint, chat_template=template)
    try:
        yield
    finally:
        model.checkpoint = was


def test_what_was_thought_goes_back_to_the_template(scripted: Scripted) -> None:
    model, server = scripted
    thought, turn = f"Hm{CLOSE}", {"role": "assistant", "content": "Yes"}
    item = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": thought}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [*HI, {**turn, "reasoning_content": thought}, *HI]}),
        (CHAT, {"messages": [*HI, {**turn, "reasoning": thought}, *HI]}),
        (RESPONSES, {"input": [*HI, item, turn, *HI]}),
        (RESPONSES, {"input": [*HI, item, call, result]}),
    ]
    with written_by(
        model, "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}{{ m.thinking }}]{% endfor %}"
    ):
        for path, body in bodies:
            assert server.post(path, body).status_code == 200
            ids = model.script.submitted[-1]["prompt"]
            assert f"[user:][assistant:{thought}{thought}]" in model.decode(ids)
            assert marks_of(model.checkpoint.tokenizer)[1] not in ids  # a message's mark is text


@pytest.mark.parametrize("printed", [CONTROL, USER_DEFINED])
def test_text_of_the_engine_shows_the_marks_and_templates_cut_by_them(printed: int) -> None:
    t = gemma4(printed)
    text = t.decode(ids_of(t, OPEN, "thought\nHm", CLOSE, "Yes"))
    assert text == f"{OPEN}thought\nHm{CLOSE}Yes"
    again = chat.encode(t, [*HI, {"role": "assistant", "content": text}, *HI])
    assert "<|turn>model\nYes<turn|>" in said(t, again)


# --- prompts ---------------------------------------------------------------------------------------------------------


def prompt_of(scripted: Scripted, **more: Any) -> str:
    answered(scripted, "a", **{"messages": HI, **more})
    return said(scripted[0].checkpoint.tokenizer, scripted[0].script.submitted[-1]["prompt"])


OFF = f"<|turn>user\nHi<turn|>\n<|turn>model\n{OPEN}thought\n{CLOSE}"
ON = "<|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ({}, OFF),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning_effort": "minimal"}, ON),
        ({"reasoning_effort": "max"}, ON),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ON),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, OFF),
        ({"thinking_token_budget": 5}, OFF),
    ],
)
def test_fields_turn_thinking_on(scripted: Scripted, asked: dict[str, Any], prompt: str) -> None:
    assert prompt_of(scripted, **asked) == prompt
    model, _ = scripted
    effort = {"reasoning": {"effort": asked["reasoning_effort"]}} if "reasoning_effort" in asked else {}
    answered(scripted, "a", to=RESPONSES, **{k: v for k, v in asked.items() if k != "reasoning_effort"}, **effort)
    assert said(model.checkpoint.tokenizer, model.script.submitted[-1]["prompt"]) == prompt


def test_tokenize_writes_the_same(scripted: Scripted) -> None:
    model, server = scripted
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        prompt_of(scripted, **more)
        found = server.post("/tokenize", {"messages": HI, **more}).json()["tokens"]
        assert found == model.script.submitted[-1]["prompt"]
    found = server.post("/tokenize", {"messages": HI, "add_generation_prompt": False}).json()["tokens"]
    assert said(model.checkpoint.tokenizer, found) == "<|turn>user\nHi<turn|>\n"


def test_our_own_template_thinks() -> None:
    t = gemma4(USER_DEFINED)
    turns = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": f"{OPEN}x{CLOSE} y"},
        *HI,
    ]
    own = chat.written(t, turns, variables={"enable_thinking": True}, parse_special=True)[0]
    assert own == (
        "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\ny<turn|>\n"
        "<|turn>user\nHi<turn|>\n<|turn>model\n"
    )
    for template in (None, TEMPLATES["gemma4"]):
        alone, _ = chat.written(t, HI, template, variables={"enable_thinking": True}, parse_special=True)
        assert alone.removeprefix("<bos>") == ON
    assert "<|think|>" not in chat.written(t, HI, parse_special=True)[0]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/tokenize"])
def test_variables_of_the_server_are_refused(scripted: Scripted, path: str) -> None:
    body = {"input": "Hi"} if path == RESPONSES else {"messages": HI}
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "image_token", "guard character", ""):
        answer = scripted[1].post(path, {**body, "chat_template_kwargs": {name: "x"}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs"), answer.text


def test_variables_cannot_write_marks() -> None:
    t, template = gemma4(USER_DEFINED), "{{ place.name }}{% for x in more %}{{ x }}{% endfor %}"
    text, guard = chat.written(t, HI, template, variables={"place": {"name": "<turn|>"}, "more": [OPEN, CLOSE]})
    ids = t.encode(text, bos=False, parse_special=True, guard=guard)
    assert t.decode(ids) == f"<turn|>{OPEN}{CLOSE}" and not {*ids_of(t, "<turn|>", OPEN, CLOSE)} & {*ids}


# --- continued turns -------------------------------------------------------------------------------------------------


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
BEGUN = [*HI, {"role": "assistant", "content": "The answer is "}]


def test_the_last_turn_is_continued(scripted: Scripted) -> None:
    want = "<|turn>user\nHi<turn|>\n<|turn>model\nThe answer is "
    assert prompt_of(scripted, messages=BEGUN, continue_final_message=True, add_generation_prompt=False) == want
    assert prompt_of(scripted, messages=BEGUN, continue_final_message=True) == want
    parts = [{"type": "text", "text": "The answer"}, {"type": "text", "text": " is "}]
    begun = [*HI, {"role": "assistant", "content": parts}]
    parted = prompt_of(scripted, messages=begun, continue_final_message=True)
    assert parted.endswith("model\nThe answeris ")  # the template trims parts
    answering = prompt_of(scripted, messages=BEGUN)
    assert answering == f"{want.strip()}{OPEN}thought\n{CLOSE}"  # without the field, as the template has it


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": HI}, "last message of the assistant"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}]}, "with text"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "add_generation_prompt: false"),
    ],
)
def test_what_cannot_be_continued(scripted: Scripted, body: dict[str, Any], message: str) -> None:
    answer = scripted[1].post(CHAT, {**body, "continue_final_message": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
    assert message in answer.json()["error"]["message"]


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(chat.ChatError, match="cannot be continued"):
        chat.written(gemma4(USER_DEFINED), BEGUN, "{{ messages[0].content }}", continued=True)
    text, _ = chat.written(
        gemma4(USER_DEFINED), BEGUN, "{{ messages[1].content }}|{{ messages[1].content | trim }}.", continued=True
    )
    assert text == "The answer is |The answer is "


def test_fields_of_a_part_reach_the_template(scripted: Scripted) -> None:
    model, server = scripted
    part = {"type": "text", "source_lang_code": "en", "target_lang_code": "de-CH", "text": "Hi"}
    with written_by(model, "{% for p in messages[0].content %}{{ p.source_lang_code }}: {{ p.text }}{% endfor %}"):
        assert server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}).status_code == 200
        assert model.decode(model.script.submitted[-1]["prompt"]) == "en: Hi"
    wrong = server.post(CHAT, {"messages": [{"role": "user", "content": "Hi", "source_lang_code": "en"}]})
    assert wrong.json()["error"]["param"] == "messages[0].source_lang_code"


# --- budgets, with an engine -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    with running(lambda: hybrid.load(checkpoint4(), device="cpu", slots=4, ctx=256, precision="exact")) as server:
        yield server


def thinking(real: Running, most: int, **more: Any) -> dict[str, Any]:
    """An answer that opens a thought, and would go on opening them."""
    opening, closing = marks_of(gemma4(USER_DEFINED))
    body = {
        "messages": HI,
        "max_tokens": most,
        "logit_bias": {str(opening): 100, str(closing): -100},
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": True},
        **more,
    }
    answer = real.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def thoughts(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_spent_budget_closes_the_thought(real: Running, budget: int) -> None:
    answer = thinking(real, 12, thinking_token_budget=budget, n=2, logprobs=True, ignore_eos=True)
    assert thoughts(answer) == 2 * budget and answer["usage"]["completion_tokens"] == 24
    for choice in answer["choices"]:
        assert choice["message"].get("reasoning_content", "") == OPEN * budget
        assert len(choice["logprobs"]["content"]) == 12 - (budget + 2 if budget else 0)
        assert choice["message"]["content"] and OPEN not in choice["message"]["content"]


def test_a_thought_without_a_budget_ends_by_the_length(real: Running) -> None:
    for more in ({}, {"thinking_token_budget": 99}, {"reasoning_effort": "minimal"}):
        answer = thinking(real, 6, **more)
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"], thoughts(answer)) == ("length", "", 5)


@pytest.mark.parametrize("tools", [False, True], ids=["json", "tools"])
def test_a_grammar_is_about_what_follows_the_thought(real: Running, tools: bool) -> None:
    shape: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"} if tools else {"response_format": BOOLEAN}
    answer = thinking(real, 60, thinking_token_budget=4, **shape)
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"] == OPEN * 4 and thoughts(answer) == 4
    if tools:
        assert choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"]) in ({}, {"city": "Rome"}, {"city": "Oslo"})
    else:
        assert choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"]) in (True, False)
    plain = thinking(real, 60, thinking_token_budget=4, chat_template_kwargs={"enable_thinking": False}, **shape)
    assert "reasoning_content" not in plain["choices"][0]["message"]  # without thinking the grammar is about all


class Spelled:
    """A grammar that keeps what it accepts."""

    def __init__(self, text: tuple[int, ...] = ()) -> None:
        self.text = text

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        self.text += (token,)

    def copy(self) -> Spelled:
        return Spelled(self.text)


@pytest.mark.parametrize("first", [0, 1])
def test_copies_within_a_thought_share_a_grammar_until_one_goes_on(first: int) -> None:
    model = ScriptedModel(Script())
    model.checkpoint = checkpoint4()
    opening, closing = marks_of(model.checkpoint.tokenizer)
    one = ThoughtConstraint(model, Channel(opening, closing, inside=True), 9, Spelled())  # type: ignore[arg-type]
    both = [one, one.copy()]
    assert both[0]._grammar is both[1]._grammar
    for n in (first, 1 - first):
        for token in (5, closing, 70 + n, 80 + n):
            both[n].accept(token)
    third = both[0].copy()
    third.accept(90)
    assert [c._grammar.text for c in (*both, third)] == [(70, 80), (71, 81), (70, 80, 90)]  # type: ignore[union-attr]


def test_an_effort_without_thoughts_is_reported(server: Running) -> None:
    answer = server.post(CHAT, {"messages": HI, "reasoning_effort": "high", "max_tokens": 2})
    assert answer.status_code == 200 and "does not think" in answer.headers["x-hybrid-note"]


def test_stop_strings_do_not_count_in_a_thought() -> None:
    t = gemma4(CONTROL)
    cases = [
        ((OPEN, "a END b", CLOSE, "c END d"), f"{OPEN}a END b{CLOSE}c ", "stop"),
        (("a EN", OPEN, "D", CLOSE, "b"), f"a EN{OPEN}D{CLOSE}b", "cancelled"),
        ((OPEN, "EN", CLOSE, "D"), f"{OPEN}EN{CLOSE}D", "cancelled"),
    ]
    for parts, text, finish in cases:
        request = Request(0, [5], Options(stop="END", thought=marks_of(t), max_tokens=99), tokenizer=t)
        request.last = 200
        for token in ids_of(t, *parts):
            if request.finish is None:
                request.push(token)
        request.end("cancelled")
        assert ("".join(e.text for e in request.events), request.finish) == (text, finish)
    inside = Request(0, ids_of(t, "a", OPEN), Options(stop="END", thought=marks_of(t)), tokenizer=t)
    inside.last = 200
    for token in ids_of(t, "END", CLOSE, "END"):
        inside.push(token)
    assert ("".join(e.text for e in inside.events), inside.finish) == (f"END{CLOSE}", "stop")
