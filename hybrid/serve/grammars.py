"""Grammar constraints in separate processes (hybrid/text/grammar_worker.py). A grammar that crashes, loops or grows
ends only its process and its requests, and unused grammars return their memory to the system.

Masks are computed while the device runs its step: `accept` requests the next mask, `ready` polls for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from hybrid.engine.sampling import Constraint, mask_of, mask_words
from hybrid.serve.errors import InvalidSchema, bad_request, busy
from hybrid.text import grammar_worker as worker
from hybrid.text.grammar_worker import HEAD
from hybrid.text.marks import ids_of
from hybrid.text.tokenizer import PRINTED_MARKS, Tokenizer

MISSING = "response_format and tools need llguidance, which is not installed (pip install hybrid-kernels[serve])"
MASK_SECONDS = 5.0
"""Timeout of a mask, after which its request fails."""
START_SECONDS = 60.0
"""Timeout of the template process's start."""
KEPT, KEPT_MEMORY = 32, 256 << 20
"""Most cached grammars without a sequence, and their bytes."""
LIVE_MEMORY = 1 << 30
"""Most bytes of grammars with sequences; further requests get 429."""
SLICE = 0.005
"""Seconds after which a waiting thread checks whether another thread has received its answer."""
LEAST = 2 << 20
"""Minimum bytes of a process."""
GONE = "the schema cannot be used: it takes more time, memory or nesting than a schema may"


def missing() -> str | None:
    """Why this installation does not support constraints; None if it does."""
    if importlib.util.find_spec("llguidance") is None:
        return MISSING
    return None if hasattr(os, "fork") else "response_format and tools need a system that can fork processes"


class Grammars:
    """Cache of compiled grammars for a tokenizer. Thread-safe. vocab: rows of the output matrix."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._ends = sorted(tokenizer.eos_ids)
        self._lock = threading.Lock()
        self._source: _Source | None = None
        self._kept: OrderedDict[tuple[str, ...], Grammar] = OrderedDict()
        self._all: weakref.WeakSet[Grammar] = weakref.WeakSet()

    def constraint(self, grammars: str | Sequence[str], param: str) -> GrammarConstraint:
        """A constraint of the first of several Lark grammars that compiles, with its first mask computed. Slow.
        ApiError 400, naming `param`, if none compiles; 429 if too much memory is in use."""
        if (what := missing()) is not None:
            raise bad_request(f"this server cannot constrain answers: {what}", code="unsupported_value")
        if not self._ends:
            raise bad_request("this model has no end-of-text token: nothing could end a structured answer", param)
        key = (grammars,) if isinstance(grammars, str) else tuple(grammars)
        try:
            made = self._grammar(key).constraint()
            made.mask()
        except InvalidSchema as error:
            raise bad_request(str(error), param, "invalid_schema") from None
        return made

    def memory(self) -> int:
        """Bytes of all grammars' processes."""
        with self._lock:
            return sum(g.memory for g in self._all if g.alive)

    def close(self) -> None:
        """Stop the processes."""
        with self._lock:
            self._kept.clear()
            source, self._source = self._source, None
            grammars = list(self._all)
        for grammar in grammars:
            grammar.close()
        if source is not None:
            source.close()

    def _grammar(self, key: tuple[str, ...]) -> Grammar:
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found.alive:
                self._kept.move_to_end(key)
                return found
            self._evict()
            if sum(g.memory for g in self._all if g.alive) > LIVE_MEMORY:
                raise busy("structured answers take all the memory that this server gives them: try again later", 5.0)
            if self._source is None or not self._source.alive:
                self._source = _Source(self._tokenizer)
            source = self._source
        made = Grammar(source, self._ends, self._vocab)
        made.compile(key)
        with self._lock:
            self._all.add(made)
            self._kept[key] = made
            self._evict()
        return made

    def _evict(self) -> None:
        """Evict the least recently used grammars without sequences, down to the limits."""
        for key in [k for k, g in self._kept.items() if not g.alive]:
            del self._kept[key]
        idle = [k for k, g in self._kept.items() if not g.sequences]
        memory = sum(self._kept[k].memory for k in idle)
        while idle and (len(idle) > KEPT or memory > KEPT_MEMORY):
            grammar = self._kept.pop(idle.pop(0))
            memory -= grammar.memory
            grammar.close()


class _Source:
    """The template process from which grammar processes are forked. It has the tokenizer but no grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ours, theirs = socket.socketpair()
        search = os.pathsep.join(p or os.getcwd() for p in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hybrid.text.grammar_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a child's crash is detected by its exit
                env={**os.environ, "PYTHONPATH": search},
                start_new_session=True,  # only the parent handles Ctrl-C
            )
        self._control, self._lock = ours, threading.Lock()
        ours.settimeout(START_SECONDS)
        special = ids_of(tokenizer, PRINTED_MARKS)  # never part of a text, regardless of their token type
        data = pickle.dumps((tokenizer, tuple(special.values())))
        with contextlib.suppress(OSError):  # it has exited; `fork` raises
            ours.sendall(struct.pack("<Q", len(data)) + data)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> tuple[socket.socket, int]:
        """(connection to a new child, its process id). RuntimeError if the template process has exited."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                socket.send_fds(self._control, [worker.FORK + bytes(4)], [theirs.fileno()])
                pid = int.from_bytes(worker.receive(self._control, 4), "little")
            except (OSError, EOFError) as error:
                ours.close()
                self._process.kill()
                raise RuntimeError(f"the process of grammars ended: {error}") from None
        return ours, pid

    def kill(self, pid: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(worker.KILL + pid.to_bytes(4, "little"))

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


class Grammar:
    """A compiled grammar and its process. Thread-safe."""

    def __init__(self, source: _Source, ends: list[int], vocab: int) -> None:
        self._source, self.ends, self.vocab = source, ends, vocab
        self._connection, self._pid = source.fork()
        self._connection.setblocking(False)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._buffer = memoryview(bytearray(1 << 16))
        self._held = bytearray()  # of an incomplete answer
        self._answers: dict[int, tuple[int, bytes, bytes]] = {}  # sequence -> (question, kind, body)
        self._freed: deque[int] = deque()
        self._compiled: tuple[bytes, bytes] | None = None
        self.alive = True
        self.memory = LEAST
        """Bytes of the grammar's process."""
        self.which = 0
        """Index of the compiled grammar."""
        self._live: set[int] = set()

    @property
    def sequences(self) -> int:
        """Sequences that use it."""
        return len(self._live) - len(self._freed)

    def compile(self, grammars: Sequence[str]) -> None:
        """Compile the first valid grammar. InvalidSchema with the reason if there is none."""
        self.say(worker.COMPILE, 0, 0, json.dumps(list(grammars)).encode(), worker.SECONDS)
        until = time.monotonic() + worker.SECONDS
        while self._compiled is None and self.alive and (left := until - time.monotonic()) > 0:
            self._listen(left)
        if self._compiled is None:
            self.close()
            raise InvalidSchema(GONE)
        kind, body = self._compiled
        if kind == worker.FAILED:
            self.close()
            raise InvalidSchema(f"the schema cannot be used: {_reason(body)}")
        said = json.loads(body)
        self.memory, self.which = self.memory + said["memory"], said["which"]

    def constraint(self, of: int = 0) -> GrammarConstraint:
        """A new sequence, in the state of sequence `of`."""
        number = next(self._numbers)
        with self._lock:
            self._live.add(number)
        self.say(worker.COPY, of, number)
        return GrammarConstraint(self, number)

    def answer(self, number: int, question: int, wait: float) -> tuple[bytes, bytes] | None:
        """(kind, body) of an answer; None after `wait` seconds without it. InvalidSchema if the process has ended."""
        until = time.monotonic() + wait
        while True:
            found = self._answers.get(number)
            if found is not None and found[0] == question:
                return found[1:]
            if not self.alive:
                raise InvalidSchema(GONE)
            left = until - time.monotonic()
            self._listen(left)
            if left <= 0 and ((found := self._answers.get(number)) is None or found[0] != question):
                return None

    def free(self, number: int) -> None:
        """Free a sequence; called by a finaliser, so without the lock."""
        self._freed.append(number)

    def close(self) -> None:
        """Kill the process."""
        self.alive = False
        self._source.kill(self._pid)
        self._connection.close()

    def __del__(self) -> None:
        if getattr(self, "alive", False):
            self._connection.close()  # the process exits at its next read

    def say(self, op: bytes, number: int, argument: int, body: bytes = b"", seconds: float = 0.0) -> None:
        """Send a message, waiting at most `seconds` for room; the process that reads none is as if it had ended."""
        until = time.monotonic() + seconds
        with self._lock:
            message = b""
            while self._freed:
                gone = self._freed.popleft()
                self._live.discard(gone)
                self._answers.pop(gone, None)
                message += HEAD.pack(worker.FREE, gone, 0, 0)
            message += HEAD.pack(op, number, argument, len(body)) + body
            while message and self.alive:
                try:
                    message = message[self._connection.send(message) :]
                except BlockingIOError:
                    if time.monotonic() >= until or not self._poll(select.POLLOUT, until - time.monotonic()):
                        self.alive = False  # it does not read its input
                except OSError:
                    self.alive = False

    def _listen(self, wait: float) -> None:
        """Receive answers, waiting at most `wait` seconds for the first."""
        if wait > 0 and not self._poll(select.POLLIN, min(wait, SLICE)):
            return
        with self._lock:
            try:
                n = self._connection.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:  # closed meanwhile
                n = 0
            if not n:
                self.alive = False
            self._held += self._buffer[:n]
            self._take()

    def _poll(self, event: int, seconds: float) -> bool:
        poll = select.poll()  # one for each thread: poll objects are not thread-safe
        try:
            poll.register(self._connection, event)
            return bool(poll.poll(1000 * seconds))
        except (OSError, ValueError):  # closed meanwhile
            return True

    def _take(self) -> None:
        at = 0
        while len(self._held) - at >= HEAD.size:
            kind, number, question, length = HEAD.unpack_from(self._held, at)
            if len(self._held) - at - HEAD.size < length:
                break
            body = bytes(self._held[at + HEAD.size : at + HEAD.size + length])
            at += HEAD.size + length
            if not number:
                self._compiled = kind, body
            elif number in self._live:  # otherwise it was freed meanwhile
                self._answers[number] = (question, kind, body)
        del self._held[:at]


def _reason(body: bytes) -> str:
    """llguidance's error message without parser internals: the first line, and a pattern's error."""
    lines = [line.strip() for line in body.decode("utf-8", "replace").splitlines() if line.strip()]
    first = lines[0].rpartition("failed to compile JSON schema: ")[2] if lines else "it cannot be compiled"
    why = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return f"{first.rstrip(':').partition('; consider')[0]}{': ' + why.removeprefix('error: ') if why else ''}"[:300]


class GrammarConstraint(Constraint):
    """A sequence's state in a grammar."""

    def __init__(self, grammar: Grammar, number: int) -> None:
        self._grammar, self._number = grammar, number
        self._question = 0
        self._mask: np.ndarray | None = None
        self._likely: Sequence[int] = ()
        self._error: str | None = None
        self._ask(worker.MASK)

    @property
    def which(self) -> int:
        """Index of the compiled grammar."""
        return self._grammar.which

    def ready(self, wait: float = 0.0) -> bool:
        """Whether the next mask has arrived, after waiting at most `wait` seconds."""
        if self._mask is not None or self._error is not None:
            return True
        try:
            late = self._asked + MASK_SECONDS - time.monotonic()
            found = self._grammar.answer(self._number, self._question, max(0.0, min(wait, late)))
        except InvalidSchema as error:
            self._error = str(error)
            return True
        if found is None:
            if time.monotonic() > self._asked + MASK_SECONDS:
                self._grammar.close()
                self._error = GONE
            return self._error is not None
        kind, body = found
        if kind == worker.FAILED:
            self._error = f"the schema cannot be followed further: {_reason(body)}"
        elif kind == worker.ENDED:
            self._mask = mask_of(self._grammar.ends, self._grammar.vocab)
        else:
            said, words = np.frombuffer(body, np.uint32), mask_words(self._grammar.vocab)
            self._likely, bits = said[1 : 1 + said[0]].tolist(), said[1 + said[0] :]
            self._mask = bits[:words].copy() if len(bits) >= words else np.pad(bits, (0, words - len(bits)))
        return True

    def mask(self) -> np.ndarray:
        """Mask of allowed next ids; end-of-text ids if nothing else is allowed. InvalidSchema for a grammar beyond its
        time or memory limits."""
        if not self.ready(MASK_SECONDS) and not self.ready():
            raise InvalidSchema(GONE)
        if self._error is not None:
            raise InvalidSchema(self._error)
        assert self._mask is not None
        return self._mask

    def likely(self) -> Sequence[int]:
        """The next tokens where the grammar forces a text, as the tokenizer writes it, and where it allows few and one was
        chosen before."""
        return self._likely

    def accept(self, token: int) -> None:
        if token in self._grammar.ends:
            return  # the text has ended: drop the token of a pass submitted early
        self._ask(worker.ACCEPT, token.to_bytes(4, "little"))

    def copy(self) -> GrammarConstraint:
        return self._grammar.constraint(self._number)

    def _ask(self, op: bytes, body: bytes = b"") -> None:
        self._question += 1
        self._mask, self._likely, self._asked = None, (), time.monotonic()
        self._grammar.say(op, self._number, self._question, body)

    def __del__(self) -> None:
        grammar = getattr(self, "_grammar", None)
        if grammar is not None:
            grammar.free(self._number)
