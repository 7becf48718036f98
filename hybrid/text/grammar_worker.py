"""Grammar processes for one vocabulary: each grammar runs in a separate process and can crash only that.

    python -m hybrid.text.grammar_worker FD

The parent (hybrid/serve/grammars.py) sends its tokenizer once. This process builds llguidance's tokenizer from it and
forks a child for each grammar, with a socket to the parent. A child compiles its grammar, keeps a matcher for each
sequence, and computes masks. The kernel limits its memory and CPU time. It exits when its socket is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hybrid.text.tokenizer import CONTROL, UNKNOWN, Tokenizer

HEAD = struct.Struct("<cIII")
"""Message header: operation, sequence, argument, length of the body."""
COMPILE, COPY, ACCEPT, MASK, FREE = b"C", b"N", b"A", b"M", b"X"
"""Requests: compile the first valid grammar; copy a sequence to `argument`; accept a token and compute the mask;
compute the mask; free a sequence. Sequence 0 is the initial state."""
COMPILED, ALLOWED, ENDED, FAILED = b"c", b"m", b"e", b"f"
"""Answers: compiled (JSON); a mask, after the number of likely tokens and these; only end-of-text is allowed; an error.
`argument` is the request's."""
SECONDS = 10.0
"""CPU time limit of a request."""
MEMORY = 512 << 20
"""Most bytes that a grammar adds to its process."""
FORK, KILL = b"F", b"K"
AHEAD = 16
"""Most likely tokens of an answer."""
FEW, OFTEN, PLACES = 64, 2, 4096
"""Masks of at most FEW tokens are places of a grammar: a token that was chosen OFTEN times in turn is likely there. Most
places that are kept."""


def receive(connection: socket.socket, n: int) -> bytes:
    """Receive exactly n bytes. EOFError if the peer has closed the connection."""
    parts = []
    while n:
        part = connection.recv(min(n, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


class Vocabulary:
    """Adapter of a tokenizer for llguidance. special: tokens that grammars refer to by id and that are never part of a
    text."""

    def __init__(self, tokenizer: Tokenizer, special: Iterable[int]) -> None:
        t = self._tokenizer = tokenizer
        self.ends = sorted(t.eos_ids)
        self.eos_token_id = self.ends[0]
        self.bos_token_id = t.vocabulary.bos_id
        found = {i for i, kind in enumerate(t.types) if kind in (CONTROL, UNKNOWN)} | {*special, *self.ends}
        pieces = t.vocabulary.pieces
        self.special_token_ids = sorted(found)
        self.tokens = [
            pieces[i].encode("utf-8", "replace") if i in found else t.token_bytes(i) for i in range(t.n_tokens)
        ]
        self.tokens += [b""] * (t.n_rows - t.n_tokens)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), bos=False)


def _virtual_and_resident() -> tuple[int, int]:
    """(virtual, resident) bytes of this process; 0 if unknown."""
    try:
        with open("/proc/self/statm") as f:
            pages = f.read().split()
    except OSError:
        return 0, 0
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE"), int(pages[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class State:
    """A sequence. real: not a copy of another one. likely: tokens that must follow, or that follow where few may. place:
    of the next token, a hash of its mask; None where many are allowed."""

    matcher: Any
    real: bool = False
    likely: list[int] = field(default_factory=list)
    place: int | None = None


class Child:
    """A grammar process. tokenizer: llguidance's."""

    def __init__(self, connection: socket.socket, tokenizer: Any) -> None:
        import resource

        from llguidance import LLMatcher

        self._connection, self._tokenizer, self._matcher, self._resource = connection, tokenizer, LLMatcher, resource
        self._sequences: dict[int, State] = {}
        self._chosen: dict[int, tuple[int, int]] = {}  # place -> its last token, and how often in turn
        virtual, self._before = _virtual_and_resident()
        if virtual:
            self._limit(resource.RLIMIT_AS, virtual + MEMORY)

    def run(self) -> None:
        while True:
            op, number, argument, length = HEAD.unpack(receive(self._connection, HEAD.size))
            body = receive(self._connection, length)
            used = self._resource.getrusage(self._resource.RUSAGE_SELF)
            self._limit(self._resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + SECONDS) + 1)
            if op == COMPILE:
                self._compile(json.loads(body))
            elif op == COPY:
                s = self._sequences[number]
                self._sequences[argument] = State(s.matcher.deep_copy(), not number, s.likely, s.place)
            elif op == FREE:
                self._sequences.pop(number, None)
            elif op in (ACCEPT, MASK):
                if op == ACCEPT:
                    self._accept(number, int.from_bytes(body, "little"))
                self._mask(number, argument)

    def _limit(self, kind: int, value: int) -> None:
        hard = self._resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            self._resource.setrlimit(kind, (value if hard == self._resource.RLIM_INFINITY else min(value, hard), hard))

    def _compile(self, grammars: list[str]) -> None:
        errors = []
        for n, lark in enumerate(grammars):
            made = self._matcher(self._tokenizer, self._matcher.grammar_from_lark(lark), log_level=0)
            trial = made.deep_copy()
            if not made.is_error():
                trial.compute_bitmask()  # some grammars exceed limits only when a mask is computed
            if not (made.is_error() or trial.is_error()):
                self._sequences[0] = State(made)
                memory = max(0, _virtual_and_resident()[1] - self._before)
                self._answer(COMPILED, 0, 0, json.dumps({"which": n, "memory": memory}).encode())
                return
            errors.append(made.get_error() or trial.get_error())
        self._answer(FAILED, 0, 0, errors[0].encode())

    def _accept(self, number: int, token: int) -> None:
        s = self._sequences[number]
        if s.matcher.is_stopped():
            return
        if s.real and s.place is not None:  # copies only try likely tokens
            before, times = self._chosen.get(s.place, (token, 0))
            if len(self._chosen) >= PLACES:
                self._chosen.clear()
            self._chosen[s.place] = token, times + 1 if token == before else 1
        s.matcher.consume_token(token)
        s.likely = s.likely[1:] if s.likely[:1] == [token] else []

    def _follow(self, s: State, bits: bytes) -> list[int]:
        """The tokens that likely follow, where this mask is the next."""
        found, m = list[int](), s.matcher
        while len(found) < AHEAD and not m.is_stopped():
            step = m.compute_ff_tokens() or self._usual(bits or m.compute_bitmask())
            if not step:
                break
            if not found:
                m = m.deep_copy()
            if not m.consume_tokens(step):
                break
            found, bits = [*found, *step], b""
        return found[:AHEAD]

    def _usual(self, bits: bytes) -> list[int]:
        """The token that is usually chosen under a mask, or none."""
        token, times = self._chosen.get(hash(bits), (0, 0))
        return [token] if times >= OFTEN else []

    def _mask(self, number: int, argument: int) -> None:
        s = self._sequences[number]
        m = s.matcher
        if m.is_stopped() and not m.is_error():
            self._answer(ENDED, number, argument)
            return
        bits = b"" if m.is_error() else m.compute_bitmask()
        if not m.is_error():
            s.place = hash(bits) if int.from_bytes(bits, "little").bit_count() <= FEW else None
            s.likely = s.likely or self._follow(s, bits)
        if m.is_error():
            self._answer(FAILED, number, argument, m.get_error().encode())
        else:
            n = len(s.likely)
            self._answer(ALLOWED, number, argument, struct.pack(f"<{1 + n}I", n, *s.likely) + bits)

    def _answer(self, kind: bytes, number: int, argument: int, body: bytes = b"") -> None:
        self._connection.sendall(HEAD.pack(kind, number, argument, len(body)) + body)


def main(argv: list[str]) -> int:
    control = socket.socket(fileno=int(argv[1]))
    import resource

    from llguidance import LLTokenizer, TokenizerWrapper

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        (length,) = struct.unpack("<Q", receive(control, 8))
        vocabulary = Vocabulary(*pickle.loads(receive(control, length)))  # trusted: sent by the parent
    except EOFError:
        return 0
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.ends)
    children: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(control, 5, 1)
        if not message:
            break
        while len(message) < 5:
            message += receive(control, 5 - len(message))
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        op, pid = message[:1], int.from_bytes(message[1:], "little")
        if op == KILL and pid in children:
            os.kill(pid, signal.SIGKILL)
        if op != FORK:
            continue
        pid = os.fork()
        if not pid:
            control.close()
            with contextlib.suppress(EOFError, ConnectionError, MemoryError):
                Child(socket.socket(fileno=files[0]), tokenizer).run()
            os._exit(0)
        os.close(files[0])
        children.add(pid)
        control.sendall(struct.pack("<I", pid))
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
