"""Write tokenizer.model from a vocabulary: SentencePiece's ModelProto in wire format."""

from __future__ import annotations

import struct

from hybrid.text.merges import with_scores
from hybrid.text.tokenizer import UNKNOWN, Vocabulary

_BPE = 2


def write_sentencepiece(v: Vocabulary) -> bytes:
    """The file's bytes: BPE, identity normaliser, byte fallback, and exactly one unknown piece, as required."""
    v = with_scores(v)
    named = {40: v.unk_id, 41: v.bos_id, 42: v.eos_id, 43: v.pad_id}
    trainer = _number(3, _BPE) + _number(4, len(v.pieces)) + _number(35, 1)
    trainer += b"".join(_number(field, -1 if i is None else i) for field, i in named.items())
    trainer += b"".join(_bytes(field + 5, _text(v.pieces[i])) for field, i in named.items() if i is not None)
    normaliser = _bytes(1, b"identity") + _number(3, int(v.add_space_prefix)) + _number(4, 0) + _number(5, 1)
    types = list(v.types)
    if v.unk_id is not None:
        types[v.unk_id] = UNKNOWN  # often a control token in GGUF files
    pieces = b"".join(
        _bytes(1, _bytes(1, _text(piece)) + struct.pack("<Bf", 2 << 3 | 5, score) + _number(3, kind))
        for piece, score, kind in zip(v.pieces, v.scores, types, strict=True)
    )
    return pieces + _bytes(2, trainer) + _bytes(3, normaliser)


def _text(piece: str) -> bytes:
    return piece.encode("utf-8", "surrogateescape")


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers are 64-bit two's complement
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
