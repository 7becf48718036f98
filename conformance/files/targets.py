"""Readers as functions of bytes, for mutated and fuzzed input: a reader loads the bytes or refuses them.

Each takes an empty folder and the bytes, and returns the loaded object. REFUSALS are the errors that a reader may
raise; `refused` checks that such an error is one printable line of bounded length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.checkpoint.tokenizer_json import read_tokenizer_json
from hybrid.core.errors import SpecError
from hybrid.spec.expr import ExprError
from hybrid.spec.load import parse_toml, validate
from hybrid.spec.op import OpSpec
from hybrid.spec.schedule import read_schedule
from hybrid.text.tokenizer import Tokenizer, TokenizerError, Vocabulary

REFUSALS = (CheckpointError, TokenizerError, SpecError, ExprError)
TEXT = "The thing:  <b>abc</b>\n\n\u00e9t\u00e9 \ud800 <eos>"


def refused(error: Exception) -> str:
    """The message of a refusal, checked."""
    text = str(error)
    assert text and len(text) <= 1100 and text.isprintable(), repr(text)
    return text


def touch(checkpoint: Checkpoint) -> Checkpoint:
    """Read everything of a checkpoint once: tensors have the declared type and shape."""
    with np.errstate(all="ignore"):
        for name in checkpoint.names:
            tensor = checkpoint.tensor(name)
            assert (tensor.dtype, tensor.shape) == (checkpoint.dtype(name), checkpoint.shape(name))
            sum(int(part.reshape(-1).view(np.uint8)[-1]) for part in tensor.parts if part.size)
    assert checkpoint.hparams.as_dict() and all(note.isprintable() for note in checkpoint.notes)
    return checkpoint


def use(tokenizer: Tokenizer) -> Tokenizer:
    """Encode, decode, and decode an id out of range."""
    ids = tokenizer.encode(TEXT, parse_special=True) + tokenizer.encode(TEXT)
    assert all(0 <= i < tokenizer.n_tokens for i in ids)
    tokenizer.decode(ids)
    return tokenizer


def gguf(folder: Path, data: bytes) -> Checkpoint:
    path = folder / "m.gguf"
    path.write_bytes(data)
    checkpoint = touch(open_checkpoint(path))
    use(checkpoint.tokenizer)
    return checkpoint


def gguf_header(folder: Path, data: bytes) -> Checkpoint:
    """Without the tokenizer."""
    path = folder / "m.gguf"
    path.write_bytes(data)
    return touch(open_checkpoint(path))


def pack_directory(config: bytes, header: bytes, data: bytes) -> bytes:
    """The form that `directory` unpacks: lengths in front, so that mutations of one part do not destroy the other."""
    return struct.pack("<HH", len(config), len(header)) + config + header + data


def directory(folder: Path, packed: bytes) -> Checkpoint:
    """config.json, the header of model.safetensors (its length is right) and the tensors' bytes."""
    n_config, n_header = struct.unpack("<HH", packed[:4].ljust(4, b"\0"))
    config, header, data = packed[4:][:n_config], packed[4 + n_config :][:n_header], packed[4 + n_config + n_header :]
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return touch(open_checkpoint(folder))


def tokenizer_model(folder: Path, data: bytes) -> Tokenizer:
    path = folder / "tokenizer.model"
    path.write_bytes(data)
    return _tokenizer(read_sentencepiece(path))


def tokenizer_json(folder: Path, data: bytes) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_bytes(data)
    return _tokenizer(read_tokenizer_json(path))


def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    return use(Tokenizer(vocabulary))


def with_workloads(spec: OpSpec) -> OpSpec:
    """Load the workloads, which are made on first use."""
    _ = spec.workload
    return spec


def toml(folder: Path, data: bytes) -> list[Any]:
    """As a schedule and as an operation: at least one of them refuses."""
    text = data.decode("utf-8", "replace")
    tables = parse_toml("fuzz.toml", text)
    loaded: list[Any] = []
    readings: tuple[Callable[[], Any], ...] = (
        lambda: read_schedule("fuzz.toml", tables, folder / "fuzz.toml"),
        lambda: with_workloads(validate("fuzz.toml", tables, OpSpec)),
    )
    for read in readings:
        try:
            loaded.append(read())
        except SpecError as error:
            refused(error)
            last = error
    if not loaded:
        raise last
    return loaded


TARGETS: dict[str, Callable[[Path, bytes], Any]] = {
    "gguf": gguf,
    "gguf_header": gguf_header,
    "directory": directory,
    "tokenizer_model": tokenizer_model,
    "tokenizer_json": tokenizer_json,
    "toml": toml,
}
