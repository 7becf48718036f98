"""Tool calls as JSON between texts of the model's own template (fine-tunes of Gemma 3), for example

    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>

The form is what the template writes for calls in a conversation. Its control tokens are recognised by their ids. Calls may
follow text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from hybrid.serve.answers import Parser
from hybrid.serve.structured import json_rule
from hybrid.serve.tools import MOST_CALLS, TEXT, Format, Offer, in_slashes, literal
from hybrid.serve.tools_marked import turns
from hybrid.text.chat import ChatError, render
from hybrid.text.tokenizer import CONTROL, Tokenizer

_READS_TOOLS = re.compile(r"\btools\b")
_MARK = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")
SURROGATE = 0xD800
"""First of the characters that stand for control tokens: no decoded text has any."""
_NAME, _QUESTION, _ANSWER, _RESULT = "look_up_a_word", "A question.", "An answer.", "A result."
_GIVEN: Sequence[dict[str, Any]] = ({"word": "one", "most": 1}, {"word": "two", "most": 2})


class Form(NamedTuple):
    """Texts of the template around calls: before the first name, between a name and its arguments, after the last arguments,
    and from arguments to the next name (None: it writes one call only)."""

    open: str
    middle: str
    close: str
    between: str | None


def form_of(write: Callable[..., str]) -> Form | None:
    """The form of calls in a template; None for a template that writes no calls, or none with JSON. write: renders messages,
    with `tools` and `generate`."""
    tools = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": _SCHEMA}}]
    asked = {"role": "user", "content": _QUESTION}
    try:
        start = write([asked], tools=tools, generate=True)
        plain = write([asked, {"role": "assistant", "content": _ANSWER}], tools=tools, generate=False)
        one = write([asked, _called(1)], tools=tools, generate=False)
        after = write([asked, _called(1), _answered()], tools=tools, generate=True)
    except ChatError:
        return None
    end = plain.rpartition(_ANSWER)[2]
    found = _parts(one, start, end, 1)
    if found is None or not plain.startswith(start) or _NAME not in start or _RESULT not in after:
        return None
    opening, middle, close = found[0].lstrip(), found[1], found[2]
    if not opening or not close:
        return None
    between = None
    with suppress(ChatError):  # a template may refuse several calls
        several = _parts(write([asked, _called(2)], tools=tools, generate=False), start, end, 2)
        if several is not None and several == [found[0], middle, several[2], middle, close]:
            between = several[2]
    return Form(opening, middle, close, between)


_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "most": {"type": "integer"}}}


def _called(count: int) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": _NAME, "arguments": given}}
        for i, given in enumerate(_GIVEN[:count])
    ]
    return {"role": "assistant", "tool_calls": calls}


def _answered() -> dict[str, Any]:
    return {"role": "tool", "name": _NAME, "tool_call_id": "call_0", "content": _RESULT}


def _parts(text: str, start: str, end: str, count: int) -> list[str] | None:
    """Texts around names and arguments of the first `count` calls, between `start` and `end`; None for another form."""
    if not text.startswith(start) or not text.endswith(end):
        return None
    rest, found = text[len(start) : len(text) - len(end)], list[str]()
    for given in _GIVEN[:count]:
        before, name, rest = rest.partition(_NAME)
        middle, brace, rest = rest.partition("{")
        if not name or not brace:
            return None
        try:
            value, length = json.JSONDecoder().raw_decode(brace + rest)
        except ValueError:
            return None
        if value != given:
            return None
        found += [before, middle]
        rest = rest[length - 1 :]
    return [*found, rest]


# ------------------------------------------------------------------------------------------------------------- grammar


def lark_with(form: Form, marks: Mapping[str, int]) -> Any:
    """The `lark` function of a form. marks: ids of its control tokens."""

    def text_of(text: str) -> str:
        """A text as a sequence of literals and tokens."""
        return " ".join(f"<[{marks[part]}]>" if part in marks else literal(part) for part in _split(text, marks))

    def lark(offer: Offer, answer: tuple[dict[str, Any] | None, bool]) -> str:
        schema, strict = answer
        rules, first = list[str](), _split(form.open, marks)[0]
        for i, tool in enumerate(offer.tools):
            followed, whole = offer.arguments(tool)
            rules += [
                f"call_{i}: {text_of(tool.name + form.middle)} args_{i}",
                f"args_{i}: {json_rule(followed, strict=whole)}",
            ]
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(offer.tools)))}")
        more = ""
        if form.between is not None and offer.several:
            more = f" ({text_of(form.between)} call){{0,{MOST_CALLS - 1}}}"
        rules.append(f"calls: call{more} {text_of(form.close)}")
        start = f"{text_of(form.open)} calls"
        if not offer.required and schema is not None:
            rules.append(f"answer: {json_rule(schema, strict=strict)}")
            start += " | answer"
        elif not offer.required and first in marks:
            rules.append(TEXT)
            start = f"TEXT ({start})?"
        elif not offer.required:
            rest = text_of(form.open[len(first) :])
            rules.append(f"before[lazy]: /(?s:.*){in_slashes(re.escape(first))}/")
            rules.append(TEXT)
            start = f"TEXT | before {rest} calls"
        return "\n".join([f"start: {start}", *rules])

    return lark


def _split(text: str, marks: Mapping[str, int]) -> list[str]:
    """A text cut at its control tokens."""
    names = "|".join(map(re.escape, marks))
    return [part for part in (re.split(f"({names})", text) if names else [text]) if part]


# -------------------------------------------------------------------------------------------------------------- reader


class WrittenReader(Parser):
    """Streaming parser of calls in one of several forms. marks: ids of the forms' control tokens. anywhere: whether calls may
    follow text."""

    def __init__(
        self, offer: Offer, forms: Sequence[Form], marks: Mapping[str, int] | None = None, anywhere: bool = True
    ) -> None:
        super().__init__()
        self.marks, self._anywhere = marks or {}, anywhere
        self._symbols = {mark: chr(SURROGATE + n) for n, mark in enumerate(self.marks)}
        self._names = [t.name for t in offer.tools]
        self._openings = {opening: found for form in forms for opening, found in self._before(form, form.open)}
        self._next: dict[str, tuple[str, Form]] = {}
        self._held, self._mode = "", "text"  # text, arguments, after; plain: text without calls
        self._depth, self._quoted, self._escaped = 0, False, False

    def take(self, mark: str, text: str) -> list[dict[str, Any]]:
        self._held += self._symbols[mark] if mark else text
        deltas: list[dict[str, Any]] = []
        while self._held and self._step(deltas):
            pass
        return deltas

    def end(self) -> list[dict[str, Any]]:
        """The rest of a text. What follows a call, or is one that was cut before its arguments, is left out."""
        held, self._held = self._held, ""
        return self._said(held) if self._mode in ("text", "plain") else []

    def _before(self, form: Form, text: str) -> Iterator[tuple[str, tuple[str, Form]]]:
        """(text before a call's arguments, (function, form)) of each function, after `text`; control tokens as surrogates."""
        for name in self._names:
            opening = f"{text}{name}{form.middle}"
            for mark, symbol in self._symbols.items():
                opening = opening.replace(mark, symbol)
            yield opening, (name, form)

    def _said(self, text: str) -> list[dict[str, Any]]:
        text = text.translate(dict.fromkeys(map(ord, self._symbols.values())))
        return [{"content": text}] if text else []

    def _step(self, deltas: list[dict[str, Any]]) -> bool:
        """Parse a piece of the text that came. False: more is needed."""
        if self._mode == "arguments":
            length, whole = self._arguments()
            deltas.append(self.more(self._held[:length]))
            self._held, self._mode = self._held[length:], "after" if whole else "arguments"
            return whole
        if self._mode == "after":
            opening = next((opening for opening in self._next if self._held.startswith(opening)), "")
            return self._begun(opening, self._next, deltas)
        return self._text(deltas)

    def _text(self, deltas: list[dict[str, Any]]) -> bool:
        """Text up to the first call; what may begin a call is held back."""
        at, opening = len(self._held), ""
        if self._mode == "text":
            found = ((self._held.find(opening), opening) for opening in self._openings)
            at, opening = min((f for f in found if f[0] >= 0), default=(at - self._partial(), ""))
        if at and not self._anywhere:
            at, opening, self._mode = len(self._held), "", "plain"
        deltas += self._said(self._held[:at])
        self._held = self._held[at:]
        return self._begun(opening, self._openings, deltas)

    def _begun(self, opening: str, known: Mapping[str, tuple[str, Form]], deltas: list[dict[str, Any]]) -> bool:
        if not opening:
            return False
        name, form = known[opening]
        self._next = {} if form.between is None else dict(self._before(form, form.between))
        deltas.append(self.begin(name))
        self._held, self._mode = self._held[len(opening) :], "arguments"
        return True

    def _partial(self) -> int:
        """Length of the longest end of the text that begins a call."""
        longest = min(len(self._held), max(map(len, self._openings)))
        ends = (self._held[len(self._held) - n :] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(opening.startswith(end) for opening in self._openings)), 0)

    def _arguments(self) -> tuple[int, bool]:
        """(characters of the arguments object in the buffer, whether it is closed)."""
        for n, c in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = c == "\\", c != '"'
            elif c == '"':
                self._quoted = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if not self._depth:
                    return n + 1, True
        return len(self._held), False


def written(tokenizer: Tokenizer, template: str) -> Format | None:
    """The format of a template that writes calls with JSON; None for others. Slow: the template runs in a process."""
    if not _READS_TOOLS.search(template):
        return None
    form = form_of(partial(render, template=template, special=tokenizer.special))
    if form is None:
        return None
    marks = dict(_marks(tokenizer, "".join(part or "" for part in form)))
    return Format(turns, lark_with(form, marks), partial(WrittenReader, forms=(form,), marks=marks))


def _marks(tokenizer: Tokenizer, text: str) -> Iterator[tuple[str, int]]:
    """Control tokens in a text, and their ids."""
    for mark in _MARK.findall(text):
        number = tokenizer.token_id(mark)
        if number is not None and tokenizer.types[number] == CONTROL:
            yield mark, number
