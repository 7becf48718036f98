"""Hugging Face directories: config.json (both dialects), safetensors in one file or sharded, tokenizer.model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.checkpoint.assemble import Stored, assemble, embedding_rows
from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation
from hybrid.checkpoint.families import EMBEDDING, family_of_hf
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.safetensors_file import read_safetensors
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.tokenizer import CONTROL, Tokenizer, TokenizerError, Vocabulary

_PREFIXES = re.compile(r"^(?:(?:model|language_model)\.)+")
_OTHER_MODALITIES = ("vision_tower", "multi_modal_projector", "audio_tower", "embed_vision", "embed_audio")


def open_hf(path: Path) -> Checkpoint:
    """Open a directory. Nothing but headers is read here."""
    config = Fields(_json(path / "config.json", required=True), path / "config.json")
    family = family_of_hf(config)
    files = _tensor_files(path)
    stored: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if any(word in name for word in _OTHER_MODALITIES):
                continue
            short = _PREFIXES.sub("", name)
            if short in stored:
                raise CheckpointError(f"{file}: tensor {name} is there twice (also as {stored[short].name})")
            stored[short] = tensor
    vocab = embedding_rows(path, stored, family.hf_name(EMBEDDING))
    try:
        hparams = family.hparams_from_hf(config, vocab)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{config.path}: {error}") from None
    entries = assemble(path, family, hparams, stored, family.hf_name, family.hf_norm_offset, "Save it in one of these.")
    generation = _generation(path, config)
    return Checkpoint(
        path=path,
        hparams=hparams,
        entries=entries,
        file_bytes=sum(f.stat().st_size for f in files),
        chat_template=_chat_template(path),
        generation=generation,
        make_tokenizer=lambda: _tokenizer(path, generation, vocab),
        name=path.resolve().name,
    )


def _json(path: Path, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; an empty one where the file is absent and not required."""
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path} is missing: a model directory needs config.json, or name a .gguf file")
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object")
    return value


def _tensor_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = Fields(_json(index), index).sub("weight_map").values.values()
        if not all(isinstance(n, str) and n == Path(n).name for n in names):
            raise CheckpointError(f"{index}: weight_map must name files of its own folder")
        files = [path / n for n in sorted(set(names))]
    else:
        files = [path / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(
                f"{path}: need model.safetensors, or model.safetensors.index.json with its shards; "
                f"found {', '.join(f.name for f in files) or 'no .safetensors file'}"
            )
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        raise CheckpointError(f"{index}: names {', '.join(missing) or 'no file'}, which {path} lacks; fetch it again")
    return files


def _generation(path: Path, config: Fields) -> Generation:
    own = Fields(_json(path / "generation_config.json"), path / "generation_config.json")
    eos = own.get("eos_token_id", config.get("eos_token_id", config.sub("text_config").get("eos_token_id", [])))
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise own.error("eos_token_id", f"must be an id or a list of ids, not {eos!r}")
    number = {key: None if own.get(key) is None else own.number(key) for key in ("temperature", "top_p")}
    return Generation(tuple(ids), top_k=None if own.get("top_k") is None else own.integer("top_k"), **number)


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = _json(path / name).get("chat_template")
        if isinstance(value, list):  # several, by name
            value = next((t.get("template") for t in value if t.get("name") == "default"), None)
        if value is not None:
            if not isinstance(value, str):
                raise CheckpointError(f"{path / name}: chat_template must be text")
            return value
    return None


def _tokenizer(path: Path, generation: Generation, rows: int) -> Tokenizer:
    file = path / "tokenizer.model"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: fetch it with the checkpoint (tokenizer.json alone is not read)")
    try:
        return Tokenizer(_with_added_tokens(read_sentencepiece(file).first(rows), path), generation.eos_ids)
    except TokenizerError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _with_added_tokens(vocabulary: Vocabulary, path: Path) -> Vocabulary:
    """tokenizer_config.json may call pieces special that tokenizer.model has as user-defined (turn markers): they
    are control tokens then. Tokens beyond the model's pieces belong to other modalities."""
    added = Fields(_json(path / "tokenizer_config.json"), path / "tokenizer_config.json").sub("added_tokens_decoder")
    types = list(vocabulary.types)
    for key, token in added.values.items():
        index = int(key) if str(key).isdigit() else len(types)
        if index < len(types) and token.get("special") and token.get("content") == vocabulary.pieces[index]:
            types[index] = CONTROL
    return replace(vocabulary, types=tuple(types))
