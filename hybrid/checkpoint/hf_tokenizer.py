"""Read the tokenizer of a Hugging Face directory as transformers does: tokenizer.json, else tokenizer.model, with the
additions and special tokens of the configs beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.checkpoint.base import CheckpointError, Generation
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import exists, read_json
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.checkpoint.tokenizer_json import ROLES, AddedToken, added_token, read_tokenizer_json, with_added
from hybrid.text.tokenizer import MARKERS, Tokenizer, TokenizerError, Vocabulary

_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MASK = "<mask>"
"""transformers gives every Gemma this token, and adds it before the nameless ones."""
_LISTS = ("extra_special_tokens", "additional_special_tokens")


def hf_tokenizer(path: Path, generation: Generation, rows: int) -> Tokenizer:
    """Tokenizer of the directory `path`, for an embedding of `rows`. End-of-text tokens are from the vocabulary, from
    generation_config.json or config.json, and eos_token of tokenizer_config.json or special_tokens_map.json."""
    configs = [_fields(path / "tokenizer_config.json")]
    if configs[0].get("added_tokens_decoder") is None:  # else the older files count no more
        configs.append(_fields(path / "special_tokens_map.json"))
    named, extra = _special(configs)
    file = path / "tokenizer.json"
    if exists(file):
        whole = read_tokenizer_json(file)
    else:
        file = path / "tokenizer.model"
        if not exists(file):
            raise CheckpointError(
                f"{path / 'tokenizer.json'} and tokenizer.model are missing: fetch one of them with the checkpoint"
            )
        whole = read_sentencepiece(file)
        whole = replace(whole, add_bos=configs[0].truth("add_bos_token", whole.add_bos))
    try:
        additions = [*_additions(path, configs[0], {*named.values(), *extra}), *_missing(named, extra)]
        gemma = configs[0].text("tokenizer_class", "Gemma").startswith("Gemma")
        vocabulary = _with_special(with_added(whole, additions), named, gemma)
        if whole.merges is None and configs[0].truth("add_eos_token", False):  # else post_processor counts
            vocabulary = replace(vocabulary, after_id=vocabulary.eos_id)
        vocabulary = vocabulary.first(rows)
        return Tokenizer(vocabulary, generation.eos_ids, rows, MARKERS)
    except TokenizerError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _fields(path: Path) -> Fields:
    return Fields(read_json(path), path)


def _special(configs: list[Fields]) -> tuple[dict[str, str | None], list[str]]:
    """(name -> text of a special token, or None where a file says that there is none; texts of nameless ones)."""
    named: dict[str, str | None] = {}
    extra: list[str] = []
    for config in configs:
        for key, value in config.values.items():
            if key in _LISTS and isinstance(value, Mapping):
                named |= {name: _text(config, f"{key}.{name}", token) for name, token in value.items()}
            elif key in _LISTS and isinstance(value, list):
                extra += [_text(config, key, token) for token in value]
            elif key in _STANDARD:
                named[key] = None if value is None else _text(config, key, value)
            elif key.endswith("_token") and isinstance(value, str):  # a model's own, as image_token
                named[key] = value
    return named, extra


def _text(config: Fields, key: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise config.error(key, f"must be text, not {token!r}")
    return text


def _additions(path: Path, config: Fields, special: set[str | None]) -> Iterator[AddedToken]:
    """The tokens of tokenizer_config.json's added_tokens_decoder, by id, else of added_tokens.json."""
    if config.get("added_tokens_decoder") is None:
        file = _fields(path / "added_tokens.json")
        for text in sorted(file.values, key=lambda text: file.integer(text)):
            yield AddedToken(text, text in special)
        return
    decoder = config.sub("added_tokens_decoder")
    wrong = next((key for key in decoder.values if not (key.isascii() and key.isdecimal())), None)
    if wrong is not None:
        raise decoder.error(wrong, "must be the id of a token")
    for key in sorted(decoder.values, key=int):
        yield added_token(decoder, key, decoder.values[key])


def _missing(named: Mapping[str, str | None], extra: list[str]) -> Iterator[AddedToken]:
    """Special tokens that no list of additions need hold."""
    order = {name: n for n, name in enumerate(_STANDARD)}
    texts = (named[name] for name in sorted(named, key=lambda name: order.get(name, len(order))))
    for text in (*texts, *([_MASK, *extra] if extra else ())):
        if text:
            yield AddedToken(text, True, weak=True)


def _with_special(vocabulary: Vocabulary, named: Mapping[str, str | None], gemma: bool) -> Vocabulary:
    """Names and ids of the special tokens: as the configs have them, else Gemma's, else as the vocabulary has them.
    gemma: whether templates see names that no config gives."""
    ids = {piece: i for i, piece in reversed(list(enumerate(vocabulary.pieces)))}
    texts, roles = dict(named), {}
    for role, default in ROLES.items():
        own = getattr(vocabulary, f"{role}_id")
        if f"{role}_token" not in named:
            texts[f"{role}_token"] = default if default in ids or own is None else vocabulary.pieces[own]
        text = texts[f"{role}_token"]
        roles[f"{role}_id"] = own if text is None else ids.get(text, own)
    if vocabulary.merges is not None and vocabulary.add_bos:
        roles["bos_id"] = vocabulary.bos_id  # post_processor's
    texts.setdefault("mask_token", _MASK)
    shown = tuple((name, text) for name, text in texts.items() if text is not None and (gemma or name in named))
    return replace(vocabulary, named=shown, **roles)
