"""Model sheets: the hyper-parameters of published models, for planning and measuring without their files."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from hybrid.core.errors import SpecError, nearest
from hybrid.core.hparams import HParams
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


class Shape(Model):
    """As hybrid.core.hparams.HParams, with the layers' kinds by period and the attention scale as configs write it."""

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
    """Layer l sees the whole context where l + 1 is a multiple of this."""
    rope_theta_global: float
    rope_theta_local: float
    rope_factor: float
    query_scale: Positive
    """Attention scores are divided by its square root."""
    eps: float
    softcap: float
    tied: bool

    def hparams(self, family: str) -> HParams:
        """As hyper-parameters. ValueError names one that cannot be."""
        same = self.model_dump(exclude={"global_every", "query_scale"})
        return HParams(
            family=family,
            layer_is_global=tuple((i + 1) % self.global_every == 0 for i in range(self.n_layers)),
            attention_scale=self.query_scale**-0.5,
            embed_scale=self.hidden**0.5,
            **same,
        )


class ModelSheet(Model):
    """One file of specs/models."""

    schema_version: Literal[1] = Field(alias="schema")
    model: ModelHead
    shape: Shape

    def hparams(self) -> HParams:
        """The model's hyper-parameters. ValueError names one that cannot be."""
        return self.shape.hparams(self.model.family)


@lru_cache(maxsize=1)
def load_models() -> dict[str, ModelSheet]:
    """All sheets by name, smallest first. SpecError for one that is wrong."""
    sheets = [load_toml(p, ModelSheet) for p in SHEETS.glob("*.toml")]
    return {s.model.name: s for s in sorted(sheets, key=lambda s: s.model.parameters)}


def find_model(name: str) -> ModelSheet:
    """A sheet by its name. SpecError with the nearest name where there is none."""
    known = load_models()
    if name not in known:
        raise SpecError(f"no model is called {name!r}{nearest(name, known)}")
    return known[name]
