"""Read tokenizer.model: SentencePiece's ModelProto in wire format, without the protobuf package.

sentencepiece's API does not expose user-defined pieces. Fields: ModelProto 1 pieces (1 text,
2 score, 3 type), 2 trainer (3 model type, 40 unk, 41 bos, 42 eos, 43 pad), 3 normaliser (2 character map,
3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.files import read_file
from hybrid.text.tokenizer import NORMAL, TokenizerError, Vocabulary

BPE = 2
_MAX_BYTES = 1 << 26


def read_sentencepiece(path: Path) -> Vocabulary:
    """Vocabulary of a tokenizer.model. CheckpointError for an invalid file or an unsupported model."""
    try:
        return _read(path)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model, or is cut short ({error})") from None
    except TokenizerError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read(path: Path) -> Vocabulary:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int] = {}
    normaliser: dict[int, int | bytes] = {}
    for field, value in _fields(read_file(path, _MAX_BYTES)):
        if field == 1 and isinstance(value, bytes):
            text, score, kind = b"", 0.0, NORMAL
            for key, item in _fields(value):
                if key == 1 and isinstance(item, bytes):
                    text = item
                elif key == 2 and isinstance(item, bytes):
                    (score,) = struct.unpack("<f", item)
                elif key == 3 and isinstance(item, int):
                    kind = item
            pieces.append(text.decode("utf-8"))
            scores.append(score)
            types.append(kind)
        elif field == 2 and isinstance(value, bytes):
            trainer = {key: item for key, item in _fields(value) if isinstance(item, int)}
        elif field == 3 and isinstance(value, bytes):
            normaliser = dict(_fields(value))
    if not pieces:
        raise CheckpointError(f"{path} is not a SentencePiece model: it has no pieces")
    if trainer.get(3, 1) != BPE:
        raise CheckpointError(f"{path}: model type {trainer.get(3, 1)} is not supported; known: {BPE} (BPE)")
    if normaliser.get(2) or normaliser.get(4, 1) or not normaliser.get(5, 1):
        raise CheckpointError(
            f"{path}: this normaliser is not supported; known: identity, without removing whitespace, with U+2581"
        )
    defaults = {40: 0, 41: 1, 42: 2, 43: -1}
    unk, bos, eos, pad = (_optional(trainer.get(key, default)) for key, default in defaults.items())
    prefix = bool(normaliser.get(3, 1))
    return Vocabulary(pieces, scores, types, bos, eos, unk, pad, add_space_prefix=prefix)


def _optional(value: int) -> int | None:
    """An int32 of the wire format; negative: None."""
    return None if value < 0 or value >= 1 << 31 else value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one message: int for varints, else bytes."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise IndexError(f"wire type {wire} at byte {at}")
        if size > end - at:
            raise IndexError(f"{size} bytes wanted at byte {at} of {end}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(f"number too long at byte {at}")
