"""python -m tools.make_random_gguf NAME OUT: a valid GGUF file of a published model's shape with random weights, for
measuring loading and speed without the model.

NAME: a sheet of specs/models. The weights are noise of a sane size (logits stay finite), drawn once per type and row
length in pieces of 64 MiB and written again and again. The tokenizer is the demonstration model's, filled up with
made-up pieces to the size of Gemma's, so that opening the file costs what it would.

    python -m tools.make_random_gguf gemma3-27b /tmp/27b.gguf --type q4_0 --head q6_k      # 15.6 GB
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.families import is_norm
from hybrid.checkpoint.gemma3 import tensors
from hybrid.checkpoint.gguf_metadata import write_metadata
from hybrid.cli import Parser, progress_bar, run
from hybrid.hparams import HParams
from hybrid.spec.dtypes import DTYPES, WEIGHT_TYPES
from hybrid.spec.model import find_model
from hybrid.tokenizer import NORMAL, SPACE, Tokenizer
from kernels.oracle.blocks import ORDER

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-gemma3-q8_0.gguf"
PIECES = 262144  # of Gemma 3's tokenizer; its embedding has a few rows more
PIECE_BYTES = 64 << 20
_ALIGNMENT = 32


def random_file(path: Path, hparams: HParams, kind: str, head: str, name: str = "random", piece_bytes: int = PIECE_BYTES) -> None:
    """Write the file: matrices of type `kind`, embedding (and head) of type `head`, norms of 1 in f32."""
    kinds = {n: "f32" if is_norm(n) else head if n in ("token_embd.weight", "output.weight") else kind for n in tensors(hparams)}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", buffering=0) as file:
            offsets, end = _header(part, hparams, kinds, head, name)
            with progress_bar(end, path.name, False, "B") as advance:
                for n, shape in tensors(hparams).items():
                    file.seek(offsets[n])
                    piece = random_rows(kinds[n], shape[-1] if len(shape) == 2 else 0, piece_bytes)
                    done, nbytes = 0, DTYPES[kinds[n]].nbytes(shape)
                    while done < nbytes:
                        done += file.write(piece[: nbytes - done].data)
                    advance(nbytes)
            file.truncate(end)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _header(path: Path, hparams: HParams, kinds: Mapping[str, str], head: str, name: str) -> tuple[dict[str, int], int]:
    """Write metadata and tensor table; returns where each tensor begins and where the file ends."""
    with open_checkpoint(DEMO) as demo:
        source = replace(demo, hparams=hparams, name=name)
        source.__dict__["tokenizer"] = _filled_up(demo.tokenizer, min(PIECES, hparams.vocab))
        writer = GGUFWriter(path, hparams.family)
        try:
            write_metadata(writer, source, max(kinds.values(), key=list(kinds.values()).count))
            for n, shape in tensors(hparams).items():
                size = DTYPES[kinds[n]].nbytes(shape)
                writer.add_tensor_info(n, shape, np.dtype("f4"), size, GGMLQuantizationType[kinds[n].upper()])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            at = _align(writer.fout[0].tell())
        finally:
            writer.close()
    offsets = {}
    for n, shape in tensors(hparams).items():
        offsets[n] = at
        at += _align(DTYPES[kinds[n]].nbytes(shape))
    return offsets, at


def _filled_up(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """With pieces after the real ones that no text of a normal kind holds."""
    v = tokenizer.vocabulary.first(size)
    more = range(len(v.pieces), size)
    lowest = min(v.scores)
    return Tokenizer(
        replace(
            v,
            pieces=(*v.pieces, *(f"{SPACE}piece{i:06}" for i in more)),
            scores=(*v.scores, *(lowest - 1 - i for i in more)),
            types=(*v.types, *(NORMAL for _ in more)),
        ),
        tokenizer.eos_ids,
    )


@cache
def random_rows(dtype: str, width: int, piece_bytes: int) -> np.ndarray:
    """uint8 [at most piece_bytes]: whole ggml blocks of values with standard deviation width ** -0.5, which keeps the
    size of what they multiply (width 0: norm weights, 1)."""
    kind, rng = DTYPES[dtype], np.random.default_rng(width)
    size = kind.nbytes((kind.block,))
    count = piece_bytes // size
    if not kind.quantised:
        values = np.ones(count, np.float32) if not width else np.float32(width**-0.5) * rng.standard_normal(count, np.float32)
        if dtype == "bf16":
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        return values.astype(kind.parts[0].dtype).view(np.uint8)
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    scale, minimum = _SCALES[dtype]
    step = (1 + 0.25 * rng.random((count, 1), np.float32)) * np.float32(width**-0.5 / scale)
    at = 0
    for name in ORDER[dtype]:
        part = next(p for p in kind.parts if p.name == name)
        nbytes = part.count * part.dtype.itemsize
        if part.dtype == np.float16:
            both = np.concatenate([step, minimum * step], axis=1)[:, : part.count]
            blocks[:, at : at + nbytes] = both.astype(np.float16).view(np.uint8)
        at += nbytes
    return blocks.reshape(-1)


# Of random codes: standard deviation of a value in units of the (super) scale; the minimum that centres it, in the same.
_SCALES = {
    "q8_0": (74.0, 0.0), "q4_0": (4.6, 0.0), "q4_1": (4.6, -7.5), "q5_0": (9.2, 0.0), "q5_1": (9.2, -15.5),
    "q4_k": (250.0, 7.5), "q5_k": (500.0, 15.5), "q6_k": (1370.0, 0.0),
}  # fmt: skip


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="python -m tools.make_random_gguf", description="Write a GGUF file of a model's shape with random weights.")
    p.add_argument("name", metavar="NAME", help="a sheet of specs/models, for example gemma3-27b")
    p.add_argument("out", metavar="OUT", type=Path, help="the file to write")
    p.add_argument("--type", default="q4_0", choices=WEIGHT_TYPES, metavar="TYPE", help="of matrices (q4_0)")
    p.add_argument("--head", choices=WEIGHT_TYPES, metavar="TYPE", help="of embedding and head (q6_k; q8_0 for odd rows)")
    p.add_argument("--layers", type=int, metavar="N", help="fewer layers than the model has")
    p.add_argument("--force", action="store_true", help="replace OUT")
    args = p.parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    if args.out.exists() and not args.force:
        raise ValueError(f"{args.out} exists: choose another name, or --force to replace it")
    hp = find_model(args.name).hparams()
    if args.layers is not None:
        if not 1 <= args.layers <= hp.n_layers:
            raise ValueError(f"--layers {args.layers} is outside 1..{hp.n_layers}")
        hp = replace(hp, n_layers=args.layers, layer_is_global=hp.layer_is_global[: args.layers])
    head = args.head or ("q8_0" if hp.hidden % DTYPES["q6_k"].block else "q6_k")
    for option, kind in (("type", args.type), ("head", head)):
        if hp.hidden % DTYPES[kind].block:
            raise ValueError(f"--{option} {kind}: rows of {hp.hidden} are no multiple of {DTYPES[kind].block}")
    begin = time.perf_counter()
    random_file(args.out, hp, args.type, head, f"{args.name} (random)")
    seconds, size = time.perf_counter() - begin, args.out.stat().st_size
    print(f"{args.out}: {size / 1e9:.2f} GB in {seconds:.1f} s ({size / seconds / 1e9:.2f} GB/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
