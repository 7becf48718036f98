"""Read the tokenizer in GGUF metadata: `llama` (SentencePiece with scores), and `gpt2` or `gemma4` (merges of
SentencePiece's pieces).

Converters from tokenizer.json (Ollama's) write `gpt2`: its scores are meaningless, its bytes have the type of ordinary
pieces, its padding is user-defined. The pieces tell SentencePiece's from GPT-2's byte alphabet.
"""

from __future__ import annotations

from typing import Any

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.tokenizer_json import BYTE_PIECES
from hybrid.text.tokenizer import (
    BYTE,
    MARKERS,
    NORMAL,
    SPACE,
    UNUSED,
    USER_DEFINED,
    Tokenizer,
    TokenizerError,
    Vocabulary,
)

_MERGED = ("gpt2", "gemma4")


def padding_piece(index: int) -> str:
    """Text of tokens that pad a vocabulary to the embedding's rows, as converters write it."""
    return f"[PAD{index}]"


def gguf_tokenizer(metadata: Fields, rows: int) -> Tokenizer:
    """Tokenizer of a file's metadata, for an embedding of `rows`. CheckpointError names the invalid key."""
    m = metadata.under("tokenizer.ggml.")
    kind = m.text("model")
    if kind == "llama" and m.get("pre") == "gemma4" and m.get("merges") is not None:
        kind = "gemma4"  # Ollama's name for it
    if kind not in ("llama", *_MERGED):
        known = "llama (SentencePiece), gpt2 with merges over its pieces, gemma4 (the same)"
        raise m.error("model", f"{kind!r} is not supported; known: {known}")
    pieces = _list(m, "tokens", str)
    types = _list(m, "token_type", int, len(pieces))
    if kind in _MERGED:
        types = _types_by_text(m, pieces, types)
        scores, merges = [0.0] * len(pieces), _merges(m)
    else:
        scores, merges = _list(m, "scores", (int, float), len(pieces)), None
    ends = end_ids(metadata, rows)
    eos = _index(m, "eos_token_id")
    # User-defined pieces have real spaces here and match them; SentencePiece has U+2581 instead.
    spelled = list(pieces)
    for i in [i for i, t in enumerate(types) if t == USER_DEFINED]:
        spelled[i] = pieces[i].replace(" ", SPACE)
    try:
        vocabulary = Vocabulary(
            spelled,
            scores,
            types,
            _index(m, "bos_token_id"),
            eos,
            _index(m, "unknown_token_id"),
            _index(m, "padding_token_id"),
            add_space_prefix=bool(m.get("add_space_prefix", False)),
            merges=merges,
            add_bos=kind == "gemma4"
            or bool(m.get("add_bos_token", True)),  # false in early files of Gemma 4 is an error
            after_id=eos if m.get("add_eos_token") else None,
        )
        n_tokens = min(len(pieces), rows)
        padding = (UNUSED, USER_DEFINED)
        while n_tokens and pieces[n_tokens - 1] == padding_piece(n_tokens - 1) and types[n_tokens - 1] in padding:
            n_tokens -= 1
        return Tokenizer(vocabulary.first(n_tokens), ends, rows, MARKERS)
    except (TokenizerError, ValueError) as error:
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml: {error}") from None


def end_ids(metadata: Fields, rows: int) -> tuple[int, ...]:
    """Every token that ends a text: those that llama.cpp takes, and the list of Ollama's converter."""
    m = metadata.under("tokenizer.ggml.")
    keys = [f"{kind}_token_id" for kind in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    named = [m.below(key, rows) for key in keys if m.get(key) is not None]
    listed = _list(m, "eos_token_ids", int, required=False)
    wrong = next((i for i in listed if not 0 <= i < rows), None)
    if wrong is not None:
        raise m.error("eos_token_ids", f"{wrong} is outside the {rows} rows of the embedding")
    return tuple(dict.fromkeys((*named, *listed)))


def first_repeated(metadata: Fields) -> tuple[str, int, int] | None:
    """A piece and its first two ids, if the vocabulary has one twice."""
    m = metadata.under("tokenizer.ggml.")
    pieces, types = m.get("tokens", []), m.get("token_type", [])
    if not isinstance(pieces, list) or not isinstance(types, list) or set(map(type, pieces)) - {str}:
        return None  # refused where the tokenizer is made
    if len(set(pieces)) == len(pieces):
        return None
    seen: dict[tuple[str, bool], int] = {}
    keys = ((p, t == USER_DEFINED and " " in p) for p, t in zip(pieces, types, strict=False))
    return next(((key[0], seen[key], i) for i, key in enumerate(keys) if seen.setdefault(key, i) != i), None)


def _list(m: Fields, key: str, kind: Any, length: int | None = None, required: bool = True) -> list[Any]:
    """A list of items of type `kind`. length: required number, one for each token."""
    values = m.get(key)
    if values is None and not required:
        return []
    if values is None:
        raise m.error(key, "is missing")
    if not isinstance(values, list) or not all(issubclass(t, kind) for t in set(map(type, values))):
        raise m.error(key, f"must be a list of {'texts' if kind is str else 'numbers'}")
    if length is not None and len(values) != length:
        raise m.error(key, f"has {len(values)} entries for {length} tokens: convert the file again")
    return values


def _index(m: Fields, key: str) -> int | None:
    return None if m.get(key) is None else m.integer(key)


def _merges(m: Fields) -> tuple[str, ...]:
    """Merges, without those that have a space within a half: they never apply."""
    merges = _list(m, "merges", str)
    wrong = next((i for i, merge in enumerate(merges) if " " not in merge), None)
    if wrong is not None:
        raise m.error("merges", f"[{wrong}] is {merges[wrong]!r}, which is not two pieces with a space between")
    return tuple(merge for merge in merges if merge.count(" ") == 1)


def _types_by_text(m: Fields, pieces: list[str], types: list[int]) -> list[int]:
    """Types, with byte pieces recognised by text. CheckpointError for a byte-level vocabulary."""
    index = {p: i for i, p in enumerate(pieces)}
    if not all(piece in index for piece in BYTE_PIECES) or not any(SPACE in p for p in pieces):
        what = "holds byte-level BPE (GPT-2's alphabet)" if "\u0120" in index else "holds no SentencePiece vocabulary"
        raise m.error(
            "tokens", f"{what}: Gemma's has pieces with U+2581 and <0x00> to <0xFF>; convert its own tokenizer.model"
        )
    out = list(types)
    for piece in BYTE_PIECES:
        if out[index[piece]] in (NORMAL, USER_DEFINED):
            out[index[piece]] = BYTE
    return out
