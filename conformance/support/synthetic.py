"""Small random checkpoints in Hugging Face layout, of any shape and in every dialect: test data made on the spot."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint.decoder import hf_name
from hybrid.checkpoint.families import tensors
from hybrid.checkpoint.gemma3 import rotations
from hybrid.core.hparams import HParams, alternating
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import quantise
from hybrid.text.tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED

_ST_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def tiny(**changes: Any) -> HParams:
    """Hyper-parameters of a model of a few thousand weights; any field can be changed."""
    n_layers = changes.get("n_layers", 3)
    values: dict[str, Any] = {
        "family": "gemma3", "n_layers": n_layers, "hidden": 64, "ffn": 96, "n_heads": 4, "n_kv_heads": 2,
        "head_dim": 16, "vocab": 320, "context_length": 256, "window": 8,
        "layer_is_global": tuple((i + 1) % 2 == 0 for i in range(n_layers)),
        "rope_theta_global": 1e6, "rope_theta_local": 1e4, "rope_factor": 1.0,
        "attention_scale": changes.get("head_dim", 16) ** -0.5, "eps": 1e-6, "softcap": 0.0,
        "embed_scale": changes.get("hidden", 64) ** 0.5, "tied": True,
    }  # fmt: skip
    return gemma3_hparams(**(values | changes))


def gemma3_hparams(
    *, n_layers: int, layer_is_global: Sequence[bool], window: int, rope_theta_global: float, rope_theta_local: float,
    rope_factor: float, **values: Any,
) -> HParams:  # fmt: skip
    """A model whose layers differ as Gemma 3's do: in their windows and rotations."""
    shape = {name: values.pop(name) for name in ("ffn", "n_heads", "n_kv_heads", "head_dim")}
    global_ = {"rope_theta": rope_theta_global, "rope_factor": rope_factor}
    layers = alternating(n_layers, layer_is_global, window, shape, {"rope_theta": rope_theta_local}, global_)
    return HParams(layers=layers, **values)


def config(hp: HParams, dialect: str = "new") -> dict[str, Any]:
    """config.json as transformers wrote it in 2025 (`old`), writes it since 5.0 (`new`), or nested in the
    multimodal model's (`multimodal`, in the old dialect)."""
    kinds = ["full_attention" if g else "sliding_attention" for g in hp.layer_is_global]
    layer, (theta_local, theta_global, factor) = hp.layers[0], rotations(hp)
    text: dict[str, Any] = {
        "model_type": "gemma3_text", "hidden_size": hp.hidden, "intermediate_size": layer.ffn,
        "num_hidden_layers": hp.n_layers, "num_attention_heads": layer.n_heads, "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim, "vocab_size": hp.vocab, "max_position_embeddings": hp.context_length,
        "sliding_window": hp.window, "rms_norm_eps": hp.eps, "query_pre_attn_scalar": _scalar(hp.attention_scale**-2),
        "final_logit_softcapping": hp.softcap or None, "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": hp.tied, "layer_types": kinds,
    }  # fmt: skip
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


def _scalar(x: float) -> int | float:
    """transformers wants an int where it is one."""
    return round(x) if abs(x - round(x)) < 1e-9 * x else x


def weights(hp: HParams, dtype: str = "bf16", seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by Hugging Face name without prefix; norm weights stored as w - 1."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in tensors(hp).items():
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        out[hf_name(name)] = quantise(rng.normal(0, scale, shape).astype(np.float32), dtype)
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
    named = {n if n.startswith("lm_head") else prefix + n: t for n, t in weights(hp, dtype, seed).items()}
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


def _pieces() -> list[tuple[str, float, int]]:
    """A vocabulary with every kind of piece: control, user-defined, bytes, merges whose scores compete."""
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    user = ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n", SPACE * 2, SPACE * 3, "<b>", "  "]
    merged = [
        "th", "he", SPACE + "t", SPACE + "th", "the", SPACE + "the", "in", "er", "ing", "ab", "abc", "bc", "cd", "abcd",
        "aa", "aaa", "aaaa", "\u00e9t", "\u00e9t\u00e9",
    ]  # fmt: skip
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
