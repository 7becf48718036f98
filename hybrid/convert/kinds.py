"""Choose each tensor's storage type, by the requested type of its class and the length of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid.checkpoint import CheckpointError
from hybrid.checkpoint.classes import CLASSES, class_of
from hybrid.checkpoint.families import is_exact, is_index
from hybrid.core.dtypes import DTYPES, WRITABLE_TYPES, fitting, requantises
from hybrid.core.names import part_of
from hybrid.core.numeric import np

__all__ = ["CLASSES", "SAME", "Types", "Wanted", "class_of", "grouped", "main_type", "plan_types"]

SAME = "same"
"""Requested type that keeps the source's type."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requested storage types: a default for matrices, and overrides by class."""

    dtype: str
    by_class: Mapping[str, str] = field(default_factory=dict)

    def of(self, kind: str) -> str:
        """The requested type of a class. An untied output matrix and the per-layer embedding table default to the
        embedding's type. The streams' matrices are quantised only by their own option."""
        default = self.by_class.get("embed", self.dtype) if kind in ("head", "table") else self.dtype
        if kind == "streams" and default != SAME and DTYPES[default].quantised:
            default = SAME
        return self.by_class.get(kind, default)


@dataclass(frozen=True, slots=True)
class Types:
    """Storage type of every tensor, in file order, and matrices that fell back to another type."""

    kinds: Mapping[str, str]
    fallbacks: Mapping[str, str]


def plan_types(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], wanted: Wanted, writing: bool = True, requantize: bool = True
) -> Types:
    """Types for `tensors` (name -> stored type and shape). CheckpointError for a read-only type if `writing`, and for a
    quantised matrix to be quantised again unless `requantize`."""
    kinds: dict[str, str] = {}
    fallbacks: dict[str, str] = {}
    for name, (stored, shape) in tensors.items():
        if is_exact(name, shape):
            kinds[name] = "i32" if is_index(name) else "f32"
            continue
        kind = wanted.of(class_of(name))
        kind = stored if kind == SAME else kind
        fits = fitting(kind, shape[-1])
        if fits != kind:
            fallbacks[name] = fits
        if writing and fits != stored and fits not in WRITABLE_TYPES:
            raise CheckpointError(
                f"{fits} can be read but not written, and tensor {name} is stored as {stored}: choose one of "
                f"{', '.join(WRITABLE_TYPES)}, or {SAME}"
            )
        if not requantize and requantises(stored, fits):
            raise CheckpointError(
                f"tensor {name} is {stored}: as {fits} it would be quantised twice, which costs accuracy; convert the "
                f"unquantised model, keep it with --type-{class_of(name)} {SAME}, or give --requantize"
            )
        kinds[name] = fits
    return Types(kinds, fallbacks)


def grouped(fallbacks: Mapping[str, str]) -> list[str]:
    """One line for each kind of tensor that fell back to another type."""
    counts = Counter((part_of(name), kind) for name, kind in fallbacks.items())
    return [f"{n} x {name}: written as {kind}, whose blocks its rows fill" for (name, kind), n in counts.items()]


def main_type(kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The most common type of elements in the layers' matrices, used in file names."""
    sizes: Counter[str] = Counter()
    for name, kind in kinds.items():
        if not is_exact(name, shapes[name]) and class_of(name) in ("attn", "ffn"):
            sizes[kind] += int(np.prod(shapes[name], dtype=np.int64))
    return sizes.most_common(1)[0][0]
