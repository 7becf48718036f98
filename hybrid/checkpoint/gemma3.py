"""Gemma 3 (text): hyper-parameters from both file formats, tensor names and shapes.

Defaults for omitted fields are those of transformers' Gemma3TextConfig (the published multimodal files rely on
them) and of llama.cpp's reader for GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import HParams

PATTERN = 6  # one global layer in six, unless the file says otherwise
LOCAL_THETA = 1e4
LAYERS_27B = 62
MAX_LAYERS = 10_000  # a damaged count must not make lists that fill the memory
LONG_CONTEXT, LONG_FACTOR = 131072, 8.0  # files without rope.scaling.* whose model nevertheless was trained with it

_DEFAULTED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "sliding_window", "query_pre_attn_scalar", "rms_norm_eps",
)  # fmt: skip
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLOBAL = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}


def tensors(hp: HParams) -> dict[str, tuple[int, ...]]:
    """GGUF names and shapes [outputs, inputs], in file order."""
    q, kv = hp.n_heads * hp.head_dim, hp.n_kv_heads * hp.head_dim
    layer = {
        "attn_norm": (hp.hidden,),
        "attn_q": (q, hp.hidden),
        "attn_k": (kv, hp.hidden),
        "attn_v": (kv, hp.hidden),
        "attn_q_norm": (hp.head_dim,),
        "attn_k_norm": (hp.head_dim,),
        "attn_output": (hp.hidden, q),
        "post_attention_norm": (hp.hidden,),
        "ffn_norm": (hp.hidden,),
        "ffn_gate": (hp.ffn, hp.hidden),
        "ffn_up": (hp.ffn, hp.hidden),
        "ffn_down": (hp.hidden, hp.ffn),
        "post_ffw_norm": (hp.hidden,),
    }
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (hp.vocab, hp.hidden)}
    for index in range(hp.n_layers):
        out |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    out["output_norm.weight"] = (hp.hidden,)
    if not hp.tied:
        out["output.weight"] = (hp.vocab, hp.hidden)
    return out


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.weight"
    _, index, part = stem.split(".")
    return f"layers.{index}.{_PER_LAYER[part]}.weight"


def hparams_from_hf(config: Fields, vocab: int) -> HParams:
    """config.json of Gemma3ForCausalLM, or of the multimodal model with its `text_config`; old and new dialect."""
    c = config.sub("text_config") if config.get("text_config") is not None else config
    _refuse_variants(c)
    quantised = config.sub("quantization_config") if c.get("quantization_config") is None else c.sub("quantization_config")
    if quantised.values:
        method = quantised.get("quant_method", "no quant_method")
        c.notes.append(f"{c.path.name} has a quantization_config ({method}): it is left out, tensors are taken as they are stored")
    n_layers, hidden = _layer_count(c, "num_hidden_layers", 26), c.integer("hidden_size", 2304)
    theta_global, theta_local, factor = _rope_from_hf(c)
    omitted = [key for key in _DEFAULTED if c.get(key) is None and not c.is_null(key)]
    if omitted:
        c.notes.append(f"{c.path.name} omits {', '.join(omitted)}: the defaults of Gemma 3's config class are taken")
    if c.get("rope_scaling") is c.get("rope_parameters") is None and not c.is_null("rope_scaling"):
        c.notes.append(f"{c.path.name} says nothing of RoPE scaling: none is taken, as its config class has it")
    for said in dict.fromkeys(f.integer("vocab_size", vocab) for f in (c, config)):
        if said != vocab:
            c.notes.append(f"{c.path.name} says vocab_size {said}: the embedding has {vocab} rows, which count")
    return HParams(
        family="gemma3",
        n_layers=n_layers,
        hidden=hidden,
        ffn=c.integer("intermediate_size", 9216),
        n_heads=c.integer("num_attention_heads", 8),
        n_kv_heads=c.integer("num_key_value_heads", 4),
        head_dim=c.integer("head_dim", 256),
        vocab=vocab,
        context_length=c.integer("max_position_embeddings", 131072),
        window=0 if c.is_null("sliding_window") else c.integer("sliding_window", 4096),
        layer_is_global=_layers_from_hf(c, n_layers),
        rope_theta_global=theta_global,
        rope_theta_local=theta_local,
        rope_factor=factor,
        attention_scale=_positive(c, "query_pre_attn_scalar", 256.0) ** -0.5,
        eps=c.number("rms_norm_eps", 1e-6),
        softcap=c.number("final_logit_softcapping", 0.0),
        embed_scale=_positive_sqrt(hidden),
        tied=c.truth("tie_word_embeddings", config.truth("tie_word_embeddings", True)),
    )


def _layer_count(c: Fields, key: str, *default: int) -> int:
    n = c.integer(key, *default)
    if n > MAX_LAYERS:
        raise c.error(key, f"{n} is not believable: the file is damaged")
    return n


def _refuse_variants(c: Fields) -> None:
    """Fields that would change the arithmetic in ways that no operation here computes."""
    activation = c.get("hidden_activation", c.get("hidden_act", "gelu_pytorch_tanh"))
    if activation not in ("gelu_pytorch_tanh", "gelu_tanh"):
        raise c.error("hidden_activation", f"{activation!r} is not supported; known: gelu_pytorch_tanh")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if c.get(key):
            raise c.error(key, f"{c.get(key)!r} is not supported: this is a causal decoder without biases")
    _refuse_attention_cap(c)


def _refuse_attention_cap(c: Fields) -> None:
    """Gemma 2 caps the scores of attention, Gemma 3 does not."""
    key = "attn_logit_softcapping"
    if c.get(key):
        raise c.error(key, f"{c.get(key)!r} is not supported: Gemma 3 caps no attention scores; remove it if it came from Gemma 2")


def _rope_from_hf(c: Fields) -> tuple[float, float, float]:
    """(theta of global layers, theta of local ones, linear factor of global ones)."""
    new = c.sub("rope_parameters")
    _refuse_two_scalings(c, new)
    if new.get("full_attention") is not None or new.get("sliding_attention") is not None:
        full, local = new.sub("full_attention"), new.sub("sliding_attention")
        if _linear_factor(local) != 1.0:
            raise c.error("rope_parameters", "scales sliding_attention layers: only full_attention may be scaled")
        return full.number("rope_theta", 1e6), local.number("rope_theta", LOCAL_THETA), _linear_factor(full)
    old = c.sub("rope_scaling") if c.get("rope_scaling") is not None else new
    theta = old.number("rope_theta", c.number("rope_theta", 1e6))
    return theta, c.number("rope_local_base_freq", LOCAL_THETA), _linear_factor(old)


def _refuse_two_scalings(c: Fields, new: Fields) -> None:
    """rope_scaling, the older name, beside rope_parameters: they may say the same."""
    if c.get("rope_scaling") is None or not new.values:
        return
    full = new.sub("full_attention") if new.get("full_attention") is not None else new
    one, other = _linear_factor(c.sub("rope_scaling")), _linear_factor(full)
    if one != other:
        raise c.error("rope_scaling", f"scales by {one:g} and rope_parameters by {other:g}: remove the one that is wrong")


def _linear_factor(rope: Fields) -> float:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind != "linear":
        raise rope.error("rope_type", f"{kind!r} is not supported; known: default, linear")
    return rope.number("factor")


def _layers_from_hf(c: Fields, n_layers: int) -> tuple[bool, ...]:
    types = c.get("layer_types")
    if types is None:
        key = next((k for k in ("sliding_window_pattern", "_sliding_window_pattern") if c.get(k) is not None), "")
        return _periodic(c, key, c.integer(key) if key else PATTERN, n_layers)
    if not isinstance(types, list):
        raise c.error("layer_types", "must be a list")
    known = {"full_attention": True, "sliding_attention": False}
    wrong = next((t for t in types if not isinstance(t, str) or t not in known), None)
    if wrong is not None:
        raise c.error("layer_types", f"holds {str(wrong)[:60]!r}; known: {', '.join(known)}")
    return tuple(known[t] for t in types)


def _periodic(c: Fields, key: str, period: int, n_layers: int) -> tuple[bool, ...]:
    if period < 1:
        raise c.error(key, f"{period} must be positive")
    return _every(period, n_layers)


def _every(period: int, n_layers: int) -> tuple[bool, ...]:
    return tuple((index + 1) % period == 0 for index in range(n_layers))


def hparams_from_gguf(metadata: Fields, vocab: int, tied: bool) -> HParams:
    """Metadata of architecture gemma3, as llama.cpp's and Ollama's converters write it."""
    m = metadata.under("gemma3.")
    n_layers, hidden = _layer_count(m, "block_count"), m.integer("embedding_length")
    n_heads = m.integer("attention.head_count")
    head_dim, context = m.integer("attention.key_length"), m.integer("context_length")
    if m.integer("attention.value_length", head_dim) != head_dim:
        raise m.error("attention.value_length", f"must equal attention.key_length {head_dim}")
    _refuse_attention_cap(m)
    key = "attention.sliding_window"
    if m.get(key) is None:
        raise m.error(key, "is missing: every Gemma 3 has local layers, which would be computed as global ones; convert the "
                      "original again, or write 0 where all layers are global")  # fmt: skip
    window = m.integer(key)
    if m.integer("vocab_size", vocab) != vocab:
        m.notes.append(f"gemma3.vocab_size is {m.get('vocab_size')}: the embedding has {vocab} rows, which count")
    if m.get("attention.layer_norm_rms_epsilon") is None:
        m.notes.append("gemma3.attention.layer_norm_rms_epsilon is absent: 1e-6 is taken")
    return HParams(
        family="gemma3",
        n_layers=n_layers,
        hidden=hidden,
        ffn=m.integer("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=m.integer("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        vocab=vocab,
        context_length=context,
        window=window,
        layer_is_global=_layers_from_gguf(m, n_layers, window),
        rope_theta_global=m.number("rope.freq_base", m.number("rope.global.freq_base", 1e6)),
        rope_theta_local=m.number("rope.freq_base_swa", m.number("rope.local.freq_base", LOCAL_THETA)),
        rope_factor=_factor_from_gguf(m, context),
        attention_scale=m.number("attention.scale", _default_scale(n_layers, hidden, n_heads, head_dim)),
        eps=m.number("attention.layer_norm_rms_epsilon", 1e-6),
        softcap=m.number("final_logit_softcapping", 0.0),
        embed_scale=_positive_sqrt(hidden),
        tied=tied,
    )


def _default_scale(n_layers: int, hidden: int, n_heads: int, head_dim: int) -> float:
    """No key in use says it: 27B (62 layers) scales by hidden/heads, all others by head_dim, as llama.cpp does."""
    if min(hidden, n_heads, head_dim) <= 0:
        return 0.0  # refused with the field that is to blame
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


def _layers_from_gguf(m: Fields, n_layers: int, window: int) -> tuple[bool, ...]:
    key = "attention.sliding_window_pattern"
    pattern = m.get(key, PATTERN)
    if window == 0:
        if isinstance(pattern, list) and any(pattern):
            raise m.error(key, "names local layers, but attention.sliding_window is 0: one of them is wrong")
        return (True,) * n_layers
    if not isinstance(pattern, list):
        return _periodic(m, key, m.integer(key, PATTERN), n_layers)
    if not all(isinstance(sliding, (bool, int)) for sliding in pattern):
        raise m.error(key, "must be a list of truth values, or a period")
    return tuple(not sliding for sliding in pattern)


def gguf_fields(hp: HParams) -> Mapping[str, Any]:
    """The metadata from which `hparams_from_gguf`, and llama.cpp, read the same model."""
    default = _default_scale(hp.n_layers, hp.hidden, hp.n_heads, hp.head_dim)
    fields: dict[str, Any] = {
        "context_length": hp.context_length,
        "embedding_length": hp.hidden,
        "block_count": hp.n_layers,
        "feed_forward_length": hp.ffn,
        "attention.head_count": hp.n_heads,
        "attention.head_count_kv": hp.n_kv_heads,
        "attention.key_length": hp.head_dim,
        "attention.value_length": hp.head_dim,
        "attention.layer_norm_rms_epsilon": float(hp.eps),
        "attention.sliding_window": hp.window,
        "rope.freq_base": float(hp.rope_theta_global),
        "rope.freq_base_swa": float(hp.rope_theta_local),
    }
    periods = (p for p in range(1, hp.n_layers + 2) if hp.layer_is_global == _every(p, hp.n_layers))
    period = next(periods, None)
    fields["attention.sliding_window_pattern"] = [not g for g in hp.layer_is_global] if period is None else period
    if hp.rope_factor != 1.0:
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(hp.rope_factor)}
    elif hp.context_length >= LONG_CONTEXT:
        fields["rope.scaling.type"] = "none"
    if hp.softcap:
        fields["final_logit_softcapping"] = float(hp.softcap)
    if abs(hp.attention_scale / default - 1) > 1e-9:
        fields["attention.scale"] = float(hp.attention_scale)  # other engines do not read it: nothing else could say it
    return fields


def _positive(c: Fields, key: str, default: float) -> float:
    value = c.number(key, default)
    if value <= 0:
        raise c.error(key, f"{value} must be positive")
    return value


def _positive_sqrt(hidden: int) -> float:
    return max(hidden, 0) ** 0.5
