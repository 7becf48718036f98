"""python -m perf.serving.pairs: the server's overhead over its engine, measured alternately on one loaded model.

Each round draws requests, all at once, and sends them first to the engine (`Model.submit`, read by asyncio in this
process), then through HTTP to a server in this process (perf.serving.clients, in a process of its own). Beside the
figures of both stand the stations of a request on its way to the first token, on the machine's one monotonic clock
since the first was sent: when the application was called, when it was submitted to the engine, when its first pass was
prepared, when its first token was handed out, and when its reader had it. Each is a quantile over the requests of its
own, so that differences say where time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hybrid.arguments import add_devices, add_model, open_model
from hybrid.bench.__main__ import span
from hybrid.bench.requests import Served, requests, serve, summary
from hybrid.cli import Parser, positive, run
from hybrid.engine.handle import Handle

STATIONS = ("called", "submitted", "prepared", "handed out", "read")
LIMIT = 600.0
"""Seconds that a round of clients may take."""


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.serving.pairs", description="Measure an engine and the server in front of it in turn."
    )
    add_model(p)
    add_devices(p)
    p.add_argument("--slots", type=positive, default=32, metavar="N", help="sequences that run at a time (32)")
    p.add_argument("--requests", type=positive, default=64, metavar="N", help="of each round, all at once (64)")
    p.add_argument("--prompt-lengths", type=span, default=(128, 128), metavar="A,B", help="tokens of a prompt (128)")
    p.add_argument("--output-lengths", type=span, default=(128, 128), metavar="A,B", help="tokens of an answer (128)")
    p.add_argument(
        "--pairs", type=positive, default=3, metavar="N", help="rounds of both (3), after one of the engine to warm up"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the first round's tokens (0)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


class Stations:
    """Notes when the application is called and when requests are submitted; the handle knows the rest."""

    def __init__(self, submit: Callable[..., Handle]) -> None:
        self._submit = submit
        self.called: list[float] = []
        self.submitted: list[tuple[float, Handle]] = []

    def submit(self, prompt: Sequence[int], **options: Any) -> Handle:
        at = time.perf_counter()
        handle = self._submit(prompt, **options)
        self.submitted.append((at, handle))
        return handle

    def around(self, app: Any) -> Any:
        async def noted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["method"] == "POST":
                self.called.append(time.perf_counter())
            await app(scope, receive, send)

        return noted

    def clear(self) -> None:
        self.called, self.submitted = [], []

    def taken(self, begin: float, n: int, read: Sequence[float]) -> dict[str, dict[str, float]]:
        """Milliseconds after `begin` for the last `n` requests; read: seconds after it."""
        times = [(at, h.result(0).timings) for at, h in self.submitted[-n:]]
        found = {
            "called": [t - begin for t in self.called[-n:]],
            "submitted": [at - begin for at, _ in times],
            "prepared": [at + t.queued - begin for at, t in times if t.queued is not None],
            "handed out": [at + t.first_token - begin for at, t in times if t.first_token is not None],
            "read": list(read),
        }
        return {k: {f"p{q}": float(np.percentile(v, q)) * 1e3 for q in (5, 50, 95)} for k, v in found.items() if v}


def _main(args: argparse.Namespace) -> int:
    import hybrid

    ctx = args.prompt_lengths[1] + args.output_lengths[1] + 1
    with hybrid.load(
        open_model(args),
        args.device,
        args.schedule,
        ctx=ctx,
        slots=args.slots,
        queue=1024,
        npu=args.npu,
        progress=sys.stderr.isatty(),
        warm=True,
    ) as model:
        stations = Stations(model.submit)
        setattr(model, "submit", stations.submit)  # noqa: B010 (of another signature than the method)
        with _server(model, stations) as url:
            _engine(args, model, stations, args.seed + 1000)
            rounds = [
                (
                    _engine(args, model, stations, args.seed + 2 * i),
                    _clients(args, url, stations, args.seed + 2 * i + 1),
                )
                for i in range(args.pairs)
            ]
        about = f"{model.checkpoint.name} on {model.device}: {args.requests} requests, {args.slots} at a time"
    if args.json:
        print(json.dumps({"about": about, "rounds": [{"engine": e, "server": s} for e, s in rounds]}))
    else:
        print("\n".join(text(about, rounds)))
    return 0


@contextlib.contextmanager
def _server(model: Any, stations: Stations) -> Iterator[str]:
    """In a thread of this process, as `hybrid.serve` has it."""
    import uvicorn

    from hybrid.serve.app import make_app
    from hybrid.serve.process import configured, listen
    from hybrid.serve.settings import Settings

    ended: list[tuple[int, str]] = []
    settings = Settings()
    app = make_app(lambda: model, settings, lambda code, line: ended.append((code, line)))
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(configured(stations.around(app), settings, drain=5))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
    if ended:
        raise RuntimeError(ended[0][1])


def _engine(args: argparse.Namespace, model: Any, stations: Stations, seed: int) -> dict[str, Any]:
    stations.clear()
    vocab = min(model.hparams.vocab, model.checkpoint.tokenizer.n_tokens)
    wanted = requests(args.requests, None, args.prompt_lengths, args.output_lengths, vocab, 0, seed)
    before, begin = model.metrics(), time.perf_counter()
    served: list[Served] = serve(model.submit, wanted)
    found = summary(served, before, model.metrics())
    read = [at - begin + s.first for (at, _), s in zip(stations.submitted, served, strict=True)]
    return {**found, "stations_ms": stations.taken(begin, args.requests, read)}


def _clients(args: argparse.Namespace, url: str, stations: Stations, seed: int) -> dict[str, Any]:
    stations.clear()
    lengths = [
        f"--{k}-lengths={a},{b}" for k, (a, b) in (("prompt", args.prompt_lengths), ("output", args.output_lengths))
    ]
    command = [
        sys.executable,
        "-m",
        "hybrid.perf.serving.clients",
        url,
        f"--requests={args.requests}",
        f"--warm={args.slots}",
        *lengths,
        f"--seed={seed}",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        raise RuntimeError(f"perf.serving.clients ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)["requests"]
    return {**found, "stations_ms": stations.taken(found["began"], args.requests, found["first_token_s"])}


def text(about: str, rounds: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """For people: each round, the medians, and where a request's time to its first token goes."""
    lines = [about, f"{'':8}{'engine tok/s':>14}{'p50':>8}{'p95 ms':>8}{'server tok/s':>14}{'p50':>8}{'p95 ms':>8}"]

    def cells(found: Sequence[dict[str, Any]]) -> str:
        speed = statistics.median(f["tokens_per_second"] for f in found)
        first = [statistics.median(f["first_token_ms"][q] for f in found) for q in ("p50", "p95")]
        return f"{speed:14.0f}{first[0]:8.0f}{first[1]:8.0f}"

    lines += [f"{i + 1:<8}{cells([e])}{cells([s])}" for i, (e, s) in enumerate(rounds)]
    lines.append(f"{'median':8}{cells([e for e, _ in rounds])}{cells([s for _, s in rounds])}")
    lines.append(
        f"{'since the first was sent':26}{'engine p5':>10}{'p50':>8}{'p95 ms':>8}{'server p5':>11}{'p50':>8}{'p95 ms':>8}"
    )
    for station in STATIONS:
        row = f"{station:26}"
        for side, width in ((0, 10), (1, 11)):
            seen = [pair[side]["stations_ms"].get(station) for pair in rounds]
            row += "".join(
                f"{statistics.median(s[q] for s in seen):{w}.1f}" if all(seen) else f"{'':{w}}"
                for q, w in (("p5", width), ("p50", 8), ("p95", 8))
            )
        lines.append(row)
    return lines


if __name__ == "__main__":
    sys.exit(main())
