"""Hyper-parameters of a model, as the rest of the project sees them: no dialect of any file format reaches here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class HParams:
    """Shapes and constants of one decoder. Checked when made; ValueError names the field.

    `hidden`, `ffn` and `head_dim` count elements; `vocab` is the number of rows of the embedding tensor (it may
    exceed the tokenizer's size); angles of RoPE are `position * theta^(-2i/head_dim) / factor`.
    """

    family: str
    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    window: int
    """Positions a local layer sees, itself included; 0 when every layer is global."""
    layer_is_global: tuple[bool, ...]
    rope_theta_global: float
    rope_theta_local: float
    rope_factor: float
    """Linear RoPE scaling of global layers; local layers are never scaled."""
    attention_scale: float
    eps: float
    softcap: float
    """Cap of the final logits, softcap * tanh(x / softcap); 0 = none."""
    embed_scale: float
    tied: bool
    """The output matrix is the embedding; otherwise the checkpoint has `output.weight`."""

    def __post_init__(self) -> None:
        for f in fields(self):
            kind, value = str(f.type), getattr(self, f.name)
            if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{f.name} must be a whole number, not {value!r}")
            if kind == "float" and not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise ValueError(f"{f.name} must be a finite number, not {value!r}")
        for name in ("n_layers", "hidden", "ffn", "n_heads", "n_kv_heads", "head_dim", "vocab", "context_length"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in ("rope_theta_global", "rope_theta_local", "rope_factor", "attention_scale", "eps", "embed_scale"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
            _require(1e-30 < getattr(self, name) < 1e30, name, getattr(self, name), "is beyond what float32 computes with")
        _require(self.softcap < 1e30, "softcap", self.softcap, "is beyond what float32 computes with")
        _require(self.head_dim % 16 == 0, "head_dim", self.head_dim, "must be a multiple of 16")
        _require(self.hidden % 32 == 0, "hidden", self.hidden, "must be a multiple of 32")
        _require(self.ffn % 32 == 0, "ffn", self.ffn, "must be a multiple of 32")
        _require(
            self.n_heads % self.n_kv_heads == 0, "n_kv_heads", self.n_kv_heads, f"must divide n_heads {self.n_heads}"
        )
        _require(self.softcap >= 0, "softcap", self.softcap, "must not be negative (0 = none)")
        _require(self.window >= 0, "window", self.window, "must not be negative (0 = none)")
        _require(
            len(self.layer_is_global) == self.n_layers,
            "layer_is_global",
            f"of {len(self.layer_is_global)} entries",
            f"must have one entry for each of the {self.n_layers} layers",
        )
        local = self.n_layers - sum(self.layer_is_global)
        _require(local == 0 or self.window > 0, "window", self.window, f"must be positive: {local} layers are local")

    def as_dict(self) -> dict[str, Any]:
        """Plain values by field name, ready for JSON."""
        return {**asdict(self), "layer_is_global": list(self.layer_is_global)}


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{name} {value} {rule}")
