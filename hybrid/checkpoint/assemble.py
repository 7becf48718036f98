"""From the tensors found in files to a checkpoint's entries: everything is checked here, before any data is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import CheckpointError, Entry
from hybrid.checkpoint.families import EMBEDDING, Family, is_norm
from hybrid.hparams import HParams
from hybrid.spec.dtypes import DTYPES, WEIGHT_TYPES
from hybrid.spec.tensor import Tensor
from kernels.oracle.quant import dequantise, from_ggml


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file has it: `dtype` is ours where we know the type, else the file's own name for it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.memmap | None
    """The file's bytes, all of them; None where the type is unknown."""
    offset: int = 0

    def load(self) -> Tensor:
        """Plain types are views of the map unless it holds them misaligned; block types are split into parts."""
        assert self.data is not None
        kind = DTYPES[self.dtype]
        raw = self.data[self.offset : self.offset + kind.nbytes(self.shape)].view(np.ndarray)
        if raw.ctypes.data % max(p.dtype.itemsize for p in kind.parts):
            raw = raw.copy()
        return from_ggml(raw, self.dtype, self.shape)


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
) -> dict[str, Entry]:
    """Entries in file order. `file_name` maps a GGUF name to a key of `stored`; `advice` ends the error about a
    storage type that we do not read. CheckpointError names the file and the first tensor that is wrong."""
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
            entries[name] = Entry(found.dtype, shape, found.load)
    return entries


def _norm_loader(found: Stored, offset: float) -> Callable[[], Tensor]:
    def load() -> Tensor:
        tensor = found.load()
        if tensor.dtype == "f32" and offset == 0:
            return tensor
        return Tensor.of(dequantise(tensor, np.float32) + np.float32(offset))

    return load
