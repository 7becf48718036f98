"""Verify converted files against their stored digests: tensors with names, types and shapes; headers with all metadata;
every other file of a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid.checkpoint import CheckpointError
from hybrid.checkpoint.files import OpenFile, read_file
from hybrid.checkpoint.gguf_file import read_gguf
from hybrid.checkpoint.gguf_split import check_parts, part_paths
from hybrid.checkpoint.safetensors_file import read_safetensors
from hybrid.checkpoint.stored import Stored
from hybrid.convert import to_gguf, to_hf
from hybrid.convert.shards import digest_of
from hybrid.core.dtypes import DTYPES

_PIECE = 1 << 22
_MAX_FILE = 1 << 30
_OTHER = "another program wrote it, or an earlier version of this one: there is nothing to compare with"


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a verification. wrong: modified tensors, headers and files."""

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


@dataclass(frozen=True, slots=True)
class Kept:
    """Stored digests of tensors. wrong: headers and small files that already failed."""

    files: tuple[str, ...]
    sums: tuple[_Sum, ...]
    wrong: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of tensors to be read."""
        return sum(s.size for s in self.sums)


def digests(path: Path) -> Kept:
    """The stored digests of a checkpoint's files. CheckpointError if there are none, or a file is not a checkpoint."""
    files = files_of(path)
    kept = [_of_safetensors(file) if path.is_dir() else _of_gguf(file) for file in files]
    wrong = [w for _, found in kept for w in found]
    if path.is_dir():
        wrong += _other_files(path)
    return Kept(tuple(map(str, files)), tuple(s for sums, _ in kept for s in sums), tuple(wrong))


def verify(kept: Kept, progress: Callable[[int], object] = lambda done: None) -> Checked:
    """Read and check every tensor. `progress` gets the bytes read since the last call."""
    wrong = list(kept.wrong)
    for item in kept.sums:
        digest = digest_of(item.stored.name, item.stored.dtype, item.stored.shape)
        for piece in _pieces(item):
            digest.update(piece.data)
            progress(piece.nbytes)
        if digest.hexdigest() != item.digest:
            wrong.append(f"{item.stored.path}: {item.stored.name}")
    return Checked(kept.files, len(kept.sums), kept.size, tuple(wrong))


def files_of(path: Path) -> list[Path]:
    """All files with tensors of a GGUF file, a set of parts (any of them named), or a Hugging Face folder."""
    if not path.is_dir():
        paths = part_paths(path, read_gguf(path).values)
        if len(paths) > 1:
            check_parts([read_gguf(p) for p in paths])
        return paths
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


def _matched(path: Path, stored: Mapping[str, Stored], kept: Mapping[str, str]) -> tuple[Sequence[_Sum], list[str]]:
    """(tensors with digests, lines on tensors or digests without a counterpart)."""
    unknown = next((t for t in stored.values() if t.file is None), None)
    if unknown is not None:
        raise CheckpointError(f"{path}: tensor {unknown.name} is stored as {unknown.dtype}, which is not known here")
    wrong = [f"{path}: {name} (a tensor that no digest names)" for name in stored if name not in kept]
    wrong += [f"{path}: {name} (a digest that no tensor has)" for name in kept if name not in stored]
    return [_Sum(t, kept[n]) for n, t in stored.items() if n in kept], wrong


def _of_gguf(path: Path) -> tuple[Sequence[_Sum], list[str]]:
    part = read_gguf(path)
    texts, own = part.values.get(to_gguf.DIGESTS), part.values.get(to_gguf.HEADER_DIGEST)
    if not isinstance(texts, list) or not isinstance(own, str):
        missing = to_gguf.DIGESTS if not isinstance(texts, list) else to_gguf.HEADER_DIGEST
        raise CheckpointError(f"{path} has no {missing}: {_OTHER}")
    kept = {name: digest for digest, _, name in (str(t).partition(" ") for t in texts)}
    sums, wrong = _matched(path, part.stored, kept)
    ends = [t.offset + DTYPES[t.dtype].nbytes(t.shape) for t in part.stored.values()]
    try:
        found = to_gguf.header_digest(
            OpenFile(path).read(0, min((t.offset for t in part.stored.values()), default=part.size))
        )
    except ValueError:
        found = ""
    if found != own:
        wrong.append(f"{path}: its header (metadata, or the table of tensors)")
    if part.size != -(-max(ends, default=0) // to_gguf.ALIGNMENT) * to_gguf.ALIGNMENT:
        wrong.append(f"{path}: its length")
    return sums, wrong


def _of_safetensors(path: Path) -> tuple[Sequence[_Sum], list[str]]:
    stored, _ = read_safetensors(path)  # checks the header
    with open(path, "rb") as file:
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
    meta = json.loads(text).get("__metadata__", {})
    own = meta.get(to_hf.HEADER_DIGEST)
    if own is None:
        raise CheckpointError(f"{path} has no {to_hf.HEADER_DIGEST} in its metadata: {_OTHER}")
    kept = {key.removeprefix(to_hf.DIGEST): value for key, value in meta.items() if key.startswith(to_hf.DIGEST)}
    sums, wrong = _matched(path, stored, kept)
    if to_hf.header_digest(length + text, own) != own:
        wrong.append(f"{path}: its header (metadata, or the table of tensors)")
    return sums, wrong


def _other_files(folder: Path) -> list[str]:
    """Files of SHA256SUMS with another digest."""
    sums = folder / to_hf.SUMS
    if not sums.is_file():
        raise CheckpointError(f"{folder} has no {to_hf.SUMS}: {_OTHER}")
    wrong = []
    for line in read_file(sums, _MAX_FILE).decode("utf-8", "replace").splitlines():
        digest, _, name = line.partition("  ")
        file = folder / name
        if not name or ".." in Path(name).parts or Path(name).is_absolute() or not file.is_file():
            wrong.append(f"{sums}: the file {name!r} that it names")
        elif hashlib.sha256(read_file(file, _MAX_FILE)).hexdigest() != digest:
            wrong.append(str(file))
    return wrong
