"""Divide tensors over files, and write their bytes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid.checkpoint import Checkpoint
from hybrid.convert.blocks import encoded
from hybrid.core.dtypes import DTYPES

Seal = Callable[[Path, Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """A file with a written header. `seal` writes the tensors' digests (name -> sha256, hex) into the header."""

    path: Path
    kinds: Mapping[str, str]
    offsets: Mapping[str, int]
    """Byte offset of each tensor."""
    size: int
    """Bytes of the finished file."""
    seal: Seal
    called: Mapping[str, str]
    """Tensor names in the file."""
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor shapes in the file."""


def divide(sizes: Mapping[str, int], most: int | None) -> list[list[str]]:
    """Group names, in order, into groups of at most `most` bytes (None: one group); a larger tensor has its own
    group."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if most is not None and groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def shard_paths(target: Path, count: int) -> list[Path]:
    """`m.gguf` -> `m-00001-of-00003.gguf`, ...; unchanged for a single file."""
    if count == 1:
        return [target]
    return [target.with_name(f"{target.stem}-{i + 1:05}-of-{count:05}{target.suffix}") for i in range(count)]


def tensor_sizes(source: Checkpoint, kinds: Mapping[str, str]) -> dict[str, int]:
    return {name: DTYPES[kind].nbytes(source.shape(name)) for name, kind in kinds.items()}


def digest_of(name: str, dtype: str, shape: Sequence[int]) -> hashlib._Hash:
    """A sha256 object updated with a tensor's name, type and shape in its file; update it with the bytes."""
    return hashlib.sha256(f"{name} {dtype} {','.join(map(str, shape))}\n".encode())


def fill(
    source: Checkpoint, shards: Sequence[Shard], jobs: int, norm_offset: float, progress: Callable[[int], object]
) -> None:
    """Write every tensor's bytes and digest. `progress` gets the bytes written since the last call."""
    for shard in shards:
        digests: dict[str, str] = {}
        with (
            open(shard.path, "r+b", buffering=0) as file,
            contextlib.closing(encoded(source, shard.kinds, jobs, norm_offset)) as blocks,
        ):
            for name, pieces in _by_tensor(blocks):
                file.seek(shard.offsets[name])
                digest = digest_of(shard.called[name], shard.kinds[name], shard.shapes[name])
                for piece in pieces:
                    left = piece.data
                    while left:
                        left = left[file.write(left) :]
                    digest.update(piece.data)
                    progress(piece.nbytes)
                digests[name] = digest.hexdigest()
            file.truncate(shard.size)  # padding after the last tensor
        shard.seal(shard.path, digests)


def _by_tensor(pieces: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """Group consecutive pieces by tensor."""
    held = next(pieces, None)

    def of(name: str) -> Iterator[np.ndarray]:
        nonlocal held
        while held is not None and held[0] == name:
            yield held[1]
            held = next(pieces, None)

    while held is not None:
        yield held[0], of(held[0])
