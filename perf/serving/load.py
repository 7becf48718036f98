"""python -m perf.serving.load: check every answer of a server under load.

Requests of a fixed seed, many at a time, against a server on this machine: whole and streamed answers, clients that
leave in the middle or at once, bodies that are broken, keys that are wrong, fields that cannot be. Each text must equal
the one that the same request got alone, each refusal must be the declared one, and in the end blocks and memory must be
where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hybrid.cli import Parser, UsageError, amount, positive, run

if TYPE_CHECKING:
    import httpx

KEY = "load-test-key"
KINDS = {"whole": 40, "stream": 28, "leave": 10, "leave at once": 6, "malformed": 6, "wrong key": 5, "wrong field": 5}
"""What is asked for, and how often in a hundred."""
PROMPTS = (
    "def read_file(path):",
    "import os\n",
    "The asyncio module provides",
    "class Server:\n    def __init__(self",
    "A list is",
)
REFUSED = {"malformed": (400, "invalid_json"), "wrong key": (401, "invalid_api_key"), "wrong field": (400, None)}
GROWTH = 1.15
"""Memory at the end, at most, over that after the first fifth of the requests."""


@dataclass
class Found:
    """What was seen."""

    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    compared: int = 0
    retried: int = 0


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.serving.load",
        description="Load a server on this machine, and compare every answer with what the same request gets alone.",
        epilog="Exit code 1 where a text differs, a refusal is not the declared one, or blocks or memory do not come back.",
    )
    p.add_argument(
        "--url",
        metavar="URL",
        help="a running server on a loopback address (starts one with the embedded model on cpu)",
    )
    p.add_argument("--key", metavar="KEY", help="its API key")
    p.add_argument("--requests", type=positive, default=1000, metavar="N", help="how many (1000)")
    p.add_argument("--at-a-time", type=positive, default=16, metavar="N", help="open at any time (16)")
    p.add_argument(
        "--texts", type=positive, default=40, metavar="N", help="different requests, each run alone first (40)"
    )
    p.add_argument("--most", type=positive, default=16, metavar="N", help="most tokens of an answer (16)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (0)")
    p.add_argument("--limit", type=amount, default=1800.0, metavar="SECONDS", help="give up after this time (1800)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    if args.url is not None and urlsplit(args.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise UsageError(f"--url {args.url}: load is for servers on a loopback address of this machine")
    with contextlib.ExitStack() as held:
        url = args.url or held.enter_context(_server())
        found, figures = asyncio.run(asyncio.wait_for(_load(url, args.key or KEY, args), args.limit))
    for line in figures:
        print(line)
    for line in found.wrong[:20]:
        print(f"wrong: {line}", file=sys.stderr)
    print(f"{len(found.wrong)} wrong", file=sys.stderr)
    return bool(found.wrong)


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A server of its own: the embedded model on cpu, in float32, where a sum that is added up in another order rounds
    to another text so rarely that one is worth a look."""
    command = [
        sys.executable,
        "-m",
        "hybrid.serve",
        "--device",
        "cpu",
        "--precision",
        "exact",
        "--slots",
        "8",
        "--ctx",
        "256",
    ]
    process = subprocess.Popen(
        [*command, "--port", "0", "--api-key", KEY], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        address = re.search(r"http://\S+", first)
        if address is None:
            raise RuntimeError(f"the server did not start: {first.strip()}")
        yield address[0]
        process.terminate()
        if process.wait(60) != 0:
            raise RuntimeError(f"the server ended with {process.returncode}")
    finally:
        process.kill()
        process.wait(30)


def _texts(seed: int, count: int, most: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "prompt": draw.choice(PROMPTS) * draw.randint(1, 3),
            "max_tokens": draw.randint(1, most),
            "temperature": draw.choice([0, 0, 0.8]),
            "seed": n,
        }
        for n in range(count)
    ]


async def _load(url: str, key: str, args: argparse.Namespace) -> tuple[Found, list[str]]:
    import httpx

    found, draw = Found(), random.Random(args.seed + 1)
    texts = _texts(args.seed, args.texts, args.most)
    limits = httpx.Limits(max_connections=args.at_a_time + 4)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        alone = [await _alone(client, body) for body in texts]
        before = await _figures(client)
        kinds = draw.choices(list(KINDS), list(KINDS.values()), k=args.requests)
        jobs = [(n, kind, draw.randrange(len(texts)), draw.randint(0, 3)) for n, kind in enumerate(kinds)]
        queue, early = iter(jobs), before
        began = time.perf_counter()

        async def work() -> None:
            nonlocal early
            for n, kind, which, count in queue:
                await _one(client, found, kind, texts[which], alone[which], count)
                if n == args.requests // 5:
                    early = await _figures(client)

        await asyncio.gather(*(work() for _ in range(args.at_a_time)))
        seconds = time.perf_counter() - began
        after = await _settled(client)
    _compare(found, before, early, after)
    return found, _report(args, found, seconds, before, early, after)


async def _alone(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


async def _one(client: httpx.AsyncClient, found: Found, kind: str, body: dict[str, Any], text: str, count: int) -> None:
    """One request of a kind; count: events that a client who leaves takes before."""
    try:
        if kind in REFUSED:
            await _refused(client, found, kind, body)
        elif kind == "whole":
            answer = await client.post("/v1/completions", json=body)
            while answer.status_code == 429:
                found.retried += 1
                await asyncio.sleep(float(answer.headers["retry-after"]))
                answer = await client.post("/v1/completions", json=body)
            got = answer.json()["choices"][0]["text"] if answer.status_code == 200 else f"status {answer.status_code}"
            _same(found, kind, body, got, text)
        else:
            await _streamed(client, found, kind, body, text, count if kind == "leave" else 0)
    except Exception as error:  # a connection that breaks, an answer that is no JSON: it is what this looks for
        found.wrong.append(f"{kind}: {type(error).__name__}: {error} for {body}")
    found.answered[kind] += 1


async def _refused(client: httpx.AsyncClient, found: Found, kind: str, body: dict[str, Any]) -> None:
    content, headers = json.dumps(body), {"content-type": "application/json"}
    if kind == "malformed":
        content = content[: len(content) // 2]
    elif kind == "wrong key":
        headers["authorization"] = "Bearer wrong"
    else:
        content = json.dumps({**body, "max_tokens": -len(content)})
    answer = await client.post("/v1/completions", content=content, headers=headers)
    status, code = REFUSED[kind]
    error = answer.json()["error"]
    if answer.status_code != status or (code and error["code"] != code):
        found.wrong.append(f"{kind}: {answer.status_code} {error}")


async def _streamed(
    client: httpx.AsyncClient, found: Found, kind: str, body: dict[str, Any], text: str, count: int
) -> None:
    began, got, events, ended = time.perf_counter(), "", 0, False
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if kind == "leave at once":
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                break
            chunk = json.loads(line[6:])
            piece = chunk["choices"][0]["text"] if chunk.get("choices") else ""
            if piece and not events:
                found.first.append(time.perf_counter() - began)
            got, events = got + piece, events + bool(piece)
            if kind == "leave" and events > count:
                return
    if ended:
        _same(found, kind, body, got, text)
    else:
        found.wrong.append(f"{kind}: the stream ended without [DONE], after {got!r}, for {body}")


def _same(found: Found, kind: str, body: dict[str, Any], got: str, text: str) -> None:
    found.compared += 1
    if got != text:
        found.wrong.append(f"{kind}: {got!r} and alone {text!r}, for {body}")


async def _figures(client: httpx.AsyncClient) -> dict[str, float]:
    """Sums over labels, and every block count by its labels."""
    out: defaultdict[str, float] = defaultdict(float)
    for line in (await client.get("/metrics")).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not name.startswith("#"):
            out[name if name.startswith("hybrid_blocks") else name.partition("{")[0]] += float(value)
    return dict(out)


async def _settled(client: httpx.AsyncClient) -> dict[str, float]:
    """The figures once nothing runs or waits; those after ten seconds where that does not happen."""
    until = time.monotonic() + 10
    while True:
        figures = await _figures(client)
        if not figures["hybrid_running"] + figures["hybrid_waiting"] or time.monotonic() > until:
            return figures
        await asyncio.sleep(0.05)


def _compare(found: Found, before: dict[str, float], early: dict[str, float], after: dict[str, float]) -> None:
    if after["hybrid_running"] or after["hybrid_waiting"]:
        found.wrong.append(f"{after['hybrid_running']:.0f} requests still run and {after['hybrid_waiting']:.0f} wait")
    for name in after:
        if 'state="used"' in name and after[name] != before.get(name, 0):
            found.wrong.append(f"{name}: {after[name]:.0f} after, {before.get(name, 0):.0f} before")
    memory = "process_resident_memory_bytes"
    if after[memory] > GROWTH * early[memory]:
        found.wrong.append(f"memory grew from {early[memory]:.0f} to {after[memory]:.0f} bytes")


def _report(args: argparse.Namespace, found: Found, seconds: float, *figures: dict[str, float]) -> list[str]:
    before, _, after = figures
    mib = [f["process_resident_memory_bytes"] / 2**20 for f in figures]
    first = sorted(found.first)
    tokens = after["hybrid_generated_tokens_total"] - before["hybrid_generated_tokens_total"]
    lines = [
        f"{sum(found.answered.values())} requests, {args.at_a_time} at a time, seed {args.seed}, in {seconds:.1f} s",
        ", ".join(f"{n} {kind}" for kind, n in sorted(found.answered.items())),
        f"{found.compared} texts compared with those of the same requests alone; {found.retried} tried again after 429",
        f"{tokens:.0f} tokens generated; resident MiB: {mib[0]:.0f} before, {mib[1]:.0f} after a fifth, {mib[2]:.0f} then",
    ]
    if first:
        half, most = first[len(first) // 2], first[min(len(first) - 1, int(0.95 * len(first)))]
        lines.append(f"time to the first piece of a stream: median {half * 1000:.0f} ms, p95 {most * 1000:.0f} ms")
    return lines


if __name__ == "__main__":
    sys.exit(main())
