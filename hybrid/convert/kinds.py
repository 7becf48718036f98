"""Which storage type each tensor gets: classes of tensors as data, a wanted type for each, and what fits a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hybrid.checkpoint import CheckpointError
from hybrid.core.dtypes import DTYPES, WRITABLE_TYPES

SAME = "same"
"""Wanted type that keeps what the source has."""

CLASSES: dict[str, tuple[str, ...]] = {
    "embed": ("token_embd",),
    "head": ("output",),
    "attn": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "ffn": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Class -> the last part of its tensors' names, without `.weight`. Vectors belong to none: they are float32."""

# For rows that are no whole number of blocks: the next better type, as llama.cpp's quantiser chooses.
_NARROWER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_UNQUANTISED = "f16"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Storage types as asked for: of all matrices, and of classes of them where they differ."""

    dtype: str
    by_class: Mapping[str, str] = field(default_factory=dict)

    def of(self, kind: str) -> str:
        """The output matrix, where it is not the embedding itself, goes with the embedding."""
        default = self.by_class.get("embed", self.dtype) if kind == "head" else self.dtype
        return self.by_class.get(kind, default)


@dataclass(frozen=True, slots=True)
class Types:
    """Storage type of every tensor, in file order, and the matrices that could not have the wanted one."""

    kinds: Mapping[str, str]
    fallbacks: Mapping[str, str]


def class_of(name: str) -> str:
    """`blk.3.ffn_up.weight` -> `ffn`. CheckpointError for a matrix that no class lists."""
    part = name.removesuffix(".weight").split(".")[-1]
    for kind, parts in CLASSES.items():
        if part in parts:
            return kind
    raise CheckpointError(f"tensor {name} belongs to no class of {', '.join(CLASSES)}: add it to CLASSES")


def plan_types(tensors: Mapping[str, tuple[str, tuple[int, ...]]], wanted: Wanted, writing: bool = True) -> Types:
    """Types for `tensors` (name -> stored type and shape). CheckpointError, if `writing`, for a type that can only be
    read."""
    kinds: dict[str, str] = {}
    fallbacks: dict[str, str] = {}
    for name, (stored, shape) in tensors.items():
        if len(shape) == 1:
            kinds[name] = "f32"
            continue
        kind = wanted.of(class_of(name))
        kind = stored if kind == SAME else kind
        fitting = _fitting(kind, shape[-1])
        if fitting != kind:
            fallbacks[name] = fitting
        if writing and fitting != stored and fitting not in WRITABLE_TYPES:
            raise CheckpointError(
                f"{fitting} can be read but not written, and tensor {name} is stored as {stored}: choose one of "
                f"{', '.join(WRITABLE_TYPES)}, or {SAME}"
            )
        kinds[name] = fitting
    return Types(kinds, fallbacks)


def grouped(fallbacks: Mapping[str, str]) -> list[str]:
    """One line for each kind of tensor that could not have the wanted type."""
    counts = Counter((name.split(".", 2)[-1] if name.startswith("blk.") else name, kind) for name, kind in fallbacks.items())
    return [f"{n} x {name}: written as {kind}, whose blocks its rows fill" for (name, kind), n in counts.items()]


def _fitting(kind: str, width: int) -> str:
    while width % DTYPES[kind].block:
        kind = _NARROWER.get(kind, _UNQUANTISED)
    return kind


def main_type(kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The type that most elements of the layers' matrices have: what a file is named after."""
    sizes: Counter[str] = Counter()
    for name, kind in kinds.items():
        if len(shapes[name]) > 1 and class_of(name) not in ("embed", "head"):
            sizes[kind] += int(np.prod(shapes[name], dtype=np.int64))
    return sizes.most_common(1)[0][0]
