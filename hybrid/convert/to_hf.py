"""Write Hugging Face directories: safetensors, config.json and tokenizer files, also loadable by transformers.

The header of safetensors is written here: the package needs whole tensors in memory, and torch for bf16.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.checkpoint import Checkpoint, CheckpointError
from hybrid.checkpoint.base import Entry
from hybrid.checkpoint.families import Family
from hybrid.checkpoint.hf_files import MORE_TEMPLATES, TOKENIZER_FILES, config, generation_config, tokenizer_config
from hybrid.checkpoint.sentencepiece_write import write_sentencepiece
from hybrid.convert.atomic import atomic_folder
from hybrid.convert.shards import Shard, divide, shard_paths, tensor_sizes
from hybrid.core.dtypes import WEIGHT_TYPES
from hybrid.core.tensor import Tensor

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "i32": "I32"}
DIGEST = "sha256."
"""Prefix of a tensor's digest key in the file's __metadata__; the tensor's name in the file follows."""
HEADER_DIGEST = "sha256"
"""Key in __metadata__: digest of the header (length and JSON), computed with zeros in place of the digest."""
SUMS = "SHA256SUMS"
"""File with digests of all files without tensors, in sha256sum's format."""

_UNKNOWN = "0" * 64


@contextmanager
def shards(
    source: Checkpoint,
    family: Family,
    target: Path,
    kinds: Mapping[str, str],
    dtype: str,
    split: int | None,
    force: bool,
) -> Iterator[tuple[list[Path], list[Shard]]]:
    """Like to_gguf.shards: a temporary folder with everything except tensor data, renamed to `target`. Get `source` and
    `kinds` from `apart`."""
    hp = source.hparams
    every = [family.parts(hp, name) for name in family.tensors(hp)]
    made_apart = {part for parts in every if len(parts) > 1 for part in parts}
    wrong = next((n for n, k in kinds.items() if k not in TYPES), None)
    if wrong is not None:
        raise CheckpointError(
            f"{kinds[wrong]} is no type of Hugging Face's format (tensor {wrong}): choose one of {', '.join(t for t in TYPES if t in WEIGHT_TYPES)}"
        )
    names = {n: _name(family, n if n in made_apart else family.hf_names(n)) for n in kinds}
    groups = divide(tensor_sizes(source, kinds), split)
    with atomic_folder(target, force) as folder:
        paths = shard_paths(folder / "model.safetensors", len(groups))
        made = [
            _begin(path, source, family, {n: kinds[n] for n in group}, names)
            for path, group in zip(paths, groups, strict=True)
        ]
        if len(paths) > 1:
            total = sum(tensor_sizes(source, kinds).values())
            index = {names[n]: path.name for path, group in zip(paths, groups, strict=True) for n in group}
            _json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
        _write_rest(folder, source, family, dtype)
        rest = sorted(p for p in folder.rglob("*") if p.is_file() and p not in paths)
        sums = "".join(
            f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder).as_posix()}\n" for p in rest
        )
        (folder / SUMS).write_text(sums, encoding="utf-8")
        yield [target / p.name for p in paths], made


def apart(source: Checkpoint, family: Family, kinds: Mapping[str, str]) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint with Hugging Face's tensors, and their types: stacked matrices as separate tensors under Hugging
    Face's names, without GGUF-only tensors."""
    entries: dict[str, Entry] = {}
    types: dict[str, str] = {}
    for name, kind in kinds.items():
        parts = family.parts(source.hparams, name)
        if len(parts) == 1:
            entries[name], types[name] = source.entries[name], kind
            continue
        height = source.shape(name)[0] // max(len(parts), 1)
        for i, part in enumerate(parts):
            entries[part], types[part] = _rows_of(source, name, i * height, (i + 1) * height), kind
    return replace(source, entries=entries), types


def _rows_of(source: Checkpoint, name: str, first: int, last: int) -> Entry:
    """Rows of a matrix as a separate tensor."""

    def rows(start: int, stop: int) -> Tensor:
        return source.rows(name, first + start, first + stop)

    shape = (last - first, *source.shape(name)[1:])
    return Entry(source.dtype(name), shape, lambda: rows(0, shape[0]), rows)


def _name(family: Family, short: str) -> str:
    return short if short.startswith(family.hf_outside) else f"model.{short}"


def _begin(path: Path, source: Checkpoint, family: Family, kinds: Mapping[str, str], names: Mapping[str, str]) -> Shard:
    sizes = tensor_sizes(source, kinds)
    shapes = {name: family.gguf_shape(source.hparams, name, source.shape(name)) for name in sizes}

    def header(digests: Mapping[str, str], own: str = _UNKNOWN) -> bytes:
        meta = {"format": "pt", HEADER_DIGEST: own} | {DIGEST + names[n]: digests.get(n, _UNKNOWN) for n in kinds}
        table, at = {}, 0
        for name, size in sizes.items():
            table[names[name]] = {
                "dtype": TYPES[kinds[name]],
                "shape": list(shapes[name]),
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps({"__metadata__": meta, **table}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def seal(where: Path, digests: Mapping[str, str]) -> None:
        with open(where, "r+b") as file:
            file.write(header(digests, hashlib.sha256(header(digests)).hexdigest()))

    first = header({})
    path.write_bytes(first)
    offsets, at = {}, len(first)
    for name, size in sizes.items():
        offsets[name] = at
        at += size
    return Shard(path, kinds, offsets, at, seal, names, shapes)


def header_digest(header: bytes, own: str) -> str:
    """Digest of a header (length and JSON). own: the digest that it contains."""
    place, zeros = (f'"{HEADER_DIGEST}":"{value}"'.encode() for value in (own, _UNKNOWN))
    return hashlib.sha256(header.replace(place, zeros, 1)).hexdigest()


def _write_rest(folder: Path, source: Checkpoint, family: Family, dtype: str) -> None:
    """Write all files without tensors; copies the source's tokenizer files if there are any."""
    _json(folder / "config.json", config(family, source, dtype))
    _json(folder / "generation_config.json", generation_config(source))
    copied = []
    more = folder / MORE_TEMPLATES
    if source.tool_template:
        more.mkdir()
        (more / "tool_use.jinja").write_text(source.tool_template, encoding="utf-8")
    if source.path.is_dir():
        for name in TOKENIZER_FILES:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
                copied.append(name)
    if not copied:
        (folder / "tokenizer.model").write_bytes(write_sentencepiece(source.tokenizer.vocabulary))
        _json(folder / "tokenizer_config.json", tokenizer_config(source))
    if source.chat_template and not (folder / "chat_template.jinja").exists():
        (folder / "chat_template.jinja").write_text(source.chat_template, encoding="utf-8")


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
