"""Write tokenizer.model from a vocabulary: SentencePiece's ModelProto in wire format."""

from __future__ import annotations

import struct

from hybrid.core.protobuf import field, key
from hybrid.text.merges import with_scores
from hybrid.text.tokenizer import UNKNOWN, Vocabulary

_BPE = 2


def write_sentencepiece(v: Vocabulary) -> bytes:
    """The file's bytes: BPE, identity normaliser, byte fallback, and exactly one unknown piece, as required."""
    v = with_scores(v)
    named = {40: v.unk_id, 41: v.bos_id, 42: v.eos_id, 43: v.pad_id}
    trainer = field(3, _BPE) + field(4, len(v.pieces)) + field(35, 1)
    trainer += b"".join(field(number, -1 if i is None else i) for number, i in named.items())
    trainer += b"".join(field(number + 5, _text(v.pieces[i])) for number, i in named.items() if i is not None)
    normaliser = field(1, b"identity") + field(3, int(v.add_space_prefix)) + field(4, 0) + field(5, 1)
    types = list(v.types)
    if v.unk_id is not None:
        types[v.unk_id] = UNKNOWN  # often a control token in GGUF files
    pieces = b"".join(
        field(1, field(1, _text(piece)) + key(2, 5) + struct.pack("<f", score) + field(3, kind))
        for piece, score, kind in zip(v.pieces, v.scores, types, strict=True)
    )
    return pieces + field(2, trainer) + field(3, normaliser)


def _text(piece: str) -> bytes:
    return piece.encode("utf-8", "surrogateescape")
