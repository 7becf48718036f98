"""Broken files, built byte by byte, and the check of a reader's error."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from conformance.files.mutations import within
from conformance.files.targets import refused
from hybrid.checkpoint import CheckpointError, open_checkpoint


def refusal(path: Path, *words: str) -> str:
    """The error of opening and reading all of `path`, which must contain these words."""
    with within(2.0), pytest.raises(CheckpointError) as error:
        c = open_checkpoint(path)
        for name in c.names:
            c.tensor(name)
        assert c.tokenizer
    text = refused(error.value)
    assert all(w in text for w in words), text
    return text


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(key: str | bytes, kind: int, data: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + data


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = 0, axes: int | None = None) -> bytes:
    axes = len(shape) if axes is None else axes
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", axes, *shape, kind, offset)


def head(
    values: list[bytes],
    tensors: list[bytes],
    n_values: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    tail: int = 4096,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(values) if n_values is None else n_values)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values + tensors) + bytes(tail)
