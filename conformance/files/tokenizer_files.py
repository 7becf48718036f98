"""One vocabulary in every file format: tokenizer.json and GGUF metadata, built as their converters do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.support.gguf_files import finish, sparse
from hybrid.checkpoint.families import tensors
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.gguf_tokenizer import gguf_tokenizer
from hybrid.checkpoint.tokenizer_json import read_tokenizer_json
from hybrid.core.hparams import HParams
from hybrid.text.tokenizer import BYTE, CONTROL, MARKERS, NORMAL, SPACE, UNKNOWN, USER_DEFINED, Tokenizer

Pieces = Sequence[tuple[str, float, int]]
"""(text, score, SentencePiece's type) by id."""


def merges_of(pieces: Pieces) -> list[tuple[str, str]]:
    """Every pair of pieces that forms a piece, best score first, longer left halves first: transformers' order."""
    ids = {p: i for i, (p, _, _) in enumerate(pieces)}
    out: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in pieces:
        if kind in (NORMAL, USER_DEFINED):
            halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            out += [(score, len(a), len(b), a, b) for a, b in halves if a in ids and b in ids]
    out.sort(key=lambda m: m[:3], reverse=True)
    return [(a, b) for _, _, _, a, b in out]


def tokenizer_json(pieces: Pieces, pairs: bool = True) -> dict[str, Any]:
    """The object that transformers' converter writes for Gemma. Pieces with real spaces stay out of added_tokens: there
    they would match text, which SentencePiece's pieces never do."""
    added = [
        {
            "id": i,
            "content": p,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED or p in MARKERS,
        }
        for i, (p, _, kind) in enumerate(pieces)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and " " not in p
    ]
    merges = merges_of(pieces)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {p: i for i, (p, _, _) in enumerate(pieces)},
            "merges": [list(m) for m in merges] if pairs else [" ".join(m) for m in merges if " " not in "".join(m)],
        },
    }


def gguf_fields(pieces: Pieces, model: str, padding: int = 0) -> dict[str, Any]:
    """tokenizer.ggml.* as converters write them. llama: from tokenizer.model (scores; user-defined pieces with real
    spaces). gpt2: from tokenizer.json, as Ollama does (merges; scores are ids; bytes are ordinary pieces)."""
    texts = [p for p, _, _ in pieces]
    types = [kind for _, _, kind in pieces]
    if model == "llama":
        types = [NORMAL if " " in p else t for p, t in zip(texts, types, strict=True)]
        texts = [p.replace(SPACE, " ") if t == USER_DEFINED else p for p, t in zip(texts, types, strict=True)]
        own: dict[str, Any] = {"scores": [s for _, s, _ in pieces] + [-10000.0] * padding}
        pad_type = 5
    else:
        special = {UNKNOWN: CONTROL, BYTE: NORMAL}
        types = [NORMAL if " " in p else special.get(t, t) for p, t in zip(texts, types, strict=True)]
        own = {
            "scores": [float(i) for i in range(len(pieces) + padding)],
            "merges": [" ".join(m) for m in merges_of(pieces) if " " not in "".join(m)],
            "eos_token_ids": [1, texts.index("<end_of_turn>")],
        }
        pad_type = USER_DEFINED
    n = len(texts)
    values = {
        "model": model,
        "pre": "default",
        "tokens": texts + [f"[PAD{n + i}]" for i in range(padding)],
        "token_type": types + [pad_type] * padding,
        **own,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def from_json(folder: Path, pieces: Pieces, pairs: bool = True) -> Tokenizer:
    """Tokenizer of a tokenizer.json written to `folder`."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json(pieces, pairs), ensure_ascii=not pairs))
    return Tokenizer(read_tokenizer_json(file), (), None, MARKERS)


def from_gguf(pieces: Pieces, model: str, padding: int = 0) -> Tokenizer:
    """Tokenizer of GGUF metadata (the values, without a file)."""
    return gguf_tokenizer(Fields(gguf_fields(pieces, model, padding), Path("m.gguf")), len(pieces) + padding)


def write_gguf(path: Path, hp: HParams, fields: dict[str, Any]) -> Path:
    """A whole model of zeros with these metadata fields beside the required ones."""
    w = sparse(path, hp)
    for key, value in fields.items():
        kinds = {bool: w.add_bool, int: w.add_uint32, str: w.add_string, list: w.add_array}
        kinds[type(value)](key, value)
    for name, shape in tensors(hp).items():
        w.add_tensor(name, np.zeros(shape, np.float32))
    finish(w)
    return path
