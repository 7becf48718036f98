"""The conversation at a terminal: typed and pasted turns, Ctrl-C, the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.kernels.vulkan.kernel import kernels_digest

TERMS = ("dumb", "xterm")


def _at_a_terminal() -> None:
    """In the child: a controlling terminal, and Ctrl-C enabled even where the tests' own shell ignores it (jobs with
    &)."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A child whose standard streams are a separate terminal."""

    def __init__(self, *args: str, code: str = "", term: str = "dumb") -> None:
        self.master, slave = pty.openpty()
        start = [
            sys.executable,
            "-c",
            code + "from hybrid.generate import main; import sys; sys.exit(main(sys.argv[1:]))",
        ]
        self.process = subprocess.Popen(
            [*start, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_at_a_terminal,
            env={**os.environ, "TERM": term},
        )
        os.close(slave)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 60.0) -> str:
        """Everything up to the first match, which is consumed."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                data = os.read(self.master, 4096)
            except OSError:  # Linux's way to say that the other side is closed
                data = b""
            assert data, f"ended without {pattern!r}: {self.seen!r}"
            self.seen += data.decode("utf-8", "replace").replace("\r\n", "\n")
        out, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return out

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def asleep(self, seconds: float = 30.0) -> None:
        """Until the child waits for a key. CPython holds back a Ctrl-C that comes while readline works, before it
        waits, until the next key."""
        end = time.monotonic() + seconds
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < end, "the child does not wait for a key"
            time.sleep(0.01)

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self.master)


SLOW = """import os, time, hybrid.engine.runner as r
old = r.Runner.tokens
def slow(*a): os.write(2, b"~"); time.sleep(0.03); return old(*a)
r.Runner.tokens = slow
"""


@pytest.mark.slow
def test_a_conversation_at_a_terminal(tmp_path: Path) -> None:
    folder = str(write_hf(tmp_path, tiny()))
    options = ["--device", "cpu", "--chat", "--ignore-eos", "--max-tokens", "150"]
    t = Terminal(folder, *options, code=SLOW)
    assert "/reset forgets the conversation" in t.until("> $")
    t.type("the thing\n")
    t.until("the thing\n")
    t.until("~")  # a token of the answer
    t.type("\x03")
    assert "stopped" in t.until("\n> $") and t.process.poll() is None
    t.type("half a line")
    t.until("half a line")  # a terminal drops undelivered input at Ctrl-C
    t.asleep()
    t.type("\x03")
    t.until("\n> $")
    for typed, answer in (("/rest", "unknown command /rest"), ("/help", "Ctrl-C stops"), ("/reset", "is forgotten")):
        t.type(typed + "\n")
        assert answer in t.until("\n> $")
    t.type("qz" * 150 + "\n")
    assert "leaves no room in the context of 256" in t.until("> $")
    t.type("\n")
    t.until("> $")
    t.type("\x04")
    assert t.close() == 0 and "Traceback" not in t.seen


@pytest.mark.slow
def test_exit_and_statistics(tmp_path: Path) -> None:
    t = Terminal(str(write_hf(tmp_path, tiny())), "--device", "cpu", "--chat", "--stats", "-n", "3", "--ignore-eos")
    t.until("> $")
    for turn in range(4):
        t.type("the\n")
        said = t.until("(?s)per decode pass.*\n> $")
        assert "cut after 3 tokens" in said and (turn or "in the cache" not in said)
    assert "in the cache" in said  # whole blocks of the earlier text
    t.type("/exit\n")
    assert t.close() == 0


ECHO = """import hybrid.generate.chat_loop as c
def ask(self, text):
    self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
    yield f"<{self.system}|{text!r}>"
c.Conversation.ask = ask
"""


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS if LONG else [TERMS[int(kernels_digest(), 16) % 2]])  # alternating
def test_pasted_and_continued_lines_are_one_turn(tmp_path: Path, term: str) -> None:
    """A paste, with or without the terminal's marks, and a continued line are one turn; lines typed one by one are not."""
    t = Terminal(
        str(write_hf(tmp_path, tiny())), "--device", "cpu", "--chat", "--system", "short", code=ECHO, term=term
    )
    begun = t.until("> ")
    marked = term != "dumb" and readline_marks_pastes()
    assert ("\x1b[?2004h" in begun) == marked  # bracketed paste is enabled
    if marked:  # however slowly it comes
        t.type("\x1b[200~one\n")
        time.sleep(0.3)
        t.type("two\x1b[201~\n")
    else:
        t.type("one\ntwo\n")
    assert "<short|'one\\ntwo'>" in t.until(">\\s+\\S*> ")
    t.type("three\\\n")
    t.until(r"\.\.\. ")
    t.type("four\n")
    assert "<short|'three\\nfour'>" in t.until(">\\s+\\S*> ")
    for word in ("five", "six"):
        t.type(word + "\n")
        assert f"<short|'{word}'>" in t.until(">\\s+\\S*> ")
    answers = {"/system be brief": "system prompt: be brief", "/system none": "no system prompt", "/drop": "3 kept"}
    for typed, answer in answers.items():
        t.type(typed + "\n")
        t.until(answer)
        t.until("> ")
    t.type("\x04")
    assert t.close() == 0


def readline_marks_pastes() -> bool:
    readline = pytest.importorskip("readline")
    return "libedit" not in (readline.__doc__ or "") and readline._READLINE_LIBRARY_VERSION >= "8.1"
