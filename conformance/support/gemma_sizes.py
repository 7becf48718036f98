"""The published sizes of Gemma 3n and Gemma 4 as their files describe them: config.json in its dialects, GGUF metadata
as llama.cpp's converter writes it. Figures: the published configs and metadata, and transformers' class defaults."""

from __future__ import annotations

import math
from typing import Any

E2B_WIDTHS = [6144] * 15 + [12288] * 20
# name: layers, hidden, ffn, heads, kv heads, of global layers, positions, window, period, sharing, inputs, tensors in a
# file
GEMMA4: dict[str, dict[str, Any]] = {
    "e2b": {
        "layers": 35,
        "hidden": 1536,
        "ffn": 6144,
        "heads": 8,
        "kv": 1,
        "wide_kv": None,
        "context": 131072,
        "window": 512,
        "period": 5,
        "sharing": 20,
        "inputs": 256,
        "tensors": 601,
        "parameters": 4647449891,
    },
    "e4b": {
        "layers": 42,
        "hidden": 2560,
        "ffn": 10240,
        "heads": 8,
        "kv": 2,
        "wide_kv": None,
        "context": 131072,
        "window": 512,
        "period": 6,
        "sharing": 18,
        "inputs": 256,
        "tensors": 720,
        "parameters": 7518069034,
    },
    "12b": {
        "layers": 48,
        "hidden": 3840,
        "ffn": 15360,
        "heads": 16,
        "kv": 8,
        "wide_kv": 1,
        "context": 262144,
        "window": 1024,
        "period": 6,
        "sharing": 0,
        "inputs": 0,
        "tensors": 667,
        "parameters": 11907350320,
    },
    "31b": {
        "layers": 60,
        "hidden": 5376,
        "ffn": 21504,
        "heads": 32,
        "kv": 16,
        "wide_kv": 4,
        "context": 262144,
        "window": 1024,
        "period": 6,
        "sharing": 0,
        "inputs": 0,
        "tensors": 833,
        "parameters": 30697345340,
    },
}
GEMMA3N: dict[str, dict[str, Any]] = {
    "e2b": {"layers": 30, "ffn": 8192, "sharing": 10, "parameters": 4456156768},
    "e4b": {"layers": 35, "ffn": 16384, "sharing": 15, "parameters": 6866696688},
}


def _global(layers: int, period: int) -> list[bool]:
    return [(i + 1) % period == 0 for i in range(layers)]


def _types(layers: int, period: int) -> list[str]:
    return ["full_attention" if g else "sliding_attention" for g in _global(layers, period)]


def gemma4_config(name: str, dialect: str) -> dict[str, Any]:
    """dialect: `published` (global_head_dim) or `by layer` (per_layer_config)."""
    s = GEMMA4[name]
    text: dict[str, Any] = {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": s["hidden"],
        "intermediate_size": s["ffn"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv"],
        "head_dim": 256,
        "max_position_embeddings": s["context"],
        "rms_norm_eps": 1e-06,
        "sliding_window": s["window"],
        "layer_types": _types(s["layers"], s["period"]),
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_k_eq_v": s["wide_kv"] is not None,
        "num_kv_shared_layers": s["sharing"],
        "use_double_wide_mlp": name == "e2b",
        "enable_moe_block": False,
        "num_experts": None,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": s["inputs"],
        "vocab_size_per_layer_input": 262144,
        "use_bidirectional_attention": "vision" if s["wide_kv"] else None,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    if dialect == "published":
        text |= {"global_head_dim": 512, "num_global_key_value_heads": s["wide_kv"]}
    else:
        wide = {"head_dim": 512, "num_key_value_heads": s["wide_kv"] or s["kv"]}
        text["per_layer_config"] = {f"{i:02}": wide for i, g in enumerate(_global(s["layers"], s["period"])) if g}
    kind = "gemma4_unified" if name == "12b" else "gemma4"
    return {
        "model_type": kind,
        "text_config": text,
        "vision_config": {"hidden_size": 768},
        "eos_token_id": [1, 106, 50],
    }


def gemma4_metadata(name: str) -> dict[str, Any]:
    s = GEMMA4[name]
    is_global = _global(s["layers"], s["period"])
    keys: dict[str, Any] = {
        "context_length": s["context"],
        "embedding_length": s["hidden"],
        "block_count": s["layers"],
        "feed_forward_length": E2B_WIDTHS if name == "e2b" else s["ffn"],
        "attention.head_count": s["heads"],
        "attention.head_count_kv": [s["wide_kv"] if g else s["kv"] for g in is_global] if s["wide_kv"] else s["kv"],
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": s["window"],
        "attention.sliding_window_pattern": [not g for g in is_global],
        "attention.shared_kv_layers": s["sharing"],
        "embedding_length_per_layer_input": s["inputs"],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256,
        "final_logit_softcapping": 30.0,
    }
    return {"general.architecture": "gemma4", **{f"gemma4.{k}": v for k, v in keys.items()}}


def gemma3n_config(name: str) -> dict[str, Any]:
    """In the dialect of 2025, as published; E4B leaves most fields to the class defaults."""
    s = GEMMA3N[name]
    text: dict[str, Any] = {
        "model_type": "gemma3n_text",
        "num_hidden_layers": s["layers"],
        "intermediate_size": [s["ffn"]] * s["layers"],
        "num_kv_shared_layers": s["sharing"],
        "layer_types": _types(s["layers"], 5),
    }
    if name == "e2b":
        text |= {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_size": 2048,
            "hidden_size_per_layer_input": 256,
            "laurel_rank": 64,
            "max_position_embeddings": 32768,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "vocab_size": 262400,
            "vocab_size_per_layer_input": 262144,
        }
    return {
        "model_type": "gemma3n",
        "text_config": text,
        "audio_config": {},
        "vision_config": {},
        "eos_token_id": [1, 106],
    }


def gemma3n_metadata(name: str, writer: str) -> dict[str, Any]:
    """writer: llama.cpp, or ollama, which renames some keys and omits some."""
    s = GEMMA3N[name]
    keys: dict[str, Any] = {
        "context_length": 32768,
        "embedding_length": 2048,
        "block_count": s["layers"],
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 512,
        "rope.freq_base": 1e6,
        "embedding_length_per_layer_input": 256,
        "altup.active_idx": 0,
        "altup.num_inputs": 4,
        "attention.sliding_window_pattern": [not g for g in _global(s["layers"], 5)],
    }
    if writer == "llama.cpp":
        keys |= {
            "feed_forward_length": [s["ffn"]] * s["layers"],
            "attention.key_length": 256,
            "attention.value_length": 256,
            "rope.freq_base_swa": 1e4,
            "final_logit_softcapping": 30.0,
            "attention.shared_kv_layers": s["sharing"],
            "activation_sparsity_scale": [1.6448536] * 10 + [-math.inf] * (s["layers"] - 10),
        }
    else:
        keys |= {
            "feed_forward_length": s["ffn"],
            "head_dim": 256,
            "rope.freq_base_local": 1e4,
            "laurel_rank": 64,
            "num_kv_shared_layers": s["sharing"],
        }
    return {"general.architecture": "gemma3n", **{f"gemma3n.{k}": v for k, v in keys.items()}}
