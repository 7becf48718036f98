"""A conversation at the terminal: `python -m hybrid.generate MODEL --chat`.

The checkpoint's template renders the whole conversation for each turn; the KV cache reuses its prefix. Ctrl-C stops an
answer, whose partial text stays in the conversation.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hybrid.cli.terminal import reader
from hybrid.core.errors import ContextExceeded
from hybrid.model import Model
from hybrid.text.chat import Message, encode
from hybrid.text.chat_template import ChatError

HELP = (
    "/reset forgets the conversation, /drop its oldest turns, /system TEXT says how to answer, /exit or Ctrl-D ends, "
    "Ctrl-C stops an answer; a pasted text is one turn, and a line that ends in \\ continues in the next"
)
_COMMAND = re.compile(r"/[a-z]+")
_ANSWER_SHARE = 4  # /drop frees 1 / _ROOM of the context for an answer


@dataclass(frozen=True, slots=True)
class Options:
    """options: of Model.generate for each answer. parse_special: recognise control tokens in the input. system: the
    system prompt."""

    options: Mapping[str, Any] = field(default_factory=dict)
    parse_special: bool = False
    system: str = ""


class Conversation:
    """A conversation with a model. Turns reuse the KV cache of earlier ones."""

    def __init__(self, model: Model, options: Options) -> None:
        self.model, self.options = model, options
        self.messages: list[Message] = []
        self.system = options.system
        self.refused = ""
        """The last message that exceeded the context."""

    def ask(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to a user message. The turn is added when the answer ends or is stopped after its first
        piece. ChatError or ContextExceeded for an impossible message, which is dropped."""
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        self.refused = ""
        try:
            pieces = self.model.generate(self._ids(turn), **self.options.options)
        except ContextExceeded:
            self.refused = text
            raise
        return self._answer(turn, pieces)

    def _ids(self, messages: list[Message]) -> list[int]:
        checkpoint = self.model.checkpoint
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return encode(checkpoint.tokenizer, [*first, *messages], checkpoint.chat_template, self.options.parse_special)

    def drop(self) -> int:
        """Drop the oldest turns with their answers, at least one, until the refused message (or a short one) leaves a
        quarter of the context, or max_tokens, for an answer. Returns the number of dropped turns."""
        ctx, dropped = self.model.engine.cache.ctx, 0
        most = ctx - min(self.options.options.get("max_tokens", 64), ctx // _ANSWER_SHARE)
        asked: Message = {"role": "user", "content": self.refused or "?"}
        while self.messages and (not dropped or len(self._ids([*self.messages, asked])) > most):
            self.messages = self.messages[2:]
            dropped += 1
        return dropped

    def _answer(self, turn: list[Message], pieces: Generator[str, None, None]) -> Generator[str, None, None]:
        said: list[str] = []
        ended = False
        try:
            for piece in pieces:
                said.append(piece)
                yield piece
            ended = True
        finally:
            pieces.close()
            if said or ended:
                self.messages = [*turn, {"role": "assistant", "content": "".join(said)}]

    def reset(self) -> None:
        """Clear the conversation; keeps the system prompt."""
        self.messages, self.refused = [], ""


class _Interrupt:
    """During an answer, the first Ctrl-C stops it after its next piece, the second interrupts it at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Interrupt:
        self._before: Any = signal.signal(signal.SIGINT, self._hit)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _hit(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def run_loop(model: Model, options: Options, details: bool = False) -> int:
    """Read messages from standard input until its end; returns 0. details: print statistics of every answer to standard
    error."""
    read = reader()
    _say(f"{model.checkpoint.name} on {model.device}. {HELP}")
    conversation = Conversation(model, options)
    while True:
        try:
            line = read()
            if line.strip() == "/exit":
                return 0
            _obey(conversation, line, details)
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:  # outside an answer: discard the line
            print()


def _obey(conversation: Conversation, line: str, details: bool) -> None:
    """Handle an input line: a command, a message, or nothing."""
    text = line.strip()
    if text == "/reset":
        conversation.reset()
        _say("the conversation is forgotten")
    elif text == "/drop":
        _drop(conversation, details)
    elif text == "/system" or text.startswith("/system "):
        _system(conversation, text.removeprefix("/system").strip())
    elif _COMMAND.fullmatch(text):
        _say(HELP if text == "/help" else f"unknown command {text}: {HELP}")
    elif text:
        _turn(conversation, line, details)


def _drop(conversation: Conversation, details: bool) -> None:
    """Drop the oldest turns, and retry the message that exceeded the context."""
    dropped, left = conversation.drop(), len(conversation.messages) // 2
    if not dropped:
        _say("there is no turn to forget")
        return
    _say(f"{dropped} of the oldest turns forgotten, {left} kept")
    if conversation.refused:
        _turn(conversation, conversation.refused, details)


def _system(conversation: Conversation, text: str) -> None:
    """Set the system prompt (`none`: none), or show it."""
    if text:
        conversation.system = "" if text == "none" else text
    _say(f"system prompt: {conversation.system}" if conversation.system else "no system prompt; /system TEXT sets one")


def _turn(conversation: Conversation, text: str, details: bool) -> None:
    model = conversation.model
    stopped = False
    with _Interrupt() as interrupt:
        try:
            pieces = conversation.ask(text)
            try:
                for piece in pieces:
                    print(piece, end="", flush=True)
                    if interrupt.asked:
                        stopped = True
                        break
            finally:
                pieces.close()
        except KeyboardInterrupt:
            stopped = True
        except ContextExceeded as error:
            drop = "/drop forgets the oldest turns and asks again, " if conversation.messages else ""
            _say(f"error: {error}; or here: {drop}/reset forgets the conversation")
            return
        except ChatError as error:
            _say(f"error: {error}")
            return
    print(flush=True)
    stats = model.stats
    if stopped:
        _say("stopped")
    elif stats is not None and stats.finish == "length":
        _say(f"cut after {stats.tokens} tokens: --max-tokens allows more")
    elif stats is not None and stats.finish == "context":
        _say(
            f"the context of {model.engine.cache.ctx} tokens is full: /drop forgets the oldest turns, /reset all; "
            "or start with a larger --ctx"
        )
    if details and stats is not None:
        _say("\n".join([stats.line(), *stats.reasons(), *stats.details()]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
