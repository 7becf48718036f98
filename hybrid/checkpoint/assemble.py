"""From the tensors found in files to a checkpoint's entries: everything is checked here, before any data is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import CheckpointError, Entry, printable
from hybrid.checkpoint.families import EMBEDDING, Family, is_norm
from hybrid.checkpoint.files import OpenFile
from hybrid.checkpoint.finite import check_finite, check_scales
from hybrid.core.dtypes import DTYPES, WEIGHT_TYPES
from hybrid.core.hparams import HParams
from hybrid.core.tensor import Packed, Tensor
from hybrid.quant.codec import dequantise, from_ggml, row_blocks

_LAYERS = ("blk.", "layers.")
_OTHER_MODALITIES = ("v.", "mm.", "a.", "vision_tower.", "multi_modal_projector.", "audio_tower.", "embed_vision.", "embed_audio.")
_COMPUTED = (".rotary_emb.inv_freq",)  # tables that old writers stored


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file has it: `dtype` is ours where we know the type, else the file's own name for it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: OpenFile | None
    """None where the type is unknown."""
    offset: int = 0

    def raw(self) -> np.ndarray:
        """The tensor's bytes, uint8 in memory of their own, with scales that are finite. CheckpointError where they are
        not, or where the file has changed."""
        return self._bytes(0, DTYPES[self.dtype].nbytes(self.shape))

    def load(self) -> Tensor:
        """The tensor in memory of its own. Raises what `raw` raises."""
        if len(self.shape) == 2:
            return self.read_rows(0, self.shape[0])
        return from_ggml(self.raw(), self.dtype, self.shape)

    def packed(self) -> Packed:
        """A matrix's bytes, read when and where they are asked for."""
        file, offset = self.file, self.offset
        assert file is not None
        return Packed(self.dtype, self.shape, lambda at, out: file.read_into(offset + at, out), self.read_rows)

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop of a matrix in memory of their own. Block types pass through a few at a time: they are split
        into parts, and what is split must not be held twice. Raises what `raw` raises."""
        width = self.shape[1]
        row, out = DTYPES[self.dtype].nbytes((width,)), Tensor.empty(self.dtype, (stop - start, width))
        if out.type.block == 1:
            assert self.file is not None
            self.file.read_into(self.offset + start * row, out.parts[0].reshape(-1).view(np.uint8))
            return out
        for a, b in row_blocks(stop - start, width):
            piece = from_ggml(self._bytes((start + a) * row, (start + b) * row, start + a), self.dtype, (b - a, width))
            for to, part in zip(out.parts, piece.parts, strict=True):
                to[a:b] = part
        return out

    def _bytes(self, begin: int, end: int, first_row: int = 0) -> np.ndarray:
        assert self.file is not None
        raw = np.empty(end - begin, np.uint8)
        self.file.read_into(self.offset + begin, raw)
        check_scales(self.path, self.name, self.dtype, self.shape, raw, first_row)
        return raw


def embedding_rows(path: Path, stored: Mapping[str, Stored], name: str) -> int:
    """Vocabulary size: the tensor's own shape is trusted, no field."""
    found = stored.get(name)
    if found is None:
        raise CheckpointError(f"{path}: tensor {name} is missing")
    if len(found.shape) != 2:
        raise CheckpointError(f"{found.path}: tensor {found.name} has shape {found.shape}, not [vocab, hidden]")
    return found.shape[0]


def assemble(
    path: Path,
    family: Family,
    hparams: HParams,
    stored: Mapping[str, Stored],
    file_name: Callable[[str], str],
    norm_offset: float,
    advice: str,
    notes: list[str],
) -> dict[str, Entry]:
    """Entries in file order. `file_name` maps a GGUF name to a key of `stored`; `advice` ends the error about a
    storage type that we do not read; what is left out is said in `notes`. CheckpointError names the file and the
    first tensor that is wrong."""
    entries: dict[str, Entry] = {}
    for name, shape in family.tensors(hparams).items():
        found = stored.get(file_name(name))
        if found is None:
            raise CheckpointError(f"{path}: tensor {file_name(name)} is missing")
        if found.shape != shape:
            why = "vocab and hidden" if name == EMBEDDING else "the hyper-parameters"
            raise CheckpointError(
                f"{found.path}: tensor {found.name} has shape {list(found.shape)}, but {why} say {list(shape)}"
            )
        if found.dtype not in WEIGHT_TYPES:
            raise CheckpointError(
                f"{found.path}: tensor {found.name} is stored as {found.dtype}; known: {', '.join(WEIGHT_TYPES)}. "
                + advice
            )
        if is_norm(name):
            entries[name] = Entry("f32", shape, _norm_loader(found, norm_offset))
        else:
            entries[name] = Entry(found.dtype, shape, found.load, found.read_rows, found.packed())
    coarse = [stored[file_name(n)] for n in entries if is_norm(n) and DTYPES[stored[file_name(n)].dtype].quantised]
    if coarse:
        who = f"{coarse[0].name} and {len(coarse) - 1} more norms are" if len(coarse) > 1 else f"{coarse[0].name} is"
        notes.append(printable(f"{who} stored as {coarse[0].dtype}: no usual writer quantises norms, and it costs accuracy"))
    used = {file_name(name) for name in entries}
    _account_for_rest({key: tensor for key, tensor in stored.items() if key not in used}, notes)
    return entries


def _account_for_rest(rest: Mapping[str, Stored], notes: list[str]) -> None:
    """Tensors that the family does not have: other modalities are left out, others too but by name; one inside a layer
    would change what the layer computes."""
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


def _norm_loader(found: Stored, offset: float) -> Callable[[], Tensor]:
    def load() -> Tensor:
        tensor = found.load()
        check_finite(found.path, found.name, dequantise(tensor, np.float32))
        if tensor.dtype == "f32" and offset == 0:
            return tensor
        return Tensor.of(dequantise(tensor, np.float32) + np.float32(offset))

    return load
