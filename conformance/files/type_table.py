"""python -m conformance.files.type_table [--model FILE] [--device NAME] [--limit N] [TYPE ...]: what a model loses in every type of file.

The tables of docs/quantisation.md were made like this, from the embedded model as trained and from a published one.
Each row: nats per token over held-out predictions in exact decoding of the file (float32 activations on cpu), and the
distance of each device and phase from it: KL divergence in nats, share of equal likeliest tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

import hybrid
from conformance.files.kquants import write_gguf
from conformance.support.models import GOLDEN, demo
from hybrid.checkpoint import open_checkpoint
from hybrid.perplexity import FORM_FEED, Measured, encode, read_text
from hybrid.planning.planner import PrecisionName

TYPES = (
    "q8_0",
    "q6_k",
    "q5_k_m",
    "q5_k",
    "q5_1",
    "q5_0",
    "q4_k_m",
    "q4_k",
    "q4_1",
    "q4_0",
    "iq4_nl",
    "iq4_xs",
    "q3_k",
    "q2_k",
)
Run = tuple[str, PrecisionName, str]
AUTO: tuple[Run, ...] = tuple((device, "auto", phase) for device in ("cpu", "vulkan") for phase in ("prompt", "decode"))
RUNS: tuple[Run, ...] = (*AUTO, ("vulkan", "exact", "prompt"))
CHUNK, TOGETHER = 256, 8


def distances(path: Path, limit: int | None = None, runs: Sequence[Run] = RUNS) -> list[Measured]:
    """The distance of each run from exact decoding on cpu, over the first `limit` predictions of the held-out text. Needs
    the memory of all their logits."""
    exact = [*logits(path, ("cpu", "exact", "prompt"), limit)]
    found = []
    for run in runs:
        found.append(Measured())
        for (ours, targets), (reference, _) in zip(logits(path, run, limit), exact, strict=True):
            found[-1].add(ours, targets, reference)
    return found


def logits(path: Path, run: Run, limit: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(logits of each prediction, the token that came) of a few chunks at a time."""
    device, precision, phase = run
    with hybrid.load(path, device, precision=precision, ctx=CHUNK, slots=TOGETHER) as model:
        chunks = encode(model, read_text(GOLDEN / "held-out.txt", FORM_FEED), CHUNK, True).documents
        before = [0, *accumulate(len(ids) - 1 for ids in chunks)]
        if limit is not None:
            chunks = [ids[: limit - n + 1] for ids, n in zip(chunks, before, strict=False) if n < limit]
        for some in (chunks[at : at + TOGETHER] for at in range(0, len(chunks), TOGETHER)):
            rows = [(at, i) for i, ids in enumerate(some) for at in range(len(ids))]
            if phase == "decode":  # reads a row of each chunk, then the next of each
                found = np.concatenate([part.rows for part in model.engine.decode_logits(some)])
                found = found[np.argsort(sorted(range(len(rows)), key=rows.__getitem__))]
            else:
                found = np.concatenate([*model.engine.logits_of(some)])
            known = [row for row, (at, i) in enumerate(rows) if at + 1 < len(some[i])]
            yield found[known], np.array([some[i][at + 1] for at, i in (rows[row] for row in known)])


def row(path: Path, types: str, limit: int | None, runs: Sequence[Run]) -> str:
    found = distances(path, limit, runs)
    cells = [types, f"{path.stat().st_size / 1e6:.2f}", f"{found[0].reference_nats.mean:.4f}"]
    cells += [f"{f.divergence.mean:.1e}, {100 * f.same / f.nats.n:.1f} %" for f in found]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m conformance.files.type_table")
    p.add_argument("types", nargs="*", default=TYPES, metavar="TYPE")
    p.add_argument("--model", type=Path, metavar="FILE", help="instead of the embedded one; first in its own types")
    p.add_argument("--limit", type=int, metavar="N", help=f"only the first N predictions, in chunks of {CHUNK} tokens")
    p.add_argument("--device", choices=("cpu", "vulkan"), help="only this one")
    args = p.parse_args()
    runs = [run for run in RUNS if args.device in (None, run[0])]
    heads = ("file", "MB", "exact decoding", *map(", ".join, runs))
    print("| " + " | ".join(heads) + " |\n|" + " - |" * len(heads))
    if args.model is not None:
        print(row(args.model, "as published", args.limit, runs), flush=True)
    with tempfile.TemporaryDirectory() as folder, open_checkpoint(args.model or demo("f32")) as source:
        for types in args.types:
            path = write_gguf(source, Path(folder) / f"{types}.gguf", types)
            print(row(path, types, args.limit, runs), flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
