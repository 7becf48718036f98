"""python -m tools.make_random_gguf NAME OUT: a valid GGUF file of a published model's shape with random weights, for
measuring loading without the model. (Speed needs no file: `--random NAME` of hybrid.bench and others.)

NAME: a sheet of specs/models. Types, weights and tokenizer are those of hybrid/checkpoint/random.py, written in pieces
of 64 MiB again and again.

    python -m tools.make_random_gguf gemma3-27b /tmp/27b.gguf --type q4_0 --head q6_k      # 15.6 GB
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.families import family_of
from hybrid.checkpoint.gguf_metadata import write_metadata
from hybrid.checkpoint.random import DEMO, PIECES, demo_tokenizer, random_rows, random_shape, random_types
from hybrid.cli import Parser, run
from hybrid.cli.progress import progress_bar
from hybrid.core.dtypes import DTYPES, WEIGHT_TYPES
from hybrid.core.hparams import HParams

PIECE_BYTES = 64 << 20
_ALIGNMENT = 32


def random_file(
    path: Path, hparams: HParams, kind: str, head: str | None, name: str = "random", piece_bytes: int = PIECE_BYTES
) -> None:
    """Write the file: matrices of type `kind`, embedding (and head) of type `head`, norms of 1 in f32. What no plan
    uses is there too: other engines demand it."""
    family = family_of(hparams)
    shapes, made = family.kept(hparams), family.made(hparams)
    kinds = random_types(hparams, kind, head, shapes)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", buffering=0) as file:
            offsets, end = _header(part, hparams, kinds, name)
            with progress_bar(end, path.name, False, "B") as advance:
                for n, shape in shapes.items():
                    file.seek(offsets[n])
                    of_layer = random_rows(kinds[n], shape[-1] if len(shape) == 2 else 0, piece_bytes)
                    piece = made[n].astype("<f4").view(np.uint8) if n in made else of_layer
                    done, nbytes = 0, DTYPES[kinds[n]].nbytes(shape)
                    while done < nbytes:
                        done += file.write(piece[: nbytes - done].data)
                    advance(nbytes)
            file.truncate(end)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _header(path: Path, hparams: HParams, kinds: Mapping[str, str], name: str) -> tuple[dict[str, int], int]:
    """Write metadata and tensor table; returns where each tensor begins and where the file ends."""
    with open_checkpoint(DEMO) as demo:
        source = replace(demo, hparams=hparams, name=name)
        source.__dict__["tokenizer"] = demo_tokenizer(min(PIECES, hparams.vocab))
        writer = GGUFWriter(path, hparams.family)
        try:
            write_metadata(writer, source, max(kinds.values(), key=list(kinds.values()).count))
            family = family_of(hparams)
            for n, shape in family.kept(hparams).items():
                size, shape = DTYPES[kinds[n]].nbytes(shape), family.gguf_shape(hparams, n, shape)
                writer.add_tensor_info(n, shape, np.dtype("f4"), size, GGMLQuantizationType[kinds[n].upper()])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            at = _align(writer.fout[0].tell())
        finally:
            writer.close()
    offsets = {}
    for n, shape in family_of(hparams).kept(hparams).items():
        offsets[n] = at
        at += _align(DTYPES[kinds[n]].nbytes(shape))
    return offsets, at


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def main(argv: list[str] | None = None) -> int:
    p = Parser(
        prog="python -m tools.make_random_gguf", description="Write a GGUF file of a model's shape with random weights."
    )
    p.add_argument("name", metavar="NAME", help="a sheet of specs/models, for example gemma3-27b")
    p.add_argument("out", metavar="OUT", type=Path, help="the file to write")
    p.add_argument("--type", default="q4_0", choices=WEIGHT_TYPES, metavar="TYPE", help="of matrices (q4_0)")
    p.add_argument(
        "--head", choices=WEIGHT_TYPES, metavar="TYPE", help="of embedding and head (q6_k; q8_0 for odd rows)"
    )
    p.add_argument("--layers", type=int, metavar="N", help="fewer layers than the model has")
    p.add_argument("--vocab", type=int, metavar="N", help="fewer tokens than the model has")
    p.add_argument("--force", action="store_true", help="replace OUT")
    args = p.parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    if args.out.exists() and not args.force:
        raise ValueError(f"{args.out} exists: choose another name, or --force to replace it")
    hp = random_shape(args.name, args.layers, args.vocab)
    begin = time.perf_counter()
    random_file(args.out, hp, args.type, args.head, f"{args.name} (random)")
    seconds, size = time.perf_counter() - begin, args.out.stat().st_size
    print(f"{args.out}: {size / 1e9:.2f} GB in {seconds:.1f} s ({size / seconds / 1e9:.2f} GB/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
