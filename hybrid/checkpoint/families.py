"""The families of models that can be read. A new one is a module like gemma3.py and a line in FAMILIES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.checkpoint import gemma3, gemma3_config
from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import HParams

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Everything about a family's files. `vocab` arguments are the rows of the embedding tensor."""

    name: str
    hf_model_types: tuple[str, ...]
    """Values of model_type in config.json."""
    gguf_architecture: str
    hparams_from_hf: Callable[[Fields, int], HParams]
    hparams_from_gguf: Callable[[Fields, int, bool], HParams]
    """Also told whether the output matrix is the embedding (the file has no `output.weight`)."""
    gguf_fields: Callable[[HParams], Mapping[str, Any]]
    """Metadata after the `<architecture>.` prefix; Python ints, floats, bools, text, lists."""
    tensors: Callable[[HParams], Mapping[str, Shape]]
    """Every tensor by its GGUF name, with its shape, in file order."""
    hf_name: Callable[[str], str]
    """GGUF name -> Hugging Face's, after its prefix."""
    hf_config: Callable[[HParams], Mapping[str, Any]]
    """What config.json says about the arithmetic."""
    hf_norm_offset: float
    """Added to Hugging Face's norm weights (Gemma 3 stores w - 1)."""


FAMILIES: tuple[Family, ...] = (
    Family(
        name="gemma3",
        hf_model_types=("gemma3_text", "gemma3"),
        gguf_architecture="gemma3",
        hparams_from_hf=gemma3.hparams_from_hf,
        hparams_from_gguf=gemma3.hparams_from_gguf,
        gguf_fields=gemma3.gguf_fields,
        tensors=gemma3.tensors,
        hf_name=gemma3.hf_name,
        hf_config=gemma3_config.hf_config,
        hf_norm_offset=1.0,
    ),
)

EMBEDDING = "token_embd.weight"


def family_of_hf(config: Fields) -> Family:
    kind = config.text("model_type")
    for family in FAMILIES:
        if kind in family.hf_model_types:
            return family
    known = ", ".join(t for f in FAMILIES for t in f.hf_model_types)
    raise CheckpointError(f"{config.path}: model_type {kind!r} is not supported; known: {known}")


def family_of_gguf(metadata: Fields) -> Family:
    kind = metadata.text("general.architecture")
    for family in FAMILIES:
        if kind == family.gguf_architecture:
            return family
    known = ", ".join(f.gguf_architecture for f in FAMILIES)
    raise CheckpointError(f"{metadata.path}: general.architecture {kind!r} is not supported; known: {known}")


def is_norm(name: str) -> bool:
    """Norm weights travel as float32 whatever the file stores."""
    return name.endswith("_norm.weight")
