"""Make a Hugging Face model's JSON files from a checkpoint of any format."""

from __future__ import annotations

from typing import Any

from hybrid.checkpoint.base import Checkpoint
from hybrid.checkpoint.families import Family
from hybrid.core.units import shortest
from hybrid.text.tokenizer import CONTROL, UNKNOWN, USER_DEFINED

TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of chat templates by name."""
_TORCH_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def config(family: Family, source: Checkpoint, dtype: str) -> dict[str, Any]:
    """config.json. dtype: of the matrices."""
    v = source.tokenizer.vocabulary
    ids = {"bos_token_id": v.bos_id, "eos_token_id": _eos(source), "pad_token_id": v.pad_id}
    return {**family.hf_config(source.hparams), **ids, "torch_dtype": _TORCH_TYPES[dtype]}


def generation_config(source: Checkpoint) -> dict[str, Any]:
    """generation_config.json: end-of-text tokens and recommended sampling parameters."""
    v, g = source.tokenizer.vocabulary, source.generation
    greedy = g.temperature == 0
    numbers = {
        "temperature": None if greedy else g.temperature,
        "top_p": g.top_p,
        "min_p": g.min_p,
        "repetition_penalty": g.repetition_penalty,
    }
    sampling = {"top_k": g.top_k, **{k: None if n is None else shortest(n) for k, n in numbers.items()}}
    out: dict[str, Any] = {"bos_token_id": v.bos_id, "eos_token_id": _eos(source), "pad_token_id": v.pad_id}
    if greedy or any(value is not None for value in sampling.values()):
        out["do_sample"] = not greedy
    return {key: value for key, value in {**out, **sampling}.items() if value is not None}


def tokenizer_config(source: Checkpoint) -> dict[str, Any]:
    """tokenizer_config.json for a tokenizer.model."""
    v = source.tokenizer.vocabulary
    named = {"bos_token": v.bos_id, "eos_token": v.eos_id, "unk_token": v.unk_id, "pad_token": v.pad_id}
    special = (CONTROL, UNKNOWN)
    added = {
        str(i): {
            "content": piece,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": kind in special,
        }
        for i, (piece, kind) in enumerate(zip(v.pieces, v.types, strict=True))
        if kind in (*special, USER_DEFINED)
    }
    return {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": v.bos_id is not None and v.add_bos,
        "add_eos_token": v.after_id is not None,
        "clean_up_tokenization_spaces": False,
        **{key: v.pieces[i] for key, i in named.items() if i is not None},
        "added_tokens_decoder": added,
    }


def _eos(source: Checkpoint) -> int | list[int] | None:
    ids = source.generation.eos_ids
    if not ids:
        return source.tokenizer.vocabulary.eos_id
    return ids[0] if len(ids) == 1 else list(ids)
