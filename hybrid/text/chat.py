"""Render chat messages with the checkpoint's sandboxed Jinja template, and encode them.

Only the template can produce control tokens: their text inside a message is ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from hybrid.text.chat_template import GUARD, OUTPUT, ChatError, expand, expand_apart
from hybrid.text.tokenizer import Tokenizer

__all__ = ["GEMMA4_TEMPLATE", "GEMMA_TEMPLATE", "ChatError", "Message", "encode", "render", "template_of", "written"]

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "model", "content": text or [{"type": "text", "text": ...}, ...]}"""

# Gemma's format: no system role (its text opens the first user turn), roles alternate, turns are trimmed.
GEMMA_TEMPLATE = """\
{{ bos_token }}
{%- set ns = namespace(prefix='', turns=messages) -%}
{%- macro text(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] != 'text' -%}{{ raise_exception('only text parts can be used') }}{%- endif -%}
            {{ part['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set ns.prefix = (system if system is string else system | map(attribute='text') | join) + '\n\n' -%}
    {%- set ns.turns = messages[1:] -%}
{%- endif -%}
{%- for message in ns.turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate user, assistant, user, ...') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- (ns.prefix if loop.first else '') + text(message['content']) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""


# Gemma 4's format: a system role, roles in any order, consecutive model messages are one turn, thoughts are removed.
# enable_thinking: the system turn, opened for it, begins with <|think|>.
GEMMA4_TEMPLATE = """\
{{ bos_token }}
{%- macro text(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] != 'text' -%}{{ raise_exception('only text parts can be used') }}{%- endif -%}
            {{ part['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set names = {'assistant': 'model', 'model': 'model', 'user': 'user', 'system': 'system', 'developer': 'system'} -%}
{%- if enable_thinking and messages and names.get(messages[0]['role']) != 'system' -%}
    {{ '<|turn>system\n<|think|>\n<turn|>\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] not in names -%}{{ raise_exception('no role is called ' + message['role']) }}{%- endif -%}
    {%- set role = names[message['role']] -%}
    {%- set before = names[loop.previtem['role']] if not loop.first else '' -%}
    {%- set after = names.get(loop.nextitem['role'], '') if not loop.last else '' -%}
    {%- if role != 'model' or before != 'model' -%}{{ '<|turn>' + role + '\n' }}{%- endif -%}
    {%- if enable_thinking and loop.first and role == 'system' -%}{{ '<|think|>\n' }}{%- endif -%}
    {%- if role == 'model' -%}{{ text(message['content']).split('<channel|>')[-1] | trim }}
    {%- else -%}{{ text(message['content']) }}{%- endif -%}
    {%- if role != 'model' or after != 'model' -%}{{ '<turn|>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}
"""

OWN_TEMPLATES = {("<start_of_turn>", "<end_of_turn>"): GEMMA_TEMPLATE, ("<|turn>", "<turn|>"): GEMMA4_TEMPLATE}
"""Turn markers of a vocabulary -> default template of checkpoints without one. It omits the empty thought that the
templates of Gemma 4's larger sizes add before an answer."""


OWN_ROLES = ("assistant", "model")


def template_of(tokenizer: Tokenizer, template: str | None) -> str:
    """The checkpoint's template, else Gemma's if the vocabulary has turn markers. ChatError if neither."""
    if template:
        return template
    for markers, own in OWN_TEMPLATES.items():
        if all(tokenizer.token_id(marker) is not None for marker in markers):
            return own
    raise ChatError("this checkpoint has no chat template and no turn markers: use a plain prompt")


def doubt(tokenizer: Tokenizer, template: str | None) -> list[str]:
    """A line on a chat with a checkpoint that has no template and gets its family's; none for other checkpoints."""
    own = any(all(tokenizer.token_id(marker) is not None for marker in markers) for markers in OWN_TEMPLATES)
    return [] if template or not own else ["no chat template: probably a base model"]


def render(
    messages: Sequence[Message],
    template: str = GEMMA_TEMPLATE,
    special: Mapping[str, str] | None = None,
    generate: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    guard: str = "",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Text of a conversation. special: `Tokenizer.special`. generate: append the start of the model's turn. tools: tool
    descriptions for the template. guard: as of `written`. variables: further ones of the template. ChatError for
    invalid messages, an invalid template, or a template that does not terminate."""
    for index, message in enumerate(messages):
        if "role" not in message or not ("content" in message or "tool_calls" in message):
            raise ChatError(f"message {index} needs a role and a content")
    given = {
        **(variables or {}),
        "messages": [_given(m) for m in messages],
        "tools": None if tools is None else list(tools),
        "documents": None,
        "add_generation_prompt": generate,
        GUARD: guard,
        **({"bos_token": "<bos>"} if special is None else special),
    }
    most = OUTPUT + 4 * sum(len(text) for text in _texts([*messages, *(tools or ()), variables]))
    # Templates from files run in a process that can be killed.
    return (expand if template in OWN_TEMPLATES.values() else expand_apart)(template, given, most)


def _given(message: Message) -> dict[str, Any]:
    """A message as transformers hands it to a template: without fields that are None, a thought under each of its
    names."""
    given = {key: value for key, value in message.items() if value is not None}
    thought = next((given[key] for key in ("reasoning_content", "thinking", "reasoning") if key in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}


_READS_PARTS = re.compile("text|tojson")


def _joined(message: Message) -> Message:
    """A message of text parts for a template that reads only texts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    texts = [p.get("text") for p in parts if isinstance(p, Mapping)]
    if not texts or len(texts) != len(parts) or not all(isinstance(t, str) for t in texts):
        return message
    return {**message, "content": "\n".join(map(str, texts))}


def written(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: str | None = None,
    parse_special: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    generate: bool = True,
    continued: bool = False,
) -> tuple[str, str]:
    """(rendered conversation, guard character that escapes control tokens inside messages: `Tokenizer.encode`).
    variables, generate: of `render`. continued: instead of a new turn, up to the end of the last message. Slow: a
    template from a file runs in a separate process."""
    source = template_of(tokenizer, template)
    if not _READS_PARTS.search(source):
        messages = [_joined(m) for m in messages]
    texts = chain(_texts([*messages, *(tools or ()), variables]), [source])
    guard, end = _unused(texts)
    if continued:
        messages = [*messages[:-1], _ended(messages[-1], end)]
    if parse_special:
        guard = ""
    else:
        messages = [_quoted(tokenizer, m, guard) for m in messages]
        tools = _nested(tokenizer, tools, guard)
        variables = {name: _nested(tokenizer, value, guard) for name, value in (variables or {}).items()}
    generate = generate and not continued
    text = render(messages, source, tokenizer.special, generate, tools, guard, variables)
    if not continued:
        return text, guard
    begin, found, _ = text.rpartition(end)
    if not found:
        raise ChatError("the chat template does not write the last message: it cannot be continued")
    return begin.replace(end, ""), guard


def encode(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: str | None = None,
    parse_special: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Ids of a conversation for generation; a begin-of-text token only where the template writes it. Control tokens
    inside messages and tools are ordinary text unless `parse_special`."""
    text, guard = written(tokenizer, messages, template, parse_special, tools)
    return tokenizer.encode(text, bos=False, parse_special=True, guard=guard)


def _texts(value: Any) -> Iterator[str]:
    """Every string in nested lists and objects, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_texts, chain(value.keys(), value.values())))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_texts, value))


def _unused(texts: Iterable[str]) -> tuple[str, str]:
    """Two Unicode noncharacters that occur in none of the texts."""
    used = set(chain.from_iterable(texts))
    free = (c for c in map(chr, chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0x110000))) if c not in used)
    return next(free), next(free)


def _ended(message: Message, end: str) -> Message:
    """A message whose text ends with `end`. ChatError for one without text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + end}
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]}
    raise ChatError("the last message has no text that could be continued")


def _nested(tokenizer: Tokenizer, value: Any, guard: str) -> Any:
    """Quote all strings of a value, for templates that concatenate them with other text."""
    if isinstance(value, str):
        return tokenizer.quote(value, guard, joined=True)
    if isinstance(value, Mapping):
        return {_nested(tokenizer, k, guard): _nested(tokenizer, v, guard) for k, v in value.items()}
    return [_nested(tokenizer, v, guard) for v in value] if isinstance(value, (list, tuple)) else value


def _quoted(tokenizer: Tokenizer, message: Message, guard: str) -> Message:
    """Quote all fields of a message except its role. Model messages keep the marks of thoughts, by which templates
    remove these."""
    content, thoughts = message.get("content"), message.get("role") not in OWN_ROLES
    other = {k: v if k == "role" else _nested(tokenizer, v, guard) for k, v in message.items() if k != "content"}
    if isinstance(content, str):
        return {**other, "content": tokenizer.quote(content, guard, thoughts=thoughts)}
    if not isinstance(content, list):
        return {**other, "content": _nested(tokenizer, content, guard)} if "content" in message else other
    parts = []
    for p in content:
        part = _nested(tokenizer, p, guard)
        if isinstance(p, Mapping) and isinstance(p.get("text"), str):
            part["text"] = tokenizer.quote(p["text"], guard, joined=True, thoughts=thoughts)
        if isinstance(p, Mapping) and p.get("type") == "text":
            part["type"] = "text"
        parts.append(part)
    return {**other, "content": parts}
