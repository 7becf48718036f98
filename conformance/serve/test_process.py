"""The command: its start, its signals, its exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from conformance.support.devices import open_backend
from conformance.support.paths import DEMO
from conformance.support.profile import LONG
from conformance.support.server import until
from hybrid.serve import main

COMMAND = [sys.executable, "-m", "hybrid.serve", "--device", "cpu", "--port", "0"]


@contextmanager
def command(*more: str, start: Sequence[str] = COMMAND) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with the embedded model, and its address, once it is ready."""
    process = subprocess.Popen([*start, "--slots", "2", *more], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        url = found[0]
        with httpx.Client(trust_env=False, verify=False) as client:  # one: each reads all certificates of the system
            until(lambda: client.get(f"{url}/ready").status_code == 200)
        yield process, url
    finally:
        process.kill()
        process.wait(30)


def lines(url: str, tokens: int) -> Iterator[str]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": tokens, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as answer:
        yield from (line for line in answer.iter_lines() if line.startswith("data: "))


LOSING = """
import os, sys, time
import hybrid
from hybrid.kernels.vulkan import timeline
from hybrid.kernels.vulkan.api import lib, vk
from hybrid.serve import main

lose, hold, load = sys.argv[1], sys.argv[2], hybrid.load


class Driver:
    def __getattr__(self, name):
        return getattr(lib, name)

    def vkQueueSubmit(self, *args):
        if os.path.exists(lose):
            os.remove(lose)
            return vk.VK_ERROR_DEVICE_LOST
        return lib.vkQueueSubmit(*args)


def held(*args, **more):
    end = time.monotonic() + 60
    while os.path.exists(hold) and time.monotonic() < end:
        time.sleep(0.01)
    return load(*args, **more)


timeline.lib, hybrid.load = Driver(), held
sys.exit(main(sys.argv[3:]))
"""
"""The command, with a driver that loses its device at the next submit where one file exists, and fails to load where
another exists."""


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["restart", "exit"] if LONG else ["restart"])
def test_a_lost_device_is_loaded_again_or_ends_the_process(choice: str, tmp_path: Path) -> None:
    open_backend("vulkan").close()
    lose, hold = tmp_path / "lose", tmp_path / "hold"
    start = [sys.executable, "-c", LOSING, str(lose), str(hold), "--device", "vulkan", "--port", "0", "--no-warm-up"]
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    small = ["--random", "gemma3-270m", "--layers", "1", "--vocab", "512", "--ctx", "64"]
    with command(*small, "--on-device-loss", choice, start=start) as (process, url):
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            text = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            hold.touch()
            lose.touch()
            refused = client.post("/v1/completions", json=asked)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "device_lost"
            if choice == "restart":
                assert client.get("/ready").json() == {"status": "lost"} and client.get("/ready").status_code == 503
                again = client.post("/v1/completions", json=asked)
                assert again.status_code == 503 and "retry-after" in again.headers
                hold.unlink()
                until(lambda: client.get("/ready").status_code == 200)
                assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == text
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == (0 if choice == "restart" else 3)
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said and "was lost while submitting" in said
        if choice == "exit":
            assert said.strip().splitlines()[-1].startswith("error: the device was lost: vulkan:")


@pytest.mark.slow
def test_a_first_sigterm_drains_and_ends_with_0() -> None:
    with command("--no-warm-up") as (process, url):
        stream = lines(url, 24)
        next(stream)
        process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert process.wait(30) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    with command("--no-warm-up") as (process, url):
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
        (["/no/such/model.gguf"], 1, "no such file"),
        (["model.gguf", "--random", "gemma3-270m"], 2, "one of the two"),
        (["--random", "gemma3-270m", "--ray"], 2, "leave out --ray"),
        (["--layers", "2"], 2, "belongs to --random"),
        (["--allow-host", "x", "--host", "0.0.0.0"], 2, "loopback"),
        (["--api-key", "\N{LATIN SMALL LETTER E WITH ACUTE}"], 2, "ASCII"),
        (["--host", "203.0.113.9"], 1, "cannot listen"),
    ]:
        assert main(["--port", "0", *more]) == code
        said = capfd.readouterr().err
        assert word in said and "Traceback" not in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two more processes")
@pytest.mark.parametrize("where", [(), ("--draft-device", "cpu")])
def test_a_draft_changes_no_text(where: tuple[str, ...]) -> None:
    """Greedy and sampled, several at a time; usage counts the drafts."""
    draft = str(DEMO.with_name("demo-gemma3-draft-q8_0.gguf"))
    found = []
    for options in ((), ("--draft", draft, "--speculate", "3", *where)):
        with command("--precision", "exact", *options) as (_, url):
            bodies = [
                {"prompt": prompt, "max_tokens": 24, "seed": 7, "temperature": temperature}
                for prompt in ("def area(", "import os\n")
                for temperature in (0.0, 0.9)
            ]
            ask = partial(httpx.post, f"{url}/v1/completions", timeout=120, trust_env=False)
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda body, ask=ask: ask(json=body).json(), bodies))
            found.append([a["choices"][0]["text"] for a in answers])
            details = [a["usage"].get("completion_tokens_details") or {} for a in answers]
    assert found[0] == found[1]
    assert sum(d.get("accepted_prediction_tokens", 0) for d in details) > 0, details
