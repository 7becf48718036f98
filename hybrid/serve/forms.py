"""Answers in the reference's forms: a form takes what the choices of a request bring, and writes chunks of a stream or, at the
end, the whole. `chat` and `completion` are here; a form knows neither HTTP nor the engine's threads."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hybrid.engine.handle import Completion, TokenLogprob, Usage
from hybrid.serve.errors import ApiError
from hybrid.serve.http import packed
from hybrid.serve.running import Item
from hybrid.text.tokenizer import Tokenizer

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", "deadline": "length", "cancelled": "length"}
"""The reference's word for how a text ended; it has none for a limit of time."""


class Form(Protocol):
    """One answer of an endpoint."""

    def open(self) -> bytes:
        """The first chunks of a stream."""

    def push(self, item: Item) -> bytes:
        """What a choice brought, as chunks; "" where there is nothing to tell yet."""

    def close(self) -> bytes:
        """The last chunks, once every choice has ended."""

    def fail(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""


class Reader(Protocol):
    """Tells calls of tools from text, as an answer comes."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas: {"content": text} or {"tool_calls": [...]}."""

    def end(self) -> list[dict[str, Any]]:
        """What was held back."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls so far."""


class Tokens:
    """How logprobs name tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token: int) -> bytes:
        """A control token by its name, since it prints nothing."""
        t = self._tokenizer
        text = t.token_bytes(token) if 0 <= token < t.n_rows else b""
        if not text and 0 <= token < t.n_tokens:
            text = t.vocabulary.pieces[token].encode("utf-8", "replace")
        return text

    def name(self, token: int) -> str:
        return self.bytes(token).decode("utf-8", "replace")

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.bytes(token)
        return {"token": text.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(text)}

    def chat(self, t: TokenLogprob, top: int) -> dict[str, Any]:
        return {**self.entry(t.id, t.logprob), "top_logprobs": [self.entry(i, p) for i, p in t.top[:top]]}


def usage(done: Sequence[Completion | None], prompts: Sequence[int]) -> dict[str, Any]:
    """Tokens of a request; done: of each choice. prompts: indices of the choices that are the first of their prompt, since a
    prompt counts once."""
    ended = [d.usage if d is not None else Usage(0, 0, 0) for d in done]
    prompt = sum(ended[i].prompt_tokens for i in prompts)
    completion = sum(u.completion_tokens for u in ended)
    guesses = {}
    if drafted := sum(u.drafted_tokens for u in ended):
        accepted = sum(u.accepted_tokens for u in ended)
        guesses = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(ended[i].cached_tokens for i in prompts), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, **guesses},
    }


def event(value: Any) -> bytes:
    return b"data: " + packed(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class _Choices:
    """What chat and completions share: the head of every object, the choices that have ended, the usage chunk."""

    prefix, chunk_object, whole_object = "", "", ""

    def __init__(self, model: str, count: int, prompts: Sequence[int], include_usage: bool, fingerprint: str) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "object": "", "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._prompts, self._include_usage = prompts, include_usage
        self.done: list[Completion | None] = [None] * count

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        more = {"usage": None} if self._include_usage else {}
        return event({**self._head, "object": self.chunk_object, "choices": [choice], **more})

    def close(self) -> bytes:
        out = b""
        if self._include_usage:
            out = event({**self._head, "object": self.chunk_object, "choices": [], "usage": usage(self.done, self._prompts)})
        return out + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body())

    def whole(self) -> dict[str, Any]:
        choices = [self._whole(i) for i in range(len(self.done))]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage(self.done, self._prompts)}

    def _whole(self, index: int) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(_Choices):
    """chat.completion and chat.completion.chunk. top: likely tokens beside each chosen one, None without logprobs. readers: one
    for each choice where tools may be called, else None; silent: tokens that print nothing, as readers see them."""

    prefix, chunk_object, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(
        self,
        model: str,
        count: int,
        include_usage: bool,
        fingerprint: str,
        tokens: Tokens,
        top: int | None,
        shown: Callable[[int], bool],
        readers: Sequence[Reader | None],
        silent: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(model, count, [0], include_usage, fingerprint)
        self._tokens, self._top, self._shown, self._readers = tokens, top, shown, readers
        self._silent = silent or {}
        self._text: list[list[str]] = [[] for _ in range(count)]
        self._logprobs: list[list[dict[str, Any]] | None] = [None if top is None else [] for _ in range(count)]

    def open(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._delta(i, first, None) for i in range(len(self.done)))

    def push(self, item: Item) -> bytes:
        i, reader = item.choice, self._readers[item.choice]
        text = "".join(e.text + self._marks(e.ids) for e in item.events)
        fresh = self._entries(i, [p for e in item.events for p in e.logprobs or ()])
        deltas = [{"content": text}] if text and reader is None else []
        if reader is not None:
            deltas = [*(reader.push(text) if text else ()), *(reader.end() if item.done is not None else ())]
        self._text[i] += [d["content"] for d in deltas if "content" in d]
        if fresh and not deltas:
            deltas = [{"content": ""}]
        out = [self._delta(i, d, fresh if n == 0 else None) for n, d in enumerate(deltas)]
        if item.done is not None:
            self.done[i] = item.done
            out.append(self._delta(i, {}, None, self._finish(i)))
        return b"".join(out)

    def _marks(self, ids: Sequence[int]) -> str:
        return "".join(self._silent.get(i, "") for i in ids) if self._silent else ""

    def _entries(self, index: int, found: Sequence[TokenLogprob]) -> list[dict[str, Any]] | None:
        kept = self._logprobs[index]
        if kept is None:
            return None
        fresh = [self._tokens.chat(p, self._top or 0) for p in found if self._shown(p.id)]
        kept += fresh
        return fresh

    def _delta(self, index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None, finish: str | None = None) -> bytes:
        shown = {"content": logprobs, "refusal": None} if logprobs else None
        return self._chunk({"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish})

    def _finish(self, index: int) -> str:
        done, reader = self.done[index], self._readers[index]
        word = FINISH[done.finish] if done is not None else "stop"
        return "tool_calls" if word == "stop" and reader is not None and reader.calls else word

    def _whole(self, index: int) -> dict[str, Any]:
        reader, kept = self._readers[index], self._logprobs[index]
        calls = reader.calls if reader is not None else []
        text = "".join(self._text[index])
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        shown = None if kept is None else {"content": kept, "refusal": None}
        return {"index": index, "message": message, "logprobs": shown, "finish_reason": self._finish(index)}


class CompletionForm(_Choices):
    """text_completion. top: as of ChatForm. echoes: what goes before each choice's text."""

    prefix, chunk_object, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        prompts: Sequence[int],
        include_usage: bool,
        fingerprint: str,
        tokens: Tokens,
        top: int | None,
        shown: Callable[[int], bool],
        echoes: Sequence[str],
    ) -> None:
        super().__init__(model, len(echoes), prompts, include_usage, fingerprint)
        self._tokens, self._top, self._shown, self._echoes = tokens, top, shown, echoes
        self._text = [[e] for e in echoes]
        self._logprobs: list[dict[str, list[Any]] | None] = [None if top is None else _empty() for _ in echoes]
        self._offsets = [len(e) for e in echoes]

    def open(self) -> bytes:
        return b"".join(self._piece(i, e, None) for i, e in enumerate(self._echoes) if e)

    def push(self, item: Item) -> bytes:
        i = item.choice
        text = "".join(e.text for e in item.events)
        fresh = self._entries(i, [p for e in item.events for p in e.logprobs or ()])
        self._text[i].append(text)
        out = self._piece(i, text, fresh) if text or (fresh and fresh["tokens"]) else b""
        if item.done is not None:
            self.done[i] = item.done
            out += self._piece(i, "", None, FINISH[item.done.finish])
        return out

    def _entries(self, index: int, found: Sequence[TokenLogprob]) -> dict[str, list[Any]] | None:
        kept = self._logprobs[index]
        if kept is None:
            return None
        fresh = _empty()
        for p in found:
            if self._shown(p.id):
                name = self._tokens.name(p.id)
                fresh["tokens"].append(name)
                fresh["token_logprobs"].append(max(p.logprob, -9999.0))
                fresh["top_logprobs"].append({self._tokens.name(t): max(q, -9999.0) for t, q in p.top[: self._top]})
                fresh["text_offset"].append(self._offsets[index])
                self._offsets[index] += len(name)
        for key, values in fresh.items():
            kept[key] += values
        return fresh

    def _piece(self, index: int, text: str, logprobs: dict[str, list[Any]] | None, finish: str | None = None) -> bytes:
        return self._chunk({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})

    def _whole(self, index: int) -> dict[str, Any]:
        done = self.done[index]
        return {
            "index": index,
            "text": "".join(self._text[index]),
            "logprobs": self._logprobs[index],
            "finish_reason": FINISH[done.finish] if done is not None else "stop",
        }


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
