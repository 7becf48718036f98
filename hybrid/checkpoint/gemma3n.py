"""Gemma 3n (text): hyper-parameters from both file formats, tensor names and shapes, config.json.

Defaults for omitted fields are those of transformers' Gemma3nTextConfig, and of llama.cpp's reader for GGUF.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint import decoder
from hybrid.checkpoint.decoder import GLOBAL_THETA, LOCAL_THETA, Shape
from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import HParams, LayerParams, kv_sources
from hybrid.core.units import shortest

if TYPE_CHECKING:
    from hybrid.checkpoint.look import Look

FAMILY = "Gemma 3n"
PATTERN = 5  # default: one global layer in five
SPARSITY, SPARSE_LAYERS = 0.95, 10
OWN_CACHES = 20  # default number of layers with their own KV cache in GGUF files
SOFTCAP = 30.0
STACKS = ("altup_proj", "altup_unembd_proj")
STREAMS = 4

_AROUND = {
    **decoder.AROUND,
    **decoder.AROUND_INPUTS,
    "altup_proj": "altup_projections.*",
    "altup_unembd_proj": "altup_unembed_projections.*",
}
_IN_LAYER = {
    **decoder.IN_LAYER,
    **decoder.IN_LAYER_INPUTS,
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_DEFAULTED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "rms_norm_eps",
    "num_kv_shared_layers",
    "laurel_rank",
    "altup_num_inputs",
    "altup_active_idx",
    "hidden_size_per_layer_input",
    "activation_sparsity_pattern",
    "final_logit_softcapping",
)


def tensors(hp: HParams) -> dict[str, Shape]:
    """GGUF names and shapes [outputs, inputs], in file order; stacked matrices are concatenated by rows."""
    stack = ((hp.n_streams - 1) * hp.hidden, hp.hidden)
    before = {**decoder.inputs_before(hp), **dict.fromkeys(STACKS, stack)}
    own: dict[str, Shape] = {
        **decoder.inputs_in_layer(hp),
        "altup_router": (hp.n_streams, hp.hidden),
        "altup_router_norm": (hp.hidden,),
        "altup_predict_coef": (hp.n_streams**2, hp.n_streams),
        "altup_correct_coef": (hp.n_streams, hp.n_streams),
        "altup_correct_scale": (hp.hidden,),
        "laurel_l": (hp.laurel_rank, hp.hidden),
        "laurel_r": (hp.hidden, hp.laurel_rank),
        "laurel_post_norm": (hp.hidden,),
    }
    return decoder.whole(hp, before, [decoder.owned(layer, decoder.block(hp, layer)) | own for layer in hp.layers])


def stacks(hp: HParams) -> dict[str, int]:
    """Stem -> number of stacked matrices."""
    return dict.fromkeys(STACKS, hp.n_streams - 1)


def hf_name(name: str) -> str:
    return decoder.hf_name(name, _AROUND, _IN_LAYER, ("altup_correct_scale",))


def hparams_from_hf(config: Fields, look: Look) -> HParams:
    """config.json of Gemma3nForCausalLM, or of the multimodal model with its `text_config`."""
    c, vocab = decoder.text_config(config), look.rows("token_embd.weight")
    decoder.refuse_variants(c, FAMILY)
    if not c.truth("altup_correct_scale", True):
        raise c.error(
            "altup_correct_scale", "false is not supported: every published Gemma 3n scales the corrected stream"
        )
    n_layers, hidden = decoder.layer_count(c, "num_hidden_layers", 35), c.integer("hidden_size", 2048)
    theta_global, theta_local, factor = decoder.rope_from_hf(c)
    decoder.note_config(c, config, vocab, _DEFAULTED, FAMILY)
    kinds = decoder.layers_from_hf(c, n_layers, PATTERN)
    window = 0 if c.is_null("sliding_window") else c.integer("sliding_window", 512)
    layers = _layers(
        c,
        "num_kv_shared_layers",
        kinds,
        window,
        {
            "n_heads": c.integer("num_attention_heads", 8),
            "n_kv_heads": c.integer("num_key_value_heads", 2),
            "head_dim": c.integer("head_dim", 256),
        },
        decoder.by_layer(c, "intermediate_size", n_layers, 16384),
        _sparsity_from_hf(c, n_layers),
        c.integer("num_kv_shared_layers", 15),
        (theta_local, theta_global, factor),
    )
    return HParams(
        family="gemma3n",
        hidden=hidden,
        vocab=vocab,
        context_length=c.integer("max_position_embeddings", 32768),
        layers=layers,
        attention_scale=1.0,
        eps=c.number("rms_norm_eps", 1e-6),
        softcap=0.0 if c.is_null("final_logit_softcapping") else c.number("final_logit_softcapping", SOFTCAP),
        embed_scale=decoder.positive_sqrt(hidden),
        tied=c.truth("tie_word_embeddings", config.truth("tie_word_embeddings", True)),
        n_streams=c.integer("altup_num_inputs", STREAMS),
        altup_active=c.integer("altup_active_idx", 0),
        laurel_rank=c.integer("laurel_rank", 64),
        per_layer_dim=c.integer("hidden_size_per_layer_input", 256),
        per_layer_vocab=look.rows("per_layer_token_embd.weight"),
    )


def _layers(
    c: Fields,
    key: str,
    kinds: Sequence[bool],
    window: int,
    shape: Mapping[str, Any],
    ffn: Sequence[int],
    sparsity: Sequence[float],
    shared: int,
    rotation: tuple[float, float, float],
) -> tuple[LayerParams, ...]:
    """key: the field with the number of layers that share caches."""
    if len(kinds) != len(ffn):
        raise ValueError(
            f"layer_is_global of {len(kinds)} entries must have one entry for each of the {len(ffn)} layers"
        )
    if not all(kinds) and window <= 0:
        raise ValueError(f"window {window} must be positive: {len(kinds) - sum(kinds)} layers are local")
    try:
        sources = kv_sources(kinds, shared)
    except ValueError as error:
        raise c.error(key, f"cannot be: {error}") from None
    local, global_, factor = rotation
    return tuple(
        LayerParams(
            **shape,
            window=0 if kind else window,
            rope_theta=global_ if kind else local,
            rope_factor=factor if kind else 1.0,
            ffn=width,
            sparsity=share,
            kv_from=source,
        )
        for kind, width, share, source in zip(kinds, ffn, sparsity, sources, strict=True)
    )


def _sparsity_from_hf(c: Fields, n_layers: int) -> list[float]:
    key = "activation_sparsity_pattern"
    if c.get(key) is None:
        return _first_sparse(n_layers)
    if isinstance(c.get(key), (int, float)):
        return [c.number(key)] * n_layers
    return decoder.numbers_by_layer(c, key, n_layers)


def _first_sparse(n_layers: int) -> list[float]:
    sparse = SPARSE_LAYERS if n_layers > SPARSE_LAYERS else 0
    return [SPARSITY] * sparse + [0.0] * (n_layers - sparse)


def hparams_from_gguf(metadata: Fields, look: Look) -> HParams:
    """Metadata of architecture gemma3n, as llama.cpp's and Ollama's converters write it."""
    m, vocab = metadata.under("gemma3n."), look.rows("token_embd.weight")
    n_layers, hidden = decoder.layer_count(m, "block_count"), m.integer("embedding_length")
    head_dim = m.integer("attention.key_length") if m.get("head_dim") is None else m.integer("head_dim")
    if m.integer("attention.value_length", head_dim) != head_dim:
        raise m.error("attention.value_length", f"must equal attention.key_length {head_dim}")
    decoder.refuse_attention_cap(m, FAMILY)
    window = m.integer("attention.sliding_window")
    heads = m.integer("attention.head_count")
    shared_key = "attention.shared_kv_layers" if m.get("num_kv_shared_layers") is None else "num_kv_shared_layers"
    if m.get(shared_key) is None:
        m.notes.append(
            f"gemma3n.{shared_key} is absent: the first {OWN_CACHES} layers are taken to have caches of their own"
        )
    theta = m.number(
        "rope.freq_base_swa", m.number("rope.freq_base_local", m.number("rope.local.freq_base", LOCAL_THETA))
    )
    table = look.rows("per_layer_token_embd.weight")
    layers = _layers(
        m,
        shared_key,
        decoder.layers_from_gguf(m, n_layers, window, PATTERN),
        window,
        {"n_heads": heads, "n_kv_heads": m.integer("attention.head_count_kv", heads), "head_dim": head_dim},
        decoder.by_layer(m, "feed_forward_length", n_layers),
        _sparsity_from_gguf(m, n_layers),
        m.integer(shared_key, max(0, n_layers - OWN_CACHES)),
        (
            theta,
            m.number("rope.freq_base", m.number("rope.global.freq_base", GLOBAL_THETA)),
            decoder.factor_from_gguf(m),
        ),
    )
    return HParams(
        family="gemma3n",
        hidden=hidden,
        vocab=vocab,
        context_length=m.integer("context_length"),
        layers=layers,
        attention_scale=1.0,
        eps=m.number("attention.layer_norm_rms_epsilon", 1e-6),
        softcap=m.number("final_logit_softcapping", SOFTCAP),
        embed_scale=decoder.positive_sqrt(hidden),
        tied=not look.has("output.weight"),
        n_streams=m.integer("altup.num_inputs", STREAMS),
        altup_active=m.integer("altup.active_idx", 0),
        laurel_rank=look.height("blk.0.laurel_l.weight") or m.integer("laurel_rank"),
        per_layer_dim=m.integer("embedding_length_per_layer_input", 256),
        per_layer_vocab=table,
    )


def _sparsity_from_gguf(m: Fields, n_layers: int) -> list[float]:
    """Sparsity by layer, from thresholds in standard deviations; minus infinity for a dense layer."""
    key = "activation_sparsity_scale"
    if m.get(key) is None:
        m.notes.append(
            f"gemma3n.{key} is absent: the first {SPARSE_LAYERS} layers are taken to be sparse, as Gemma 3n was trained"
        )
        return _first_sparse(n_layers)
    scales = decoder.numbers_by_layer(m, key, n_layers)
    return [0.0 if s == -math.inf else float(f"{NormalDist().cdf(s):.6g}") for s in scales]


def gguf_fields(hp: HParams) -> Mapping[str, Any]:
    """The metadata from which `hparams_from_gguf`, and llama.cpp, read the same model."""
    local, global_, factor = decoder.rotations(hp)
    layer = hp.layers[0]
    scaling = {} if factor == 1 else {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
    return {
        **scaling,
        "context_length": hp.context_length,
        "embedding_length": hp.hidden,
        "block_count": hp.n_layers,
        "feed_forward_length": [x.ffn for x in hp.layers],
        "attention.head_count": layer.n_heads,
        "attention.head_count_kv": layer.n_kv_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "attention.layer_norm_rms_epsilon": float(hp.eps),
        "attention.sliding_window": hp.window,
        "attention.sliding_window_pattern": [not g for g in hp.layer_is_global],
        "attention.shared_kv_layers": hp.n_layers - hp.n_kv_layers,
        "rope.freq_base": float(global_),
        "rope.freq_base_swa": float(local),
        "final_logit_softcapping": float(hp.softcap),
        "altup.active_idx": hp.altup_active,
        "altup.num_inputs": hp.n_streams,
        "embedding_length_per_layer_input": hp.per_layer_dim,
        "activation_sparsity_scale": [x.sparsity_scale if x.sparsity else -math.inf for x in hp.layers],
    }


def hf_config(hp: HParams) -> Mapping[str, Any]:
    """Fields of config.json that define the arithmetic."""
    local, global_, factor = decoder.rotations(hp)
    layer = hp.layers[0]
    scaling = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": shortest(factor)}
    return {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "vocab_size": hp.vocab,
        "vocab_size_per_layer_input": hp.per_layer_vocab,
        "hidden_size": hp.hidden,
        "hidden_size_per_layer_input": hp.per_layer_dim,
        "intermediate_size": [x.ffn for x in hp.layers],
        "num_hidden_layers": hp.n_layers,
        "num_attention_heads": layer.n_heads,
        "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "num_kv_shared_layers": hp.n_layers - hp.n_kv_layers,
        "max_position_embeddings": hp.context_length,
        "sliding_window": hp.window or None,
        "layer_types": decoder.layer_types(hp),
        "rope_parameters": {
            "full_attention": {"rope_theta": shortest(global_), **scaling},
            "sliding_attention": {"rope_theta": shortest(local), "rope_type": "default"},
        },
        "activation_sparsity_pattern": [shortest(x.sparsity) for x in hp.layers],
        "altup_active_idx": hp.altup_active,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_num_inputs": hp.n_streams,
        "laurel_rank": hp.laurel_rank,
        "rms_norm_eps": shortest(hp.eps),
        "final_logit_softcapping": shortest(hp.softcap) or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": hp.tied,
        "use_cache": True,
    }
