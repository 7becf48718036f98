"""safetensors: the header is parsed and checked here, the data stays in a memory map.

Layout: u64 header length n, n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, data from 8 + n.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint.assemble import Stored
from hybrid.checkpoint.base import CheckpointError

_TYPES = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2)}
_MAX_HEADER = 100_000_000  # the limit of the format's own library


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Tensors of one file by the file's names. Types that we do not read keep the file's name for them."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    size = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or size > min(_MAX_HEADER, data.size - 8):
        raise CheckpointError(f"{path} is not a safetensors file, or is cut short")
    try:
        header = json.loads(data[8 : 8 + size].tobytes())
        if not isinstance(header, dict):
            raise TypeError("the header is no object")
        return {
            name: _stored(path, name, info, data, 8 + size) for name, info in header.items() if name != "__metadata__"
        }
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} has a malformed safetensors header: {error!r}") from None


def _stored(path: Path, name: str, info: dict[str, Any], data: np.memmap, start: int) -> Stored:
    kind, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) or begin > end:
        raise TypeError(f"tensor {name}: shape {shape}, offsets {begin}..{end}")
    if start + end > data.size:
        raise CheckpointError(
            f"{path} is cut short: tensor {name} ends at byte {start + end} of {data.size}; fetch it again"
        )
    if kind not in _TYPES:
        return Stored(path, name, str(kind), shape, None)
    dtype, item = _TYPES[kind]
    if end - begin != item * math.prod(shape):
        raise TypeError(f"tensor {name}: {end - begin} bytes for shape {shape} of {kind}")
    return Stored(path, name, dtype, shape, data, start + begin)
