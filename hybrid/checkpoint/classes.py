"""Classes of matrices that share a storage type in conversions. Vectors have no class: they are float32."""

from __future__ import annotations

from hybrid.checkpoint.base import CheckpointError
from hybrid.core.names import stem_of

CLASSES: dict[str, tuple[str, ...]] = {
    "embed": ("token_embd",),
    "head": ("output",),
    "table": ("per_layer_token_embd",),
    "attn": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "ffn": ("ffn_gate", "ffn_up", "ffn_down"),
    "experts": ("ffn_gate_up_exps", "ffn_down_exps"),
    "dense": ("dense_2", "dense_3"),
    "inputs": ("inp_gate", "proj", "nextn.pre_projection", "nextn.post_projection"),
    "streams": ("altup_proj", "altup_unembd_proj", "laurel_l", "laurel_r", "per_layer_model_proj"),
}
"""Class -> last parts of its tensors' names, without `.weight`."""

AS_STORED = ("table", "streams")
"""Classes that are not converted at load: a token reads only one row of the table, and the streams' matrices are too
small to be worth a loss of accuracy."""


def class_of(name: str) -> str:
    """`blk.3.ffn_up.weight` -> `ffn`. CheckpointError for a matrix that no class lists."""
    stem = stem_of(name)
    for kind, parts in CLASSES.items():
        if stem in parts:
            return kind
    raise CheckpointError(f"tensor {name} belongs to no class of {', '.join(CLASSES)}: add it to CLASSES")
