"""GGUF files (versions 2 and 3): metadata and tensor table are parsed here, the data stays in a memory map.

Own parser: the gguf package's reader makes NumPy views of every string, 12 s for a vocabulary of 262144 where this
takes a fraction of one. Files are written with the package (hybrid.convert).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint.assemble import Stored, assemble, embedding_rows
from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation
from hybrid.checkpoint.families import EMBEDDING, family_of_gguf
from hybrid.checkpoint.fields import Fields
from hybrid.spec.dtypes import DTYPES
from hybrid.tokenizer import SPACE, UNUSED, USER_DEFINED, Tokenizer, TokenizerError, Vocabulary

TYPE_IDS = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
_TYPES = {number: name for name, number in TYPE_IDS.items()}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


def open_gguf(path: Path) -> Checkpoint:
    """Open a file. Metadata and tensor table are read; CheckpointError names what is wrong."""
    values, stored = read_gguf(path)
    metadata = Fields(values, path)
    family = family_of_gguf(metadata)
    if metadata.integer("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata.integer('split.count')} parts: join them with llama-gguf-split"
        )
    vocab = embedding_rows(path, stored, EMBEDDING)
    try:
        hparams = family.hparams_from_gguf(metadata, vocab, "output.weight" not in stored)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    advice = "Convert the original checkpoint: python -m hybrid.convert SRC DST --type q8_0"
    entries = assemble(path, family, hparams, stored, lambda name: name, 0.0, advice)
    eos = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    number = {ours: metadata.get(f"general.sampling.{key}") for ours, key in _SAMPLING.items()}
    return Checkpoint(
        path=path,
        hparams=hparams,
        entries=entries,
        file_bytes=path.stat().st_size,
        chat_template=metadata.get("tokenizer.chat_template"),
        generation=Generation(tuple(dict.fromkeys(i for i in eos if i is not None)), **number),
        make_tokenizer=lambda: _tokenizer(metadata, vocab),
        name=metadata.text("general.name", path.stem),
    )


_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """(metadata, tensors by name). Arrays are lists; strings that are not UTF-8 keep surrogate escapes."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    cursor = _Cursor(path, data.view(np.ndarray).data)
    if bytes(cursor.view[:4]) != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file")
    cursor.at = 4
    version = cursor.number("I")
    if version not in (2, 3):
        what = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise CheckpointError(f"{path}: {what} GGUF is not supported; known: 2 and 3, little-endian")
    n_tensors, n_values = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(n_values):
        key = cursor.string()
        values[key] = cursor.value(cursor.number("I"))
    table = [_tensor_info(cursor) for _ in range(n_tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment must be a positive whole number, not {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    stored: dict[str, Stored] = {}
    for name, kind, shape, offset in table:
        if name in stored:
            raise CheckpointError(f"{path}: tensor {name} is there twice")
        stored[name] = _stored(path, name, kind, shape, data, start + offset)
    return values, stored


class _Cursor:
    """Reads little-endian values one after another; every read stays inside the file."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path, self.view, self.at = path, view, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.view) - self.at:
            raise CheckpointError(
                f"{self.path} is cut short or damaged: {size} bytes wanted at byte {self.at} of {len(self.view)}"
            )
        self.at += size
        return self.view[self.at - size : self.at]

    def number(self, code: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.number("Q")), "utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > 3:
            raise CheckpointError(f"{self.path}: damaged metadata: value type {kind} before byte {self.at}")
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item] if item != 7 else "?")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return [self.value(item, depth + 1) for _ in range(count)]


def _tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """(name, ggml type, shape [slowest axis first], offset)."""
    name, n_dims = cursor.string(), cursor.number("I")
    if n_dims > _MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {n_dims} axes; at most {_MAX_DIMS} are possible")
    shape = tuple(cursor.number("Q") for _ in range(n_dims))[::-1]
    return name, cursor.number("I"), shape, cursor.number("Q")


def _stored(path: Path, name: str, kind: int, shape: tuple[int, ...], data: np.memmap, at: int) -> Stored:
    if kind not in _TYPES:
        return Stored(path, name, _type_name(kind), shape, None)
    dtype = DTYPES[_TYPES[kind]]
    if dtype.block > 1 and (not shape or shape[-1] % dtype.block):
        raise CheckpointError(f"{path}: tensor {name} of {dtype.name} has rows that are no multiple of {dtype.block}")
    end = at + math.ceil(math.prod(shape) * dtype.bits / 8)
    if end > data.size:
        raise CheckpointError(f"{path} is cut short: tensor {name} ends at byte {end} of {data.size}; fetch it again")
    return Stored(path, name, dtype.name, shape, data, at)


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType  # only for an error: the import takes a quarter of a second

    known = {t.value: t.name for t in GGMLQuantizationType}
    return known.get(kind, f"ggml type {kind}").lower()


def padding_piece(index: int) -> str:
    """Text of the tokens that only fill a vocabulary up to the embedding's rows (llama.cpp's converter's form)."""
    return f"[PAD{index}]"


def _tokenizer(metadata: Fields, rows: int) -> Tokenizer:
    m = metadata.under("tokenizer.ggml.")
    kind = m.text("model")
    if kind != "llama":
        raise m.error("model", f"{kind!r} is not supported; known: llama (SentencePiece)")
    pieces, types = m.get("tokens", []), m.get("token_type", [])
    bos, eos, unk, pad = (m.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding"))
    eot = m.get("eot_token_id")
    try:
        vocabulary = Vocabulary(
            # Here user-defined pieces have real spaces and match them; SentencePiece writes U+2581 for that.
            tuple(p.replace(" ", SPACE) if t == USER_DEFINED else p for p, t in zip(pieces, types, strict=True)),
            tuple(m.get("scores", ())),
            tuple(types),
            bos,
            eos,
            unk,
            pad,
            add_space_prefix=bool(m.get("add_space_prefix", False)),
        )
        n_tokens = min(len(pieces), rows)
        while n_tokens and pieces[n_tokens - 1] == padding_piece(n_tokens - 1) and types[n_tokens - 1] == UNUSED:
            n_tokens -= 1
        return Tokenizer(vocabulary.first(n_tokens), () if eot is None else (eot,))
    except (TokenizerError, ValueError) as error:
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml: {error}") from None
