"""Digests kept in converted files, and the check of a file against its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid.checkpoint import CheckpointError
from hybrid.checkpoint.assemble import Stored
from hybrid.checkpoint.files import OpenFile
from hybrid.checkpoint.gguf_file import read_gguf
from hybrid.checkpoint.gguf_split import part_paths
from hybrid.checkpoint.safetensors_file import read_safetensors
from hybrid.convert.to_gguf import DIGESTS
from hybrid.convert.to_hf import DIGEST
from hybrid.spec.dtypes import DTYPES

_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class Checked:
    """What a verification found. `wrong`: tensors whose bytes are not those that were written."""

    files: tuple[str, ...]
    tensors: int
    bytes: int
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sum:
    stored: Stored
    digest: str

    @property
    def size(self) -> int:
        return DTYPES[self.stored.dtype].nbytes(self.stored.shape)


def digests(path: Path) -> list[_Sum]:
    """The tensors of a checkpoint with the digests kept for them. CheckpointError where there are none."""
    return [s for file in files_of(path) for s in (_of_safetensors(file) if path.is_dir() else _of_gguf(file))]


def verify(sums: list[_Sum], progress: Callable[[int], object] = lambda done: None) -> Checked:
    """Read every tensor's bytes and compare. `progress` gets the bytes read since the last call."""
    wrong = []
    for item in sums:
        digest = hashlib.sha256()
        for piece in _pieces(item):
            digest.update(piece.data)
            progress(piece.nbytes)
        if digest.hexdigest() != item.digest:
            wrong.append(f"{item.stored.path}: {item.stored.name}")
    files = tuple(dict.fromkeys(str(s.stored.path) for s in sums))
    return Checked(files, len(sums), sum(s.size for s in sums), tuple(wrong))


def files_of(path: Path) -> list[Path]:
    """All files with tensors of a GGUF file, a set of parts (any of them named), or a Hugging Face folder."""
    if not path.is_dir():
        return part_paths(path, read_gguf(path).values)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no .safetensors file")
    return files


def _pieces(item: _Sum) -> Iterator[np.ndarray]:
    file, at, left = OpenFile(item.stored.path), item.stored.offset, item.size
    buffer = np.empty(min(_PIECE, left), np.uint8)
    while left:
        piece = buffer[: min(_PIECE, left)]
        file.read_into(at, piece)
        at += piece.size
        left -= piece.size
        yield piece


def _of_gguf(path: Path) -> list[_Sum]:
    part = read_gguf(path)
    stored, kept = part.stored, part.values.get(DIGESTS)
    if not isinstance(kept, list):
        raise CheckpointError(f"{path} has no {DIGESTS}: another program wrote it, there is nothing to compare with")
    if len(kept) != len(stored):
        raise CheckpointError(f"{path}: {DIGESTS} has {len(kept)} entries for {len(stored)} tensors")
    unknown = next((t for t in stored.values() if t.file is None), None)
    if unknown is not None:
        raise CheckpointError(f"{path}: tensor {unknown.name} is stored as {unknown.dtype}, which is not known here")
    return [_Sum(tensor, str(digest)) for tensor, digest in zip(stored.values(), kept, strict=True)]


def _of_safetensors(path: Path) -> list[_Sum]:
    stored, _ = read_safetensors(path)  # checks the header
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    meta = header.get("__metadata__", {})
    without = next((n for n in stored if DIGEST + n not in meta), None)
    if without is not None:
        raise CheckpointError(f"{path} has no {DIGEST}{without}: another program wrote it, there is nothing to compare with")
    return [_Sum(tensor, str(meta[DIGEST + name])) for name, tensor in stored.items()]
