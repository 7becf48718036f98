"""Check for NaN and infinity in scales of block types and in norm weights, where one value corrupts a block or layer.

All scales are checked when a tensor is read, since they are a small part of a file. Values of plain matrices are not:
that would read every weight again. Their damage shows in the logits, which the device checks
(hybrid/engine/faults.py). `damaged` checks all values, on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import Checkpoint, CheckpointError
from hybrid.core.dtypes import DTYPES, FILE_TYPES, QUANTISED_TYPES
from hybrid.quant.codec import dequantise, row_blocks


def _fields(dtype: str) -> dict[int, str]:
    """Byte offsets of the float16 scales in a ggml block."""
    found, at = dict[int, str](), 0
    for part in map(DTYPES[dtype].part, FILE_TYPES[dtype].order):
        if part.code == "f2":
            found |= {at + 2 * i: ("scale", "minimum")[i] for i in range(part.count)}
        at += part.itemsize * part.count
    return found


FIELDS = {dtype: _fields(dtype) for dtype in QUANTISED_TYPES}
_EXPONENT = np.uint16(0x7C00)
_CHUNK = 1 << 18  # blocks at once: temporaries fit in the cache
_ELEMENTS = 1 << 22  # elements of a plain matrix at once


def check_scales(path: Path, name: str, dtype: str, shape: tuple[int, ...], raw: np.ndarray, first: int = 0) -> None:
    """CheckpointError for the first NaN or infinite float16 scale of ggml blocks `raw` (uint8); no-op for plain types.
    `shape` ends with the elements of a row; `raw` begins at the tensor's row `first`."""
    if dtype not in FIELDS:
        return
    fields, elements = FIELDS[dtype], DTYPES[dtype].block
    size = DTYPES[dtype].nbytes((elements,))
    words = raw.view("<u2").reshape(-1, size // 2)
    for begin in range(0, len(words), _CHUNK):
        for offset, field in fields.items():
            bits = words[begin : begin + _CHUNK, offset // 2]
            wrong = (bits & _EXPONENT) == _EXPONENT
            if wrong.any():
                block = begin + int(wrong.argmax())
                row, at = divmod(block * elements, shape[-1])
                raise CheckpointError(
                    f"{path}: tensor {name} of {dtype} is damaged: the {field} of row {first + row}, elements {at} to "
                    f"{at + elements - 1}, is {float(words[block, offset // 2].view('<f2'))}; fetch the file again"
                )


def check_finite(path: Path, name: str, values: np.ndarray) -> None:
    """CheckpointError for the first NaN or infinite value of a vector (norm weights)."""
    wrong = ~np.isfinite(values)
    if wrong.any():
        at = int(wrong.argmax())
        raise CheckpointError(
            f"{path}: tensor {name} is damaged: element {at} is {float(values.reshape(-1)[at])}; fetch the file again"
        )


def damaged(checkpoint: Checkpoint, progress: Callable[[int], object] = lambda done: None) -> Iterator[str]:
    """A line for each tensor with NaN or infinity, with the first position, and for each unreadable tensor. Reads every
    byte, in blocks of rows; `progress` gets the bytes read since the last call."""
    for name in checkpoint.names:
        shape, kind = checkpoint.shape(name), DTYPES[checkpoint.dtype(name)]
        try:
            if len(shape) == 1:
                checkpoint.tensor(name)  # checks its values
                progress(kind.nbytes(shape))
                continue
            for start, stop in row_blocks(shape[0], shape[1], _ELEMENTS):
                rows = checkpoint.rows(name, start, stop)  # checks scales
                if not kind.quantised:
                    _check_rows(checkpoint.path, name, kind.name, start, dequantise(rows, np.float32))
                progress(kind.nbytes((stop - start, shape[1])))
        except CheckpointError as error:
            yield str(error)


def _check_rows(path: Path, name: str, dtype: str, first: int, values: np.ndarray) -> None:
    wrong = ~np.isfinite(values)
    if wrong.any():
        row, at = divmod(int(wrong.argmax()), values.shape[1])
        raise CheckpointError(
            f"{path}: tensor {name} of {dtype} is damaged: row {first + row}, element {at} is {float(values[row, at])}; "
            "fetch the file again"
        )
