"""python -m conformance.files.type_table [--model FILE] [--limit N] [TYPE ...]: what a model loses in every type of file.

The tables of docs/quantisation.md were made like this, from the embedded model as trained and from a published one.
Each row: nats per token over held-out predictions in exact decoding of the file (float32 activations on cpu), and the
distance of each device and phase from it: KL divergence in nats, share of equal likeliest tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import hybrid
from conformance.files.kquants import write_gguf
from conformance.support.models import GOLDEN, demo
from hybrid.checkpoint import open_checkpoint
from hybrid.perplexity import FORM_FEED, Measured, encode, measure, read_text

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
AUTO = tuple((device, "auto", phase) for device in ("cpu", "vulkan") for phase in ("prompt", "decode"))
RUNS = (*AUTO, ("vulkan", "exact", "prompt"))
HEADS = ("file", "MB", "exact decoding", *(f"{device}, {precision}, {phase}" for device, precision, phase in RUNS))
CHUNK, TOGETHER = 256, 8


def distances(path: Path, limit: int | None = None, runs: tuple[tuple[str, str, str], ...] = RUNS) -> list[Measured]:
    """The distance of each run from exact decoding on cpu, over the first `limit` chunks of the held-out text."""
    found = []
    with hybrid.load(path, "cpu", precision="exact", ctx=CHUNK, slots=TOGETHER) as exact:
        chunks = encode(exact, read_text(GOLDEN / "held-out.txt", FORM_FEED), CHUNK, True).documents[:limit]
        for device, precision, phase in runs:
            with hybrid.load(path, device, precision=precision, ctx=CHUNK, slots=TOGETHER) as model:  # type: ignore[arg-type]
                found.append(Measured())
                for at in range(0, len(chunks), TOGETHER):
                    measure(model, chunks[at : at + TOGETHER], found[-1], exact, phase == "decode")
    return found


def row(path: Path, types: str, limit: int | None) -> str:
    found = distances(path, limit)
    cells = [types, f"{path.stat().st_size / 1e6:.2f}", f"{found[0].reference_nats.mean:.4f}"]
    cells += [f"{f.divergence.mean:.1e}, {100 * f.same / f.nats.n:.1f} %" for f in found]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m conformance.files.type_table")
    p.add_argument("types", nargs="*", default=TYPES, metavar="TYPE")
    p.add_argument("--model", type=Path, metavar="FILE", help="instead of the embedded one; first in its own types")
    p.add_argument("--limit", type=int, metavar="N", help=f"only the first N chunks of {CHUNK} tokens")
    args = p.parse_args()
    print("| " + " | ".join(HEADS) + " |\n|" + " - |" * len(HEADS))
    if args.model is not None:
        print(row(args.model, "as published", args.limit), flush=True)
    with tempfile.TemporaryDirectory() as folder, open_checkpoint(args.model or demo("f32")) as source:
        for types in args.types:
            path = write_gguf(source, Path(folder) / f"{types}.gguf", types)
            print(row(path, types, args.limit), flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
