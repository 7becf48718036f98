"""python -m perf.serving.scheduler: host cost of the scheduler per pass, without a device.

Method: B sequences of 200 to 231 tokens decode in blocks of 32 positions, with local layers of a window of 1024; the
process's time (of the processor, not of the clock) of each call over the passes after the first 40. Blocks are full
every 32 passes of a sequence, and sequences are staggered, so the mean has its share of sealing and growing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from hybrid.cli import Parser, positive, run
from hybrid.engine.blocks import Blocks, Group
from hybrid.engine.request import Options, Request
from hybrid.engine.scheduler import Limits, Pass, Scheduler

WARM, WINDOW, BLOCK, PROMPT, CTX = 40, 1024, 32, 200, 8192


def measure(rows: int, passes: int) -> dict[str, list[float]]:
    """Microseconds of each pass with so many decoding rows: schedule, arrays (of the pass), commit."""
    blocks = Blocks([Group("global", rows * CTX // BLOCK), Group("local", rows * (WINDOW // BLOCK + 2), WINDOW)], BLOCK)
    scheduler = Scheduler(blocks, Limits(rows, CTX, rows + 2048))
    for i in range(rows):
        scheduler.add(
            Request(
                i,
                [(7 * i + j) % 1000 for j in range(PROMPT + i % BLOCK)],
                Options(max_tokens=passes + 2 * WARM),
                ends=[5000],
            )
        )
    spent: dict[str, list[float]] = {"schedule": [], "arrays": [], "commit": []}
    clock, flights = time.process_time_ns, list[Pass]()
    for _ in range(passes + WARM):
        marks = [clock()]
        made = scheduler.schedule()
        marks.append(clock())
        assert made is not None
        made.arrays()
        marks.append(clock())
        flights.append(made)
        if len(flights) < 2:
            continue
        done = flights.pop(0)
        tokens = [7] * done.outs
        begin = clock()
        scheduler.commit(done, tokens)
        took = [marks[1] - marks[0], marks[2] - marks[1], clock() - begin]
        if made.rows == rows and made.number > WARM:
            for name, ns in zip(spent, took, strict=True):
                spent[name].append(ns / 1e3)
    return spent


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.serving.scheduler",
        description="Processor time of the scheduler for each pass, without a device.",
    )
    p.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 32, 256], metavar="N", help="decoding rows (1 32 256)"
    )
    p.add_argument(
        "--readers", action="store_true", help="instead: the engine's thread, while asyncio reads every token"
    )
    p.add_argument("--passes", type=positive, default=320, metavar="N", help="of each (320)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    if args.readers:
        from hybrid.perf.serving import readers

        print(f"{'rows':>6}{'engine us':>12}{'process us':>12}{'passes':>8}")
        for rows in args.rows:
            one = readers.measure(rows, args.passes)
            print(f"{rows:6}{one.engine:12.1f}{one.process:12.1f}{one.passes:8}")
        return 0
    print(f"{'rows':>6}" + "".join(f"{name + ' us':>14}{'p99':>8}" for name in ("schedule", "arrays", "commit")))
    for rows in args.rows:
        spent = measure(rows, args.passes)
        cells = [(statistics.fmean(us), sorted(us)[int(0.99 * len(us))]) for us in spent.values()]
        print(f"{rows:6}" + "".join(f"{mean:14.1f}{late:8.1f}" for mean, late in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
