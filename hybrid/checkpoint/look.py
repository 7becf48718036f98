"""Access to tensors before the hyper-parameters are known: shapes and small vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.finite import check_finite
from hybrid.checkpoint.stored import Stored
from hybrid.core.dtypes import DTYPES
from hybrid.quant.codec import dequantise

_MOST = 1 << 16  # elements of a small vector


class Look:
    """Tensors of a file or folder by GGUF name. called: GGUF name -> key of `stored`."""

    def __init__(self, path: Path, stored: Mapping[str, Stored], called: Callable[[str], str]) -> None:
        self.path, self._stored, self._called = path, stored, called

    def has(self, name: str) -> bool:
        return self._called(name) in self._stored

    def rows(self, name: str) -> int:
        """Rows of an embedding table, by its shape rather than a field. CheckpointError if missing or not a matrix."""
        found = self._stored.get(self._called(name))
        if found is None:
            raise CheckpointError(f"{self.path}: tensor {self._called(name)} is missing")
        if len(found.shape) != 2:
            raise CheckpointError(f"{found.path}: tensor {found.name} has shape {found.shape}, not [vocab, hidden]")
        return found.shape[0]

    def width(self, name: str) -> int | None:
        """Elements in a row of a matrix; None if missing."""
        found = self._stored.get(self._called(name))
        return found.shape[1] if found is not None and len(found.shape) == 2 else None

    def height(self, name: str) -> int | None:
        """Rows of a matrix; None if missing."""
        found = self._stored.get(self._called(name))
        return found.shape[0] if found is not None and len(found.shape) == 2 else None

    def values(self, name: str, finite: bool = True) -> np.ndarray | None:
        """A small vector or scalar as float32 [n]; None if missing."""
        found = self._stored.get(self._called(name))
        if found is None:
            return None
        count = int(np.prod(found.shape, dtype=np.int64))
        if found.file is None or DTYPES[found.dtype].quantised or count > _MOST or len(found.shape) > 1:
            raise CheckpointError(f"{found.path}: tensor {found.name} must be a small vector of f32, f16 or bf16")
        values = dequantise(found.load(), np.float32).reshape(-1)
        if finite:
            check_finite(found.path, found.name, values)
        return values
