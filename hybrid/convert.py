"""python -m hybrid.convert SRC DST --type q4_0: any checkpoint to a GGUF file that other engines load as well."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from hybrid.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from hybrid.checkpoint.families import EMBEDDING
from hybrid.checkpoint.gguf_file import TYPE_IDS
from hybrid.checkpoint.gguf_metadata import write_metadata
from hybrid.spec.dtypes import DTYPES, WEIGHT_TYPES
from hybrid.spec.tensor import Tensor
from kernels.oracle.quant import dequantise, quantise, row_blocks, to_ggml

_BLOCK_ELEMENTS = 1 << 23  # elements decoded at once: 32 MB in float32


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion wrote."""

    path: str
    bytes: int
    source_bytes: int
    types: dict[str, int]
    """Tensors by storage type."""
    fallbacks: tuple[str, ...]
    """Matrices kept in f16 because their rows are no multiple of 32."""
    seconds: float

    def line(self) -> str:
        types = ", ".join(f"{n} {t}" for t, n in self.types.items())
        ratio = self.bytes / max(self.source_bytes, 1)
        return f"{self.path}: {_mb(self.bytes)} ({ratio:.0%} of the source), {types} tensors, {self.seconds:.1f} s"


def convert(
    source: Checkpoint,
    target: Path,
    dtype: str,
    embed_dtype: str | None = None,
    force: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> Report:
    """Write `source` as a GGUF file, its matrices as `dtype` (embedding and output matrix as `embed_dtype`).

    Vectors are float32. Tensors already of the wanted type are copied bit for bit. Memory: one tensor as written.
    `progress` gets the bytes written since the last call. The target appears complete or not at all.
    CheckpointError for a target that exists (unless `force`) and for values that the type cannot hold.
    """
    start = time.perf_counter()
    _check_target(target, force)
    types, fallbacks = _plan_types(source, dtype, embed_dtype or dtype)
    with _atomic(target, force) as temporary:
        writer = GGUFWriter(temporary, source.hparams.family)
        try:
            write_metadata(writer, source, dtype)
            for name, kind in types.items():
                shape = source.shape(name)
                ggml = GGMLQuantizationType(TYPE_IDS[kind])
                writer.add_tensor_info(name, shape, np.dtype("f4"), DTYPES[kind].nbytes(shape), ggml)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, kind in types.items():
                data = _encode(source, name, kind)
                writer.write_tensor_data(data)
                progress(data.nbytes)
        finally:
            writer.close()
    counts = {t: n for t, n in Counter(types.values()).most_common()}
    size = target.stat().st_size
    return Report(str(target), size, source.file_bytes, counts, fallbacks, time.perf_counter() - start)


def _plan_types(source: Checkpoint, dtype: str, embed_dtype: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Storage type of every tensor, and the names of those that the wanted one does not fit."""
    types, fallbacks = {}, []
    for name in source.names:
        shape = source.shape(name)
        kind = embed_dtype if name in (EMBEDDING, "output.weight") else dtype
        if len(shape) == 1:
            kind = "f32"
        elif shape[-1] % DTYPES[kind].block:
            kind = "f16"
            fallbacks.append(name)
        types[name] = kind
    return types, tuple(fallbacks)


def _encode(source: Checkpoint, name: str, dtype: str) -> np.ndarray:
    """The tensor's bytes in the file, uint8."""
    tensor = source.tensor(name)
    if tensor.dtype == dtype:
        return to_ggml(tensor).reshape(-1)
    rows = tensor if len(tensor.shape) == 2 else Tensor(tensor.dtype, (1, *tensor.shape), (tensor.array[None],))
    n, width = rows.shape
    out = np.empty((n, DTYPES[dtype].nbytes((width,))), np.uint8)
    for start, stop in row_blocks(n, width, _BLOCK_ELEMENTS):
        values = dequantise(rows.rows(start, stop), np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{source.path}: tensor {name} holds NaN or infinity: fetch the checkpoint again")
        try:
            coded = quantise(values, dtype)
        except ValueError as error:
            raise CheckpointError(f"{source.path}: tensor {name}: {error}. Try --type bf16") from None
        if dtype == "f16" and not np.isfinite(coded.array).all():
            raise CheckpointError(f"{source.path}: tensor {name} has values beyond float16's range. Try --type bf16")
        out[start:stop] = to_ggml(coded).reshape(stop - start, -1)
    return out.reshape(-1)


def _check_target(target: Path, force: bool) -> None:
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder: give the name of the .gguf file to write")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target.absolute().parent} does not exist: create the folder first")
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists: choose another name, or --force to replace it")


@contextmanager
def _atomic(target: Path, force: bool) -> Iterator[Path]:
    """A temporary path beside `target`, which becomes it when the block ends well and is removed when it does not."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        _check_target(target, force)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(target.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hybrid.convert", description=__doc__.split(": ", 1)[1])
    parser.add_argument("src", type=Path, help="Hugging Face directory or .gguf file")
    parser.add_argument("dst", type=Path, help=".gguf file to write")
    parser.add_argument("--type", required=True, choices=WEIGHT_TYPES, help="storage type of the matrices")
    parser.add_argument("--type-embed", choices=WEIGHT_TYPES, help="of the embedding and output matrix (as --type)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and no progress")
    args = parser.parse_args(argv)
    from tqdm import tqdm

    try:
        with open_checkpoint(args.src) as source:
            types, _ = _plan_types(source, args.type, args.type_embed or args.type)
            total = sum(DTYPES[t].nbytes(source.shape(n)) for n, t in types.items())
            with tqdm(total=total, unit="B", unit_scale=True, desc=args.dst.name, disable=args.json) as bar:
                report = convert(source, args.dst, args.type, args.type_embed, args.force, bar.update)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    for name in report.fallbacks:
        print(f"{name}: kept as f16, its rows are no multiple of 32", file=sys.stderr)
    print(json.dumps(asdict(report)) if args.json else report.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
