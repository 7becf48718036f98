"""A conversation at the terminal: `python -m hybrid.generate MODEL --chat`.

The whole conversation is rendered anew for each turn by the checkpoint's template; the session keeps it in the KV
cache, so that a turn runs only what is new. Ctrl-C stops an answer, which stays in the conversation as far as it came.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from hybrid.chat import Message, encode
from hybrid.chat_template import ChatError
from hybrid.kv import ContextExceeded

if TYPE_CHECKING:
    from hybrid.model import Model

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"
PROMPT = "> "
_COMMAND = re.compile(r"/[a-z]+")


@dataclass(frozen=True, slots=True)
class Options:
    """How answers are chosen, as `Model.generate` takes it; parse_special: control tokens in a turn count as such."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    parse_special: bool = False


class Conversation:
    """Turns of one conversation with a model; holds a slot of the cache until `close`."""

    def __init__(self, model: Model, options: Options) -> None:
        self.model, self.options = model, options
        self.messages: list[Message] = []
        self._session = model.session()

    def ask(self, text: str) -> Iterator[str]:
        """The answer to one user turn, piece by piece. The turn joins the conversation when the answer ends or is
        dropped after its first piece. ChatError or ContextExceeded where the turn is impossible: it is forgotten."""
        o, checkpoint = self.options, self.model.checkpoint
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        ids = encode(checkpoint.tokenizer, turn, checkpoint.chat_template, o.parse_special)
        pieces = self.model.generate(
            ids, o.max_tokens, o.temperature, o.top_k, o.top_p, o.min_p, o.seed, o.stop, o.ignore_eos, self._session
        )
        return self._answer(turn, pieces)

    def _answer(self, turn: list[Message], pieces: Iterator[str]) -> Iterator[str]:
        said: list[str] = []
        ended = False
        try:
            for piece in pieces:
                said.append(piece)
                yield piece
            ended = True
        finally:
            pieces.close()  # type: ignore[attr-defined]
            if said or ended:
                self.messages = [*turn, {"role": "assistant", "content": "".join(said)}]

    def reset(self) -> None:
        """Begin anew."""
        self.messages = []
        self._session.close()

    def close(self) -> None:
        self._session.close()


class _Interrupt:
    """While an answer runs: the first Ctrl-C asks it to stop after its next piece, the second breaks it off."""

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
    """Read turns from standard input until it ends; 0. `details`: statistics of every answer on standard error."""
    read = _reader()
    _say(f"{model.checkpoint.name} on {model.device}. {HELP}")
    conversation = Conversation(model, options)
    try:
        while True:
            try:
                line = read()
                if line.strip() == "/exit":
                    return 0
                _obey(conversation, line, details)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:  # outside an answer it drops the line
                print()
    finally:
        conversation.close()


def _obey(conversation: Conversation, line: str, details: bool) -> None:
    """One line: a command, a turn, or nothing."""
    text = line.strip()
    if text == "/reset":
        conversation.reset()
        _say("the conversation is forgotten")
    elif _COMMAND.fullmatch(text):
        _say(HELP if text == "/help" else f"unknown command {text}: {HELP}")
    elif text:
        _turn(conversation, line, details)


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
                pieces.close()  # type: ignore[attr-defined]
        except KeyboardInterrupt:
            stopped = True
        except ContextExceeded as error:
            _say(f"error: {error}, or forget the conversation with /reset")
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
        _say(f"the context of {model.engine.cache.ctx} tokens is full: /reset, or start with a larger --ctx")
    if details and stats is not None:
        _say("\n".join([stats.line(), *stats.reasons(), *stats.details()]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _reader() -> Callable[[], str]:
    """Reads a line at the prompt, with editing where readline is there. Standard output gets no prompt when it is
    no terminal."""
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # input() uses it once it is loaded

    def read() -> str:
        if sys.stdout.isatty():
            return input(PROMPT)
        print(PROMPT, end="", file=sys.stderr, flush=True)
        return input()

    return read
