"""Gemma 4 (text): hyper-parameters from both file formats and both dialects of config.json, tensor names and
shapes.

Defaults for omitted fields are those of transformers' Gemma4TextConfig. Global layers have full attention, wider heads,
partial RoPE, and possibly one projection for keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint import decoder
from hybrid.checkpoint.decoder import GLOBAL_THETA, LOCAL_THETA, Shape
from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import HParams, LayerParams, kv_sources
from hybrid.core.names import in_layer
from hybrid.core.numeric import np
from hybrid.core.units import shortest

if TYPE_CHECKING:
    from hybrid.checkpoint.look import Look

FAMILY = "Gemma 4"
PATTERN = 6  # default: one global layer in six
ROTATED = 0.25
SCALAR, FREQS = "layer_output_scale", "rope_freqs.weight"
STILL = 1e30  # divisor of frequencies that do not rotate, as in llama.cpp's converter
EMBEDDING, INPUTS = "token_embd.weight", "per_layer_token_embd.weight"

_AROUND = {**decoder.AROUND, **decoder.AROUND_INPUTS}
_EXPERTS_IN_LAYER = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_STACKED = ("ffn_gate_up_exps", "ffn_down_exps")
APART = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
"""Stacked matrices that GGUF files may hold apart: of each expert the rows of the first, then those of the second."""
_IN_LAYER = {**decoder.IN_LAYER, **decoder.IN_LAYER_INPUTS, **_EXPERTS_IN_LAYER, SCALAR: "layer_scalar"}
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
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
)
_PER_LAYER = ("head_dim", "num_key_value_heads")


def tensors(hp: HParams) -> dict[str, Shape]:
    """GGUF names and shapes [outputs, inputs], in file order."""
    own = decoder.inputs_in_layer(hp)
    layers = [decoder.owned(layer, decoder.block(hp, layer)) | _mixture(hp, layer) | own for layer in hp.layers]
    return decoder.whole(hp, decoder.inputs_before(hp), layers)


def _mixture(hp: HParams, layer: LayerParams) -> dict[str, Shape]:
    """Tensors of a layer's experts, stacked by rows; empty for a dense layer."""
    count, width = layer.n_experts, layer.expert_ffn
    if not count:
        return {}
    return {
        "ffn_gate_inp": (count, hp.hidden),
        "ffn_gate_inp.scale": (hp.hidden,),
        "ffn_gate_up_exps": (2 * count * width, hp.hidden),
        "ffn_down_exps": (count * hp.hidden, width),
        "ffn_down_exps.scale": (count,),
        "pre_ffw_norm_2": (hp.hidden,),
        "post_ffw_norm_1": (hp.hidden,),
        "post_ffw_norm_2": (hp.hidden,),
    }


def stacks(hp: HParams) -> dict[str, int]:
    """Stacked matrices: three axes in both formats. All layers with experts have as many."""
    count = max(layer.n_experts for layer in hp.layers)
    return dict.fromkeys(_STACKED, count) if count else {}


def made(hp: HParams) -> dict[str, np.ndarray]:
    """The layers' scalars, and the divisors of global layers' RoPE frequencies."""
    found = {in_layer(i, f"{SCALAR}.weight"): np.array([layer.scalar], np.float32) for i, layer in enumerate(hp.layers)}
    layer = next((x for x in hp.layers if not x.window), None)
    if layer is not None and (layer.rotated < 1 or layer.rope_factor != 1):
        rotates = np.arange(layer.head_dim // 2) < layer.rotated_pairs
        found[FREQS] = np.where(rotates, layer.rope_factor, STILL).astype(np.float32)
    return found


_BARE = (SCALAR, *_STACKED, "ffn_gate_inp.scale", "ffn_down_exps.scale")


def hf_name(name: str) -> str:
    """Hugging Face's name without prefix; empty for GGUF-only tensors."""
    return "" if name == FREQS else decoder.hf_name(name, _AROUND, _IN_LAYER, _BARE)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Common fields of local or global layers."""

    window: int
    rope_theta: float
    rotated: float = 1.0
    rope_factor: float = 1.0
    k_as_v: bool = False


def _layers(
    c: Fields,
    key: str,
    is_global: Sequence[bool],
    kinds: tuple[_Kind, _Kind],
    heads: Sequence[tuple[int, int, int]],
    ffn: Sequence[int],
    shared: int,
    look: Look,
    experts: tuple[int, int, int] = (0, 0, 0),
) -> tuple[LayerParams, ...]:
    """kinds: local, global. heads: (head_dim, n_heads, n_kv_heads) by layer. key: the field with the number of layers
    that share caches. experts: their number, how many a token uses, their width."""
    if len(is_global) != len(ffn):
        raise ValueError(
            f"layer_is_global of {len(is_global)} entries must have one entry for each of the {len(ffn)} layers"
        )
    if not all(is_global) and kinds[False].window <= 0:
        raise ValueError(
            f"window {kinds[False].window} must be positive: {len(is_global) - sum(is_global)} layers are local"
        )
    try:
        sources = kv_sources(is_global, shared)
    except ValueError as error:
        raise c.error(key, f"cannot be: {error}") from None
    found = []
    for i, (g, (head_dim, n_heads, n_kv_heads), width, source) in enumerate(
        zip(is_global, heads, ffn, sources, strict=True)
    ):
        kind = kinds[g]
        found.append(
            LayerParams(
                head_dim=head_dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                window=kind.window,
                rope_theta=kind.rope_theta,
                rope_factor=kind.rope_factor,
                rotated=kind.rotated,
                ffn=width,
                kv_from=source,
                k_as_v=kind.k_as_v,
                scalar=_scalar(c, i, look),
                n_experts=experts[0],
                experts_used=experts[1],
                expert_ffn=experts[2],
            )
        )
    return tuple(found)


def _scalar(c: Fields, layer: int, look: Look) -> float:
    name = in_layer(layer, f"{SCALAR}.weight")
    values = look.values(name)
    if values is None or len(values) != 1:
        what = "is missing" if values is None else f"has {len(values)} numbers, not one"
        raise ValueError(f"the scalar of layer {layer} ({hf_name(name)}; GGUF: {name}) {what}")
    return float(values[0])


# ------------------------------------------------------------------------------------------------------------ Hugging
# Face
def hparams_from_hf(config: Fields, look: Look) -> HParams:
    """config.json of Gemma4ForCausalLM, or of a multimodal model with its `text_config`; heads of global layers by
    `per_layer_config`, or by `global_head_dim` and `num_global_key_value_heads`."""
    return layers_from_hf(config, look)


def layers_from_hf(config: Fields, look: Look, plain: bool = False) -> HParams:
    """plain: ignore fields of shared caches and per-layer embeddings."""
    c, vocab = decoder.text_config(config), look.rows(EMBEDDING)
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    experts = _experts(c, keys) if c.truth("enable_moe_block", False) else (0, 0, 0)
    decoder.refuse_variants(c, FAMILY)
    n_layers, hidden = decoder.layer_count(c, "num_hidden_layers", 30), c.integer("hidden_size", 2304)
    decoder.note_config(c, config, vocab, _DEFAULTED, FAMILY)
    is_global = decoder.layers_from_hf(c, n_layers, PATTERN)
    if len(is_global) != n_layers:
        what = f"layer_is_global of {len(is_global)} entries must have one entry for each of the {n_layers} layers"
        raise c.error("layer_types", what)
    is_global = (*is_global[:-1], True)  # the last layer is always global, as in transformers
    shared = 0 if plain else c.integer("num_kv_shared_layers", 0)
    same = c.truth("attention_k_eq_v", False)
    ffn = decoder.by_layer(c, "intermediate_size", n_layers, 9216)
    if c.truth("use_double_wide_mlp", False):
        ffn = [width * (2 if i >= n_layers - shared else 1) for i, width in enumerate(ffn)]
    window = 0 if c.is_null("sliding_window") else c.integer("sliding_window", 512)
    local, global_ = _rope_from_hf(c)
    none = plain or c.is_null("hidden_size_per_layer_input")
    inputs = 0 if none else c.integer("hidden_size_per_layer_input", 256)
    kinds = replace(local, window=window), replace(global_, k_as_v=same)
    heads = _heads_from_hf(c, is_global, same)
    _one_branch(c, inputs, experts)
    return HParams(
        family="gemma4",
        hidden=hidden,
        vocab=vocab,
        context_length=c.integer("max_position_embeddings", 131072),
        layers=_layers(c, "num_kv_shared_layers", is_global, kinds, heads, ffn, shared, look, experts),
        attention_scale=1.0,
        eps=c.number("rms_norm_eps", 1e-6),
        softcap=c.number("final_logit_softcapping", 0.0),
        embed_scale=decoder.positive_sqrt(hidden),
        tied=c.truth("tie_word_embeddings", config.truth("tie_word_embeddings", True)),
        per_layer_dim=inputs,
        per_layer_vocab=look.rows(INPUTS) if inputs else 0,
    )


def _experts(c: Fields, keys: Sequence[str]) -> tuple[int, int, int]:
    """Number of experts, how many a token uses, their width."""
    found = []
    for key in keys:
        found.append(c.integer(key))
        if found[-1] < 1:
            raise c.error(key, f"{found[-1]} must be positive in a mixture of experts")
    count, used, width = found
    if used > count:
        raise c.error(keys[1], f"{used} is more than the {count} experts")
    return count, used, width


def _one_branch(c: Fields, inputs: int, experts: tuple[int, int, int]) -> None:
    if inputs and experts[0]:
        raise c.error("hidden_size_per_layer_input", f"is {inputs}, beside {experts[0]} experts: no model has both")


def _heads_from_hf(c: Fields, is_global: Sequence[bool], same: bool) -> list[tuple[int, int, int]]:
    """(head_dim, n_heads, n_kv_heads) of every layer."""
    head_dim, n_heads = c.integer("head_dim", 256), c.integer("num_attention_heads", 8)
    n_kv_heads = c.integer("num_key_value_heads", 4)
    if c.get("per_layer_config") is None:
        wide = c.integer("global_head_dim", 512)
        # transformers uses this field only if keys are values too.
        fewer = c.integer("num_global_key_value_heads", n_kv_heads) if same else n_kv_heads
        return [(wide, n_heads, fewer) if g else (head_dim, n_heads, n_kv_heads) for g in is_global]
    own = c.sub("per_layer_config")
    found = [(head_dim, n_heads, n_kv_heads)] * len(is_global)
    for key in own.values:
        if not (key.isascii() and key.isdecimal()) or int(key) >= len(is_global):
            raise c.error("per_layer_config", f"names a layer {key[:20]!r}, of {len(is_global)}")
        fields = own.sub(key)
        unknown = next((k for k in fields.values if k not in _PER_LAYER), None)
        if unknown is not None:
            raise fields.error(unknown, f"is not known for one layer; known: {', '.join(_PER_LAYER)}")
        found[int(key)] = (
            fields.integer("head_dim", head_dim),
            n_heads,
            fields.integer("num_key_value_heads", n_kv_heads),
        )
    return found


def _rope_from_hf(c: Fields) -> tuple[_Kind, _Kind]:
    """Local and global layers, without windows."""
    rope = c.sub("rope_parameters")
    if c.get("rope_scaling") is not None:
        raise c.error("rope_scaling", "is not a field of Gemma 4: write rope_parameters")
    local, full = rope.sub("sliding_attention"), rope.sub("full_attention")
    if decoder.linear_factor(local) != 1.0:
        raise c.error("rope_parameters", "scales sliding_attention layers: only full_attention may be scaled")
    kind = full.get("rope_type", "default" if rope.values else "proportional")
    if kind not in ("default", "proportional"):
        raise full.error("rope_type", f"{kind!r} is not supported; known: default, proportional")
    share = full.number("partial_rotary_factor", 1.0 if rope.values else ROTATED) if kind == "proportional" else 1.0
    factor = full.number("factor", 1.0) if kind == "proportional" else 1.0
    theta = full.number("rope_theta", GLOBAL_THETA)
    return _Kind(0, local.number("rope_theta", LOCAL_THETA)), _Kind(0, theta, share, factor)


def hf_config(hp: HParams) -> Mapping[str, Any]:
    """Fields of config.json that define the arithmetic. Heads of global layers are in the older dialect if possible,
    which old releases of transformers also read."""
    base = next((x for x in hp.layers if x.window), hp.layers[0])
    wide = next((x for x in hp.layers if not x.window), base)
    shared = hp.n_layers - hp.n_kv_layers
    own, sharing = hp.layers[: hp.n_kv_layers], hp.layers[hp.n_kv_layers :]
    double = bool(sharing) and all(x.ffn == 2 * own[0].ffn for x in sharing)
    plain = all(x.ffn == own[0].ffn for x in (own if double else hp.layers))
    fewer = wide.n_kv_heads != base.n_kv_heads
    regular = all(
        (x.head_dim, x.n_kv_heads) == (y.head_dim, y.n_kv_heads)
        for x in hp.layers
        for y in [base if x.window else wide]
    )
    heads: dict[str, Any]
    if regular and (wide.k_as_v or not fewer):
        heads = {"global_head_dim": wide.head_dim, "num_global_key_value_heads": wide.n_kv_heads if fewer else None}
    else:
        differ = {
            str(i): x for i, x in enumerate(hp.layers) if (x.head_dim, x.n_kv_heads) != (base.head_dim, base.n_kv_heads)
        }
        heads = {
            "per_layer_config": {
                i: {"head_dim": x.head_dim, "num_key_value_heads": x.n_kv_heads} for i, x in differ.items()
            }
        }
    rotation: dict[str, Any] = {"rope_theta": shortest(wide.rope_theta), "rope_type": "default"}
    if wide.rotated < 1 or wide.rope_factor != 1:
        rotation |= {"rope_type": "proportional", "partial_rotary_factor": shortest(wide.rotated)}
    if wide.rope_factor != 1:
        rotation["factor"] = shortest(wide.rope_factor)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": hp.vocab,
        "vocab_size_per_layer_input": hp.per_layer_vocab or hp.vocab,
        "hidden_size": hp.hidden,
        "hidden_size_per_layer_input": hp.per_layer_dim,
        "intermediate_size": own[0].ffn if plain else [x.ffn for x in hp.layers],
        "use_double_wide_mlp": double and plain,
        "num_hidden_layers": hp.n_layers,
        "num_attention_heads": base.n_heads,
        "num_key_value_heads": base.n_kv_heads,
        "head_dim": base.head_dim,
        **heads,
        "attention_k_eq_v": wide.k_as_v,
        "num_kv_shared_layers": shared,
        "max_position_embeddings": hp.context_length,
        "sliding_window": hp.window or None,
        "layer_types": decoder.layer_types(hp),
        "rope_parameters": {
            "full_attention": rotation,
            "sliding_attention": {"rope_theta": shortest(base.rope_theta), "rope_type": "default"},
        },
        "rms_norm_eps": shortest(hp.eps),
        "final_logit_softcapping": shortest(hp.softcap) or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "enable_moe_block": bool(base.n_experts),
        "num_experts": base.n_experts or None,
        "top_k_experts": base.experts_used or None,
        "moe_intermediate_size": base.expert_ffn or None,
        "tie_word_embeddings": hp.tied,
        "use_cache": True,
    }


# ---------------------------------------------------------------------------------------------------------------------
# GGUF
def hparams_from_gguf(metadata: Fields, look: Look) -> HParams:
    """Metadata of architecture gemma4, as llama.cpp's and Ollama's converters write it."""
    return layers_from_gguf(metadata.under("gemma4."), look)


def layers_from_gguf(m: Fields, look: Look, plain: bool = False, share: float | None = None) -> HParams:
    """m: the metadata under the architecture's name; plain: as of layers_from_hf; share: of the pairs that global layers
    rotate in files without divisors (default: all, with a note)."""
    vocab = look.rows(EMBEDDING)
    keys = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    experts = _experts(m, keys) if m.integer("expert_count", 0) else (0, 0, 0)
    n_layers, hidden = decoder.layer_count(m, "block_count"), m.integer("embedding_length")
    decoder.refuse_attention_cap(m, FAMILY)
    wide = m.integer("attention.key_length")
    narrow = m.integer("attention.key_length_swa", wide)
    for end, size in (("", wide), ("_swa", narrow)):
        if m.integer(f"attention.value_length{end}", size) != size:
            raise m.error(f"attention.value_length{end}", f"must equal attention.key_length{end} {size}")
    window = m.integer("attention.sliding_window")
    is_global = decoder.layers_from_gguf(m, n_layers, window, PATTERN)
    n_heads = decoder.by_layer(m, "attention.head_count", n_layers)
    n_kv_heads = decoder.by_layer(m, "attention.head_count_kv", n_layers)
    if len(is_global) != n_layers:
        raise m.error(
            "attention.sliding_window_pattern", f"layer_is_global of {len(is_global)} entries, for {n_layers} layers"
        )
    rotated, factor = (share, 1.0) if share and not look.has(FREQS) else _rotated(m, look, wide)
    owners = [i for i in range(n_layers) if is_global[i] and look.has(in_layer(i, "attn_k.weight"))]
    same = bool(owners) and not look.has(in_layer(owners[0], "attn_v.weight"))
    inputs = 0 if plain else m.integer("embedding_length_per_layer_input", 0)
    kinds = (
        _Kind(window, m.number("rope.freq_base_swa", LOCAL_THETA)),
        _Kind(0, m.number("rope.freq_base", GLOBAL_THETA), rotated, factor, same),
    )
    heads = [(wide if g else narrow, q, kv) for g, q, kv in zip(is_global, n_heads, n_kv_heads, strict=True)]
    ffn = decoder.by_layer(m, "feed_forward_length", n_layers)
    shared = 0 if plain else m.integer("attention.shared_kv_layers", 0)
    _one_branch(m, inputs, experts)
    return HParams(
        family="gemma4",
        hidden=hidden,
        vocab=vocab,
        context_length=m.integer("context_length"),
        layers=_layers(m, "attention.shared_kv_layers", is_global, kinds, heads, ffn, shared, look, experts),
        attention_scale=1.0,
        eps=m.number("attention.layer_norm_rms_epsilon", 1e-6),
        softcap=m.number("final_logit_softcapping", 0.0),
        embed_scale=decoder.positive_sqrt(hidden),
        tied=not look.has("output.weight"),
        per_layer_dim=inputs,
        per_layer_vocab=look.rows(INPUTS) if inputs else 0,
    )


def _rotated(m: Fields, look: Look, head_dim: int) -> tuple[float, float]:
    """(fraction of rotated pairs in global layers, divisor of their frequencies), from the file's divisors."""
    divisors = look.values(FREQS, finite=False)
    if divisors is None:
        m.notes.append(f"{FREQS} is absent: global layers rotate whole heads")
        return 1.0, 1.0
    rotates = divisors < STILL / 10
    count = int(rotates.sum())
    right = (
        len(divisors) == head_dim // 2
        and count > 0
        and bool(rotates[:count].all())
        and bool((divisors[:count] > 0).all())
    )
    if not right or len(set(divisors[:count].tolist())) > 1:
        raise ValueError(
            f"{FREQS} must have one divisor for each of the {head_dim // 2} pairs of a head: one number for the first "
            f"ones, {STILL:g} for the rest"
        )
    return count / len(divisors), float(divisors[0])


def gguf_fields(hp: HParams) -> Mapping[str, Any]:
    """The metadata from which `hparams_from_gguf`, and llama.cpp, read the same model."""
    local = next((x for x in hp.layers if x.window), hp.layers[0])
    wide = next((x for x in hp.layers if not x.window), hp.layers[0])

    def one_or_each(values: Sequence[int]) -> int | list[int]:
        return values[0] if len(set(values)) == 1 else list(values)

    experts = {
        "expert_count": local.n_experts,
        "expert_used_count": local.experts_used,
        "expert_feed_forward_length": local.expert_ffn,
    }
    return {
        **(experts if local.n_experts else {}),
        "context_length": hp.context_length,
        "embedding_length": hp.hidden,
        "block_count": hp.n_layers,
        "feed_forward_length": one_or_each([x.ffn for x in hp.layers]),
        "attention.head_count": one_or_each([x.n_heads for x in hp.layers]),
        "attention.head_count_kv": one_or_each([x.n_kv_heads for x in hp.layers]),
        "attention.key_length": wide.head_dim,
        "attention.value_length": wide.head_dim,
        "attention.key_length_swa": local.head_dim,
        "attention.value_length_swa": local.head_dim,
        "attention.layer_norm_rms_epsilon": float(hp.eps),
        "attention.sliding_window": hp.window,
        "attention.sliding_window_pattern": [not g for g in hp.layer_is_global],
        "attention.shared_kv_layers": hp.n_layers - hp.n_kv_layers,
        "embedding_length_per_layer_input": hp.per_layer_dim,
        "rope.freq_base": float(wide.rope_theta),
        "rope.freq_base_swa": float(local.rope_theta),
        "rope.dimension_count": wide.head_dim,
        "rope.dimension_count_swa": local.head_dim,
        "final_logit_softcapping": float(hp.softcap),
    }
