"""Make Gemma 3's config.json from hyper-parameters, in a dialect that old and new releases of transformers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.decoder import layer_types, rotations
from hybrid.core.hparams import HParams
from hybrid.core.units import shortest


def hf_config(hp: HParams) -> Mapping[str, Any]:
    """Fields of config.json that define the arithmetic."""
    theta_local, theta_global, factor = rotations(hp)
    layer = hp.layers[0]
    if any((x.ffn, x.n_heads, x.n_kv_heads) != (layer.ffn, layer.n_heads, layer.n_kv_heads) for x in hp.layers):
        raise CheckpointError(
            "config.json of Gemma 3 has one head count and feed-forward size for all layers: write GGUF"
        )
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": hp.vocab,
        "hidden_size": hp.hidden,
        "intermediate_size": layer.ffn,
        "num_hidden_layers": hp.n_layers,
        "num_attention_heads": layer.n_heads,
        "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": hp.context_length,
        "sliding_window": hp.window or None,
        "layer_types": layer_types(hp),
        "rope_theta": shortest(theta_global),
        "rope_local_base_freq": shortest(theta_local),
        "rope_scaling": None if factor == 1 else {"rope_type": "linear", "factor": shortest(factor)},
        "query_pre_attn_scalar": _whole(hp.attention_scale**-2),
        "rms_norm_eps": shortest(hp.eps),
        "final_logit_softcapping": shortest(hp.softcap) or None,
        "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": hp.tied,
        "use_cache": True,
    }


def _whole(value: float) -> float:
    """Undo float32 rounding of a square root: the query scalar is a whole number."""
    return round(value) if abs(value - round(value)) < 1e-5 * value else value
