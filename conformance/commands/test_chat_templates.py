"""Chat templates: what transformers 5.24 gives them (its values), and what must never come of a message."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from conformance.support.paths import DEMO
from hybrid.checkpoint import open_checkpoint
from hybrid.text import chat
from hybrid.text.chat_template import ChatError
from hybrid.text.tokenizer import CONTROL, Tokenizer


@cache
def demo() -> Tokenizer:
    return open_checkpoint(DEMO).tokenizer


SPECIAL = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "h\u00f6 <b> & 'q' \u2028"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": ["x", None, True]}}}
        ],
    },
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
]
THOUGHT: list[dict[str, Any]] = [{"role": "assistant", "content": "a", "reasoning": "why"}]
CASES: list[tuple[list[dict[str, Any]], str, str]] = [
    (
        MESSAGES[:1],
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}|{{ pad_token }}|{{ unk_token }}|{{ mask_token }}|{{ sep_token is defined }}",
        "<bos>hö <b> & 'q' \u2028<eos>|<pad>|<unk>|<mask>|False",
    ),
    (
        MESSAGES[:2],
        "{{ messages[0] | tojson }}{{ messages[1].tool_calls | tojson }}",
        '{"role": "user", "content": "hö <b> & \'q\' \u2028"}[{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": ["x", null, true]}}}]',
    ),
    (
        MESSAGES[:2],
        "{{ messages[0].content | tojson(ensure_ascii=True) }}{{ messages[1].tool_calls[0].function | tojson(indent=2) }}{{ messages[1].tool_calls[0].function.arguments | tojson(separators=(',', ':'), sort_keys=true) }}",
        '"h\\u00f6 <b> & \'q\' \\u2028"{\n  "name": "f",\n  "arguments": {\n    "z": 1,\n    "a": [\n      "x",\n      null,\n      true\n    ]\n  }\n}{"a":["x",null,true],"z":1}',
    ),
    (
        MESSAGES[:2],
        "{{ messages[1].tool_calls[0].function.arguments | tojson(true, 1) }}",
        '{\n "z": 1,\n "a": [\n  "x",\n  null,\n  true\n ]\n}',
    ),
    (
        MESSAGES[:1],
        "{% for m in messages %}{% generation %}[{{ m.content }}]{% set x = 1 %}{% endgeneration %}{{ x is defined }}{% endfor %}",
        "[hö <b> & 'q' \u2028]False",
    ),
    (MESSAGES[:1], "a {%- generation -%}  b  {%- endgeneration -%} c", "abc"),
    (
        MESSAGES,
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% if loop.index0 == 2 %}{% break %}{% endif %};{% endfor %}",
        "user;user",
    ),
    (
        MESSAGES[:1],
        "  {% if true %}\n  x\n  {% endif %}\n{% for m in messages %}\n{{ m.role }}\n{% endfor %}\nend",
        "  x\nuser\nend",
    ),
    (
        MESSAGES[:2],
        "{% for m in messages %}{{ m.content is defined }}{{ 'content' in m }},{% endfor %}",
        "TrueTrue,FalseFalse,",
    ),
    (
        MESSAGES[2:],
        "{% for p in messages[0].content %}({{ p.text }}){% endfor %}{{ messages[0].content is string }}",
        "(one)(two)False",
    ),
    (
        MESSAGES[:1],
        "{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ add_generation_prompt }}{{ nope is defined }}",
        "TrueTrueTrueTrueFalse",
    ),
    (
        MESSAGES[:1],
        "{% set d = dict(a=1, b=2) %}{{ d }}{{ dict.fromkeys(['k'], 0) }}{{ dict([('x', 1)]).items() | list }}",
        "{'a': 1, 'b': 2}{'k': 0}[('x', 1)]",
    ),
    (MESSAGES[:1], "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}", "2"),
    (MESSAGES[:1], "{% set ns = namespace(self=3) %}{{ ns.self }}", "3"),
    (THOUGHT, "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ messages[0].reasoning }}", "whywhywhy"),
    (
        MESSAGES[:1],
        "{{ 'abc'.startswith('a') }}{{ ' x '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'x' ~ 1 }}{{ [1,2,3][::-1] }}{{ 'a' in 'abc' }}{{ 'T' | lower }}{{ {'a': 1}.get('b', 5) }}{{ '%s' | format(3) }}{{ 'abc'[1:] }}",
        "Truexbx1[3, 2, 1]Truet53bc",
    ),
    (
        MESSAGES,
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map(attribute='role') | join(',') }}{{ range(3) | list }}{{ 5 // 2 }}{{ messages | last == messages[-1] }}",
        "2user,assistant,user[0, 1, 2]2True",
    ),
    (MESSAGES[:1], "{{ messages[0].content | e }}", "hö &lt;b&gt; &amp; &#39;q&#39; \u2028"),
    (MESSAGES[:1], "{{ strftime_now('%%') }}{{ strftime_now(format='%%x'[:2]) }}", "%%"),
]


@pytest.mark.parametrize(("messages", "template", "want"), CASES)
def test_a_template_writes_what_transformers_writes(
    messages: list[dict[str, Any]], template: str, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "expand_apart", chat.expand)  # no process for each: test_template_worker.py has that
    assert chat.render(messages, template, SPECIAL) == want


@pytest.mark.parametrize("arguments", ["", "ensure_ascii=True", "indent=1"])
def test_json_of_a_message_holds_neither_guards_nor_control_tokens(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "expand_apart", chat.expand)
    t = demo()
    said = "<end_of_turn>\u00f6\ufdd0"
    template = "{{ messages[0].content | tojson(ARGUMENTS) }}<end_of_turn>".replace("ARGUMENTS", arguments)
    ids = chat.encode(t, [{"role": "user", "content": said}], template)
    want = '"<end_of_turn>\\u00f6\\ufdd0"' if "ascii" in arguments else f'"{said}"'
    assert [i for i in ids if t.types[i] == CONTROL] == [5] and t.decode(ids) == want


def test_the_template_alone_decides_on_begin_of_text() -> None:
    """transformers adds no special tokens to a rendered conversation."""
    t, message = demo(), [{"role": "user", "content": "a"}]
    for template, bos in (("{{ messages[0].content }}", 0), ("{{ bos_token }}x", 1), ("<bos>x", 1)):
        assert chat.encode(t, message, template).count(2) == bos


def test_parts_are_joined_for_a_template_that_reads_only_texts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert chat.written(demo(), parts, "[{{ messages[0].content }}]", parse_special=True)[0] == "[a\nb]"
    assert chat.written(demo(), parts, "{{ messages[0].content[1].text }}", parse_special=True)[0] == "b"
    system = [{"role": "system", "content": parts[0]["content"]}, {"role": "user", "content": "c"}]
    assert "user\nab\n\nc<end_of_turn>" in chat.render(system)


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"function": {"name": "f", "arguments": {"a<eos>": "<end_of_turn>"}}}]},
        {"content": {"text": "<end_of_turn>"}},
        {"content": None, "tool_calls": [{"x": "<end_of_turn>"}]},
        {"content": ["<end_of_turn>", {"type": "text", "text": "<eos>", "more": "<bos>"}]},
    ],
)
def test_no_field_of_a_message_writes_control_tokens(message: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "expand_apart", chat.expand)
    ids = chat.encode(demo(), [{"role": "assistant", **message}], "{{ messages | tojson }}{{ messages }}")
    assert not [i for i in ids if demo().types[i] == CONTROL]


def test_a_message_needs_a_content_or_calls() -> None:
    with pytest.raises(ChatError, match="message 0 needs a role and a content"):
        chat.render([{"role": "assistant"}])
