"""Checkpoints from one format and storage type to another: `convert`, and the command python -m hybrid.convert."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
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
    """What a conversion wrote."""

    paths: tuple[str, ...]
    """The files with tensors, in order."""
    bytes: int
    source_bytes: int
    types: dict[str, int]
    """Tensors by storage type."""
    fallbacks: dict[str, str]
    """Matrices whose rows are no whole number of the wanted type's blocks, and the type they got."""
    seconds: float
    removed: tuple[str, ...] = ()
    """Unfinished files of runs that were killed, in the target's folder."""

    def line(self) -> str:
        types = ", ".join(f"{n} {t}" for t, n in self.types.items())
        ratio = self.bytes / max(self.source_bytes, 1)
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        speed = self.source_bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.paths[0]}{more}: {self.bytes / 1e6:.1f} MB ({ratio:.0%} of the source), {types} tensors, "
            f"{self.seconds:.1f} s, {speed:.0f} MB/s read"
        )


def planned(source: Checkpoint, wanted: Wanted) -> Types:
    """The storage type of every tensor. CheckpointError for one that cannot be written."""
    return plan_types({n: (source.dtype(n), source.shape(n)) for n in source.names}, wanted)


def convert(
    source: Checkpoint,
    target: Path,
    wanted: Wanted | str,
    *,
    format: Format = "gguf",
    split: int | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> Report:
    """Write `source` as a GGUF file or a Hugging Face folder, its matrices as `wanted`, its vectors as float32.

    Tensors already of the wanted type are copied bit for bit. split: bytes of tensors in one file at most; GGUF files
    are then named NAME-00001-of-0000N.gguf. jobs: blocks of rows at work at once; memory is less than 100 MB for each,
    whatever the model's size. `progress` gets the bytes written since the last call. Every tensor's sha256 is kept
    with it (verify). The target appears complete or not at all; one that exists is kept unless `force`. What killed
    runs left unfinished in its folder is removed first.
    Raises CheckpointError for a target that is in the way and for values that a type cannot hold.
    """
    from hybrid.convert import to_gguf, to_hf  # inspect needs the types alone
    from hybrid.convert.blocks import default_jobs
    from hybrid.convert.shards import fill
    from hybrid.convert.unfinished import remove_stale

    start = time.perf_counter()
    types = planned(source, Wanted(wanted) if isinstance(wanted, str) else wanted)
    if split is not None and split < 1:
        raise CheckpointError(f"split {split} must be a positive number of bytes")
    family = family_of(source.hparams)
    shapes = {n: source.shape(n) for n in source.names}
    dtype = main_type(types.kinds, shapes)
    folder = target.absolute().parent
    removed = remove_stale(folder) if folder.is_dir() else []
    if format == "gguf":
        made = to_gguf.shards(source, target, types.kinds, dtype, split, force)
    else:
        source, kinds = to_hf.apart(source, family, types.kinds)
        made = to_hf.shards(source, family, target, kinds, dtype, split, force)
    with made as (paths, shards):
        _check_room(target, sum(s.size for s in shards))
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


def _check_room(target: Path, size: int) -> None:
    free = shutil.disk_usage(target.absolute().parent).free
    if size > free:
        raise CheckpointError(f"{target} takes {show_bytes(size)}, and its disk has {show_bytes(free)} left: make room")


def total_bytes(source: Checkpoint, wanted: Wanted) -> int:
    """Bytes of tensors that a conversion will write."""
    from hybrid.convert.shards import tensor_sizes

    return sum(tensor_sizes(source, planned(source, wanted).kinds).values())
