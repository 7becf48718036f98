"""python -m perf.serving.clients: client-side figures of a running server, as in `hybrid.bench
--requests`.

The same seed draws the same requests as there: arrivals, prompts of token ids, lengths; an end of text ends nothing.
Each has a connection of its own, open shortly before its time as that of a client which has asked before, and reads a
stream. While the run lasts a client notes when bytes came and nothing else, and what they say is read afterwards, so
that clients on the server's machine take little of it. A chunk of text may hold several tokens, or one may have no text
yet: a stream's tokens are counted by its last chunk, and spread over the chunks in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from hybrid.bench.__main__ import span
from hybrid.bench.requests import Request, Served, requests, summary, text
from hybrid.cli import Parser, UsageError, amount, positive, run
from hybrid.engine.request import Completion, Timings, Usage
from hybrid.engine.stats import Metrics

EARLY = 1.0
"""Seconds before a request's time at which its connection is made."""
END = b"\r\n0\r\n\r\n"


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.serving.clients",
        description="Send a running server the requests of hybrid.bench --requests, and show what its clients see.",
        epilog="Exit code 1 where an answer is refused, broken, or does not have the tokens that it was asked for.",
    )
    p.add_argument("url", metavar="URL", help="a running server on a loopback address, http://127.0.0.1:8000")
    p.add_argument("--key", default="", metavar="KEY", help="its API key")
    p.add_argument("--requests", type=positive, default=64, metavar="N", help="how many (64)")
    p.add_argument(
        "--warm", type=positive, metavar="N", help="short requests before the run, as many as slots (as --requests)"
    )
    p.add_argument("--rate", type=amount, metavar="R", help="they arrive at R per second on average (all at once)")
    p.add_argument("--prompt-lengths", type=span, default=(128, 128), metavar="A,B", help="tokens of a prompt (128)")
    p.add_argument("--output-lengths", type=span, default=(128, 128), metavar="A,B", help="tokens of an answer (128)")
    p.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="the first N tokens of all prompts are the same (0)"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and tokens (0)")
    p.add_argument("--limit", type=amount, default=600.0, metavar="SECONDS", help="give up after this time (600)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    to = urlsplit(args.url)
    if to.hostname not in ("127.0.0.1", "localhost", "::1") or to.scheme != "http" or to.port is None:
        raise UsageError(
            f"{args.url}: load is for servers on a loopback address of this machine, http://127.0.0.1:PORT"
        )
    if not 0 <= args.shared_prefix < args.prompt_lengths[0]:
        raise UsageError(
            f"--shared-prefix must be 0 or more, and less than the shortest prompt ({args.prompt_lengths[0]})"
        )
    try:
        found = asyncio.run(asyncio.wait_for(_measured(args, to.hostname, to.port), args.limit))
    except asyncio.TimeoutError:
        raise RuntimeError(f"not done after {args.limit:g} s: ask for less, or give more with --limit") from None
    print(json.dumps({"url": args.url, "requests": found}) if args.json else "\n".join(text(found)))
    return 0


async def _measured(args: argparse.Namespace, host: str, port: int) -> dict[str, Any]:
    while (answer := await _whole(host, port, args.key, "GET", "/ready"))[0] == 503:
        await asyncio.sleep(0.2)
    _expect(answer)
    about = json.loads(_expect(await _whole(host, port, args.key, "GET", "/v1/models")))["data"][0]

    def drawn(n: int, rate: float | None, outputs: tuple[int, int], seed: int) -> list[Request]:
        return requests(n, rate, args.prompt_lengths, outputs, about["vocabulary"], args.shared_prefix, seed)

    await _serve(host, port, args.key, drawn(args.warm or args.requests, None, (4, 4), args.seed + 1))
    before = await _metrics(host, port, args.key)
    began, served = await _serve(host, port, args.key, drawn(args.requests, args.rate, args.output_lengths, args.seed))
    found = summary(served, before, await _metrics(host, port, args.key))
    return {**found, "began": began, "first_token_s": [s.times[0] for s in served]}


class Reader(asyncio.Protocol):
    """One request on a connection of its own. pieces: bytes, and when they came."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc) if exc is not None else self.ended.set_result(None)

    @property
    def head(self) -> tuple[int, bytes]:
        """Status and header lines. RuntimeError where there are none."""
        head = b"".join(data for _, data in self.pieces).partition(b"\r\n\r\n")[0]
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        if found is None:
            raise RuntimeError(f"the server closed the connection after {head[:80]!r}")
        return int(found[1]), head


def _request(host: str, key: str, method: str, path: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}"] + ([f"Authorization: Bearer {key}"] if key else [])
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _answer(connection: tuple[asyncio.Transport, Reader], sent: bytes) -> Reader:
    """All that comes after a request, until the connection ends."""
    transport, reader = connection
    try:
        transport.write(sent)
        await reader.ended
    finally:
        transport.close()
    return reader


async def _connection(host: str, port: int) -> tuple[asyncio.Transport, Reader]:
    return await asyncio.get_running_loop().create_connection(Reader, host, port)


async def _whole(host: str, port: int, key: str, method: str, path: str) -> tuple[int, bytes]:
    reader = await _answer(await _connection(host, port), _request(host, key, method, path))
    return reader.head[0], b"".join(data for _, data in reader.pieces).partition(b"\r\n\r\n")[2]


def _expect(answer: tuple[int, bytes]) -> bytes:
    if answer[0] != 200:
        raise RuntimeError(f"the server answered {answer[0]}: {answer[1][:300]!r}")
    return answer[1]


async def _metrics(host: str, port: int, key: str) -> Metrics:
    said = _expect(await _whole(host, port, key, "GET", "/metrics")).decode()
    found = {m[1]: int(float(m[2])) for m in re.finditer(r"^hybrid_(\w+)_total (\S+)$", said, re.M)}
    return Metrics(passes=found["passes"], preemptions=found["preemptions"], evictions=found["evictions"])


async def _serve(host: str, port: int, key: str, wanted: Sequence[Request]) -> tuple[float, list[Served]]:
    """When the run began, as time.perf_counter() has it, and what came. The run begins when its first connections are
    open."""
    early = [await _connection(host, port) if r.at < EARLY else None for r in wanted]
    begin = time.perf_counter()

    async def one(request: Request, connection: tuple[asyncio.Transport, Reader] | None) -> tuple[float, Reader]:
        body = {
            "prompt": request.ids,
            "max_tokens": request.n,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = _request(host, key, "POST", "/v1/completions", json.dumps(body).encode())
        if connection is None:
            await asyncio.sleep(max(0.0, begin + request.at - EARLY - time.perf_counter()))
            connection = await _connection(host, port)
        await asyncio.sleep(max(0.0, begin + request.at - time.perf_counter()))
        submitted = time.perf_counter() - begin
        while (reader := await _answer(connection, sent)).head[0] == 429:
            again = re.search(rb"retry-after: (\d+)", reader.head[1], re.I)
            await asyncio.sleep(float(again[1]) if again else 1.0)
            connection = await _connection(host, port)
        return submitted, reader

    found = await asyncio.gather(*map(one, wanted, early))
    return begin, [served(reader, at, begin) for at, reader in found]


def served(reader: Reader, submitted: float, begin: float) -> Served:
    """What a stream brought. RuntimeError for one that was refused or is not whole."""
    came = b"".join(data for _, data in reader.pieces)
    if reader.head[0] != 200 or not came.endswith(END) or b"data: [DONE]\n\n" not in came:
        raise RuntimeError(f"an answer is not whole: {came[-300:]!r}")
    times, usage, finish, at = list[float](), None, "", 0
    ends = [at := at + len(data) for _, data in reader.pieces]
    piece = 0
    for line in re.finditer(rb"data: (\{.*\})\n\n", came):
        while ends[piece] < line.end():
            piece += 1
        chunk = json.loads(line[1])
        if "error" in chunk:
            raise RuntimeError(f"an answer ended with {chunk['error']}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            times += [reader.pieces[piece][0] - begin] * bool(choice["text"])
    if usage is None or not times:
        raise RuntimeError("an answer has no usage or no text")
    n = usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    spread = tuple(times[i * len(times) // n] for i in range(n))
    done = Completion("", (), finish, None, Usage(usage["prompt_tokens"], cached, n), Timings(None, None, times[-1]))  # type: ignore[arg-type]
    return Served(submitted, spread, done)


if __name__ == "__main__":
    sys.exit(main())
