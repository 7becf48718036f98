"""Speed of an embedding model: passes full of texts of one length."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack

import numpy as np

from hybrid.bench.report import say
from hybrid.checkpoint import Checkpoint
from hybrid.cli import UsageError
from hybrid.devices.about import driver_of, kernels_of
from hybrid.embedding import load_embedder


def embeddings(args: argparse.Namespace, checkpoint: Checkpoint, command: str, held: ExitStack) -> int:
    """Measure the lengths of -p, as many texts at a time as a pass holds. UsageError for options of models that write."""
    lengths = [n for n in args.prompt if n]
    if not lengths:
        raise UsageError("an embedding model has nothing to generate: give -p lengths of texts")
    names = ("weights", "requantize", "precision", "chunk")
    options = {name: getattr(args, name) for name in names}
    model = held.enter_context(load_embedder(checkpoint, args.device, **options, prove=False))
    engine, draw, rows = model.engine, np.random.default_rng(0), []
    main = getattr(engine.device, "main", engine.device)
    say([f"{model.device}: {checkpoint.name}, {driver_of(main)}"], args.json)
    for n in lengths:
        count = max(1, min(engine.cache.slots, engine.sizes.rows[-1] // n))
        texts = draw.integers(0, engine.target.n_tokens, (count, n)).tolist()
        seconds = []
        for _ in range(args.repetitions + 1):
            began = time.perf_counter()
            engine.embed(texts)
            seconds.append(time.perf_counter() - began)
        rates = [count * n / s for s in seconds[1:]]  # the first warms up
        row = {"n": n, "texts": count, "seconds": seconds[1:], "tokens_per_second": statistics.median(rates)}
        rows.append(row)
        say([f"{count} texts of {n}: {statistics.median(rates):.1f} tok/s"], args.json)
    if args.json:
        about = {"command": command, "device": model.device, "driver": driver_of(main), "kernels": kernels_of(main)}
        print(json.dumps({**about, "model": checkpoint.name, "results": rows}))
    return 0
