"""Open Hugging Face directories: config.json (both dialects), safetensors (whole or sharded), tokenizer."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from hybrid.checkpoint.assemble import Dialect, assemble
from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation
from hybrid.checkpoint.families import EMBEDDING, family_of_hf
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import exists, read_file, read_json
from hybrid.checkpoint.hf_tokenizer import hf_tokenizer
from hybrid.checkpoint.look import Look
from hybrid.checkpoint.safetensors_file import read_safetensors
from hybrid.checkpoint.stored import Stored

_PREFIXES = re.compile(r"^(?:(?:model|language_model)\.)+")
_MAX_SHARDS = 1024
_MAX_TEMPLATE = 1 << 22


def open_hf(path: Path) -> Checkpoint:
    """Open a directory; reads only configs and headers."""
    config = Fields(read_json(path / "config.json", required=True), path / "config.json")
    family = family_of_hf(config)
    stored, size = _tensors(path)
    look = Look(path, stored, family.hf_names)
    vocab = look.rows(EMBEDDING)
    try:
        hparams = family.hparams_from_hf(config, look)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{config.path}: {error}") from None
    dialect = Dialect(partial(family.parts, hparams), family.hf_norm_offset, "Save it in one of these.")
    try:
        entries = assemble(path, family, hparams, stored, dialect, config.notes)
    except CheckpointError as error:
        if config.get("quantization_config") is None:
            raise
        raise CheckpointError(
            f"{error}. {config.path} has a quantization_config: its weights are packed in a way that is not read here; take the "
            "original checkpoint, or a GGUF file"
        ) from None
    generation = _generation(path, config, vocab)
    return Checkpoint(
        path=path,
        hparams=hparams,
        entries=entries,
        file_bytes=size,
        chat_template=_chat_template(path),
        generation=generation,
        make_tokenizer=lambda: hf_tokenizer(path, generation, vocab),
        name=path.resolve().name,
        notes=tuple(config.notes),
    )


def _tensors(path: Path) -> tuple[dict[str, Stored], int]:
    """(tensors of all shards by name without prefix, bytes of the shards)."""
    files, owner = _tensor_files(path)
    stored: dict[str, Stored] = {}
    total = 0
    for file in files:
        found, size = read_safetensors(file)
        total += size
        lost = next((name for name, shard in owner.items() if shard == file.name and name not in found), None)
        if lost is not None:
            raise CheckpointError(f"{file}: tensor {lost} is missing, which {_INDEX} says is here; fetch it again")
        for name, tensor in found.items():
            short = _PREFIXES.sub("", name)
            if short in stored:
                raise CheckpointError(f"{file}: tensor {name} is duplicated (also as {stored[short].name})")
            stored[short] = tensor
    return stored, total


_INDEX = "model.safetensors.index.json"


def _tensor_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """(files with tensors, tensor -> file name by the index)."""
    index = path / _INDEX
    if not exists(index):
        file = path / "model.safetensors"
        files = [file] if exists(file) else sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            names = ", ".join(f.name for f in files[:4]) + (", ..." if len(files) > 4 else "")
            raise CheckpointError(
                f"{path}: need model.safetensors, or {_INDEX} with its shards; found {names or 'no .safetensors file'}"
            )
        return files, {}
    owner = dict(Fields(read_json(index), index).sub("weight_map").values)
    if not all(isinstance(n, str) and n == Path(n).name and n.endswith(".safetensors") for n in owner.values()):
        raise CheckpointError(f"{index}: weight_map must name .safetensors files of its own folder")
    files = [path / n for n in sorted(set(owner.values()))]
    if len(files) > _MAX_SHARDS:
        raise CheckpointError(f"{index}: weight_map names {len(files)} files; at most {_MAX_SHARDS} are believable")
    missing = [f.name for f in files if not exists(f)]
    if missing or not files:
        raise CheckpointError(f"{index}: names {', '.join(missing) or 'no file'}, which {path} lacks; fetch it again")
    return files, owner


def _generation(path: Path, config: Fields, vocab: int) -> Generation:
    own = Fields(read_json(path / "generation_config.json"), path / "generation_config.json")
    eos = own.get("eos_token_id", config.get("eos_token_id", config.sub("text_config").get("eos_token_id", [])))
    ids = eos if isinstance(eos, list) else [eos]
    where = own if own.get("eos_token_id") is not None else config
    if not all(type(i) is int and i >= 0 for i in ids):
        raise where.error("eos_token_id", f"must be an id or a list of ids, not {str(eos)[:60]}")
    beyond = next((i for i in ids if i >= vocab), None)
    if beyond is not None:
        raise where.error("eos_token_id", f"{beyond} is outside the {vocab} rows of the embedding")
    return Generation(
        tuple(ids),
        temperature=own.optional_number("temperature"),
        top_k=None if own.get("top_k") is None else own.integer("top_k"),
        top_p=own.optional_number("top_p"),
    )


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if exists(file):
        try:
            return read_file(file, _MAX_TEMPLATE).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8: {error}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json(path / name).get("chat_template")
        if isinstance(value, list):  # several named templates
            named = (t for t in value if isinstance(t, dict) and t.get("name") == "default")
            value = next((t.get("template") for t in named), None)
        if value is not None:
            if not isinstance(value, str):
                raise CheckpointError(f"{path / name}: chat_template must be text")
            return value
    return None
