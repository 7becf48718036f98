"""Two replicas through Ray on this machine, one of them killed in the middle. Needs the extra `ray`, and half a minute."""

from __future__ import annotations

import importlib.util
import json
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


def check_streams_and_routes(client: httpx.Client) -> None:
    """Streams come in pieces, equal to the whole answer; the turns of a conversation meet the replica that has them cached."""
    talks = [[{"role": "user", "content": f"{n}: what is a file? " * 8}] for n in range(4)]
    for turn in range(2):
        for talk in talks:
            body = {"messages": talk, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            whole = client.post("/v1/chat/completions", json=body).json()
            pieces, usage = [], None
            more = {"stream": True, "stream_options": {"include_usage": True}}
            with client.stream("POST", "/v1/chat/completions", json={**body, **more}) as answer:
                lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            for chunk in map(json.loads, (line[6:] for line in lines[:-1])):
                pieces += [c["delta"].get("content") or "" for c in chunk["choices"]]
                usage = chunk["usage"] or usage
            said = whole["choices"][0]["message"]["content"]
            assert "".join(pieces) == said and len(pieces) > 2
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0  # the same prompt, asked for a second time
            assert not turn or whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


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
            check_streams_and_routes(client)
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


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="Ray Data needs pyarrow")
def test_a_batch_over_two_engines_is_that_of_one(tmp_path: Path) -> None:
    """In order, with the options of each line; what is there already is kept; a prompt that cannot be run is one line."""
    prompts = tmp_path / "prompts.txt"
    line = json.dumps({"prompt": "import os", "max_tokens": 3, "logit_bias": {"300": -5}})
    prompts.write_text("\n".join([*PROMPTS[:6], line, *PROMPTS[6:]]), encoding="utf-8")
    common = ["--batch", str(prompts), "--device", "cpu", "--precision", "exact", "--slots", "2", "--ctx", "256", "-n", "5"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1"}
    found = []
    for name, more in (("one", []), ("two", ["--ray", "--replica", "cpu", "--replica", "cpu"])):
        output = tmp_path / name
        if more:  # interrupted after four results, within the fifth
            kept = found[0][:4]
            output.write_text("".join(json.dumps(k) + "\n" for k in kept) + '{"index": 4, "pro', encoding="utf-8")
        run = [sys.executable, "-m", "hybrid.generate", *common, "--output", str(output), *more]
        done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=READY)
        assert done.returncode == 0, done.stderr
        found.append([json.loads(said) for said in output.read_text(encoding="utf-8").splitlines()])
    one, two = ([(r["index"], r["prompt"], r["text"], r["usage"]["completion_tokens"]) for r in results] for results in found)
    assert one == two and [r[0] for r in one] == list(range(len(PROMPTS) + 1)) and one[6][3] == 3
