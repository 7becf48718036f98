"""EmbeddingGemma: Gemma 3's layers with attention to both sides, then mean pooling and two matrices. The window of its
local layers counts positions to one side, the row's own included: half of what files say, and 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid.checkpoint import gemma3
from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.decoder import AROUND, Shape
from hybrid.checkpoint.decoder import hf_name as in_gemma3
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.look import Look
from hybrid.core.hparams import HParams

FAMILY = "gemma-embedding"
BOTH_SIDES = "use_bidirectional_attention"
EMBEDDING, DENSE = "token_embd.weight", ("dense_2.weight", "dense_3.weight")
MODULES = {"dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"}
"""GGUF's stem -> Hugging Face's folder and tensor, as hybrid/checkpoint/sentence.py names them."""
MEAN = 1
"""Value of GGUF's pooling_type."""

_QUERY, _DOCUMENT = "task: {} | query: ".format, "title: none | text: "
PROMPTS = {
    "query": _QUERY("search result"),
    "document": _DOCUMENT,
    "BitextMining": _QUERY("search result"),
    "Clustering": _QUERY("clustering"),
    "Classification": _QUERY("classification"),
    "InstructionRetrieval": _QUERY("code retrieval"),
    "MultilabelClassification": _QUERY("classification"),
    "PairClassification": _QUERY("sentence similarity"),
    "Reranking": _QUERY("search result"),
    "Retrieval": _QUERY("search result"),
    "Retrieval-query": _QUERY("search result"),
    "Retrieval-document": _DOCUMENT,
    "STS": _QUERY("sentence similarity"),
    "Summarization": _QUERY("summarization"),
}
"""Task -> text before an input, as published beside the model: GGUF files lack them."""


def tensors(hp: HParams) -> dict[str, Shape]:
    """GGUF names and shapes [outputs, inputs], in file order."""
    return gemma3.tensors(hp) | dict(zip(DENSE, ((hp.dense, hp.hidden), (hp.dimensions, hp.dense)), strict=True))


def hf_name(name: str) -> str:
    return in_gemma3(name, AROUND | MODULES)


def hparams_from_hf(config: Fields, look: Look) -> HParams:
    """config.json of Gemma3TextModel, in a sentence-transformers folder."""
    plain = {key: value for key, value in config.values.items() if key != BOTH_SIDES}
    same = Fields(plain, config.path, notes=config.notes)
    return _embedding(gemma3.hparams_from_hf(same, look.rows(EMBEDDING)), look)


def hparams_from_gguf(metadata: Fields, look: Look) -> HParams:
    """Metadata of architecture gemma-embedding, as llama.cpp's converter writes it."""
    check_pooling(metadata.under(f"{FAMILY}."))
    return _embedding(gemma3.hparams_from_gguf(metadata, look.rows(EMBEDDING), True, FAMILY), look)


def check_pooling(m: Fields) -> None:
    """CheckpointError for other pooling than the mean. m: the metadata under the architecture's name."""
    if m.integer("pooling_type", MEAN) != MEAN:
        raise m.error("pooling_type", f"{m.get('pooling_type')!r} is not supported; known: {MEAN} (mean)")


def gguf_fields(hp: HParams) -> Mapping[str, Any]:
    """The metadata from which `hparams_from_gguf`, and llama.cpp, read the same model."""
    whole = replace(hp, layers=tuple(replace(x, window=2 * (x.window - 1) if x.window else 0) for x in hp.layers))
    dense = {"dense_2_feat_in": hp.hidden, "dense_2_feat_out": hp.dense}
    dense |= {"dense_3_feat_in": hp.dense, "dense_3_feat_out": hp.dimensions}
    return {**gemma3.gguf_fields(whole), "pooling_type": MEAN, **dense}


def hf_config(hp: HParams) -> Mapping[str, Any]:
    raise CheckpointError(
        f"an embedding model of {hp.dimensions} dimensions is written as GGUF only: name a .gguf file"
    )


def _embedding(hp: HParams, look: Look) -> HParams:
    """A Gemma 3 with `dense`, and windows to each side."""
    dense = look.height(DENSE[0])
    if dense is None:
        raise CheckpointError(
            f"{look.path}: tensor {DENSE[0]} is missing: without the matrices after pooling its embeddings would be "
            "others; convert the original again, with them (--sentence-transformers-dense-modules)"
        )
    layers = tuple(replace(x, window=x.window // 2 + 1 if x.window else 0) for x in hp.layers)
    return replace(hp, family=FAMILY, layers=layers, dimensions=hp.hidden, dense=dense)
