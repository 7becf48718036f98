"""Open GGUF files (versions 2 and 3), whole or split, as a checkpoint that reads data lazily.

hybrid.convert writes files with the gguf package.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid.checkpoint.assemble import Dialect, assemble
from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation, printable
from hybrid.checkpoint.families import EMBEDDING, family_of_gguf
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import OpenFile
from hybrid.checkpoint.gguf_header import TensorInfo, read_header, refuse_overlaps
from hybrid.checkpoint.gguf_split import check_parts, part_paths
from hybrid.checkpoint.gguf_tokenizer import end_ids, first_repeated, gguf_tokenizer
from hybrid.checkpoint.look import Look
from hybrid.checkpoint.sentence import prompts_of
from hybrid.checkpoint.stored import Stored
from hybrid.core.dtypes import DTYPES, FILE_TYPES
from hybrid.quant.foreign import FOREIGN

_TYPES = {files.number: name for name, files in FILE_TYPES.items()}
INTEGERS = {26: "I32", 27: "I64"}
"""Types of token ids, under safetensors' names."""
_FOREIGN = {kind.number: kind for kind in FOREIGN.values()}


@dataclass(frozen=True, slots=True)
class Part:
    """One file: metadata (arrays are lists, texts that are not UTF-8 keep surrogate escapes), tensors by name, bytes.
    Every tensor is inside the file and overlaps no other."""

    path: Path
    values: dict[str, Any]
    stored: dict[str, Stored]
    size: int


def open_gguf(path: Path) -> Checkpoint:
    """Open a file, or all parts of a split model by the path of any part. Reads metadata and tensor tables.
    CheckpointError."""
    opened = read_gguf(path)
    paths = part_paths(path, opened.values)
    parts = [opened if p == path else read_gguf(p) for p in paths]
    if len(parts) > 1:
        check_parts(parts)
    path, values = parts[0].path, parts[0].values
    stored = {name: tensor for part in parts for name, tensor in part.stored.items()}
    _take_scales(stored)
    metadata = Fields(values, path)
    if metadata.get("general.type") == "adapter":
        raise metadata.error(
            "general.type",
            "is adapter: a LoRA adapter is not supported; merge it into its model (llama.cpp's llama-export-lora)",
        )
    family = family_of_gguf(metadata)
    stored = {family.renamed.get(name, name): tensor for name, tensor in stored.items()}
    look = Look(path, stored, str)
    vocab = look.rows(EMBEDDING)
    try:
        hparams = family.hparams_from_gguf(metadata, look)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if (twice := first_repeated(metadata)) is not None:
        piece, first, again = twice
        metadata.notes.append(
            printable(f"tokenizer.ggml.tokens has {piece!r} twice, at {first} and {again}: the first counts")
        )
    advice = "Convert the original checkpoint: python -m hybrid.convert SRC DST --type q8_0"
    entries = assemble(path, family, hparams, stored, Dialect(lambda name: (name,), 0.0, advice), metadata.notes)
    foreign = Counter(tensor.foreign for tensor in stored.values() if tensor.foreign)
    metadata.notes += [FOREIGN[kind].note(n) for kind, n in foreign.items()]
    return Checkpoint(
        path=path,
        hparams=hparams,
        entries=entries,
        file_bytes=sum(part.size for part in parts),
        chat_template=metadata.optional_text("tokenizer.chat_template"),
        generation=_generation(metadata, vocab),
        make_tokenizer=lambda: gguf_tokenizer(metadata, vocab),
        name=metadata.text("general.name", path.stem),
        notes=tuple(metadata.notes),
        tool_template=metadata.optional_text("tokenizer.chat_template.tool_use"),
        prompts=prompts_of(metadata.under(f"{metadata.text('general.architecture')}.")) or family.prompts,
    )


def _take_scales(stored: dict[str, Stored]) -> None:
    """Join `X.scale`, a number, with `X.weight` of nvfp4; drop `X.input_scale`, of activations in that type."""
    for name, found in [*stored.items()]:
        stem, weight = name.removesuffix(".weight"), name.endswith(".weight")
        scale = stored.get(f"{stem}.scale")
        if weight and found.foreign == "nvfp4" and scale is not None:
            if scale.dtype != "f32" or math.prod(scale.shape) != 1:
                raise CheckpointError(
                    f"{scale.path}: tensor {scale.name} must be one number in f32, for {name} of nvfp4"
                )
            stored[name] = replace(found, factor=stored.pop(f"{stem}.scale"))
        if weight and found.foreign == "nvfp4":
            stored.pop(f"{stem}.input_scale", None)


def _generation(metadata: Fields, vocab: int) -> Generation:
    m = metadata.under("general.sampling.")
    return Generation(
        end_ids(metadata, vocab),
        temperature=m.optional_number("temp"),
        top_k=None if m.get("top_k") is None else m.integer("top_k"),
        top_p=m.optional_number("top_p"),
        min_p=m.optional_number("min_p"),
        repetition_penalty=m.optional_number("penalty_repeat"),
    )


def read_gguf(path: Path) -> Part:
    """Metadata and tensor table of one file. CheckpointError."""
    file = OpenFile(path)
    values, table = read_header(file)
    stored = {info.name: _stored(file, info) for info in table}
    refuse_overlaps(path, [(t.offset, t.offset + _nbytes(t), t.name) for t in stored.values()])
    return Part(path, values, stored, file.size)


def _nbytes(tensor: Stored) -> int:
    """Bytes of a tensor; 1 for an unknown type, to check at least its first byte for overlaps."""
    if tensor.dtype in INTEGERS.values():
        return tensor.ids_bytes
    return 1 if tensor.file is None else tensor.nbytes


def _stored(file: OpenFile, info: TensorInfo) -> Stored:
    if info.at > file.size:
        raise CheckpointError(
            f"{file.path} is cut short: tensor {info.name} begins at byte {info.at} of {file.size}; fetch it again"
        )
    if info.kind in INTEGERS:
        return Stored(file.path, info.name, INTEGERS[info.kind], info.shape, file, info.at)
    if info.kind not in _TYPES and info.kind not in _FOREIGN:
        return Stored(file.path, info.name, _type_name(info.kind), info.shape, None, info.at)
    kind = _FOREIGN.get(info.kind)
    dtype = kind or DTYPES[_TYPES[info.kind]]
    if dtype.block > 1 and (not info.shape or info.shape[-1] % dtype.block):
        raise CheckpointError(
            f"{file.path}: tensor {info.name} of {dtype.name} has rows that are no multiple of {dtype.block}"
        )
    end = info.at + math.ceil(math.prod(info.shape) * dtype.bits / 8)
    if end > file.size:
        raise CheckpointError(
            f"{file.path} is cut short: tensor {info.name} ends at byte {end} of {file.size}; fetch it again"
        )
    if kind is not None:
        return Stored(file.path, info.name, kind.target, info.shape, file, info.at, kind.name)
    return Stored(file.path, info.name, dtype.name, info.shape, file, info.at)


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType  # slow import, needed only for an error

    known = {t.value: t.name for t in GGMLQuantizationType}
    return known.get(kind, f"ggml type {kind}").lower()
