"""Convert BPE merges to scores, for formats that have only scores (SentencePiece's file, GGUF's `llama`)."""

from __future__ import annotations

from dataclasses import replace

from hybrid.text.tokenizer import NORMAL, UNUSED, USER_DEFINED, TokenizerError, Vocabulary


def with_scores(v: Vocabulary) -> Vocabulary:
    """An equivalent vocabulary with scores instead of merges; `v` itself if it has no merges.

    A score ranks a piece, a merge ranks a pair. They are equivalent if every pair that forms a piece is a merge and the
    merges of each piece are consecutive, as SentencePiece's converters write them. TokenizerError for other lists.
    """
    if v.merges is None:
        return v
    cut = {p for p, t in zip(v.pieces, v.types, strict=True) if t == USER_DEFINED}  # never formed by merges
    known = {p for p, t in zip(v.pieces, v.types, strict=True) if t in (NORMAL, UNUSED) and " " not in p}
    listed = set(v.merges)
    for piece in known:
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            missing = (
                (at == 1 or left in known) and (len(right) == 1 or right in known) and f"{left} {right}" not in listed
            )
            if missing and left not in cut and right not in cut:
                raise TokenizerError(
                    f"scores cannot replace these merges: {left!r} and {right!r} make a piece, but no merge"
                )
    first: dict[str, int] = {}
    last = ""
    for merge in v.merges:
        piece = merge.replace(" ", "", 1)
        if piece not in known:
            continue
        if first.setdefault(piece, len(first)) != len(first) - 1 and piece != last:
            raise TokenizerError(f"scores cannot replace these merges: those of {piece!r} do not follow one another")
        last = piece
    used = next((p for p, t in zip(v.pieces, v.types, strict=True) if t == UNUSED and p in first), None)
    if used is not None:
        raise TokenizerError(f"scores cannot replace these merges: they make {used!r}, which is typed as unused")
    rest = float(len(first))
    scores = (-float(first.get(p, rest)) if p in known else 0.0 for p in v.pieces)
    return replace(v, scores=tuple(scores), merges=None)
