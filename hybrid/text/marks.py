"""Marks of a vocabulary in an answer, found by token id: their text may be empty, or be written by other tokens.

A thought is the text between two marks, begun by its channel's name: <|channel>thought, a line break, ..., <channel|>.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.text.tokenizer import THOUGHT, StreamDecoder, Tokenizer

OPEN, CLOSE = THOUGHT
NAME = "thought\n"
"""What a thought begins with."""
THINK = "<|think|>"
"""Turns thinking on, in the system turn."""


def ids_of(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[str, int]:
    """Ids of the marks that the vocabulary has."""
    return {m: i for m in marks if (i := tokenizer.token_id(m)) is not None}


@dataclass(slots=True)
class Channel:
    """Follows tokens into thoughts and out of them. opening, closing: ids of the marks; tokens: those of all thoughts,
    without these marks."""

    opening: int
    closing: int
    inside: bool = False
    tokens: int = 0

    @classmethod
    def after(cls, marks: tuple[int, int], prompt: Sequence[int]) -> Channel:
        """Of an answer to a prompt, which may end within a thought. marks: the ids."""
        last = next((token for token in reversed(prompt) if token in marks), None)
        return cls(*marks, inside=last == marks[0])

    def take(self, token: int) -> bool:
        """Follow a token. Whether it belongs to a thought or is a mark of one."""
        if token == self.closing:
            self.inside = False
        elif self.inside:
            self.tokens += 1
        elif token == self.opening:
            self.inside = True
        else:
            return False
        return True


class Marks:
    """Finds marks in an answer and removes their text, if any. Text may lag behind its tokens (incomplete characters,
    stop strings), so positions count characters."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[str, int]) -> None:
        self._names = {i: m for m, i in marks.items()}
        self._decoder = StreamDecoder(tokenizer)
        self._printed = self._read = 0  # characters of all tokens, and of consumed text
        self._text = ""  # received but not consumed
        self._found: deque[tuple[int, int, str]] = deque()  # (begin, end, mark)

    def push(self, text: str, ids: Sequence[int]) -> list[tuple[str, str]]:
        """("", text) and (mark, "") in order."""
        for token in ids if self._names else ():
            begin = self._printed
            self._printed += len(self._decoder.push(token))
            if (mark := self._names.get(token)) is not None:
                self._found.append((max(begin, self._printed - len(mark)), self._printed, mark))
        self._text += text
        out: list[tuple[str, str]] = []
        while self._found and self._found[0][1] <= self._read + len(self._text):
            begin, end, mark = self._found.popleft()
            out += [("", self._take(begin)), (mark, "")]
            self._take(end)
        whole = self._read + len(self._text)
        out.append(("", self._take(min(whole, self._found[0][0]) if self._found else whole)))
        return [part for part in out if any(part)]

    def _take(self, until: int) -> str:
        """Consume received text up to a position."""
        n = until - self._read
        text, self._text, self._read = self._text[:n], self._text[n:], until
        return text
