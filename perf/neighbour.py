"""A program that keeps a device busy for a given time, to test an engine on the same device.

    python -m perf.neighbour --device gpu --kind matrix --seconds 60
    python -m perf.neighbour --kind engine --random gemma3-4b

copy and matrix submit the bench's probe kernels repeatedly, two submits in flight, so that the device never idles;
engine generates text with a model. `busy` is printed once the first work is done, and at the end what was done.
perf.neighbours starts, stops and kills these beside a generation whose text must not change.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from hybrid.arguments import add_model, open_model
from hybrid.bench.probe import Variant, buffers, copies, products, record
from hybrid.cli import Parser, UsageError, amount, positive, run
from hybrid.devices.opening import open_device
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options
from hybrid.spec.schedule import find_schedule

KINDS = ("copy", "matrix", "engine")
BUSY = "busy"
AHEAD = 2  # submits in flight


def open_gpu(name: str) -> Any:
    """The Vulkan device of a --device choice: `gpu`, `vulkan` or `vulkan:N`. UsageError for others."""
    if name != "gpu" and "cpu" in find_schedule("gemma3").chain(name):
        raise UsageError(
            f"--device {name}: neighbours share a GPU, or a CPU driver of Vulkan: use gpu, vulkan or vulkan:N"
        )
    return open_device(name).device


def variant_of(device: Any, kind: str, nbytes: int) -> Variant:
    """The probe that a neighbour of this kind submits. ValueError where the device cannot run it."""
    found = (copies if kind == "copy" else products)(device, nbytes)
    if not found:
        raise ValueError(f"{device.name} has no matrix units that the probe could keep busy: use --kind copy")
    return found[-1]


def probes(device: Any, kind: str, held: ExitStack) -> Iterator[int]:
    """Submits probes for ever; yields 1 for each that has finished."""
    source, target = buffers(device, held)
    program = record(device, variant_of(device, kind, source.size), source, target)
    held.callback(program.close)
    running: deque[int] = deque()
    while True:
        while len(running) < AHEAD:
            running.append(program.submit())
        device.wait(running.popleft())
        yield 1


def tokens(engine: Engine, prompt: int) -> Iterator[int]:
    """Generates text for ever, one after another; yields 1 for each token."""
    rng, ctx = np.random.default_rng(1), engine.cache.ctx
    while True:
        ids = rng.integers(0, engine.target.n_tokens, prompt).tolist()
        options = Options(max_tokens=ctx, ignore_eos=True, temperature=1.0, seed=int(rng.integers(1 << 31)))
        for event in engine.generate(ids, options).events():
            yield len(event.ids)


def keep_busy(work: Iterator[int], stop: Callable[[], bool], out: Any = None) -> tuple[int, float]:
    """Runs `work` until `stop()`; says `busy` on `out` once it has begun. What was done, and in how many seconds."""
    next(work)
    print(BUSY, file=out, flush=True)
    begin = time.monotonic()
    done = next(work)
    while not stop():
        done += next(work)
    return done, time.monotonic() - begin


def stopping(seconds: float, attached: bool) -> Callable[[], bool]:
    """Tells when to end: after so many seconds, at SIGTERM, and with `attached` when standard input ends (the parent
    did)."""
    ended, last = threading.Event(), time.monotonic() + seconds
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if attached:

        def listen() -> None:
            while os.read(0, 4096):  # sys.stdin's own lock would be held when the interpreter ends
                pass
            ended.set()

        threading.Thread(target=listen, name="standard input", daemon=True).start()
    return lambda: ended.is_set() or time.monotonic() > last


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.neighbour",
        description="Keeps a device busy: with copies, products of matrix units, or the generation of text.",
        epilog="Exit codes: 0 the time was up or SIGTERM came, 1 error, "
        "2 wrong usage, 3 device lost or not answering, 130 interrupted.",
    )
    add_model(p)
    p.add_argument("--kind", required=True, choices=KINDS, help="what it does; engine needs MODEL or --random")
    p.add_argument("--device", default="gpu", metavar="NAME", help="gpu (a real one), vulkan, or vulkan:N (gpu)")
    p.add_argument("--seconds", type=amount, default=60.0, metavar="S", help="ends after so long (60)")
    p.add_argument("--prompt", type=positive, default=16, metavar="N", help="of engine: tokens before each text (16)")
    p.add_argument("--tokens", type=positive, default=512, metavar="N", help="of engine: tokens of each text (512)")
    p.add_argument(
        "--attached", action="store_true", help="ends when its standard input does, so that it outlives no parent"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)

    def command() -> int:
        if (args.kind == "engine") != (args.model is not None or args.random is not None):
            raise UsageError("--kind engine needs MODEL or --random NAME, the other kinds take neither")
        stop = stopping(args.seconds, args.attached)
        with ExitStack() as held:
            if args.kind == "engine":
                checkpoint = held.enter_context(open_model(args))
                device = open_gpu(args.device)
                held.callback(device.close)
                engine = Engine(
                    checkpoint, device, EngineConfig(ctx=args.prompt + args.tokens, n_tokens=checkpoint.hparams.vocab)
                )
                done, seconds = keep_busy(tokens(engine, args.prompt), stop)
                print(f"{done} tokens, {done / max(seconds, 1e-9):.1f} a second on {device.name}")
            else:
                device = open_gpu(args.device)
                held.callback(device.close)
                done, seconds = keep_busy(probes(device, args.kind, held), stop)
                print(f"{done} submits of {args.kind}, {done / max(seconds, 1e-9):.1f} a second on {device.name}")
        return 0

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
