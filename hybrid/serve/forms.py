"""Format chat and completion answers as in OpenAI's API, streamed in chunks or whole. Forms are independent of HTTP and
the engine's threads."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from hybrid.engine.request import Completion, Event, Timings, Usage
from hybrid.engine.stats import TokenLogprob
from hybrid.serve.answers import Answer
from hybrid.serve.errors import ApiError
from hybrid.serve.http import EVENTS, packed
from hybrid.serve.running import Item
from hybrid.text.tokenizer import StreamDecoder, Tokenizer

FINISH = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "deadline": "length",
    "cancelled": "length",
}
"""OpenAI's finish_reason by ours; OpenAI has none for a time limit."""


TEXTS = ("content", "reasoning_content")
"""Deltas that hold text."""


class Form(ABC):
    """An answer in an endpoint's format, streamed in chunks or whole."""

    media = EVENTS
    """Type of a stream."""
    api = ""
    """Beginning of the API's addresses, if its errors have a form of their own."""

    def waiting(self) -> bytes:
        """A chunk that keeps an idle stream open."""
        return b": waiting\n\n"

    def open(self) -> bytes:
        """The first chunks of a stream."""
        return b""

    @abstractmethod
    def push(self, item: Item) -> bytes:
        """A choice's new events as chunks; empty if there is nothing to send yet."""

    @abstractmethod
    def close(self) -> bytes:
        """The last chunks, after every choice has ended."""

    def fail(self, error: ApiError) -> bytes:
        """The final chunks of a failed stream."""
        return error.ending(self.api)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer as one object."""


def finite(logprob: float) -> float:
    """A log probability as a finite number for JSON."""
    return max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0


class Tokens:
    """Token text and bytes in logprobs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token: int) -> bytes:
        """A token's bytes; a control token's name, since its text is empty."""
        t = self._tokenizer
        text = t.token_bytes(token) if 0 <= token < t.n_rows else b""
        if not text and 0 <= token < t.n_tokens:
            text = t.vocabulary.pieces[token].encode("utf-8", "replace")
        return text

    def decoder(self) -> StreamDecoder:
        """A streaming decoder, to count characters of generated text."""
        return StreamDecoder(self._tokenizer)

    def name(self, token: int) -> str:
        return self.bytes(token).decode("utf-8", "replace")

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.bytes(token)
        return {"token": text.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(text)}

    def chat(self, t: TokenLogprob, top: int) -> dict[str, Any]:
        return {**self.entry(t.id, t.logprob), "top_logprobs": [self.entry(i, p) for i, p in t.top[:top]]}


def usage(done: Sequence[Completion], prompts: Sequence[int], readers: Sequence[Answer] = ()) -> dict[str, Any]:
    """The usage object. done: completion of each choice. prompts: index of each prompt's first choice, since a prompt
    counts once. readers: of the choices."""
    thoughts = sum(r.channel.tokens for r in readers if r.channel is not None)
    ended = [d.usage for d in done]
    prompt = sum(ended[i].prompt_tokens for i in prompts)
    completion = sum(u.completion_tokens for u in ended)
    drafts = {}
    if drafted := sum(u.drafted_tokens for u in ended):
        accepted = sum(u.accepted_tokens for u in ended)
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(ended[i].cached_tokens for i in prompts), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": thoughts, "audio_tokens": 0, **drafts},
    }


def event(value: Any) -> bytes:
    return b"data: " + packed(value) + b"\n\n"


def named_event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + event({"type": kind, **fields})


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """Fields of an answer besides its choices. top: number of top_logprobs, None without logprobs; ends: end-of-text
    tokens, which chat logprobs omit; usage: in the last chunk of a stream; every_usage: in every chunk."""

    model: str
    fingerprint: str
    tokens: Tokens
    top: int | None
    ends: frozenset[int]
    prompt_tokens: int
    usage: bool = False
    every_usage: bool = False

    def logprobs(self, events: Sequence[Event], reader: Answer) -> list[dict[str, Any]]:
        """Logprobs of the events' tokens that are part of a message. Before the reader gets the events."""
        if self.top is None:
            return []
        channel = copy(reader.channel)
        found = [p for e in events for p in e.logprobs or () if channel is None or not channel.take(p.id)]
        return [self.tokens.chat(p, self.top) for p in found if p.id not in self.ends]


class _Choices(Form):
    """Base of chat and completions: the head of every object, finished choices, the usage chunk."""

    prefix, chunk_object, whole_object = "", "", ""
    _readers: Sequence[Answer] = ()

    def __init__(self, head: Head, count: int, prompts: Sequence[int]) -> None:
        self.head = head
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._same = {
            "id": self.id,
            "created": int(time.time()),
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._prompts = prompts
        self._count = count
        self.done: dict[int, Completion] = {}
        self._generated = 0

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        more: dict[str, Any] = {"usage": None} if self.head.usage else {}
        if self.head.every_usage:
            n, m = self.head.prompt_tokens, self._generated
            more = {"usage": {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}}
        return event({**self._same, "object": self.chunk_object, "choices": [choice], **more})

    def close(self) -> bytes:
        out = b""
        if self.head.usage:
            out = event({**self._same, "object": self.chunk_object, "choices": [], "usage": self._usage()})
        return out + DONE

    def whole(self) -> dict[str, Any]:
        choices = [self._whole(i) for i in range(self._count)]
        return {**self._same, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage([self.done[i] for i in range(self._count)], self._prompts, self._readers)

    @abstractmethod
    def _whole(self, index: int) -> dict[str, Any]:
        """A choice of the whole answer."""


def read(reader: Answer, item: Item) -> list[dict[str, Any]]:
    """The deltas of a choice's events, with adjacent text joined."""
    deltas: list[dict[str, Any]] = []
    for e in item.events:
        deltas += reader.push(e.text, e.ids)
    if item.done is not None:
        deltas += reader.end()
    out: list[dict[str, Any]] = []
    for delta in deltas:
        key = next(iter(delta))
        if out and key in out[-1] and key in TEXTS:
            out[-1] = {key: out[-1][key] + delta[key]}
        else:
            out.append(delta)
    return out


class ChatForm(_Choices):
    """chat.completion and chat.completion.chunk. readers: one for each choice."""

    prefix, chunk_object, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, head: Head, readers: Sequence[Answer]) -> None:
        super().__init__(head, len(readers), [0])
        self._readers = readers
        self._texts: list[dict[str, list[str]]] = [{key: [] for key in TEXTS} for _ in readers]
        self._logprobs: list[list[dict[str, Any]] | None] = [None if head.top is None else [] for _ in readers]

    def open(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._delta(i, first, None) for i in range(self._count))

    def push(self, item: Item) -> bytes:
        i = item.choice
        self._generated += sum(len(e.ids) for e in item.events)
        fresh = self.head.logprobs(item.events, self._readers[i])
        deltas = read(self._readers[i], item)
        if (kept := self._logprobs[i]) is not None:
            kept += fresh
        for key, texts in self._texts[i].items():
            texts += [d[key] for d in deltas if key in d]
        at = next((n for n, d in enumerate(deltas) if "reasoning_content" not in d), len(deltas))
        if fresh and at == len(deltas):
            deltas = [*deltas, {"content": ""}]
        out = [self._delta(i, d, fresh if n == at else None) for n, d in enumerate(deltas)]
        if item.done is not None:
            self.done[i] = item.done
            out.append(self._delta(i, {}, None, self._finish(i)))
        return b"".join(out)

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None, finish: str | None = None
    ) -> bytes:
        shown = {"content": logprobs, "refusal": None} if logprobs else None
        return self._chunk({"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish})

    def _finish(self, index: int) -> str:
        word, reader = FINISH[self.done[index].finish], self._readers[index]
        return "tool_calls" if word == "stop" and reader.calls else word

    def _whole(self, index: int) -> dict[str, Any]:
        calls, kept = self._readers[index].calls, self._logprobs[index]
        text, thought = ("".join(self._texts[index][key]) for key in TEXTS)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        shown = None if kept is None else {"content": kept, "refusal": None}
        return {"index": index, "message": message, "logprobs": shown, "finish_reason": self._finish(index)}


class PartsForm(Form):
    """Base of answers of one choice that list its parts in order: thoughts, texts and calls of tools."""

    def __init__(self, head: Head, reader: Answer) -> None:
        self.head, self.reader = head, reader
        self.parts: list[dict[str, Any]] = []
        self.done: Completion | None = None
        self._kind = ""  # of the open part: as of deltas; empty if there is none
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._late: list[dict[str, Any]] = []  # logprobs of tokens without text yet

    def push(self, item: Item) -> bytes:
        fresh, out = self._late + self.head.logprobs(item.events, self.reader), b""
        for delta in read(self.reader, item):
            ((kind, piece),) = delta.items()
            call = piece[0] if kind == "tool_calls" else {}
            if kind != self._kind or "id" in call:
                out += self.end() + self._begin(kind, call)
                self._kind, self._pieces, self._logprobs = kind, [], []
            piece = call["function"]["arguments"] if call else piece
            said, fresh = (fresh, []) if kind == "content" else ([], fresh)
            self._pieces.append(piece)
            self._logprobs += said
            out += self._more(piece, said) if piece else b""
        self._late = fresh
        if item.done is not None:
            self.done = item.done
            self._logprobs += self._late
            out += self.end()
        return out

    def end(self) -> bytes:
        """Complete the open part, if any."""
        ended, self._kind = bool(self._kind), ""
        return self._end("".join(self._pieces), self._logprobs) if ended else b""

    @abstractmethod
    def _begin(self, kind: str, call: dict[str, Any]) -> bytes:
        """Append a part. kind: as of deltas; call: of a tool, else empty."""

    @abstractmethod
    def _more(self, piece: str, logprobs: list[dict[str, Any]]) -> bytes:
        """More of the last part."""

    @abstractmethod
    def _end(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Complete the last part. text: all its pieces."""


@dataclass(frozen=True, slots=True)
class Echo:
    """An echoed prompt: its text and, if requested, its tokens' log probabilities."""

    tokens: int
    text: str = ""
    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob | None] = ()


class CompletionForm(_Choices):
    """text_completion. n: choices of a prompt; echoes: the prompt of each choice; begun: whether tokens are generated
    or only the prompt is echoed."""

    prefix, chunk_object, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, head: Head, n: int, echoes: Sequence[Echo], begun: bool = True) -> None:
        super().__init__(head, len(echoes), range(0, len(echoes), n))
        self._echoes = echoes
        self._text = [[e.text] for e in echoes]
        self._rows = [_Rows(head, e) for e in echoes]
        if not begun:
            took = Timings(None, None, 0.0)
            for i, e in enumerate(echoes):
                self.done[i] = Completion("", (), "length", None, Usage(e.tokens, 0, 0), took)

    def open(self) -> bytes:
        out = []
        for i, e in enumerate(self._echoes):
            if e.text or e.ids:
                out.append(self._piece(i, e.text, self._rows[i].all))
            if i in self.done:
                out.append(self._piece(i, "", None, FINISH[self.done[i].finish]))
        return b"".join(out)

    def push(self, item: Item) -> bytes:
        i = item.choice
        self._generated += sum(len(e.ids) for e in item.events)
        text = "".join(e.text for e in item.events)
        self._text[i].append(text)
        # An entry for every token, end-of-text included: clients rely on it.
        fresh = self._rows[i].more([p for e in item.events for p in e.logprobs or ()])
        out = self._piece(i, text, fresh) if text or fresh else b""
        if item.done is not None:
            self.done[i] = item.done
            out += self._piece(i, "", None, FINISH[item.done.finish])
        return out

    def _piece(self, index: int, text: str, rows: list[_Row] | None, finish: str | None = None) -> bytes:
        return self._chunk(self._choice(index, text, rows, finish))

    def _choice(self, index: int, text: str, rows: list[_Row] | None, finish: str | None) -> dict[str, Any]:
        shown = None
        if rows is not None and self.head.top is not None:
            shown = {name: [row[n] for row in rows] for n, name in enumerate(_ROW)}
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": finish}

    def _whole(self, index: int) -> dict[str, Any]:
        return self._choice(index, "".join(self._text[index]), self._rows[index].all, FINISH[self.done[index].finish])


_ROW = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_Row = tuple[str, float | None, dict[str, float] | None, int]
"""Row of a completion's logprobs object."""


class _Rows:
    """Rows of a completion's tokens, those of an echoed prompt first. Without logprobs there are none."""

    def __init__(self, head: Head, echo: Echo) -> None:
        self._tokens, self._top = head.tokens, head.top
        self._text = head.tokens.decoder()
        self._at = 0 if echo.ids else len(echo.text)
        self.all = [self._row(*of) for of in zip(echo.ids, echo.logprobs, strict=False)]

    def more(self, found: Sequence[TokenLogprob]) -> list[_Row]:
        """The rows of the next tokens."""
        fresh = [self._row(p.id, p) for p in found]
        self.all += fresh
        return fresh

    def _row(self, token: int, known: TokenLogprob | None) -> _Row:
        name, at = self._tokens.name, self._at
        self._at += len(self._text.push(token))
        if known is None:
            return name(token), None, None, at
        top = {name(t): finite(q) for t, q in (*known.top[: self._top], (token, known.logprob))}
        return name(token), finite(known.logprob), top, at
