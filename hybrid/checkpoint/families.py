"""Supported model families, registered in FAMILIES. A new family needs a module like gemma3.py, a line here, and a
schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint import (
    gemma3,
    gemma3_config,
    gemma3n,
    gemma4,
    gemma4_assistant,
    gemma_embedding,
    gemma_embedding2,
)
from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.decoder import Shape, dead, hf_name
from hybrid.checkpoint.fields import Fields
from hybrid.core.hparams import HParams
from hybrid.core.names import stem_of
from hybrid.core.numeric import np

if TYPE_CHECKING:
    from hybrid.checkpoint.look import Look

EMBEDDING = "token_embd.weight"


def _none(hp: HParams) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """Readers and writers of a family's files. Tensor names are GGUF's."""

    name: str
    hf_model_types: tuple[str, ...]
    """Values of model_type in config.json."""
    hparams_from_hf: Callable[[Fields, Look], HParams]
    hparams_from_gguf: Callable[[Fields, Look], HParams]
    gguf_fields: Callable[[HParams], Mapping[str, Any]]
    """Metadata after the `<architecture>.` prefix; Python ints, floats, bools, text, lists."""
    tensors: Callable[[HParams], Mapping[str, Shape]]
    """Tensors that plans use, with shapes, in file order."""
    hf_config: Callable[[HParams], Mapping[str, Any]]
    """Fields of config.json that define the arithmetic."""
    hf_names: Callable[[str], str]
    """GGUF name -> Hugging Face's name without prefix."""
    hf_norm_offset: float = 0.0
    """Added to Hugging Face's norm weights (Gemma 3 stores w - 1)."""
    dead: Callable[[HParams], Mapping[str, Shape]] = _none
    """Unused tensors that files may have; conversions keep them for readers that require them."""
    stacks: Callable[[HParams], Mapping[str, int]] = _none
    """Stem -> number of stacked matrices: three axes in GGUF; in Hugging Face files also, or separate tensors whose
    names have a number for `*`."""
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stem of stacked matrices -> stems of those of which GGUF files may have them joined, matrix by matrix."""
    merged_tokenizer: bool = False
    """Whether its GGUF files have the tokenizer's merges, if any; otherwise equivalent scores."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Default prompt prefixes of an embedding model, by task, for files without any."""
    modules: tuple[str, ...] = ()
    """sentence-transformers' modules of an embedding model, in order."""
    hf_flag: str = ""
    """The field of config.json that must be true, where another family has the same model_type without it."""
    made: Callable[[HParams], Mapping[str, np.ndarray]] = _none
    """float32 tensors of GGUF files that are derived from hyper-parameters; fields in Hugging Face files."""
    architectures: tuple[str, ...] = ()
    """Values of general.architecture in GGUF files, the written one first; none: `name`."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Other names of tensors in GGUF files -> GGUF names."""
    hf_outside: tuple[str, ...] = ("lm_head",)
    """Hugging Face's modules beside the inner model, whose names have no `model.` before them."""

    @property
    def architecture(self) -> str:
        """general.architecture of the GGUF files that are written."""
        return (*self.architectures, self.name)[0]

    def kept(self, hp: HParams) -> dict[str, Shape]:
        """All tensors of a file, in file order: `tensors`, `dead`, `made`."""
        found = {**self.tensors(hp), **{name: value.shape for name, value in self.made(hp).items()}}
        return {**found, **self.dead(hp)}

    def gguf_shape(self, hp: HParams, name: str, shape: Shape) -> Shape:
        """A tensor's shape in GGUF files: three axes for stacked matrices."""
        count = self.stacks(hp).get(stem_of(name))
        return shape if count is None else (count, shape[0] // count, *shape[1:])

    def parts(self, hp: HParams, name: str) -> tuple[str, ...]:
        """Hugging Face's names of the tensors whose rows are concatenated; empty for GGUF-only tensors."""
        short = self.hf_names(name)
        if not short:
            return ()
        count = self.stacks(hp).get(stem_of(name))
        return (
            (short,) if count is None or "*" not in short else tuple(short.replace("*", str(i)) for i in range(count))
        )


FAMILIES: tuple[Family, ...] = (
    Family(
        name="gemma3",
        hf_model_types=("gemma3_text", "gemma3"),
        hparams_from_hf=lambda config, look: gemma3.hparams_from_hf(config, look.rows(EMBEDDING)),
        hparams_from_gguf=lambda m, look: gemma3.hparams_from_gguf(
            m, look.rows(EMBEDDING), not look.has("output.weight")
        ),
        gguf_fields=gemma3.gguf_fields,
        tensors=gemma3.tensors,
        hf_config=gemma3_config.hf_config,
        hf_names=hf_name,
        hf_norm_offset=1.0,
    ),
    Family(
        name="gemma3n",
        hf_model_types=("gemma3n_text", "gemma3n"),
        hparams_from_hf=gemma3n.hparams_from_hf,
        hparams_from_gguf=gemma3n.hparams_from_gguf,
        gguf_fields=gemma3n.gguf_fields,
        tensors=gemma3n.tensors,
        hf_config=gemma3n.hf_config,
        hf_names=gemma3n.hf_name,
        dead=dead,
        stacks=gemma3n.stacks,
    ),
    Family(
        name="gemma4",
        hf_model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        hparams_from_hf=gemma4.hparams_from_hf,
        hparams_from_gguf=gemma4.hparams_from_gguf,
        gguf_fields=gemma4.gguf_fields,
        tensors=gemma4.tensors,
        hf_config=gemma4.hf_config,
        hf_names=gemma4.hf_name,
        dead=dead,
        stacks=gemma4.stacks,
        apart=gemma4.APART,
        merged_tokenizer=True,
        made=gemma4.made,
    ),
    Family(
        name="gemma4_assistant",
        hf_model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        hparams_from_hf=gemma4_assistant.hparams_from_hf,
        hparams_from_gguf=gemma4_assistant.hparams_from_gguf,
        gguf_fields=gemma4_assistant.gguf_fields,
        tensors=gemma4_assistant.tensors,
        hf_config=gemma4_assistant.hf_config,
        hf_names=gemma4_assistant.hf_name,
        merged_tokenizer=True,
        made=gemma4.made,
        architectures=gemma4_assistant.ARCHITECTURES,
        renamed=gemma4_assistant.RENAMED,
        hf_outside=("lm_head", *gemma4_assistant.OUTSIDE),
    ),
    Family(
        name=gemma_embedding.FAMILY,
        hf_model_types=("gemma3_text",),
        hf_flag=gemma_embedding.BOTH_SIDES,
        hparams_from_hf=gemma_embedding.hparams_from_hf,
        hparams_from_gguf=gemma_embedding.hparams_from_gguf,
        gguf_fields=gemma_embedding.gguf_fields,
        tensors=gemma_embedding.tensors,
        hf_config=gemma_embedding.hf_config,
        hf_names=gemma_embedding.hf_name,
        hf_norm_offset=1.0,
        prompts=gemma_embedding.PROMPTS,
        modules=("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
    ),
    Family(
        name=gemma_embedding2.FAMILY,
        hf_model_types=("embedding_gemma2_text", "embedding_gemma2"),
        hparams_from_hf=gemma_embedding2.hparams_from_hf,
        hparams_from_gguf=gemma_embedding2.hparams_from_gguf,
        gguf_fields=gemma_embedding2.gguf_fields,
        tensors=gemma_embedding2.tensors,
        hf_config=gemma_embedding.hf_config,
        hf_names=gemma_embedding2.hf_name,
        merged_tokenizer=True,
        made=gemma4.made,
        modules=("Transformer", "Pooling", "Normalize"),
    ),
)


def family_of(hp: HParams) -> Family:
    """The family of a model. ValueError for an unknown one."""
    return family_named(hp.family)


def family_named(name: str) -> Family:
    for family in FAMILIES:
        if name == family.name:
            return family
    raise ValueError(f"no family is called {name!r}; known: {', '.join(f.name for f in FAMILIES)}")


def tensors(hp: HParams) -> Mapping[str, Shape]:
    """Every tensor that plans of a model use, with its shape, in file order."""
    return family_of(hp).tensors(hp)


def family_of_hf(config: Fields) -> Family:
    kind = config.text("model_type")
    for family in reversed(FAMILIES):  # those with a flag are the last ones
        if kind in family.hf_model_types and (not family.hf_flag or config.get(family.hf_flag) is True):
            return family
    known = ", ".join(dict.fromkeys(t for f in FAMILIES for t in f.hf_model_types))
    raise CheckpointError(f"{config.path}: model_type {kind!r} is not supported; known: {known}")


def family_of_gguf(metadata: Fields) -> Family:
    kind = metadata.text("general.architecture")
    for family in FAMILIES:
        if kind in (family.architectures or (family.name,)):
            return family
    known = ", ".join(f.architecture for f in FAMILIES)
    raise CheckpointError(f"{metadata.path}: general.architecture {kind!r} is not supported; known: {known}")


_SMALL = ("ffn_gate_inp", "altup_router", "altup_predict_coef", "altup_correct_coef", gemma4_assistant.CENTROIDS)


def is_exact(name: str, shape: Shape) -> bool:
    """True for tensors that are never quantised: vectors and very small matrices, float32 (int32: is_index)."""
    return len(shape) == 1 or stem_of(name) in _SMALL


def is_index(name: str) -> bool:
    """True for an int32 permutation of token ids."""
    return stem_of(name) == gemma4_assistant.ORDERING


def is_norm(name: str) -> bool:
    """Whether a vector is norm weights, which Hugging Face files of some families store as w - 1."""
    return name.endswith("_norm.weight")
