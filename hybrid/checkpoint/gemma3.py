"""Gemma 3 (text): hyper-parameters from both file formats, tensor names and shapes.

Defaults for omitted fields are those of transformers' Gemma3TextConfig (the published multimodal files rely on
them) and of llama.cpp's reader for GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid.checkpoint.decoder import (
    GLOBAL_THETA,
    LOCAL_THETA,
    block,
    by_layer,
    every,
    layer_count,
    layers_from_gguf,
    layers_from_hf,
    note_config,
    positive,
    positive_sqrt,
    refuse_attention_cap,
    refuse_variants,
    rope_from_hf,
    rotations,
    text_config,
    whole,
)
from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import HParams, LayerParams, alternating

PATTERN = 6  # default: one global layer in six
LAYERS_27B = 62
LONG_CONTEXT, LONG_FACTOR = 131072, 8.0  # default RoPE scaling of files without rope.scaling.*, by context
FAMILY = "Gemma 3"

_DEFAULTED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "query_pre_attn_scalar",
    "rms_norm_eps",
)


def tensors(hp: HParams) -> dict[str, tuple[int, ...]]:
    """GGUF names and shapes [outputs, inputs], in file order."""
    return whole(hp, {}, [block(hp, layer) for layer in hp.layers])


def hparams_from_hf(config: Fields, vocab: int) -> HParams:
    """config.json of Gemma3ForCausalLM, or of the multimodal model with its `text_config`; old and new dialect."""
    c = text_config(config)
    refuse_variants(c, FAMILY)
    n_layers, hidden = layer_count(c, "num_hidden_layers", 26), c.integer("hidden_size", 2304)
    theta_global, theta_local, factor = rope_from_hf(c)
    note_config(c, config, vocab, _DEFAULTED, FAMILY)
    if c.get("rope_scaling") is c.get("rope_parameters") is None and not c.is_null("rope_scaling"):
        c.notes.append(f"{c.path.name} says nothing of RoPE scaling: none is taken, as its config class has it")
    window = 0 if c.is_null("sliding_window") else c.integer("sliding_window", 4096)
    shape = {
        "ffn": c.integer("intermediate_size", 9216),
        "n_heads": c.integer("num_attention_heads", 8),
        "n_kv_heads": c.integer("num_key_value_heads", 4),
        "head_dim": c.integer("head_dim", 256),
    }
    return HParams(
        family="gemma3",
        hidden=hidden,
        vocab=vocab,
        context_length=c.integer("max_position_embeddings", 131072),
        layers=_layers(
            layers_from_hf(c, n_layers, PATTERN), n_layers, window, shape, theta_local, theta_global, factor
        ),
        attention_scale=positive(c, "query_pre_attn_scalar", 256.0) ** -0.5,
        eps=c.number("rms_norm_eps", 1e-6),
        softcap=c.number("final_logit_softcapping", 0.0),
        embed_scale=positive_sqrt(hidden),
        tied=c.truth("tie_word_embeddings", config.truth("tie_word_embeddings", True)),
    )


def _layers(
    kinds: tuple[bool, ...],
    n_layers: int,
    window: int,
    shape: dict[str, int],
    local: float,
    global_: float,
    factor: float,
) -> tuple[LayerParams, ...]:
    """Make the layers; only global ones have RoPE scaling."""
    rotations = {"rope_theta": local}, {"rope_theta": global_, "rope_factor": factor}
    return alternating(n_layers, kinds, window, shape, *rotations)


def hparams_from_gguf(metadata: Fields, vocab: int, tied: bool, family: str = "gemma3") -> HParams:
    """Metadata of architecture gemma3, or of `family` with the same fields, as llama.cpp's and Ollama's converters write
    it."""
    m = metadata.under(f"{family}.")
    n_layers, hidden = layer_count(m, "block_count"), m.integer("embedding_length")
    heads = by_layer(m, "attention.head_count", n_layers)
    n_heads = heads[0] if heads else 0
    head_dim, context = m.integer("attention.key_length"), m.integer("context_length")
    if m.integer("attention.value_length", head_dim) != head_dim:
        raise m.error("attention.value_length", f"must equal attention.key_length {head_dim}")
    refuse_attention_cap(m, FAMILY)
    key = "attention.sliding_window"
    if m.get(key) is None:
        raise m.error(
            key,
            "is missing: every Gemma 3 has local layers, which would be computed as global ones; convert the "
            "original again, or write 0 where all layers are global",
        )
    window = m.integer(key)
    if m.integer("vocab_size", vocab) != vocab:
        m.notes.append(f"{family}.vocab_size is {m.get('vocab_size')}: the embedding has {vocab} rows, which count")
    if m.get("attention.layer_norm_rms_epsilon") is None:
        m.notes.append(f"{family}.attention.layer_norm_rms_epsilon is absent: 1e-6 is taken")
    ffn = by_layer(m, "feed_forward_length", n_layers)
    n_kv = heads if m.get("attention.head_count_kv") is None else by_layer(m, "attention.head_count_kv", n_layers)
    shape = {"ffn": max(ffn, default=0), "n_heads": n_heads, "n_kv_heads": n_heads, "head_dim": head_dim}
    layers = _layers(
        layers_from_gguf(m, n_layers, window, PATTERN),
        n_layers,
        window,
        shape,
        m.number("rope.freq_base_swa", m.number("rope.local.freq_base", LOCAL_THETA)),
        m.number("rope.freq_base", m.number("rope.global.freq_base", GLOBAL_THETA)),
        _factor_from_gguf(m, context),
    )
    return HParams(
        family=family,
        hidden=hidden,
        vocab=vocab,
        context_length=context,
        layers=tuple(
            replace(layer, ffn=f, n_heads=n, n_kv_heads=kv)
            for layer, f, n, kv in zip(layers, ffn, heads, n_kv, strict=True)
        ),
        attention_scale=m.number("attention.scale", _default_scale(n_layers, hidden, n_heads, head_dim)),
        eps=m.number("attention.layer_norm_rms_epsilon", 1e-6),
        softcap=m.number("final_logit_softcapping", 0.0),
        embed_scale=positive_sqrt(hidden),
        tied=tied,
    )


def _default_scale(n_layers: int, hidden: int, n_heads: int, head_dim: int) -> float:
    """Attention scale of files without one, as in llama.cpp: 27B (62 layers) by hidden/heads, other sizes by
    head_dim."""
    if min(hidden, n_heads, head_dim) <= 0:
        return 0.0  # refused later, naming the invalid field
    return (hidden / n_heads if n_layers == LAYERS_27B else head_dim) ** -0.5


def _factor_from_gguf(m: Fields, context: int) -> float:
    kind = m.get("rope.scaling.type")
    key = "rope.scale_linear" if m.get("rope.scale_linear") is not None else "rope.scaling.factor"  # the older name
    if kind is None and m.get(key) is None:
        if context < LONG_CONTEXT:
            return 1.0
        m.notes.append(
            f"gemma3.rope.scaling is absent although context_length is {context}: global layers are scaled by 1/8, "
            "as Gemma 3 was trained"
        )
        return LONG_FACTOR
    if kind == "none":
        return 1.0
    if kind not in (None, "linear"):
        raise m.error("rope.scaling.type", f"{kind!r} is not supported; known: none, linear")
    return m.number(key)


def gguf_fields(hp: HParams) -> Mapping[str, Any]:
    """The metadata from which `hparams_from_gguf`, and llama.cpp, read the same model."""
    theta_local, theta_global, factor = rotations(hp)
    layer = hp.layers[0]
    default = _default_scale(hp.n_layers, hp.hidden, layer.n_heads, layer.head_dim)
    fields: dict[str, Any] = {
        "context_length": hp.context_length,
        "embedding_length": hp.hidden,
        "block_count": hp.n_layers,
        "feed_forward_length": _same([x.ffn for x in hp.layers]),
        "attention.head_count": _same([x.n_heads for x in hp.layers]),
        "attention.head_count_kv": _same([x.n_kv_heads for x in hp.layers]),
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "attention.layer_norm_rms_epsilon": float(hp.eps),
        "attention.sliding_window": hp.window,
        "rope.freq_base": float(theta_global),
        "rope.freq_base_swa": float(theta_local),
    }
    periods = (p for p in range(1, hp.n_layers + 2) if hp.layer_is_global == every(p, hp.n_layers))
    period = next(periods, None)
    fields["attention.sliding_window_pattern"] = [not g for g in hp.layer_is_global] if period is None else period
    if factor != 1.0:
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
    elif hp.context_length >= LONG_CONTEXT:
        fields["rope.scaling.type"] = "none"
    if hp.softcap:
        fields["final_logit_softcapping"] = float(hp.softcap)
    if abs(hp.attention_scale / default - 1) > 1e-9:
        fields["attention.scale"] = float(hp.attention_scale)  # our own key: no standard key has it
    return fields


def _same(values: list[int]) -> int | list[int]:
    """One number for all layers, if they have the same."""
    return values[0] if len(set(values)) == 1 else values
