"""Make a checkpoint's entries from the tensors in files, and validate them before reading data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import CheckpointError, Entry, printable
from hybrid.checkpoint.decoder import Shape
from hybrid.checkpoint.families import EMBEDDING, Family, is_exact, is_index, is_norm
from hybrid.checkpoint.finite import check_finite
from hybrid.checkpoint.stored import Stored
from hybrid.core.dtypes import DTYPES, WEIGHT_TYPES
from hybrid.core.hparams import HParams
from hybrid.core.names import LAYER, stem_of
from hybrid.core.tensor import Packed, Tensor
from hybrid.quant.codec import dequantise

_LAYERS = (LAYER, "layers.")
_OTHER_MODALITIES = (
    "v.",
    "mm.",
    "a.",
    "vision_tower.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
)
_COMPUTED = (".rotary_emb.inv_freq",)  # ignored tables in old files


@dataclass(frozen=True, slots=True)
class Dialect:
    """Representation of a family's tensors in a file format."""

    parts: Callable[[str], Sequence[str]]
    """GGUF name -> keys of the tensors whose rows are concatenated; empty: the format lacks the tensor."""
    norm_offset: float
    advice: str
    """Last sentence of the error for an unsupported storage type."""


def assemble(
    path: Path, family: Family, hparams: HParams, stored: Mapping[str, Stored], dialect: Dialect, notes: list[str]
) -> dict[str, Entry]:
    """Entries in file order; `notes` gets lines on ignored tensors. CheckpointError names the file and the first
    invalid tensor."""
    entries: dict[str, Entry] = {}
    used: set[str] = set()
    coarse: list[Stored] = []
    dead = family.dead(hparams)
    made = family.made(hparams)
    for name, shape in family.kept(hparams).items():
        keys = dialect.parts(name)
        if name in made:
            used |= {*keys}  # already read with the hyper-parameters
            entries[name] = Entry("f32", shape, _constant(made[name]))
            continue
        if name in dead and not all(key in stored for key in keys):
            continue
        missing = next((key for key in keys if key not in stored), None)
        halves = [name.replace(stem_of(name), stem) for stem in family.apart.get(stem_of(name), ())]
        if missing is not None and halves and all(key in stored for key in halves):
            count = family.stacks(hparams)[stem_of(name)]
            half = (shape[0] // len(halves), *shape[1:])
            found = [_checked(name, stored[key], half, count, dialect) for key in halves]
            height = half[0] // count
            parts = [(part, i * height) for i in range(count) for part in found]
            used |= {*halves}
            entries[name] = _joined(parts, height, shape)
            continue
        if missing is not None:
            raise CheckpointError(f"{path}: tensor {missing} is missing")
        if is_index(name):
            used |= {*keys}
            entries[name] = Entry("i32", shape, partial(stored[keys[0]].ids, shape[0]))
            continue
        stack = family.stacks(hparams).get(stem_of(name))
        found = [_checked(name, stored[key], _part_shape(shape, len(keys)), stack, dialect) for key in keys]
        used |= {*keys}
        if is_exact(name, shape):
            if DTYPES[found[0].dtype].quantised and is_norm(name):
                coarse.append(found[0])
            entries[name] = Entry("f32", shape, _exact_loader(found[0], dialect.norm_offset if is_norm(name) else 0.0))
        elif len(found) == 1:
            entries[name] = Entry(
                found[0].dtype,
                shape,
                found[0].load,
                found[0].read_rows,
                None if found[0].foreign else found[0].packed(),
            )
        else:
            entries[name] = _joined([(part, 0) for part in found], shape[0] // len(found), shape)
    if coarse:
        who = f"{coarse[0].name} and {len(coarse) - 1} more norms are" if len(coarse) > 1 else f"{coarse[0].name} is"
        notes.append(
            printable(f"{who} stored as {coarse[0].dtype}: no usual writer quantises norms, and it costs accuracy")
        )
    unread = [name for name in dead if name in entries]
    if unread:
        notes.append(
            f"{len(unread)} tensors ({unread[0]}, ...) of layers that read another layer's cache are never used"
        )
    _account_for_rest({key: tensor for key, tensor in stored.items() if key not in used}, notes)
    return entries


def _part_shape(shape: Shape, count: int) -> Shape:
    return shape if count == 1 else (shape[0] // count, *shape[1:])


def _checked(name: str, found: Stored, shape: Shape, count: int | None, dialect: Dialect) -> Stored:
    """Check a tensor's shape and type; flattens a stack of `count` matrices (three axes) to two axes."""
    if count is not None and found.shape == (count, shape[0] // count, *shape[1:]):
        found = replace(found, shape=shape)
    if len(shape) == 1 and len(found.shape) != 1 and prod(found.shape) == prod(shape) == 1:
        found = replace(found, shape=shape)
    if found.shape != shape:
        why = "vocab and hidden" if name == EMBEDDING else "the hyper-parameters"
        raise CheckpointError(
            f"{found.path}: tensor {found.name} has shape {list(found.shape)}, but {why} say {list(shape)}"
        )
    if found.dtype not in WEIGHT_TYPES:
        raise CheckpointError(
            f"{found.path}: tensor {found.name} is stored as {found.dtype}; known: {', '.join(WEIGHT_TYPES)}. "
            + dialect.advice
        )
    return found


Part = tuple[Stored, int]
"""A tensor and its first row that counts."""


def _joined(parts: Sequence[Part], height: int, shape: Shape) -> Entry:
    """Concatenate `height` rows of matrices of one type. CheckpointError if their types differ."""
    first = parts[0][0]
    other = next((t for t, _ in parts if t.dtype != first.dtype), None)
    if other is not None:
        raise CheckpointError(
            f"{other.path}: tensor {other.name} is stored as {other.dtype}, but {first.name} as {first.dtype}: "
            "store them as one type"
        )
    dtype = DTYPES[first.dtype]
    row = dtype.nbytes((1, *shape[1:]))
    size = height * row

    def rows(start: int, stop: int) -> Tensor:
        out = Tensor.empty(dtype.name, (stop - start, shape[1]))
        for i in range(start // height, -(-stop // height)):
            part, begin = parts[i]
            a, b = max(start, i * height), min(stop, (i + 1) * height)
            piece = part.read_rows(begin + a - i * height, begin + b - i * height)
            for to, of in zip(out.parts, piece.parts, strict=True):
                to[a - start : b - start] = of
        return out

    def read_into(at: int, out: np.ndarray) -> None:
        done = 0
        while done < out.size:
            i, inside = divmod(at + done, size)
            n = min(out.size - done, size - inside)
            part, begin = parts[i]
            part.packed().read_into(begin * row + inside, out[done : done + n])
            done += n

    packed = None if any(t.foreign for t, _ in parts) else Packed(dtype.name, shape, read_into, rows)
    return Entry(dtype.name, shape, lambda: rows(0, shape[0]), rows, packed)


def _account_for_rest(rest: Mapping[str, Stored], notes: list[str]) -> None:
    """Handle unknown tensors: ignore those of other modalities and unused ones, with notes. CheckpointError for one
    inside a layer, which would change its result."""
    others = [key for key in rest if key.startswith(_OTHER_MODALITIES)]
    ignored = [key for key in rest if not key.startswith(_OTHER_MODALITIES) and not key.endswith(_COMPUTED)]
    for key in ignored:
        if key.startswith(_LAYERS):
            raise CheckpointError(
                f"{rest[key].path}: tensor {rest[key].name} is no part of this architecture or of its number of layers"
            )
    if others:
        notes.append(printable(f"{len(others)} tensors of other modalities ({others[0]}, ...) are left out: text only"))
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        notes.append(printable(f"tensors without a use in this model are left out: {', '.join(ignored[:3])}{more}"))


def _constant(values: np.ndarray) -> Callable[[], Tensor]:
    return lambda: Tensor.of(values.astype(np.float32))


def _exact_loader(found: Stored, offset: float) -> Callable[[], Tensor]:
    def load() -> Tensor:
        tensor = found.load()
        check_finite(found.path, found.name, dequantise(tensor, np.float32))
        if tensor.dtype == "f32" and offset == 0:
            return tensor
        return Tensor.of(dequantise(tensor, np.float32) + np.float32(offset))

    return load
