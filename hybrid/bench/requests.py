"""A server workload: requests with random arrivals and lengths, and their latencies, measured from `Model.submit` by a
reader in this process.

A seed determines Poisson arrivals, uniform lengths and random ids. End-of-text tokens are ignored, so that every run
does the same work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid.core.errors import QueueFull
from hybrid.engine.handle import Handle
from hybrid.engine.request import Completion
from hybrid.engine.stats import Metrics

QUANTILES = (50, 95, 99)
Submit = Callable[..., Handle]
"""`Model.submit`."""


@dataclass(frozen=True, slots=True)
class Request:
    """at: arrival in seconds after the first request. n: tokens to generate."""

    at: float
    ids: tuple[int, ...]
    n: int


@dataclass(frozen=True, slots=True)
class Served:
    """A finished request. times: arrival of each token. All times are in seconds after the run's start."""

    submitted: float
    times: tuple[float, ...]
    completion: Completion

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def requests(
    n: int,
    rate: float | None,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    vocab: int,
    shared: int = 0,
    seed: int = 0,
) -> list[Request]:
    """`n` random requests. rate: mean arrivals per second (None: all at once); prompts, outputs: (least, most) tokens;
    shared: length of the common prompt prefix."""
    draw = np.random.default_rng(seed)
    arrivals = np.zeros(n) if rate is None else np.cumsum(draw.exponential(1 / rate, n))
    common = draw.integers(0, vocab, shared).tolist()
    found = []
    for at in (arrivals - arrivals[0]).tolist():
        length = int(draw.integers(prompts[0], prompts[1] + 1))
        own = draw.integers(0, vocab, max(1, length - shared)).tolist()
        found.append(Request(at, (*common[: length - len(own)], *own), int(draw.integers(outputs[0], outputs[1] + 1))))
    return found


def serve(submit: Submit, wanted: Sequence[Request]) -> list[Served]:
    """Submit each request at its time and read all of them. Retries after QueueFull.retry_after."""
    return asyncio.run(_serve(submit, wanted))


async def _serve(submit: Submit, wanted: Sequence[Request]) -> list[Served]:
    begin = time.perf_counter()

    async def one(request: Request) -> Served:
        await asyncio.sleep(max(0.0, begin + request.at - time.perf_counter()))
        submitted = time.perf_counter() - begin
        while True:
            try:
                handle = submit(request.ids, max_tokens=request.n, ignore_eos=True)
                break
            except QueueFull as full:
                await asyncio.sleep(full.retry_after)
        times: list[float] = []
        async for event in handle.aevents():
            times += [time.perf_counter() - begin] * len(event.ids)
        return Served(submitted, tuple(times), handle.result(timeout=0))

    return list(await asyncio.gather(*map(one, wanted)))


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and maximum in milliseconds."""
    found = np.percentile(np.array(seconds) * 1e3, QUANTILES).tolist()
    return {**{f"p{q}": value for q, value in zip(QUANTILES, found, strict=True)}, "max": max(seconds) * 1e3}


def summary(served: Sequence[Served], before: Metrics, after: Metrics) -> dict[str, Any]:
    """Throughput and latencies as plain data. RuntimeError if a request has too few tokens."""
    for s in served:
        if s.completion.finish != "length" or len(s.times) != s.completion.usage.completion_tokens:
            raise RuntimeError(
                f"a request ended with {s.completion.finish!r} after {len(s.times)} tokens: the measurement is invalid"
            )
    begin, end = min(s.submitted for s in served), max(s.times[-1] for s in served)
    full = (max(s.times[0] for s in served), min(s.times[-1] for s in served))  # interval in which all requests run
    tokens = sum(len(s.times) for s in served)
    inside = sum(full[0] < t <= full[1] for s in served for t in s.times)
    prompts = sum(s.completion.usage.prompt_tokens for s in served)
    cached = sum(s.completion.usage.cached_tokens for s in served)
    gaps = [g for s in served for g in s.gaps]
    return {
        "requests": len(served),
        "seconds": end - begin,
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "generated_tokens": tokens,
        "tokens_per_second": tokens / (end - begin),
        "tokens_per_second_while_all_run": inside / (full[1] - full[0]) if inside else None,
        "first_token_ms": quantiles([s.first for s in served]),
        "between_tokens_ms": quantiles(gaps) if gaps else None,
        "passes": after.passes - before.passes,
        "preemptions": after.preemptions - before.preemptions,
        "evictions": after.evictions - before.evictions,
    }


def text(found: Mapping[str, Any]) -> list[str]:
    """Report lines."""

    def line(name: str, ms: Mapping[str, float] | None) -> str:
        return f"{name:22}" + ("-" if ms is None else "   ".join(f"{k} {v:.1f}" for k, v in ms.items()) + " ms")

    together = found["tokens_per_second_while_all_run"]
    whole = f"{found['tokens_per_second']:.1f} tok/s" + ("" if together is None else f"; {together:.1f} while all run")
    share = found["cached_tokens"] / found["prompt_tokens"]
    return [
        f"{'requests':22}{found['requests']} in {found['seconds']:.2f} s, {found['passes']} passes",
        f"{'generated':22}{found['generated_tokens']} tokens, {whole}",
        f"{'prompts':22}{found['prompt_tokens']} tokens, {found['cached_tokens']} ({100 * share:.1f} %) found in the cache",
        line("to the first token", found["first_token_ms"]),
        line("between tokens", found["between_tokens_ms"]),
        f"{'preemptions':22}{found['preemptions']}; {found['evictions']} blocks evicted",
    ]
