"""Drafters of Gemma 4 (its assistants): layers with queries only, which read the target's cache, between two projections
from and to its hidden state. Heads of clusters score the tokens of the best clusters only.

Files are those of transformers' Gemma4AssistantForCausalLM, and llama.cpp's `mtp-*.gguf` with the head where they have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint import decoder, gemma4
from hybrid.checkpoint.decoder import Shape
from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import HParams

if TYPE_CHECKING:
    from hybrid.checkpoint.look import Look

PRE, POST = "nextn.pre_projection", "nextn.post_projection"
CENTROIDS, ORDERING = "nextn.centroids", "nextn.token_ordering"
ARCHITECTURES = ("gemma4-assistant", "gemma4_assistant", "gemma4_mtp")
"""GGUF architecture names of different converters; the first is written."""
RENAMED = {
    **{f"mtp.{stem.partition('.')[2]}.weight": f"{stem}.weight" for stem in (PRE, POST, CENTROIDS, ORDERING)},
    "mtp_pre_proj.weight": f"{PRE}.weight",
    "mtp_post_proj.weight": f"{POST}.weight",
}
"""Other converters' names of tensors."""
OUTSIDE = ("pre_projection", "post_projection", "masked_embedding")
"""Hugging Face's modules beside the inner model."""
USED = 32  # clusters that a token scores, where a file does not say
_USED_KEYS = ("centroid_top_k", "centroid_intermediate_top_k")
_AROUND = {
    **decoder.AROUND,
    PRE: "pre_projection",
    POST: "post_projection",
    CENTROIDS: "masked_embedding.centroids",
    ORDERING: "masked_embedding.token_ordering",
}
_IN_LAYER = {**decoder.IN_LAYER, gemma4.SCALAR: "layer_scalar"}
_REFUSED = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")


def tensors(hp: HParams) -> dict[str, Shape]:
    """GGUF names and shapes [outputs, inputs], in file order."""
    before: dict[str, Shape] = {PRE: (hp.hidden, 2 * hp.backbone), POST: (hp.backbone, hp.hidden)}
    if hp.clusters:
        before |= {CENTROIDS: (hp.clusters, hp.hidden), ORDERING: (hp.vocab,)}
    queries = [
        {stem: shape for stem, shape in decoder.block(hp, layer).items() if stem not in decoder.OF_SHARING}
        for layer in hp.layers
    ]
    return decoder.whole(hp, before, queries)


def hf_name(name: str) -> str:
    """Hugging Face's name without prefix; empty for GGUF-only tensors."""
    return "" if name == gemma4.FREQS else decoder.hf_name(name, _AROUND, _IN_LAYER, (gemma4.SCALAR, ORDERING))


def _drafter(hp: HParams, look: Look, clusters: int, used: int) -> HParams:
    """The hyper-parameters of Gemma 4's layers as those of its drafter. ValueError."""
    width = look.width(f"{PRE}.weight") or 0
    if width % 2:
        raise ValueError(f"{PRE}.weight has rows of {width}: they are an embedding and a hidden state of equal length")
    return replace(
        hp,
        family="gemma4_assistant",
        softcap=0.0,
        embed_scale=decoder.positive_sqrt(width // 2),
        backbone=width // 2,
        clusters=clusters,
        clusters_used=used if clusters else 0,
    )


def hparams_from_hf(config: Fields, look: Look) -> HParams:
    """config.json of Gemma4AssistantForCausalLM: the layers' fields in its `text_config`."""
    c = decoder.text_config(config)
    refused = next((key for key in _REFUSED if c.get(key)), None)
    if refused is not None:
        raise c.error(refused, f"{c.get(refused)!r} is not supported in a drafter")
    hp = gemma4.layers_from_hf(config, look, plain=True)
    ordered = config.truth("use_ordered_embeddings", False)
    clusters = config.integer("num_centroids", 2048) if ordered else 0
    made = _drafter(hp, look, clusters, config.integer("centroid_intermediate_top_k", USED))
    said = config.integer("backbone_hidden_size", made.backbone)
    if said != made.backbone:
        raise config.error(
            "backbone_hidden_size", f"{said} is not half of pre_projection's {2 * made.backbone} columns"
        )
    return made


def hf_config(hp: HParams) -> Mapping[str, Any]:
    text = {
        **gemma4.hf_config(replace(hp, per_layer_vocab=0)),
        "num_kv_shared_layers": hp.n_layers,
        "vocab_size_per_layer_input": 0,
    }
    del text["architectures"]
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": hp.backbone,
        "use_ordered_embeddings": hp.clusters > 0,
        "num_centroids": hp.clusters or 2048,
        "centroid_intermediate_top_k": hp.clusters_used or USED,
        "tie_word_embeddings": hp.tied,
        "text_config": text,
    }


def hparams_from_gguf(metadata: Fields, look: Look) -> HParams:
    """Metadata of a sidecar: keys of gemma4 under the architecture's name."""
    m = metadata.under(f"{metadata.text('general.architecture')}.")
    hp = gemma4.layers_from_gguf(m, look, plain=True, share=gemma4.ROTATED)
    key = next((k for k in _USED_KEYS if m.get(k) is not None), _USED_KEYS[0])
    return _drafter(hp, look, look.height(f"{CENTROIDS}.weight") or 0, m.integer(key, USED))


def gguf_fields(hp: HParams) -> Mapping[str, Any]:
    """The metadata from which `hparams_from_gguf`, and llama.cpp, read the same drafter."""
    own = {key: value for key, value in gemma4.gguf_fields(hp).items() if key != "final_logit_softcapping"}
    own |= {
        "attention.shared_kv_layers": hp.n_layers,
        "embedding_length_out": hp.backbone,
        "nextn_predict_layers": hp.n_layers,
    }
    return {**own, "n_centroids": hp.clusters, _USED_KEYS[0]: hp.clusters_used} if hp.clusters else own
