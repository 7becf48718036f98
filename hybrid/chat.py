"""Chat messages to text with the checkpoint's Jinja template (sandboxed), and to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from hybrid.tokenizer import Tokenizer

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
    {%- set ns.prefix = (system if system is string else system[0]['text']) + '\n\n' -%}
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


class ChatError(ValueError):
    """The messages or the template cannot be used; says why in one line."""


def template_of(tokenizer: Tokenizer, template: str | None) -> str:
    """The checkpoint's template, or Gemma's where it has none but knows the turn markers. ChatError otherwise."""
    if template:
        return template
    if any(tokenizer.token_id(marker) is None for marker in ("<start_of_turn>", "<end_of_turn>")):
        raise ChatError("this checkpoint has no chat template and no turn markers: use a plain prompt")
    return GEMMA_TEMPLATE


def render(
    messages: Sequence[Message], template: str = GEMMA_TEMPLATE, bos: str = "<bos>", generate: bool = True
) -> str:
    """Text of a conversation, its begin-of-text token included if the template writes one. `generate` opens the
    model's turn. ChatError for messages or a template that cannot be used."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    for index, message in enumerate(messages):
        if not {"role", "content"} <= set(message):
            raise ChatError(f"message {index} needs a role and a content")
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        return env.from_string(template).render(
            messages=messages, bos_token=bos, eos_token="", add_generation_prompt=generate, tools=None
        )
    except ChatError:
        raise
    except (TemplateError, TypeError, KeyError, IndexError) as error:
        raise ChatError(f"the chat template failed: {error}") from None


def encode(tokenizer: Tokenizer, messages: Sequence[Message], template: str | None = None) -> list[int]:
    """Ids of a conversation that the model is to continue, with exactly one begin-of-text token."""
    bos = "" if tokenizer.bos_id is None else tokenizer.vocabulary.pieces[tokenizer.bos_id]
    text = render(messages, template_of(tokenizer, template), bos)
    return tokenizer.encode(text, bos=not bos or not text.startswith(bos), parse_special=True)


def _refuse(reason: str) -> None:
    raise ChatError(f"the chat template refuses: {reason}")
