"""The published Gemma 3 text models as their files describe them: config.json in its dialects, GGUF metadata as
llama.cpp's and Ollama's converters write it. Figures: the published configs, and transformers' class defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.support.synthetic import gemma3_hparams
from hybrid.core.hparams import HParams


@dataclass(frozen=True, slots=True)
class Size:
    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    context: int
    factor: float
    query: float
    parameters: int
    tensors: int
    multimodal: bool

    def hparams(self, **changes: Any) -> HParams:
        values: dict[str, Any] = {
            "family": "gemma3",
            "n_layers": self.layers,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "n_heads": self.heads,
            "n_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab": self.vocab,
            "context_length": self.context,
            "window": self.window,
            "layer_is_global": tuple(i % 6 == 5 for i in range(self.layers)),
            "rope_theta_global": 1e6,
            "rope_theta_local": 1e4,
            "rope_factor": self.factor,
            "attention_scale": self.query**-0.5,
            "eps": 1e-6,
            "softcap": 0.0,
            "embed_scale": self.hidden**0.5,
            "tied": True,
        }
        return gemma3_hparams(**(values | changes))


SIZES = (
    Size("270m", 18, 640, 2048, 4, 1, 256, 262144, 512, 32768, 1.0, 256, 268098176, 236, False),
    Size("1b", 26, 1152, 6912, 4, 1, 256, 262144, 512, 32768, 1.0, 256, 999885952, 340, False),
    Size("4b", 34, 2560, 10240, 8, 4, 256, 262208, 1024, 131072, 8.0, 256, 3880263168, 444, True),
    Size("12b", 48, 3840, 15360, 16, 8, 256, 262208, 1024, 131072, 8.0, 256, 11766034176, 626, True),
    Size("27b", 62, 5376, 21504, 32, 16, 128, 262208, 1024, 131072, 8.0, 168, 27009346304, 808, True),
)


def published_config(size: Size) -> dict[str, Any]:
    """config.json as released: the text-only ones complete, the multimodal ones with the fields that differ from the
    class defaults (4b: five fields)."""
    if not size.multimodal:
        return {
            "model_type": "gemma3_text",
            "hidden_size": size.hidden,
            "intermediate_size": size.ffn,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "vocab_size": size.vocab,
            "max_position_embeddings": size.context,
            "sliding_window": size.window,
            "sliding_window_pattern": 6,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": size.query,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "pad_token_id": 0,
        }
    text: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "sliding_window": size.window,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    if size.name != "4b":
        text |= {"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads}
    if size.name == "27b":
        text |= {"head_dim": 128, "query_pre_attn_scalar": 168}
    vision = {"hidden_size": 1152, "model_type": "siglip_vision_model"}
    return {"model_type": "gemma3", "text_config": text, "vision_config": vision, "eos_token_id": [1, 106]}


def gguf_metadata(size: Size, writer: str) -> dict[str, Any]:
    """Metadata of architecture gemma3 as `writer` (llama.cpp or ollama) leaves it."""
    common = {
        "context_length": size.context,
        "embedding_length": size.hidden,
        "block_count": size.layers,
        "feed_forward_length": size.ffn,
        "attention.head_count": size.heads,
        "attention.head_count_kv": size.kv_heads,
        "attention.key_length": size.head_dim,
        "attention.value_length": size.head_dim,
        "attention.sliding_window": size.window,
    }
    if writer == "llama.cpp":
        common |= {"attention.layer_norm_rms_epsilon": 9.999999974752427e-07, "rope.freq_base": 1e6}
        if size.factor != 1:
            common |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    elif size.name == "1b":
        common |= {"rope.local.freq_base": 1e4, "rope.global.freq_base": 1e6, "final_logit_softcapping": 30.0}
    return {f"gemma3.{key}": value for key, value in common.items()}
