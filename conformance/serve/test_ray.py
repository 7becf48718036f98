"""Two replicas through Ray on this machine, one of them killed in the middle. Needs the extra `ray`, and half a minute."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import hybrid
from conformance.support.paths import DEMO, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"),
]
PROMPTS = [f"def function_{i}(path, name):\n    " for i in range(12)]
READY = 120.0  # seconds in which Ray has started everything


def served(command: subprocess.Popen[str], log: Path) -> str:
    """The address that the process prints."""
    until = time.monotonic() + READY
    while time.monotonic() < until and command.poll() is None:
        found = re.search(r"serving (http://\S+) with 2 replicas", log.read_text())
        if found:
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"not served within {READY:g} s, exit code {command.poll()}: {log.read_text()[-2000:]}")


def engines() -> list[int]:
    """Processes of the replicas: Ray writes an actor's class into its command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if line.startswith(b"ray::ServeReplica") and b"engine-" in line:
            found.append(int(folder.name))
    return sorted(found)


def test_two_replicas_one_killed_in_the_middle_lose_nothing_that_was_not_streaming(tmp_path: Path) -> None:
    with hybrid.load(DEMO, device="cpu", slots=4, ctx=512, precision="exact") as model:  # batches round alike
        alone = [model.submit(p, max_tokens=48).result(60).text for p in PROMPTS]
    log = tmp_path / "log"
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1"}
    arguments = ["--ray", "--replica", "cpu", "--replica", "cpu", "--port", "0", "--slots", "4", "--ctx", "512",
                 "--precision", "exact", "--drain", "5"]  # fmt: skip
    with log.open("w") as out:
        command = subprocess.Popen([sys.executable, "-m", "hybrid.serve", *arguments], cwd=ROOT, env=environment, text=True,
                                   stdout=out, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        with httpx.Client(base_url=served(command, log), timeout=120, trust_env=False) as client:

            def ask(prompt: str) -> Any:
                body = {"prompt": prompt, "max_tokens": 48, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["text"]

            until = time.monotonic() + READY
            while client.get("/ready").status_code != 200 and time.monotonic() < until:
                time.sleep(0.2)
            assert [ask(p) for p in PROMPTS[:2]] == alone[:2]
            before = engines()
            assert len(before) == 2
            with ThreadPoolExecutor(len(PROMPTS)) as threads:
                asked = [threads.submit(ask, p) for p in PROMPTS]
                time.sleep(0.3)
                os.kill(before[0], signal.SIGKILL)
                assert [a.result(120) for a in asked] == alone
            until = time.monotonic() + READY
            while (len(engines()) < 2 or client.get("/health").json()["down"]) and time.monotonic() < until:
                time.sleep(0.5)
            assert len(engines()) == 2 and engines() != before, "Ray has not replaced the replica"
            assert [ask(p) for p in PROMPTS[:4]] == alone[:4]
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0, log.read_text()[-2000:]
    finally:
        if command.poll() is None:
            command.kill()
            command.wait(30)
