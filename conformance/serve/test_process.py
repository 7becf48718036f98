"""The command: its start, its signals, its exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from conformance.support.server import until
from hybrid.serve import main

COMMAND = [sys.executable, "-m", "hybrid.serve", "--device", "cpu", "--port", "0"]


@contextmanager
def command(*more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with the embedded model, and its address, once it is ready."""
    process = subprocess.Popen([*COMMAND, "--slots", "2", *more], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        url = found[0]
        until(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 200)
        yield process, url
    finally:
        process.kill()
        process.wait(30)


def lines(url: str, tokens: int) -> Iterator[str]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": tokens, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as answer:
        yield from (line for line in answer.iter_lines() if line.startswith("data: "))


@pytest.mark.slow
def test_a_first_sigterm_drains_and_ends_with_0() -> None:
    with command() as (process, url):
        stream = lines(url, 60)
        next(stream)
        process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert process.wait(30) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    with command() as (process, url):
        stream = lines(url, 1500)
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_wrong_use_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for more, code, word in [
        (["/no/such/model.gguf"], 1, "is not there"),
        (["model.gguf", "--random", "gemma3-270m"], 1, "is not there"),
        (["--random", "gemma3-270m", "--ray"], 2, "leave out --ray"),
        (["--layers", "2"], 2, "belongs to --random"),
        (["--allow-host", "x", "--host", "0.0.0.0"], 2, "loopback"),
        (["--api-key", "\N{LATIN SMALL LETTER E WITH ACUTE}"], 2, "ASCII"),
        (["--host", "203.0.113.9"], 1, "cannot listen"),
    ]:
        assert main(["--port", "0", *more]) == code
        said = capfd.readouterr().err
        assert word in said and "Traceback" not in said and said.count("\n") == 1
