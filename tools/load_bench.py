"""python -m tools.load_bench FILE [--device vulkan]: the cost of loading a model, up to its first token.

Runs load, first token and a few tokens more in a fresh process, twice (--runs): the first may find neither the file in
the page cache nor compiled pipelines, the last finds both. Prints one JSON object: seconds by phase, GB/s, peak host
memory by kind (sampled every 5 ms), tokens per second. Exit code 1 where --most-seconds or --most-memory is exceeded by
the last run.

    python -m tools.make_random_gguf gemma3-27b /dev/shm/27b.gguf
    python -m tools.load_bench /dev/shm/27b.gguf --device vulkan --most-seconds 6 --most-memory 2GiB
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hybrid.cli import Parser, run, size
from hybrid.engine.loading import peak_resident, resident

PROMPT = "def read_file(path):\n    "
KINDS = ("anonymous", "file", "shared")


class Sampler(threading.Thread):
    """The most memory of each kind at once, while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = dict.fromkeys(KINDS, 0)
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.005):
            now = resident()
            self.most = {k: max(self.most[k], now.get(k, 0)) for k in KINDS}

    def stop(self) -> dict[str, int]:
        self._end.set()
        self.join()
        return self.most


def measure(path: Path, device: str, tokens: int, ctx: int | None, since: float) -> dict[str, Any]:
    """One load in this process, which was started at time `since`, and `tokens` tokens by greedy choice."""
    sampler = Sampler()
    sampler.start()
    import hybrid

    imported = time.time()
    with hybrid.load(path, device, ctx=ctx) as model:
        loaded = time.time()
        pieces = model.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
        text = next(pieces, "")
        first = time.time()
        text += "".join(pieces)
        load, stats = model.load, model.stats
        assert stats is not None
        held = dict(model.engine.device.memory())
    weights = load.seconds.get("weights", 0.0)
    return {
        "device": stats.device,
        "seconds_to_first_token": round(first - since, 3),
        "seconds": {
            "start": round(imported - since, 3),
            **{k: round(v, 3) for k, v in load.seconds.items()},
            "load": round(loaded - imported, 3),
            "first_token": round(first - loaded, 3),
        },
        "gb_up": round(load.bytes_up / 1e9, 3),
        "upload_gb_per_second": round(load.bytes_up / weights / 1e9, 3) if weights else None,
        "peak_host_bytes": peak_resident(),
        "peak_host_by_kind": sampler.stop(),
        "device_bytes": held,
        "tokens": stats.tokens,
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "text": text,
    }


def _fresh(args: argparse.Namespace) -> dict[str, Any]:
    options = ["--device", args.device, "--tokens", str(args.tokens)]
    options += [] if args.ctx is None else ["--ctx", str(args.ctx)]
    begin = time.time()
    command = [sys.executable, "-m", "tools.load_bench", str(args.file), *options, "--since", str(begin)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measured process ended with exit code {done.returncode}")
    return {**json.loads(done.stdout), "seconds_of_process": round(time.time() - begin, 3)}


def _main(args: argparse.Namespace) -> int:
    if args.since is not None:
        print(json.dumps(measure(args.file, args.device, args.tokens, args.ctx, args.since)))
        return 0
    runs = [_fresh(args) for _ in range(args.runs)]
    last = runs[-1]
    # Pages of mapped files (libraries) are the page cache's: only what comes on top of them is the load's.
    above = last["peak_host_by_kind"]["anonymous"] + last["peak_host_by_kind"]["shared"]
    wrong = []
    if args.most_seconds is not None and last["seconds_to_first_token"] > args.most_seconds:
        wrong.append(f"{last['seconds_to_first_token']} s to the first token, more than {args.most_seconds:g}")
    if args.most_memory is not None and above > args.most_memory:
        wrong.append(f"{above} bytes of host memory beyond the page cache, more than {args.most_memory}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report = {
        "file": str(args.file),
        "file_bytes": args.file.stat().st_size,
        "cores": cores,
        "runs": runs,
        "failed": wrong,
    }
    print(json.dumps(report, indent=1, ensure_ascii=False))
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return bool(wrong)


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="python -m tools.load_bench", description="Measure the load of a model, up to its first token.")
    p.add_argument("file", metavar="FILE", type=Path, help="a .gguf file")
    p.add_argument("--device", default="auto", metavar="NAME", help="as for hybrid.generate (auto)")
    p.add_argument(
        "--tokens", type=int, default=17, metavar="N", help="to generate: the first, and 16 of decoding (17)"
    )
    p.add_argument("--ctx", type=int, metavar="N", help="as for hybrid.generate (the model's, at most 4096)")
    p.add_argument("--runs", type=int, default=2, metavar="N", help="processes, one after another (2)")
    p.add_argument("--most-seconds", type=float, metavar="S", help="fail where the last run's first token comes later")
    p.add_argument(
        "--most-memory", type=size, metavar="SIZE", help="fail where the last run holds more beyond the file"
    )
    p.add_argument("--since", type=float, help=argparse.SUPPRESS)  # one run, in a process started then
    args = p.parse_args(argv)
    return run(lambda: _main(args))


if __name__ == "__main__":
    sys.exit(main())
