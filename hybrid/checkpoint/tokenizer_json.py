"""Read tokenizer.json (Hugging Face's fast tokenizers): BPE with byte fallback, converted from SentencePiece.

model: vocab (piece -> id) and merges, as pairs or as "left right". added_tokens: control tokens (special) and
user-defined ones. An unsupported normaliser, pre-tokeniser, decoder or post-processor is refused, never ignored.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import parse_json, read_file
from hybrid.text.tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED, TokenizerError, Vocabulary

MAX_BYTES = 256 << 20
BYTE_PIECES = tuple(f"<0x{b:02X}>" for b in range(256))
ROLES = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "unk": "<unk>"}
"""Role -> default text of its token, Gemma's."""
_BYTE_LEVEL = "byte-level BPE (GPT-2's alphabet) is not supported: Gemma's vocabularies are SentencePiece ones"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that text is split at before merges. special: a control token. weak: only if the vocabulary lacks it."""

    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    weak: bool = False


def added_token(fields: Fields, where: str, value: Any) -> AddedToken:
    """An entry of added_tokens or added_tokens_decoder. CheckpointError."""
    text = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(text, str) or not text:
        raise fields.error(where, "needs an id and a content")
    flags = {key: value.get(key, False) for key in ("special", "lstrip", "rstrip", "single_word")}
    wrong = next((key for key, flag in flags.items() if type(flag) is not bool), None)
    if wrong is not None:
        raise fields.error(f"{where}.{wrong}", f"must be true or false, not {flags[wrong]!r}")
    return AddedToken(text, **flags)


def with_added(vocabulary: Vocabulary, added: Iterable[AddedToken]) -> Vocabulary:
    """The vocabulary with these tokens, as transformers adds them: known ones keep their ids, new ones get the next."""
    pieces, types = list(vocabulary.pieces), list(vocabulary.types)
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    reach = {entry[0]: entry for entry in vocabulary.reach}
    for token in added:
        # user-defined pieces match real spaces, before the normaliser
        piece = token.text if token.special or token.text in ids else token.text.replace(" ", SPACE)
        if token.weak and piece in ids:
            continue
        index = ids.setdefault(piece, len(pieces))
        if index == len(pieces):
            pieces.append(piece)
            types.append(NORMAL)
        if types[index] != UNKNOWN:
            types[index] = CONTROL if token.special else USER_DEFINED
        reach.pop(index, None)
        if token.lstrip or token.rstrip or token.single_word:
            reach[index] = (index, token.lstrip, token.rstrip, token.single_word)
    scores = [*vocabulary.scores, *[0.0] * (len(pieces) - len(vocabulary.pieces))]
    return replace(vocabulary, pieces=pieces, types=types, scores=scores, reach=tuple(reach.values()))


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Vocabulary of a tokenizer.json, with merges instead of scores and the ids of Gemma's special tokens.
    CheckpointError names the unsupported field."""
    root = Fields(_load(path), path)
    model = root.sub("model")
    _check_model(model)
    for key, check in (("normalizer", _normaliser), ("pre_tokenizer", _pre_tokeniser), ("decoder", _decoder)):
        for stage in _stages(root, key):
            check(stage)
    pieces, types, ids, reach = _pieces(root, model)
    unk = model.get("unk_token")
    role = {name: ids.get(unk if name == "unk" and isinstance(unk, str) else text) for name, text in ROLES.items()}
    if role["unk"] is not None:
        types[role["unk"]] = UNKNOWN
    before, after = _around(root, len(pieces))
    try:
        return Vocabulary(
            tuple(pieces),
            (0.0,) * len(pieces),
            tuple(types),
            role["bos"] if before is None else before,
            role["eos"],
            role["unk"],
            role["pad"],
            merges=_merges(model),
            add_bos=before is not None,
            after_id=after,
            reach=reach,
        )
    except TokenizerError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _load(path: Path) -> dict[str, Any]:
    data = read_file(path, MAX_BYTES)
    collecting = gc.isenabled()
    gc.disable()  # collections during the parse of many small lists double its time
    try:
        return parse_json(data, f"{path} is not JSON")
    finally:
        if collecting:
            gc.enable()


def _check_model(model: Fields) -> None:
    kind = model.text("type", "BPE")
    if kind != "BPE":
        raise model.error("type", f"{kind!r} is not supported; known: BPE")
    if model.get("byte_fallback") is not True:
        byte_level = "\u0120" in model.sub("vocab").values
        raise model.error(
            "byte_fallback", _BYTE_LEVEL if byte_level else "must be true, as SentencePiece's models have it"
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            raise model.error(key, f"{model.get(key)!r} is not supported; known: none")


def _pieces(
    root: Fields, model: Fields
) -> tuple[list[str], list[int], dict[str, int], tuple[tuple[int, bool, bool, bool], ...]]:
    """(pieces, types, id by piece, reach) of the vocabulary and the added tokens."""
    vocab = dict(model.sub("vocab").values)
    types: dict[int, int] = {}
    reach: list[tuple[int, bool, bool, bool]] = []
    added = root.get("added_tokens", [])
    if not isinstance(added, list):
        raise root.error("added_tokens", "must be a list")
    for n, token in enumerate(added):
        where = f"added_tokens[{n}]"
        one = added_token(root, where, token)
        index: Any = token.get("id")
        if type(index) is not int:
            raise root.error(f"{where}.id", f"must be a whole number, not {index!r}")
        if vocab.setdefault(one.text, index) != index:
            other = f"{vocab[one.text]}, which model.vocab gives {one.text!r}"
            raise root.error(f"{where}.id", f"{index!r} differs from {other}")
        types[index] = CONTROL if one.special else USER_DEFINED
        if one.lstrip or one.rstrip or one.single_word:
            reach.append((index, one.lstrip, one.rstrip, one.single_word))
    n = len(vocab)
    pieces: list[str | None] = [None] * n
    for piece, index in vocab.items():
        if type(index) is not int or not 0 <= index < n or pieces[index] is not None:
            twice = type(index) is int and 0 <= index < n
            problem = f"which {pieces[index]!r} has too" if twice else f"but ids must fill 0..{n - 1}"
            raise model.error("vocab", f"gives {piece!r} the id {index!r}, {problem}")
        pieces[index] = piece
    names = [p if p is not None else "" for p in pieces]
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        raise model.error("vocab", f"holds text that is no Unicode: {error}") from None
    kinds = [NORMAL] * n
    for piece in BYTE_PIECES:
        if piece in vocab:
            kinds[vocab[piece]] = BYTE
    for index, kind in types.items():
        kinds[index] = kind
        if kind == USER_DEFINED:  # they match real spaces here, before the normaliser
            names[index] = names[index].replace(" ", SPACE)
    return names, kinds, vocab, tuple(reach)


def _merges(model: Fields) -> tuple[str, ...]:
    """Merges as "left right", without those that have a space within a half: they never apply."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise model.error("merges", "must be a list")
    if all(type(m) is str for m in merges):
        wrong = next((m for m in merges if m.count(" ") != 1), None)
        if wrong is not None:
            raise model.error("merges", f"holds {wrong!r}, which is not two pieces with a space between")
        return tuple(merges)
    try:
        joined = tuple(" ".join(m) for m in merges if type(m) is list and len(m) == 2)
    except TypeError:
        joined = ()
    if len(joined) != len(merges):
        raise model.error("merges", 'must be pairs of pieces, or texts "left right"')
    return tuple(m for m in joined if m.count(" ") == 1)


def _stages(root: Fields, key: str) -> Iterator[Fields]:
    """Steps of a normaliser, pre-tokeniser, decoder or post-processor; flattens sequences."""
    if root.get(key) is None:
        return
    step = root.sub(key)
    if step.get("type") != "Sequence":
        yield step
        return
    inner = {"decoder": "decoders", "normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}.get(
        key, "processors"
    )
    steps = step.get(inner, [])
    if not isinstance(steps, list) or not all(isinstance(s, Mapping) for s in steps):
        raise step.error(inner, "must be a list of objects")
    for n, values in enumerate(steps):
        yield Fields(values, root.path, where=f"{key}.{inner}[{n}].")


def _refuse(step: Fields, known: str) -> CheckpointError:
    kind = step.get("type")
    if kind == "ByteLevel":
        return step.error("type", f"ByteLevel: {_BYTE_LEVEL}")
    return step.error("type", f"{kind!r} is not supported, or not with these settings; known: {known}")


def _is_replace(step: Fields, old: str, new: str) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": old} and step.get("content") == new


def _is_metaspace(step: Fields) -> bool:
    """Whether a Metaspace step only replaces spaces: no leading space, no splitting."""
    plain = step.get("prepend_scheme", "always") == "never" and step.get("split") is False
    return step.get("type") == "Metaspace" and step.get("replacement") == SPACE and plain


def _normaliser(step: Fields) -> None:
    if not _is_replace(step, " ", SPACE):
        raise _refuse(step, "Replace of ' ' by U+2581")


def _pre_tokeniser(step: Fields) -> None:
    # A split at spaces has no effect: the normaliser has replaced all spaces.
    split = step.get("type") == "Split" and step.get("pattern") == {"String": " "} and not step.get("invert")
    if not (split and step.get("behavior") == "MergedWithPrevious") and not _is_metaspace(step):
        raise _refuse(step, "Split at ' ' merged with the previous, Metaspace without prefix and split")


def _decoder(step: Fields) -> None:
    if not (_is_replace(step, SPACE, " ") or step.get("type") in ("ByteFallback", "Fuse") or _is_metaspace(step)):
        raise _refuse(step, "Replace of U+2581 by ' ', ByteFallback, Fuse")


def _around(root: Fields, n: int) -> tuple[int | None, int | None]:
    """Ids of the tokens that the post-processor adds before and after a text."""
    before = after = None
    for step in _stages(root, "post_processor"):
        if step.get("type") != "TemplateProcessing":
            raise _refuse(step, "TemplateProcessing of begin-of-text, the text, end-of-text")
        single, special = step.get("single", []), step.sub("special_tokens").values
        ids: list[Any] = []
        for part in single if isinstance(single, list) else ():
            token = part.get("SpecialToken") if isinstance(part, Mapping) else None
            entry = special.get(str(token.get("id")), {}) if isinstance(token, Mapping) else {}
            ids += [None] if token is None else entry.get("ids", ["?"]) if isinstance(entry, Mapping) else ["?"]
        at = ids.index(None) if None in ids else -1
        right = all(i is None or (type(i) is int and 0 <= i < n) for i in ids) and ids.count(None) == 1
        if not right or at > 1 or len(ids) - at > 2:
            raise step.error("single", "is not supported; known: the text, at most one token before and after it")
        before = ids[0] if at else before
        after = ids[-1] if at < len(ids) - 1 else after
    return before, after
