"""Separate an answer's thoughts, tool calls and text."""

from __future__ import annotations

import json
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.text.marks import CLOSE, NAME, OPEN, Channel, Marks
from hybrid.text.tokenizer import Tokenizer


class Parser(ABC):
    """Base of streaming parsers that separate tool calls from text, both without thoughts."""

    marks: Mapping[str, int] = {}
    """Ids of the marks that it reads."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        """Tool calls so far."""

    @abstractmethod
    def take(self, mark: str, text: str) -> list[dict[str, Any]]:
        """The deltas of one of its marks, or of text."""

    def end(self) -> list[dict[str, Any]]:
        """Deltas of the buffered rest."""
        return []

    def begin(self, name: str) -> dict[str, Any]:
        """The delta of a new call."""
        function = {"name": name, "arguments": ""}
        self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1], "function": {**function}}]}

    def more(self, arguments: str) -> dict[str, Any]:
        """The delta of more arguments of the last call."""
        self.calls[-1]["function"]["arguments"] += arguments
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": arguments}}]}


class Answer:
    """Streaming reader of an answer. channel: where the pushed tokens are, None for a vocabulary without thoughts; parser:
    None if no tools may be called."""

    def __init__(self, tokenizer: Tokenizer, channel: Channel | None, parser: Parser | None) -> None:
        self.channel, self._parser = channel, parser
        own = {} if channel is None else {OPEN: channel.opening, CLOSE: channel.closing}
        self._marks = Marks(tokenizer, {**own, **(parser.marks if parser is not None else {})})
        self._thinks = channel is not None and channel.inside
        self._begins, self._held = True, ""  # of a thought: whether its name may follow, and what is held back

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls so far."""
        return self._parser.calls if self._parser is not None else []

    def push(self, text: str, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The deltas of an event: {"content": text}, {"reasoning_content": text} or {"tool_calls": [call]}."""
        if self.channel is not None:
            for token in ids:
                self.channel.take(token)
        deltas: list[dict[str, Any]] = []
        for mark, part in self._marks.push(text, ids):
            if mark == CLOSE or (mark == OPEN and not self._thinks):
                self._thinks, self._begins, self._held = mark == OPEN, True, ""
            elif self._thinks:
                deltas += self._thought(mark or part)
            elif self._parser is not None:
                deltas += self._parser.take(mark, part)
            else:
                deltas.append({"content": part})
        return deltas

    def end(self) -> list[dict[str, Any]]:
        """Deltas of the buffered rest."""
        return self._parser.end() if self._parser is not None else []

    def _thought(self, text: str) -> list[dict[str, Any]]:
        """Text of a thought, without its channel's name and the line break at its end: templates write both."""
        text = self._held + text
        if self._begins and len(text) < len(NAME) and NAME.startswith(text):
            self._held = text
            return []
        if self._begins:
            self._begins, text = False, text.removeprefix(NAME)
        self._held = text[-1:] if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        return [{"reasoning_content": text}] if text else []


def arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call in an answer; None if they were cut off. Numbers too large for a float are its largest."""
    try:
        found: dict[str, Any] = json.loads(text or "{}", parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return found


def _finite(number: str) -> float:
    most = sys.float_info.max
    return max(-most, min(most, float(number)))
