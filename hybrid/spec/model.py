"""Model sheets: hyper-parameters of published models, for planning and benchmarks without their files."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from hybrid.core.errors import SpecError, nearest
from hybrid.core.hparams import HParams, LayerParams, alternating, kv_sources
from hybrid.core.places import SPECS
from hybrid.spec.load import Model, load_toml

SHEETS = SPECS / "models"

Positive = Annotated[int, Field(gt=0)]


class ModelHead(Model):
    name: str
    family: str
    summary: str
    source: Annotated[str, Field(min_length=1)]
    parameters: Positive
    """Elements of all tensors of the text model."""


class Own(Model):
    """Overrides of the shape's fields for some layers."""

    ffn: Positive | None = None
    n_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    rotated: float | None = None
    k_as_v: bool | None = None
    sparsity: float | None = None


class Some(Own):
    """Overrides for a number of layers."""

    layers: Positive


class Shape(Model):
    """Like hybrid.core.hparams.HParams, with a period of global layers and the attention scale as in config.json."""

    n_layers: Positive
    hidden: Positive
    ffn: Positive
    n_heads: Positive
    n_kv_heads: Positive
    head_dim: Positive
    vocab: Positive
    context_length: Positive
    window: Positive
    global_every: Positive
    """Layer l has full attention if l + 1 is a multiple of this."""
    rope_theta_global: float
    rope_theta_local: float
    rope_factor: float
    query_scale: Positive
    """Attention scores are divided by its square root."""
    eps: float
    softcap: float
    tied: bool
    n_streams: Positive = 1
    laurel_rank: int = 0
    per_layer_dim: int = 0
    per_layer_vocab: int = 0
    dimensions: int = 0
    dense: int = 0
    n_experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0
    backbone: int = 0
    clusters: int = 0
    clusters_used: int = 0
    global_: Own = Field(Own(), alias="global")
    """Overrides for layers with full attention."""
    first: Some | None = None
    """Overrides for the first layers."""
    sharing: Some | None = None
    """Overrides for the last layers, which read the KV cache of the last unshared layer of their kind."""

    def hparams(self, family: str) -> HParams:
        """The hyper-parameters. ValueError names an invalid one."""
        model = {
            "hidden",
            "vocab",
            "context_length",
            "eps",
            "softcap",
            "tied",
            "n_streams",
            "laurel_rank",
            "per_layer_dim",
            "per_layer_vocab",
            "backbone",
            "clusters",
            "clusters_used",
            "dimensions",
            "dense",
        }
        return HParams(
            family=family,
            layers=self._layers(),
            attention_scale=self.query_scale**-0.5,
            embed_scale=(self.backbone or self.hidden) ** 0.5,
            **self.model_dump(include=model),
        )

    def _layers(self) -> tuple[LayerParams, ...]:
        kinds = tuple((i + 1) % self.global_every == 0 for i in range(self.n_layers))
        own = self.global_.model_dump(exclude_none=True)
        rotations = (
            {"rope_theta": self.rope_theta_local},
            {"rope_theta": self.rope_theta_global, "rope_factor": self.rope_factor},
        )
        own_shape = {"ffn", "n_heads", "n_kv_heads", "head_dim", "n_experts", "experts_used", "expert_ffn"}
        shape = self.model_dump(include=own_shape)
        layers = list(alternating(self.n_layers, kinds, self.window, shape, rotations[0], {**rotations[1], **own}))
        for some, start in ((self.first, 0), (self.sharing, -self.sharing.layers if self.sharing else 0)):
            if some is not None:
                changes = some.model_dump(exclude_none=True, exclude={"layers"})
                for index in range(start, start + some.layers):
                    layers[index] = replace(layers[index], **changes)
        if self.sharing is not None:
            shared = kv_sources(kinds, self.sharing.layers)
            layers = [replace(layer, kv_from=source) for layer, source in zip(layers, shared, strict=True)]
        return tuple(layers)


class ModelSheet(Model):
    """One file of specs/models."""

    schema_version: Literal[1] = Field(alias="schema")
    model: ModelHead
    shape: Shape

    def hparams(self) -> HParams:
        """The model's hyper-parameters. ValueError names an invalid one."""
        return self.shape.hparams(self.model.family)


@lru_cache(maxsize=1)
def load_models() -> dict[str, ModelSheet]:
    """All sheets by name, smallest first. SpecError for an invalid one."""
    sheets = [load_toml(p, ModelSheet) for p in SHEETS.glob("*.toml")]
    return {s.model.name: s for s in sorted(sheets, key=lambda s: s.model.parameters)}


def find_model(name: str) -> ModelSheet:
    """A sheet by its name. SpecError for an unknown name, with the nearest one."""
    known = load_models()
    if name not in known:
        raise SpecError(f"no model is called {name!r}{nearest(name, known)}")
    return known[name]
