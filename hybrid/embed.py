"""python -m hybrid.embed MODEL [TEXT ...]: embeddings of texts, as numbers, JSON or a NumPy file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from hybrid.arguments import add_weights, open_model
from hybrid.cli import PRECISIONS, Parser, UsageError, check_writable, input_waits, positive, run


def parser() -> argparse.ArgumentParser:
    from hybrid.arguments import add_model

    p = Parser(
        prog="python -m hybrid.embed",
        description="Make embeddings of texts with an embedding model: a line of numbers for each text, of length 1.",
        epilog="Embeddings go to standard output, statistics and errors to standard error. "
        "Exit codes: 0, 1 error, 2 wrong usage, 3 device lost or not answering, 130 interrupted.",
    )
    add_model(p)
    p.add_argument("texts", nargs="*", metavar="TEXT", help="texts (default: the lines of standard input)")
    p.add_argument("--file", type=Path, metavar="FILE", help="take the lines of a file as texts")
    p.add_argument(
        "--task", metavar="NAME", help="put the model's prompt for this task before each text: query, document, ..."
    )
    p.add_argument("--dimensions", type=positive, metavar="N", help="keep the first N numbers, of length 1 again (all)")
    p.add_argument("--truncate", action="store_true", help="cut texts that are too long, instead of refusing them")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--output", type=Path, metavar="FILE", help="write a NumPy file (.npy), float32 [texts, dimensions]")
    p.add_argument(
        "--device", default="auto", metavar="NAME", help="auto (a real GPU, else cpu), cpu, vulkan, or vulkan:N (auto)"
    )
    add_weights(p)
    p.add_argument("--precision", default="auto", choices=PRECISIONS, metavar="NAME", help="auto, exact or fast (auto)")
    p.add_argument("--ctx", type=positive, metavar="N", help="most tokens of a text (the model's, at most 2048)")
    p.add_argument("--chunk", type=positive, metavar="N", help="rows of a pass, at least --ctx (what suits the device)")
    p.add_argument(
        "--no-prove",
        dest="prove",
        action="store_false",
        help="do not prove a model's kernels on its first load with this GPU and driver",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv)  # options may stand between MODEL and TEXT
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    if args.random is not None and args.model is not None:  # the first text
        args.texts, args.model = [args.model, *args.texts], None
    if args.output is not None:
        if args.json:
            raise UsageError("give --json or --output, not both")
        check_writable("--output", args.output)
    texts = _texts(args)
    from hybrid.embedding import load_embedder

    names = ("weights", "requantize", "precision", "ctx", "chunk", "prove")
    options = {name: getattr(args, name) for name in names}
    with load_embedder(open_model(args), args.device, **options, progress=sys.stderr.isatty()) as model:
        began = time.perf_counter()
        vectors = model.embed(texts, args.task, args.dimensions, args.truncate)
        seconds = time.perf_counter() - began
        tokens, notes, device = model.engine.tokens, model.checkpoint.notes, model.device
        reasons = model.passed_over
    if args.output is not None:
        import numpy as np

        with open(args.output, "wb") as file:  # a name without .npy stays as it is
            np.save(file, vectors)
    elif args.json:
        about = {"device": device, "task": args.task, "dimensions": vectors.shape[1], "tokens": tokens}
        print(json.dumps({**about, "seconds": seconds, "notes": notes, "embeddings": vectors.tolist()}))
    else:
        for vector in vectors:
            print(" ".join(f"{value:.6f}" for value in vector))
    for reason in reasons:
        print(f"passed over: {reason}", file=sys.stderr)
    rate = f"{tokens / seconds:.1f} tok/s"
    print(f"{device}: {len(texts)} texts of {tokens} tokens, {seconds:.2f} s, {rate}", file=sys.stderr)
    return 0


def _texts(args: argparse.Namespace) -> list[str]:
    """The texts that the arguments name. UsageError."""
    if args.texts and args.file is not None:
        raise UsageError("give TEXT or --file, not both")
    if args.texts:
        return list(args.texts)
    if args.file is not None:
        lines = args.file.read_text(encoding="utf-8").splitlines()
    elif input_waits():
        lines = sys.stdin.read().splitlines()
    else:
        raise UsageError("there is no text: give MODEL and TEXT, --file FILE, or lines on standard input")
    if not lines:
        raise UsageError("there is no text: the input is empty")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
