"""Open Hugging Face directories: config.json (both dialects), safetensors (whole or sharded), tokenizer."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from hybrid.checkpoint.assemble import Dialect, assemble
from hybrid.checkpoint.base import Checkpoint, CheckpointError, Generation, printable
from hybrid.checkpoint.compressed import Scaled, unpacked
from hybrid.checkpoint.families import EMBEDDING, family_of_hf
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import exists, read_file, read_json
from hybrid.checkpoint.hf_files import MORE_TEMPLATES
from hybrid.checkpoint.hf_tokenizer import hf_tokenizer
from hybrid.checkpoint.look import Look
from hybrid.checkpoint.safetensors_file import read_safetensors
from hybrid.checkpoint.sentence import read_modules, read_prompts
from hybrid.checkpoint.stored import Stored

_PREFIXES = re.compile(r"^(?:(?:model|language_model)\.)+")
_MAX_SHARDS = 1024
_MAX_TEMPLATE = 1 << 22


def open_hf(path: Path) -> Checkpoint:
    """Open a directory; reads only configs and headers."""
    adapter = path / "adapter_config.json"
    if exists(adapter) and not any(exists(path / name) for name in ("model.safetensors", _INDEX)):
        base = read_json(adapter).get("base_model_name_or_path")
        of = f" of {base}" if isinstance(base, str) and base else ""
        raise CheckpointError(
            f"{path} is a LoRA adapter{of} ({adapter.name}), which is not supported: merge it into its model "
            "(peft's merge_and_unload) and save that"
        )
    config = Fields(read_json(path / "config.json", required=True), path / "config.json")
    family = family_of_hf(config)
    stored, size, lost = _tensors(path)
    if family.modules:
        modules, more = read_modules(path, family.modules)
        stored, size = stored | modules, size + more
    stored, notes = unpacked(path, config, stored)
    look = Look(path, stored, family.hf_names)
    vocab = look.rows(EMBEDDING)
    try:
        hparams = family.hparams_from_hf(config, look)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{config.path}: {error}") from None
    for name, shape in family.kept(hparams).items():
        for key in family.parts(hparams, name):
            found = stored.get(key)
            if isinstance(found, Scaled) and len(shape) == 2:
                stored[key] = found.of_width(shape[1])
    dialect = Dialect(partial(family.parts, hparams), family.hf_norm_offset, "Save it in one of these.")
    try:
        entries = assemble(path, family, hparams, stored, dialect, config.notes)
    except CheckpointError as error:
        if lost:
            raise CheckpointError(f"{lost[0]}; fetch it again") from None
        if config.get("quantization_config") is None:
            raise
        raise CheckpointError(
            f"{error}. {config.path} has a quantization_config: its weights are packed in a way that is not read here; take the "
            "original checkpoint, or a GGUF file"
        ) from None
    config.notes += [printable(line) for line in lost]
    generation = _generation(path, config, vocab)
    templates = _chat_templates(path)
    if templates and "default" not in templates:
        config.notes.append(f"none of the chat templates {', '.join(templates)} is the default one: none is taken")
    return Checkpoint(
        path=path,
        hparams=hparams,
        entries=entries,
        file_bytes=size,
        chat_template=templates.get("default"),
        generation=generation,
        make_tokenizer=lambda: hf_tokenizer(path, generation, vocab),
        name=path.resolve().name,
        notes=(*config.notes, *notes),
        tool_template=templates.get("tool_use"),
        prompts=read_prompts(path) or family.prompts,
    )


def _tensors(path: Path) -> tuple[dict[str, Stored], int, list[str]]:
    """(tensors of all shards by name without prefix, bytes of the shards, a line for each tensor that only the index
    has)."""
    files, owner = _tensor_files(path)
    read = [(file, *read_safetensors(file)) for file in files]
    known = {name for _, found, _ in read for name in found}
    lost = [
        f"{path / shard}: tensor {name} is missing, which {_INDEX} says is here"
        for name, shard in owner.items()
        if name not in known
    ]
    stored: dict[str, Stored] = {}
    for file, found, _ in read:
        for name, tensor in found.items():
            short = _PREFIXES.sub("", name)
            if short in stored:
                twice = f"{file}: tensor {name} is duplicated (also as {stored[short].name})"
                raise CheckpointError(f"{lost[0]}; fetch it again" if lost else twice)
            stored[short] = tensor
    return stored, sum(size for _, _, size in read), lost


_INDEX = "model.safetensors.index.json"


def _tensor_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """(files with tensors, tensor -> file name by the index)."""
    index, file = path / _INDEX, path / "model.safetensors"
    if not exists(index):
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
    if exists(file):  # an index beside it is left over
        return [file], {}
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
    unused = [key for key in _CHOICES if own.get(key)]
    if unused:
        config.notes.append(f"{own.path.name} has {', '.join(unused)}: left out, tokens are chosen without")
    return Generation(
        tuple(ids),
        temperature=own.optional_number("temperature") if own.truth("do_sample", True) else 0.0,
        top_k=None if own.get("top_k") is None else own.integer("top_k"),
        top_p=own.optional_number("top_p"),
        min_p=own.optional_number("min_p"),
        repetition_penalty=own.optional_number("repetition_penalty"),
    )


_CHOICES = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "no_repeat_ngram_size",
    "sequence_bias",
)
"""Fields that change which tokens are chosen, and are not supported."""


def _chat_templates(path: Path) -> dict[str, str]:
    """Name -> template. Files of their own come before tokenizer_config.json, and that before the chat_template.json of
    old processors."""
    found: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        config = Fields(read_json(path / name), path / name)
        value = config.get("chat_template")
        if isinstance(value, dict):
            value = [{"name": name, "template": template} for name, template in value.items()]
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            named = [(t.get("name"), t.get("template")) for t in value if isinstance(t, dict)]
            if len(named) < len(value) or not all(isinstance(text, str) for pair in named for text in pair):
                raise config.error("chat_template", "must be text, or a list of objects with a name and a template")
            found |= {str(name): str(template) for name, template in named}
        elif value is not None:
            raise config.error("chat_template", "must be text, or a list of objects with a name and a template")
    for file in sorted((path / MORE_TEMPLATES).glob("*.jinja")):
        found[file.stem] = _template(file)
    if exists(path / "chat_template.jinja"):
        found["default"] = _template(path / "chat_template.jinja")
    return found


def _template(file: Path) -> str:
    try:
        return read_file(file, _MAX_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8: {error}") from None
