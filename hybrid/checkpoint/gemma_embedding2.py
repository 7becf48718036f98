"""EmbeddingGemma 2 (text): Gemma 4's layers with attention to both sides and per-layer embeddings of a projection alone,
then mean pooling and one matrix.

`sliding_window` of its files counts positions to one side without the row's own: one less than the window of LayerParams.
Files are those of transformers' EmbeddingGemma2Model and EmbeddingGemma2TextModel, and GGUF files of hybrid.convert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid.checkpoint import decoder, gemma4
from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.decoder import GLOBAL_THETA, LOCAL_THETA, Shape
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.gemma_embedding import MEAN, check_pooling
from hybrid.checkpoint.look import Look
from hybrid.core.hparams import HParams

FAMILY = "gemma-embedding2"
PROJECTION = "dense_2.weight"
INPUTS_KEY = "embedding_length_per_layer_input"
_AROUND = {
    **decoder.AROUND,
    "dense_2": "embedding_projection",
    **{stem: f"ple.{name}" for stem, name in decoder.AROUND_INPUTS.items()},
}
_IN_LAYER = {
    **decoder.IN_LAYER,
    **{stem: f"ple_block.{name}" for stem, name in decoder.IN_LAYER_INPUTS.items()},
    gemma4.SCALAR: "layer_scalar",
}
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "hidden_size_per_layer_input": 512,
    "rope_parameters": {
        "full_attention": {"rope_theta": GLOBAL_THETA, "rope_type": "default"},
        "sliding_attention": {"rope_theta": LOCAL_THETA, "rope_type": "default"},
    },
}
"""Defaults of transformers' EmbeddingGemma2TextConfig."""
_WIDE = {"head_dim": 512, "num_key_value_heads": 1}
"""Heads of global layers in a config.json without per_layer_config."""


def tensors(hp: HParams) -> dict[str, Shape]:
    """GGUF names and shapes [outputs, inputs], in file order."""
    return gemma4.tensors(hp) | {PROJECTION: (hp.dimensions, hp.hidden)}


def hf_name(name: str) -> str:
    """Hugging Face's name without prefix; empty for GGUF-only tensors."""
    return "" if name == gemma4.FREQS else decoder.hf_name(name, _AROUND, _IN_LAYER, (gemma4.SCALAR,))


def hparams_from_hf(config: Fields, look: Look) -> HParams:
    """config.json of EmbeddingGemma2TextModel, or of the multimodal model with its `text_config`."""
    c = decoder.text_config(config)
    decoder.note_defaults(c, _DEFAULTS, "EmbeddingGemma 2")
    said = {key: value for key, value in c.values.items() if value is not None}
    filled = Fields({**_DEFAULTS, "num_kv_shared_layers": 0, **said}, c.path, "", c.where, c.notes)
    if filled.get("per_layer_config") is None:
        is_global = decoder.layers_from_hf(filled, decoder.layer_count(filled, "num_hidden_layers"), gemma4.PATTERN)
        wide = [i for i, g in enumerate(is_global) if g or i == len(is_global) - 1]
        filled.values = {**filled.values, "per_layer_config": {str(i): _WIDE for i in wide}}
    made = _embedding(gemma4.layers_from_hf(filled, look, plain=True), look, filled, "hidden_size_per_layer_input")
    rows = filled.integer("embedding_dim", made.dimensions)
    if rows != made.dimensions:
        raise filled.error("embedding_dim", f"{rows} is not the {made.dimensions} rows of embedding_projection")
    return made


def hparams_from_gguf(metadata: Fields, look: Look) -> HParams:
    """Metadata as `gguf_fields` has it."""
    m = metadata.under(f"{FAMILY}.")
    check_pooling(m)
    return _embedding(gemma4.layers_from_gguf(m, look, plain=True, share=1.0), look, m, INPUTS_KEY)


def gguf_fields(hp: HParams) -> Mapping[str, Any]:
    """The metadata from which `hparams_from_gguf` reads the same model."""
    fields = {k: v for k, v in gemma4.gguf_fields(hp).items() if k not in _OF_DECODERS}
    dense = {"dense_2_feat_in": hp.hidden, "dense_2_feat_out": hp.dimensions}
    return {**fields, "attention.sliding_window": max(hp.window - 1, 0), "pooling_type": MEAN, **dense}


_OF_DECODERS = ("attention.shared_kv_layers", "final_logit_softcapping")


def _embedding(hp: HParams, look: Look, c: Fields, key: str) -> HParams:
    """Gemma 4's layers with windows to each side and the per-layer inputs of field `key`."""
    dimensions = look.height(PROJECTION)
    if dimensions is None:
        raise CheckpointError(f"{look.path}: tensor {hf_name(PROJECTION)} (GGUF: {PROJECTION}) is missing")
    inputs = c.integer(key)
    if inputs < 1:
        raise c.error(key, f"{inputs} must be positive: all layers have per-layer inputs")
    layers = tuple(replace(x, window=x.window + 1 if x.window else 0) for x in hp.layers)
    return replace(hp, family=FAMILY, layers=layers, softcap=0.0, per_layer_dim=inputs, dimensions=dimensions)
