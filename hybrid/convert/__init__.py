"""Convert checkpoints between formats and storage types: `convert`, and the command python -m hybrid.convert."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybrid.checkpoint import Checkpoint, CheckpointError
from hybrid.checkpoint.families import family_of
from hybrid.convert.kinds import CLASSES, SAME, Types, Wanted, main_type, plan_types
from hybrid.core.units import show_bytes

__all__ = ["CLASSES", "SAME", "Report", "Wanted", "convert", "planned"]

Format = Literal["gguf", "hf"]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a conversion."""

    paths: tuple[str, ...]
    """The files with tensors, in order."""
    bytes: int
    source_bytes: int
    types: dict[str, int]
    """Tensors by storage type."""
    fallbacks: dict[str, str]
    """Matrices with rows that are not whole blocks of the requested type -> the type used instead."""
    seconds: float
    removed: tuple[str, ...] = ()
    """Removed temporary files of killed runs in the target's folder."""

    def line(self) -> str:
        types = ", ".join(f"{n} {t}" for t, n in self.types.items())
        ratio = self.bytes / max(self.source_bytes, 1)
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        speed = self.source_bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.paths[0]}{more}: {self.bytes / 1e6:.1f} MB ({ratio:.0%} of the source), {types} tensors, "
            f"{self.seconds:.1f} s, {speed:.0f} MB/s read"
        )


def planned(source: Checkpoint, wanted: Wanted, requantize: bool = False) -> Types:
    """The storage type of every tensor. CheckpointError for a read-only type, and for a quantised matrix to be quantised
    again unless `requantize`."""
    tensors = {n: (source.dtype(n), source.shape(n)) for n in source.names}
    try:
        return plan_types(tensors, wanted, requantize=requantize)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from None


def convert(
    source: Checkpoint,
    target: Path,
    wanted: Wanted | str,
    *,
    format: Format = "gguf",
    split: int | None = None,
    jobs: int | None = None,
    force: bool = False,
    requantize: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> Report:
    """Write `source` as a GGUF file or a Hugging Face folder, its matrices as `wanted`, its vectors as float32.

    Tensors of the requested type are copied exactly. split: most bytes of tensors in a file; GGUF parts are named
    NAME-00001-of-0000N.gguf. jobs: concurrent blocks of rows, each with less than 100 MB of memory. progress: gets the
    bytes written since the last call. Stores every tensor's sha256 (verify). The target is written atomically, and an
    existing one is kept unless `force`. Removes temporary files of killed runs first.
    Raises CheckpointError for an existing target, for one that is the source, for values beyond a type's range, and for a
    quantised matrix to be quantised again unless `requantize`.
    """
    from hybrid.convert import to_gguf, to_hf  # lazy: hybrid.inspect needs only the types
    from hybrid.convert.blocks import default_jobs
    from hybrid.convert.shards import fill
    from hybrid.convert.unfinished import remove_stale

    start = time.perf_counter()
    types = planned(source, Wanted(wanted) if isinstance(wanted, str) else wanted, requantize)
    if split is not None and split < 1:
        raise CheckpointError(f"split {split} must be a positive number of bytes")
    family = family_of(source.hparams)
    shapes = {n: source.shape(n) for n in source.names}
    dtype = main_type(types.kinds, shapes)
    if format == "gguf":
        _check_source(source, to_gguf.targets(source, target, types.kinds, split))
    else:
        _check_source(source, [target, *target.glob("*.safetensors")])
    folder = target.absolute().parent
    removed = remove_stale(folder) if folder.is_dir() else []
    if format == "gguf":
        made = to_gguf.shards(source, target, types.kinds, dtype, split, force)
    else:
        source, kinds = to_hf.apart(source, family, types.kinds)
        made = to_hf.shards(source, family, target, kinds, dtype, split, force)
    with made as (paths, shards):
        _check_space(target, sum(s.size for s in shards))
        fill(source, shards, jobs or default_jobs(), family.hf_norm_offset if format == "hf" else 0.0, progress)
    removed += remove_stale(folder, replaced=True)
    return Report(
        tuple(map(str, paths)),
        sum(s.size for s in shards),
        source.file_bytes,
        dict(Counter(types.kinds.values()).most_common()),
        dict(types.fallbacks),
        time.perf_counter() - start,
        tuple(map(str, removed)),
    )


def _check_source(source: Checkpoint, targets: Iterable[Path]) -> None:
    """CheckpointError if a target is the source, a part of it or a file of its folder, also by another name."""
    from hybrid.checkpoint.gguf_split import beside

    path = source.path
    files = [path, *(path.iterdir() if path.is_dir() else beside(path.resolve()))]
    own = [os.stat(f) for f in files if f.exists()]
    for target in targets:
        if target.exists() and any(os.path.samestat(os.stat(target), one) for one in own):
            raise CheckpointError(f"{target} is the source, or one of its files: choose another name")


def _check_space(target: Path, size: int) -> None:
    free = shutil.disk_usage(target.absolute().parent).free
    if size > free:
        raise CheckpointError(
            f"{target} takes {show_bytes(size)}, and its disk has {show_bytes(free)} left: free some space"
        )


def total_bytes(source: Checkpoint, wanted: Wanted, requantize: bool = False) -> int:
    """Total bytes of tensors that a conversion writes."""
    from hybrid.convert.shards import tensor_sizes

    return sum(tensor_sizes(source, planned(source, wanted, requantize).kinds).values())
