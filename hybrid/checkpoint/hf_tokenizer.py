"""Read the tokenizer of a Hugging Face directory: tokenizer.model, else tokenizer.json, and additions in configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hybrid.checkpoint.base import CheckpointError, Generation
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import exists, read_json
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.checkpoint.tokenizer_json import read_tokenizer_json
from hybrid.text.tokenizer import CONTROL, MARKERS, Tokenizer, TokenizerError, Vocabulary

_ROLES = ("bos", "eos", "pad", "unk")


def hf_tokenizer(path: Path, generation: Generation, rows: int) -> Tokenizer:
    """Tokenizer of the directory `path`, for an embedding of `rows`. End-of-text tokens are from the vocabulary, from
    generation_config.json or config.json, and eos_token of tokenizer_config.json or special_tokens_map.json."""
    config = _fields(path / "tokenizer_config.json")
    roles = _roles(config, _fields(path / "special_tokens_map.json"))
    file = path / "tokenizer.model"
    from_model = exists(file)
    if not from_model:
        file = path / "tokenizer.json"
        if not exists(file):
            raise CheckpointError(f"{file} and tokenizer.model are missing: fetch one of them with the checkpoint")
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, (bool, type(None))):
        raise config.error("add_bos_token", f"must be true or false, not {add_bos!r}")
    whole = read_sentencepiece(file) if from_model else read_tokenizer_json(file, roles)
    try:
        vocabulary = whole.first(rows)
        if from_model:
            vocabulary = _with_added_tokens(vocabulary, config)
        if add_bos is not None:
            vocabulary = replace(vocabulary, add_bos=add_bos)
        tokenizer = Tokenizer(vocabulary, generation.eos_ids, rows, MARKERS)
        named = tokenizer.token_id(roles.get("eos", ""))
        if named is None or named in tokenizer.eos_ids:
            return tokenizer
        return Tokenizer(vocabulary, (*generation.eos_ids, named), rows, MARKERS)
    except TokenizerError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _fields(path: Path) -> Fields:
    return Fields(read_json(path), path)


def _roles(*configs: Fields) -> dict[str, str]:
    """Role (bos, eos, pad, unk) -> text of its token; the first file with the role wins."""
    roles: dict[str, str] = {}
    for config in configs:
        for role in _ROLES:
            token = config.get(f"{role}_token")
            if isinstance(token, Mapping):
                token = token.get("content")
            if token is None:
                continue
            if not isinstance(token, str):
                raise config.error(f"{role}_token", f"must be text, not {token!r}")
            roles.setdefault(role, token)
    return roles


def _with_added_tokens(vocabulary: Vocabulary, config: Fields) -> Vocabulary:
    """Make user-defined pieces of tokenizer.model that tokenizer_config.json lists as special (turn markers) control
    tokens. Tokens beyond the model's pieces are of other modalities and ignored."""
    added = config.sub("added_tokens_decoder")
    types = list(vocabulary.types)
    for key, token in added.values.items():
        if not isinstance(token, Mapping):
            raise added.error(key, f"must be an object, not {token!r}")
        index = int(key) if str(key).isdecimal() else len(types)
        if index < len(types) and token.get("special") and token.get("content") == vocabulary.pieces[index]:
            types[index] = CONTROL
    return replace(vocabulary, types=tuple(types))
