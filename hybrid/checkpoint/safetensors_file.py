"""Read safetensors files: parses and validates the header; data is read lazily.

Layout: u64 header length n, n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, data from 8 + n, which
the tensors fill without holes. Validation is at least as strict as that of the format's library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.files import OpenFile, parse_json
from hybrid.checkpoint.stored import Stored

_TYPES = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2)}
_OTHERS = {"I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}  # parts of quantised matrices (compressed.py)
_MAX_HEADER = 1 << 24  # stricter than the format's own limit, to bound memory
_MAX_AXES = 8
_MAX_ELEMENTS = 1 << 63


def read_safetensors(path: Path) -> tuple[dict[str, Stored], int]:
    """(tensors by the file's names, bytes of the file). Unsupported types keep the file's name."""
    file = OpenFile(path)
    size = int.from_bytes(file.read(0, min(8, file.size)), "little")
    if file.size < 8 or size > min(_MAX_HEADER, file.size - 8):
        raise CheckpointError(f"{path} is not a safetensors file, or is cut short")
    problem = f"{path} has a malformed safetensors header"
    header = parse_json(file.read(8, size), problem)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{problem}: __metadata__ is no table of texts")
    stored = {name: _stored(file, problem, name, info, 8 + size) for name, info in header.items()}
    at, last = 8 + size, "the header"
    for begin, end, name in sorted((t.offset, header[n]["data_offsets"][1] + 8 + size, n) for n, t in stored.items()):
        if begin != at:
            what = "overlap" if begin < at else "leave a hole"
            raise CheckpointError(f"{problem}: {last} and tensor {name} {what} at byte {min(begin, at)}")
        at, last = end, f"tensor {name}"
    if at != file.size:
        raise CheckpointError(f"{problem}: {file.size - at} bytes after {last} belong to no tensor")
    return stored, file.size


def _stored(file: OpenFile, problem: str, name: str, info: Any, start: int) -> Stored:
    where = f"{problem}: tensor {name}"
    if not isinstance(info, Mapping):
        raise CheckpointError(f"{where} is no object")
    kind: Any = info.get("dtype")
    shape: Any = info.get("shape")
    offsets: Any = info.get("data_offsets")
    if not isinstance(kind, str) or not _naturals(shape) or not _naturals(offsets):
        raise CheckpointError(f"{where} needs dtype, shape and data_offsets, a text and lists of whole numbers")
    if len(offsets) != 2 or offsets[0] > offsets[1] or len(shape) > _MAX_AXES:
        raise CheckpointError(f"{where} has shape {shape[:_MAX_AXES]} and data_offsets {offsets[:3]}")
    if math.prod(max(n, 1) for n in shape) >= _MAX_ELEMENTS:
        raise CheckpointError(f"{where} has shape {shape}: more elements than 2**63")
    begin, end = offsets
    if start + end > file.size:
        raise CheckpointError(
            f"{file.path} is cut short: tensor {name} ends at byte {start + end} of {file.size}; fetch it again"
        )
    if kind not in _TYPES:
        if kind in _OTHERS and end - begin != _OTHERS[kind] * math.prod(shape):
            raise CheckpointError(f"{where} has {end - begin} bytes for shape {shape} of {kind}")
        return Stored(file.path, name, kind, tuple(shape), file if kind in ("I32", "I64") else None, start + begin)
    dtype, item = _TYPES[kind]
    if end - begin != item * math.prod(shape):
        raise CheckpointError(f"{where} has {end - begin} bytes for shape {shape} of {kind}")
    return Stored(file.path, name, dtype, tuple(shape), file, start + begin)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in value)
