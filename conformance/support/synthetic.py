"""Small random checkpoints in Hugging Face layout, of any shape and in every dialect, made by the tests."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint.decoder import rotations
from hybrid.checkpoint.families import family_of, is_index
from hybrid.core.hparams import HParams, LayerParams, alternating
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import quantise
from hybrid.text.tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED

_ST_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "i32": "I32"}


def tiny(**changes: Any) -> HParams:
    """Hyper-parameters of a model of a few thousand weights; any field can be changed."""
    n_layers = changes.get("n_layers", 3)
    values: dict[str, Any] = {
        "family": "gemma3",
        "n_layers": n_layers,
        "hidden": 64,
        "ffn": 96,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "vocab": 320,
        "context_length": 256,
        "window": 8,
        "layer_is_global": tuple((i + 1) % 2 == 0 for i in range(n_layers)),
        "rope_theta_global": 1e6,
        "rope_theta_local": 1e4,
        "rope_factor": 1.0,
        "attention_scale": changes.get("head_dim", 16) ** -0.5,
        "eps": 1e-6,
        "softcap": 0.0,
        "embed_scale": changes.get("hidden", 64) ** 0.5,
        "tied": True,
    }
    return gemma3_hparams(**(values | changes))


def gemma3_hparams(
    *,
    n_layers: int,
    layer_is_global: Sequence[bool],
    window: int,
    rope_theta_global: float,
    rope_theta_local: float,
    rope_factor: float,
    **values: Any,
) -> HParams:
    """A model whose layers differ as Gemma 3's do: in their windows and rotations."""
    shape = {name: values.pop(name) for name in ("ffn", "n_heads", "n_kv_heads", "head_dim")}
    global_ = {"rope_theta": rope_theta_global, "rope_factor": rope_factor}
    layers = alternating(n_layers, layer_is_global, window, shape, {"rope_theta": rope_theta_local}, global_)
    return HParams(layers=layers, **values)


def tiny_gemma3n(**changes: Any) -> HParams:
    """A Gemma 3n of a few thousand weights: five layers, of which the last two read the caches of layers 1 and 2."""
    own = {"head_dim": 16, "n_heads": 4, "n_kv_heads": 2}
    layers = (
        LayerParams(**own, window=8, rope_theta=1e4, ffn=96, sparsity=0.9),
        LayerParams(**own, window=8, rope_theta=1e4, ffn=64, sparsity=0.9),
        LayerParams(**own, window=0, rope_theta=1e6, ffn=96),
        LayerParams(**own, window=8, rope_theta=1e4, ffn=96, kv_from=1),
        LayerParams(**own, window=0, rope_theta=1e6, ffn=96, kv_from=2),
    )
    values: dict[str, Any] = {
        "family": "gemma3n",
        "hidden": 64,
        "vocab": 320,
        "context_length": 256,
        "layers": layers,
        "attention_scale": 1.0,
        "eps": 1e-6,
        "softcap": 30.0,
        "embed_scale": 8.0,
        "tied": True,
        "n_streams": 4,
        "laurel_rank": 32,
        "per_layer_dim": 32,
        "per_layer_vocab": 310,
    }
    return HParams(**(values | changes))


def tiny_gemma4(*, inputs: bool = True, experts: tuple[int, int, int] = (0, 0, 0), **changes: Any) -> HParams:
    """A Gemma 4 of a few thousand weights. As the small sizes: per-layer inputs, two layers that read other layers'
    caches, and wider feed-forwards there. As the large ones (`inputs` false): every layer has a cache. experts: their
    number, how many a token uses, their width."""
    local = {"head_dim": 16, "n_heads": 4, "n_kv_heads": 2, "window": 8, "rope_theta": 1e4}
    wide = {
        "head_dim": 32,
        "n_heads": 4,
        "n_kv_heads": 1,
        "window": 0,
        "rope_theta": 1e6,
        "rotated": 0.25,
        "k_as_v": True,
    }
    layers = (
        LayerParams(**local, ffn=64, scalar=0.75),
        LayerParams(**local, ffn=64, scalar=1.25),
        LayerParams(**wide, ffn=64, scalar=0.5),
        LayerParams(**local, ffn=128 if inputs else 64, kv_from=1 if inputs else None, scalar=1.125),
        LayerParams(**wide, ffn=128 if inputs else 64, kv_from=2 if inputs else None, scalar=0.875),
    )
    mixture = dict(zip(("n_experts", "experts_used", "expert_ffn"), experts, strict=True))
    layers = tuple(replace(layer, **mixture) for layer in layers)
    values: dict[str, Any] = {
        "family": "gemma4",
        "hidden": 64,
        "vocab": 320,
        "context_length": 256,
        "layers": layers,
        "attention_scale": 1.0,
        "eps": 1e-6,
        "softcap": 30.0,
        "embed_scale": 8.0,
        "tied": True,
        "per_layer_dim": 32 if inputs else 0,
        "per_layer_vocab": 320 if inputs else 0,
    }
    return HParams(**(values | changes))


def tiny_assistant(target: HParams, clusters: int = 0, **changes: Any) -> HParams:
    """A drafter of a `tiny_gemma4`: two local layers and a global one over its caches. clusters: of its head; a token uses
    three."""
    local, wide = (next(x for x in target.layers if bool(x.window) == windowed) for windowed in (True, False))
    own = {"ffn": 64, "kv_from": None, "k_as_v": False}
    layers = tuple(
        replace(layer, **own, scalar=scalar) for layer, scalar in ((local, 0.75), (local, 1.125), (wide, 0.875))
    )
    values: dict[str, Any] = {
        "family": "gemma4_assistant",
        "hidden": 32,
        "layers": layers,
        "softcap": 0.0,
        "embed_scale": target.hidden**0.5,
        "per_layer_dim": 0,
        "per_layer_vocab": 0,
        "backbone": target.hidden,
        "clusters": clusters,
        "clusters_used": 3 if clusters else 0,
    }
    return replace(target, **(values | changes))


def tiny_embedding(**changes: Any) -> HParams:
    """An EmbeddingGemma of a few thousand weights and its wide matrices; window: to each side, the row's own included."""
    own = {"family": "gemma-embedding", "n_layers": 4, "window": 9, "dimensions": 64, "dense": 3072}
    return tiny(**(own | changes))


def tiny_embedding2(**changes: Any) -> HParams:
    """An EmbeddingGemma 2 of a few thousand weights; window: as of `tiny_embedding`."""
    local = {"head_dim": 16, "n_heads": 4, "n_kv_heads": 2, "window": 9, "rope_theta": 1e4, "ffn": 96}
    wide = {"head_dim": 32, "n_heads": 4, "n_kv_heads": 1, "window": 0, "rope_theta": 1e6, "ffn": 96}
    layers = (
        LayerParams(**local, scalar=0.75),
        LayerParams(**wide, scalar=1.25),
        LayerParams(**local, scalar=1.125),
        LayerParams(**wide, scalar=0.5),
    )
    own = {"family": "gemma-embedding2", "layers": layers, "per_layer_dim": 32, "per_layer_vocab": 0, "softcap": 0.0}
    return tiny_gemma4(**(own | {"dimensions": 96} | changes))


def config(hp: HParams, dialect: str = "new") -> dict[str, Any]:
    """config.json of any family. Gemma 3: as transformers wrote it in 2025 (`old`), writes it since 5.0 (`new`), or
    nested in the multimodal model's (`multimodal`, in the old dialect). Others: `new`, or `multimodal`; Gemma 4 with
    per_layer_config, or (`global`) with what the published files have instead."""
    if hp.family not in ("gemma3", "gemma-embedding"):
        of_family = {"gemma3n": _config_3n, "gemma-embedding2": _config_embedding2}
        text = of_family.get(hp.family, _config_4)(hp)
        if hp.family == "gemma-embedding2":
            return text if dialect == "new" else {"model_type": "embedding_gemma2", "text_config": text}
        if hp.family == "gemma4_assistant":
            return {
                "model_type": "gemma4_assistant",
                "architectures": ["Gemma4AssistantForCausalLM"],
                "backbone_hidden_size": hp.backbone,
                "use_ordered_embeddings": hp.clusters > 0,
                "num_centroids": hp.clusters or 2048,
                "centroid_intermediate_top_k": hp.clusters_used or 32,
                "tie_word_embeddings": True,
                "text_config": text | {"num_kv_shared_layers": hp.n_layers, "final_logit_softcapping": 30.0},
            }
        if hp.family == "gemma4" and dialect == "global":
            wide = next(layer for layer in hp.layers if not layer.window)
            text = {**text, "global_head_dim": wide.head_dim, "num_global_key_value_heads": wide.n_kv_heads}
            del text["per_layer_config"]
        if dialect == "multimodal":
            return {
                "model_type": hp.family,
                "text_config": text,
                "vision_config": {},
                "audio_config": {},
                "eos_token_id": [1, 5],
            }
        return {**text, "eos_token_id": 1}
    kinds = ["full_attention" if g else "sliding_attention" for g in hp.layer_is_global]
    layer, (theta_local, theta_global, factor) = hp.layers[0], rotations(hp)
    text: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": hp.hidden,
        "intermediate_size": layer.ffn,
        "num_hidden_layers": hp.n_layers,
        "num_attention_heads": layer.n_heads,
        "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": hp.vocab,
        "max_position_embeddings": hp.context_length,
        "sliding_window": hp.window,
        "rms_norm_eps": hp.eps,
        "query_pre_attn_scalar": _scalar(hp.attention_scale**-2),
        "final_logit_softcapping": hp.softcap or None,
        "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": hp.tied,
        "layer_types": kinds,
    }
    if hp.dimensions:
        text |= {"use_bidirectional_attention": True, "sliding_window": 2 * (hp.window - 1)}
    scaled = factor != 1.0
    if dialect == "new":
        scaling = {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
        return text | {
            "rope_parameters": {
                "full_attention": {"rope_theta": theta_global, **scaling},
                "sliding_attention": {"rope_theta": theta_local, "rope_type": "default"},
            },
            "dtype": "bfloat16",
            "eos_token_id": 1,
        }
    text |= {
        "rope_theta": theta_global,
        "rope_local_base_freq": theta_local,
        "rope_scaling": {"rope_type": "linear", "factor": factor} if scaled else None,
        "torch_dtype": "bfloat16",
    }
    if dialect == "old":
        return text
    return {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 32}, "eos_token_id": [1, 5]}


def _config_3n(hp: HParams) -> dict[str, Any]:
    layer = hp.layers[0]
    return _common(hp) | {
        "model_type": "gemma3n_text",
        "intermediate_size": [x.ffn for x in hp.layers],
        "num_attention_heads": layer.n_heads,
        "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "activation_sparsity_pattern": [x.sparsity for x in hp.layers],
        "altup_active_idx": hp.altup_active,
        "altup_num_inputs": hp.n_streams,
        "altup_correct_scale": True,
        "altup_coef_clip": 120.0,
        "laurel_rank": hp.laurel_rank,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }


def _config_4(hp: HParams) -> dict[str, Any]:
    layer, wide = hp.layers[0], next(x for x in hp.layers if not x.window)
    return _common(hp) | {
        "model_type": "gemma4_text",
        "intermediate_size": layer.ffn,
        "use_double_wide_mlp": hp.layers[-1].ffn == 2 * layer.ffn,
        "num_attention_heads": layer.n_heads,
        "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "per_layer_config": {
            f"{i:02}": {"head_dim": x.head_dim, "num_key_value_heads": x.n_kv_heads}
            for i, x in enumerate(hp.layers)
            if not x.window
        },
        "attention_k_eq_v": wide.k_as_v,
        "enable_moe_block": bool(layer.n_experts),
        "num_experts": layer.n_experts or None,
        "top_k_experts": layer.experts_used or None,
        "moe_intermediate_size": layer.expert_ffn or None,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": wide.rotated,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }


def _config_embedding2(hp: HParams) -> dict[str, Any]:
    text = {k: v for k, v in _config_4(hp).items() if k in _OF_EMBEDDING2}
    full, local = ({"rope_theta": theta, "rope_type": "default"} for theta in (1e6, 1e4))
    return text | {
        "model_type": "embedding_gemma2_text",
        "embedding_dim": hp.dimensions,
        "sliding_window": hp.window - 1,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "per_layer_config": {str(int(i)): own for i, own in text["per_layer_config"].items()},
    }


_OF_EMBEDDING2 = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_size_per_layer_input",
    "hidden_activation",
    "layer_types",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "per_layer_config",
)


def _common(hp: HParams) -> dict[str, Any]:
    return {
        "hidden_size": hp.hidden,
        "num_hidden_layers": hp.n_layers,
        "vocab_size": hp.vocab,
        "max_position_embeddings": hp.context_length,
        "sliding_window": hp.window,
        "rms_norm_eps": hp.eps,
        "hidden_size_per_layer_input": hp.per_layer_dim,
        "vocab_size_per_layer_input": hp.per_layer_vocab,
        "num_kv_shared_layers": hp.n_layers - hp.n_kv_layers,
        "final_logit_softcapping": hp.softcap or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": hp.tied,
        "dtype": "bfloat16",
        "layer_types": ["sliding_attention" if layer.window else "full_attention" for layer in hp.layers],
    }


def _scalar(x: float) -> int | float:
    """transformers expects an int for scalars."""
    return round(x) if abs(x - round(x)) < 1e-9 * x else x


def weights(hp: HParams, dtype: str = "bf16", seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by Hugging Face name without prefix; norm weights of Gemma 3 stored as w - 1. Includes the unused
    tensors of layers that read another layer's cache, as published files do."""
    rng = np.random.default_rng(seed)
    family, out = family_of(hp), {}
    made = family.made(hp)
    for name, shape in family.kept(hp).items():
        parts = family.parts(hp, name)
        for part in parts:
            if name in made:
                out[part] = Tensor.of(made[name])
                continue
            if is_index(name):
                out[part] = Tensor.of(rng.permutation(shape[0]).astype(np.int32))
                continue
            one = family.gguf_shape(hp, name, shape) if len(parts) == 1 else (shape[0] // len(parts), *shape[1:])
            scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
            centre = 1.0 if len(shape) == 1 and not family.hf_norm_offset else 0.0
            out[part] = quantise(rng.normal(centre, scale, one).astype(np.float32), dtype)
    return out


def write_safetensors(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Plain tensors in the order given."""
    header, at = {}, 0
    for name, t in arrays.items():
        header[name] = {"dtype": _ST_TYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.array.tobytes() for t in arrays.values()))


def write_hf(
    folder: Path,
    hp: HParams | None = None,
    dialect: str = "new",
    shards: int = 1,
    prefix: str = "model.",
    dtype: str = "bf16",
    seed: int = 0,
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """A whole checkpoint; `extra` adds tensors under their full names. Returns the folder."""
    hp = hp or tiny()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(hp, dialect)))
    made = weights(hp, dtype, seed)
    if hp.dimensions:
        prefix = "" if dialect != "multimodal" else "language_model."
        dense = [name for name in made if "_Dense." in name]
        _write_modules(folder, hp, {name: made.pop(name) for name in dense})
    outside = family_of(hp).hf_outside
    named = {n if n.startswith(outside) else prefix + n: t for n, t in made.items()}
    named |= extra or {}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", named)
    else:
        index: dict[str, str] = {}
        for k in range(shards):
            part = dict(list(named.items())[k::shards])
            file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
            write_safetensors(folder / file, part)
            index |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(PIECES))
    return folder


def _write_modules(folder: Path, hp: HParams, dense: Mapping[str, Tensor]) -> None:
    """The parts of a sentence-transformers folder around the model."""
    kinds = family_of(hp).modules
    parts = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": part, "type": f"sentence_transformers.models.{kind}"}
        for i, (part, kind) in enumerate(zip(parts, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for part in parts[1:]:
        (folder / part).mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": hp.hidden, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "include_prompt": True}))
    for name, tensor in dense.items():
        part, outputs = folder / name.partition(".")[0], {"out_features": tensor.shape[0], "bias": False}
        activation = "torch.nn.modules.linear.Identity"
        text = json.dumps({"in_features": tensor.shape[1], **outputs, "activation_function": activation})
        (part / "config.json").write_text(text)
        write_safetensors(part / "model.safetensors", {"linear.weight": tensor})
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    text = json.dumps({"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"})
    (folder / "config_sentence_transformers.json").write_text(text)


def _pieces() -> list[tuple[str, float, int]]:
    """A vocabulary with every kind of piece: control, user-defined, bytes, merges whose scores compete."""
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    user = ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n", SPACE * 2, SPACE * 3, "<b>", "  "]
    merged = [
        "th",
        "he",
        SPACE + "t",
        SPACE + "th",
        "the",
        SPACE + "the",
        "in",
        "er",
        "ing",
        "ab",
        "abc",
        "bc",
        "cd",
        "abcd",
        "aa",
        "aaa",
        "aaaa",
        "\u00e9t",
        "\u00e9t\u00e9",
    ]
    single = [SPACE, *"abcdefghinrt\u00e9"]
    out = [(p, 0.0, kind) for p, kind in special] + [(p, 0.0, USER_DEFINED) for p in user]
    out += [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)]
    return out + [(p, -float(rank), NORMAL) for rank, p in enumerate(merged + single)]


PIECES = _pieces()


def sentencepiece_model(pieces: Sequence[tuple[str, float, int]]) -> bytes:
    """tokenizer.model (SentencePiece's ModelProto) of (text, score, type): BPE, byte fallback, identity normaliser."""
    trainer = _number(3, 2) + _number(35, 1) + _number(40, 3) + _number(41, 2) + _number(42, 1) + _number(43, 0)
    trainer += b"".join(_text(45 + k, t) for k, t in enumerate((b"<unk>", b"<bos>", b"<eos>", b"<pad>")))
    normaliser = _text(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    body = b"".join(
        _text(1, _text(1, piece.encode()) + struct.pack("<Bf", 2 << 3 | 5, score) + _number(3, kind))
        for piece, score, kind in pieces
    )
    return body + _text(2, trainer) + _text(3, normaliser)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
