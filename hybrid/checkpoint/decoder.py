"""Common parts of all families' files: tensors of a layer, kinds of layers, unsupported fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import MAX_LAYERS, HParams, LayerParams
from hybrid.core.names import in_layer, layer_of, stem_of

Shape = tuple[int, ...]

LOCAL_THETA, GLOBAL_THETA = 1e4, 1e6

# GGUF's name -> Hugging Face's, both without `.weight`.
IN_LAYER = {
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
AROUND = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
IN_LAYER_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
AROUND_INPUTS = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
"""Names of models with per-layer embeddings."""
SCALE = ".scale"
"""End of vectors' names that have no `.weight`."""
OF_SHARING = ("attn_k", "attn_v", "attn_k_norm")
"""Unused tensors of layers that read another layer's KV cache."""


def block(hp: HParams, layer: LayerParams) -> dict[str, Shape]:
    """Attention and feed-forward of a layer: stems and shapes [outputs, inputs], in file order."""
    q, kv = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    found: dict[str, Shape] = {
        "attn_norm": (hp.hidden,),
        "attn_q": (q, hp.hidden),
        "attn_k": (kv, hp.hidden),
        "attn_v": (kv, hp.hidden),
        "attn_q_norm": (layer.head_dim,),
        "attn_k_norm": (layer.head_dim,),
        "attn_output": (hp.hidden, q),
        "post_attention_norm": (hp.hidden,),
        "ffn_norm": (hp.hidden,),
        "ffn_gate": (layer.ffn, hp.hidden),
        "ffn_up": (layer.ffn, hp.hidden),
        "ffn_down": (hp.hidden, layer.ffn),
        "post_ffw_norm": (hp.hidden,),
    }
    if layer.k_as_v:
        del found["attn_v"]
    return found


def inputs_before(hp: HParams) -> dict[str, Shape]:
    """Tensors before the layers that compute per-layer embeddings; empty without them."""
    width = hp.n_layers * hp.per_layer_dim
    if not width:
        return {}
    table: dict[str, Shape] = {"per_layer_token_embd": (hp.per_layer_vocab, width)} if hp.per_layer_vocab else {}
    return {**table, "per_layer_model_proj": (width, hp.hidden), "per_layer_proj_norm": (hp.per_layer_dim,)}


def inputs_in_layer(hp: HParams) -> dict[str, Shape]:
    """Tensors of a layer that apply its per-layer embedding."""
    if not hp.per_layer_dim:
        return {}
    return {"inp_gate": (hp.per_layer_dim, hp.hidden), "proj": (hp.hidden, hp.per_layer_dim), "post_norm": (hp.hidden,)}


def owned(layer: LayerParams, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Remove unused tensors of a layer that reads another layer's KV cache."""
    return {stem: shape for stem, shape in shapes.items() if layer.kv_from is None or stem not in OF_SHARING}


def dead(hp: HParams) -> dict[str, Shape]:
    """Unused tensors that files may have in layers that read another layer's KV cache."""
    sharing = [(i, layer) for i, layer in enumerate(hp.layers) if layer.kv_from is not None]
    shapes = ((i, stem, shape) for i, layer in sharing for stem, shape in block(hp, layer).items())
    return {in_layer(i, f"{stem}.weight"): shape for i, stem, shape in shapes if stem in OF_SHARING}


def whole(hp: HParams, before: Mapping[str, Shape], layers: Sequence[Mapping[str, Shape]]) -> dict[str, Shape]:
    """Every tensor by GGUF name, in file order: the embedding, `before`, the layers' (by stem), the rest."""
    out: dict[str, Shape] = {"token_embd.weight": (hp.vocab, hp.hidden)}
    out |= {f"{stem}.weight": shape for stem, shape in before.items()}
    for index, layer in enumerate(layers):
        out |= {in_layer(index, stem if stem.endswith(SCALE) else f"{stem}.weight"): s for stem, s in layer.items()}
    out["output_norm.weight"] = (hp.hidden,)
    if not hp.tied:
        out["output.weight"] = (hp.vocab, hp.hidden)
    return out


def hf_name(
    name: str, around: Mapping[str, str] = AROUND, within: Mapping[str, str] = IN_LAYER, bare: Collection[str] = ()
) -> str:
    """`blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`; stems of `bare` have no `.weight` there."""
    layer, stem = layer_of(name), stem_of(name)
    end = "" if stem in bare else ".weight"
    return f"{around[stem]}{end}" if layer is None else f"layers.{layer}.{within[stem]}{end}"


def text_config(config: Fields) -> Fields:
    """Fields of the text model, which a multimodal config nests."""
    return config.sub("text_config") if config.get("text_config") is not None else config


def layer_count(c: Fields, key: str, *default: int) -> int:
    n = c.integer(key, *default)
    if n > MAX_LAYERS:
        raise c.error(key, f"{n} is not believable: the file is damaged")
    return n


def refuse_variants(c: Fields, family: str) -> None:
    """Refuse fields that enable unsupported arithmetic."""
    activation = c.get("hidden_activation", c.get("hidden_act", "gelu_pytorch_tanh"))
    if activation not in ("gelu_pytorch_tanh", "gelu_tanh"):
        raise c.error("hidden_activation", f"{activation!r} is not supported; known: gelu_pytorch_tanh")
    for key in ("attention_bias", "use_bidirectional_attention"):
        value = c.get(key)
        if value and value != "vision":  # applies to image tokens only
            raise c.error(key, f"{value!r} is not supported: this is a causal decoder without biases")
    refuse_attention_cap(c, family)


def refuse_attention_cap(c: Fields, family: str) -> None:
    """Refuse a cap of attention scores, which only Gemma 2 has."""
    key = "attn_logit_softcapping"
    if c.get(key):
        raise c.error(
            key,
            f"{c.get(key)!r} is not supported: {family} caps no attention scores; remove it if it came from Gemma 2",
        )


METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "gemma")
"""Values of a quantization_config's quant_method whose tensors are read (hybrid/checkpoint/compressed.py)."""


def note_config(c: Fields, config: Fields, vocab: int, defaulted: Sequence[str], family: str) -> None:
    """Add notes on defaults and ignored fields of config.json."""
    quantised = (
        config.sub("quantization_config") if c.get("quantization_config") is None else c.sub("quantization_config")
    )
    method = quantised.get("quant_method", "no quant_method")
    if quantised.values and method not in METHODS:
        c.notes.append(
            f"{c.path.name} has a quantization_config ({method}): it is left out, tensors are taken as they are stored"
        )
    note_defaults(c, defaulted, family)
    for said in dict.fromkeys(f.integer("vocab_size", vocab) for f in (c, config)):
        if said != vocab:
            c.notes.append(f"{c.path.name} says vocab_size {said}: the embedding has {vocab} rows, which count")


def note_defaults(c: Fields, defaulted: Iterable[str], family: str) -> None:
    omitted = [key for key in defaulted if c.get(key) is None and not c.is_null(key)]
    if omitted:
        c.notes.append(f"{c.path.name} omits {', '.join(omitted)}: the defaults of {family}'s config class are taken")


def linear_factor(rope: Fields) -> float:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind != "linear":
        raise rope.error("rope_type", f"{kind!r} is not supported; known: default, linear")
    return rope.number("factor")


def rope_from_hf(c: Fields) -> tuple[float, float, float]:
    """(theta of global layers, theta of local ones, linear factor of global ones)."""
    new = c.sub("rope_parameters")
    refuse_two_scalings(c, new)
    if new.get("full_attention") is not None or new.get("sliding_attention") is not None:
        full, local = new.sub("full_attention"), new.sub("sliding_attention")
        if linear_factor(local) != 1.0:
            raise c.error("rope_parameters", "scales sliding_attention layers: only full_attention may be scaled")
        return full.number("rope_theta", GLOBAL_THETA), local.number("rope_theta", LOCAL_THETA), linear_factor(full)
    old = c.sub("rope_scaling") if c.get("rope_scaling") is not None else new
    theta = old.number("rope_theta", c.number("rope_theta", GLOBAL_THETA))
    return theta, c.number("rope_local_base_freq", LOCAL_THETA), linear_factor(old)


def refuse_two_scalings(c: Fields, new: Fields) -> None:
    """Refuse rope_scaling, the older name, if it contradicts rope_parameters."""
    if c.get("rope_scaling") is None or not new.values:
        return
    full = new.sub("full_attention") if new.get("full_attention") is not None else new
    one, other = linear_factor(c.sub("rope_scaling")), linear_factor(full)
    if one != other:
        raise c.error(
            "rope_scaling", f"scales by {one:g} and rope_parameters by {other:g}: remove the one that is wrong"
        )


def rotations(hp: HParams) -> tuple[float, float, float]:
    """(theta of local layers, theta of global ones, linear factor of global ones); defaults for a missing kind."""
    local = next((layer.rope_theta for layer in hp.layers if layer.window), LOCAL_THETA)
    theta, factor = next(((x.rope_theta, x.rope_factor) for x in hp.layers if not x.window), (GLOBAL_THETA, 1.0))
    return local, theta, factor


def layers_from_hf(c: Fields, n_layers: int, period: int) -> tuple[bool, ...]:
    """Which layers are global: by layer_types, else by a period field, else every `period`-th."""
    types = c.get("layer_types")
    if types is None:
        key = next((k for k in ("sliding_window_pattern", "_sliding_window_pattern") if c.get(k) is not None), "")
        return periodic(c, key, c.integer(key) if key else period, n_layers)
    if not isinstance(types, list):
        raise c.error("layer_types", "must be a list")
    known = {"full_attention": True, "sliding_attention": False}
    wrong = next((t for t in types if not isinstance(t, str) or t not in known), None)
    if wrong is not None:
        raise c.error("layer_types", f"holds {str(wrong)[:60]!r}; known: {', '.join(known)}")
    return tuple(known[t] for t in types)


def layer_types(hp: HParams) -> list[str]:
    """layer_types of config.json."""
    return ["full_attention" if g else "sliding_attention" for g in hp.layer_is_global]


def factor_from_gguf(m: Fields) -> float:
    """Linear RoPE scaling of global layers; 1 if absent."""
    kind = m.get("rope.scaling.type", "none" if m.get("rope.scaling.factor") is None else "linear")
    if kind not in ("none", "linear"):
        raise m.error("rope.scaling.type", f"{kind!r} is not supported; known: none, linear")
    return 1.0 if kind == "none" else m.number("rope.scaling.factor")


def layers_from_gguf(m: Fields, n_layers: int, window: int, period: int) -> tuple[bool, ...]:
    """Which layers are global, by the metadata's pattern, a period or a list; all without a window."""
    key = "attention.sliding_window_pattern"
    pattern = m.get(key, period)
    if window == 0:
        if isinstance(pattern, list) and any(pattern):
            raise m.error(key, "names local layers, but attention.sliding_window is 0: one of them is wrong")
        return (True,) * n_layers
    if not isinstance(pattern, list):
        return periodic(m, key, m.integer(key, period), n_layers)
    if not all(isinstance(sliding, (bool, int)) for sliding in pattern):
        raise m.error(key, "must be a list of truth values, or a period")
    return tuple(not sliding for sliding in pattern)


def periodic(c: Fields, key: str, period: int, n_layers: int) -> tuple[bool, ...]:
    if period < 1:
        raise c.error(key, f"{period} must be positive")
    return every(period, n_layers)


def every(period: int, n_layers: int) -> tuple[bool, ...]:
    return tuple((index + 1) % period == 0 for index in range(n_layers))


def positive(c: Fields, key: str, default: float) -> float:
    value = c.number(key, default)
    if value <= 0:
        raise c.error(key, f"{value} must be positive")
    return value


def positive_sqrt(hidden: int) -> float:
    return max(hidden, 0) ** 0.5


def by_layer(c: Fields, key: str, n_layers: int, *default: int) -> list[int]:
    """A whole number for every layer: a list of them, or one for all."""
    value = c.get(key)
    if not isinstance(value, list):
        return [c.integer(key, *default)] * n_layers
    whole = [v for v in value if isinstance(v, int) and not isinstance(v, bool)]
    if len(value) != n_layers or len(whole) != len(value):
        raise c.error(key, f"must be one whole number for each of the {n_layers} layers, or one for all")
    return whole


def numbers_by_layer(c: Fields, key: str, n_layers: int) -> list[float]:
    """A list with a number for every layer; infinities are allowed."""
    value = c.get(key)
    right = isinstance(value, list) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and v == v for v in value
    )
    if not right or len(value) != n_layers:
        raise c.error(key, f"must be a list of one number for each of the {n_layers} layers")
    return [float(v) for v in value]
