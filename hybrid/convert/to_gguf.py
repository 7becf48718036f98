"""Write GGUF: headers with the gguf package, one file or llama.cpp's shards, digests in the metadata."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybrid.checkpoint import Checkpoint, CheckpointError
from hybrid.checkpoint.families import family_of
from hybrid.checkpoint.gguf_metadata import write_metadata
from hybrid.convert.atomic import atomic_files
from hybrid.convert.shards import Shard, divide, shard_paths, tensor_sizes
from hybrid.core.dtypes import DTYPES

if TYPE_CHECKING:  # the import takes a quarter of a second
    from gguf import GGUFWriter

DIGESTS = "hybrid.sha256"
"""Metadata key: for each tensor of the file a text of its digest (hybrid.convert.shards.digest_of) in hex, a space, its
name."""
HEADER_DIGEST = "hybrid.sha256.header"
"""Last metadata key: hex sha256 of all bytes before the tensors' data, computed with zeros in place of the digest."""

ALIGNMENT = 32
_HEX = 64
_MAX_SHARDS = 4096  # readers' limit
_UNKNOWN = "0" * _HEX


def targets(source: Checkpoint, target: Path, kinds: Mapping[str, str], split: int | None) -> list[Path]:
    """The files that `shards` writes. CheckpointError for too many parts."""
    count = len(divide(tensor_sizes(source, kinds), split))
    if count > _MAX_SHARDS:
        raise CheckpointError(f"--split makes {count} files; at most {_MAX_SHARDS} are possible: give a larger size")
    return shard_paths(target, count)


@contextmanager
def shards(
    source: Checkpoint, target: Path, kinds: Mapping[str, str], dtype: str, split: int | None, force: bool
) -> Iterator[tuple[list[Path], list[Shard]]]:
    """Temporary files with headers, to be filled; renamed to the targets if the block succeeds.

    The first shard has all metadata; the others have only their index, as written by llama.cpp's tools.
    """
    from gguf import GGUFWriter

    final = targets(source, target, kinds, split)
    groups = divide(tensor_sizes(source, kinds), split)
    with atomic_files(final, force) as parts:
        made = []
        for index, (part, names) in enumerate(zip(parts, groups, strict=True)):
            writer = GGUFWriter(part, family_of(source.hparams).architecture)
            try:
                if index == 0:
                    write_metadata(writer, source, dtype)
                if len(parts) > 1:
                    writer.add_uint16("split.no", index)
                    writer.add_uint16("split.count", len(parts))
                    writer.add_int32("split.tensors.count", len(kinds))
                made.append(_begin(writer, part, source, {n: kinds[n] for n in names}))
            finally:
                writer.close()
        yield final, made


def _begin(writer: GGUFWriter, path: Path, source: Checkpoint, kinds: Mapping[str, str]) -> Shard:
    """Write the header, with space for the digests as its last values."""
    from gguf import GGMLQuantizationType

    writer.add_array(DIGESTS, [f"{_UNKNOWN} {name}" for name in kinds])
    writer.add_string(HEADER_DIGEST, _UNKNOWN)
    family = family_of(source.hparams)
    shapes = {name: family.gguf_shape(source.hparams, name, source.shape(name)) for name in kinds}
    for name, kind in kinds.items():
        shape = shapes[name]
        writer.add_tensor_info(
            name, shape, np.dtype("f4"), DTYPES[kind].nbytes(shape), GGMLQuantizationType[kind.upper()]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    values_end = path.stat().st_size  # the writer has flushed
    writer.write_ti_data_to_file()
    data = at = _align(path.stat().st_size)
    offsets = {}
    for name, size in tensor_sizes(source, kinds).items():
        offsets[name] = at
        at += _align(size)
    names = list(kinds)
    called = {name: name for name in names}
    return Shard(
        path, kinds, offsets, at, lambda where, digests: _seal(where, values_end, data, names, digests), called, shapes
    )


def _seal(path: Path, end: int, data: int, names: Sequence[str], digests: Mapping[str, str]) -> None:
    """Write the digests into the header. A string is a u64 length and its bytes; a metadata entry is key, u32 type,
    value. The header's digest ends at byte `end`; the array of digests ends where the header digest's key begins."""
    with open(path, "r+b") as file:
        at = end - len(_own_place())
        for name in reversed(names):
            at -= _HEX + 1 + len(name.encode())
            file.seek(at)
            file.write(digests[name].encode())
            at -= 8
        file.seek(0)
        digest = header_digest(file.read(data))
        file.seek(end - _HEX)
        file.write(digest.encode())


def _own_place() -> bytes:
    """The metadata entry of the header's digest, with zeros."""
    key = HEADER_DIGEST.encode()
    from gguf import GGUFValueType

    return struct.pack("<Q", len(key)) + key + struct.pack("<IQ", GGUFValueType.STRING, _HEX) + _UNKNOWN.encode()


def header_digest(header: bytes) -> str:
    """Digest of the bytes before the tensors' data, regardless of a stored digest. ValueError if there is no place for
    one."""
    before = _own_place()[:-_HEX]
    at = header.rindex(before) + len(before)
    return hashlib.sha256(header[:at] + _UNKNOWN.encode() + header[at + _HEX :]).hexdigest()


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
