"""Two replicas through Ray on this machine: access to them, and one of them killed during requests. Needs the extra
`ray`, and half a minute."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
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
READY = 120.0  # limit in seconds until Ray has started everything


def served(command: subprocess.Popen[str], log: Path) -> str:
    """The address that the process prints."""
    until = time.monotonic() + READY
    while time.monotonic() < until and command.poll() is None:
        found = re.search(r"serving (http://\S+) with 2 replicas", log.read_text())
        if found:
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"not served within {READY:g} s, exit code {command.poll()}: {log.read_text()[-2000:]}")


def processes(root: int) -> dict[int, str]:
    """The command lines of a process and of all its descendants; Ray writes an actor's class into its own."""
    found, children = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    these = [root]
    for one in these:
        these += children.get(one, [])
    return {one: found[one] for one in these if one in found}


def engines(root: int) -> list[int]:
    return sorted(one for one, line in processes(root).items() if line.startswith("ray::ServeReplica"))


def listening(lines: dict[int, str]) -> list[tuple[str, int, int]]:
    """Address, port and process of each TCP socket that these processes listen on."""
    owners = {}
    for one in lines:
        for file in Path(f"/proc/{one}/fd").glob("*"):
            try:
                owners[os.readlink(file)] = one
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in owners:
                host, _, port = local.partition(":")
                raw = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
                address = socket.inet_ntop(socket.AF_INET6 if len(raw) == 16 else socket.AF_INET, raw)
                found.append((address.removeprefix("::ffff:"), int(port, 16), owners[f"socket:[{inode}]"]))
    return found


def check_who_may_connect(root: int, folder: Path) -> subprocess.Popen[str]:
    """Only loopback addresses, except one port of each replica, which requires the token. The token is on no command
    line. Returns a process that tries to join without one."""
    import grpc

    lines = processes(root)
    sockets = listening(lines)
    elsewhere = [(port, one) for address, port, one in sockets if address != "127.0.0.1"]
    assert len(sockets) > len(elsewhere) and sorted(one for _, one in elsewhere) == engines(root)
    for port, _ in elsewhere:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=30)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    variables = Path(f"/proc/{elsewhere[0][1]}/environ").read_bytes().split(b"\0")
    token = next(v for v in variables if v.startswith(b"RAY_AUTH_TOKEN=")).decode().partition("=")[2]
    assert len(token) == 64 and not any(token in line for line in lines.values())
    session = next(found[1] for line in lines.values() if (found := re.search(r"--session.dir=(/\S+)", line)))
    assert any(not parent.stat().st_mode & 0o077 for parent in Path(session).parents)

    port = next(port for _, port, one in sockets if "gcs_server" in lines[one])
    stranger = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    stranger |= {
        "HOME": str(folder),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }  # otherwise it looks for 127.0.0.1 elsewhere
    join = f"import ray; ray.init('127.0.0.1:{port}', log_to_driver=False); print(len(ray.nodes()), 'node')"
    friend = {**stranger, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    joined = subprocess.run([sys.executable, "-c", join], env=friend, capture_output=True, text=True, timeout=READY)
    assert "1 node" in joined.stdout, joined.stderr
    arguments = ["--ray", "--ray-address", f"127.0.0.1:{port}", "--replica", "cpu", "--port", "0"]
    return subprocess.Popen(
        [sys.executable, "-m", "hybrid.serve", *arguments],
        cwd=ROOT,
        env=stranger,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def check_streams_and_routes(client: httpx.Client) -> None:
    """Streams come in pieces, equal to the whole answer; the turns of a conversation reach the replica that has them
    cached."""
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
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0  # the same prompt, sent a second time
            assert not turn or whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def test_two_replicas_one_killed_in_the_middle_lose_nothing_that_was_not_streaming(tmp_path: Path) -> None:
    with hybrid.load(DEMO, device="cpu", slots=4, ctx=512, precision="exact") as model:  # equal rounding in batches
        alone = [model.submit(p, max_tokens=48).result(60).text for p in PROMPTS]
    log = tmp_path / "log"
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1"}
    arguments = [
        "--ray",
        "--replica",
        "cpu",
        "--replica",
        "cpu",
        "--port",
        "0",
        "--slots",
        "4",
        "--ctx",
        "512",
        "--precision",
        "exact",
        "--drain",
        "5",
    ]
    with log.open("w") as out:
        command = subprocess.Popen(
            [sys.executable, "-m", "hybrid.serve", *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    stranger: subprocess.Popen[str] | None = None
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
            stranger = check_who_may_connect(command.pid, tmp_path)
            for host, status in (("rebound.example", 403), ("localhost", 404)):  # no server of Ray's own answers
                assert client.get("/-/routes", headers={"host": host}).status_code == status
            check_streams_and_routes(client)
            before = engines(command.pid)
            assert len(before) == 2
            with ThreadPoolExecutor(len(PROMPTS)) as threads:
                asked = [threads.submit(ask, p) for p in PROMPTS]
                time.sleep(0.3)
                os.kill(before[0], signal.SIGKILL)
                assert [a.result(120) for a in asked] == alone
            until = time.monotonic() + READY
            while (len(engines(command.pid)) < 2 or client.get("/health").json()["down"]) and time.monotonic() < until:
                time.sleep(0.5)
            assert len(engines(command.pid)) == 2 and engines(command.pid) != before, "Ray has not replaced the replica"
            assert [ask(p) for p in PROMPTS[:4]] == alone[:4]
        said = stranger.communicate(timeout=READY)[0]
        assert stranger.returncode == 1 and "RAY_AUTH_TOKEN" in said.splitlines()[-1], said
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0, log.read_text()[-2000:]
    finally:
        for one in (command, stranger):
            if one is not None and one.poll() is None:
                one.kill()
                one.wait(30)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="Ray Data needs pyarrow")
def test_a_batch_over_two_engines_is_that_of_one(tmp_path: Path) -> None:
    """In order, with the options of each line; existing results are kept; a prompt that cannot be run is one line."""
    prompts = tmp_path / "prompts.txt"
    line = json.dumps({"prompt": "import os", "max_tokens": 3, "logit_bias": {"300": -5}})
    prompts.write_text("\n".join([*PROMPTS[:6], line, *PROMPTS[6:]]), encoding="utf-8")
    common = [
        "--batch",
        str(prompts),
        "--device",
        "cpu",
        "--precision",
        "exact",
        "--slots",
        "2",
        "--ctx",
        "256",
        "-n",
        "5",
    ]
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
    one, two = (
        [(r["index"], r["prompt"], r["text"], r["usage"]["completion_tokens"]) for r in results] for results in found
    )
    assert one == two and [r[0] for r in one] == list(range(len(PROMPTS) + 1)) and one[6][3] == 3
