"""The folders that sentence-transformers puts around a model: its modules, and prompts by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import MAX_JSON, exists, parse_json, read_file, read_json
from hybrid.checkpoint.safetensors_file import read_safetensors
from hybrid.checkpoint.stored import Stored

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
PROMPT_TASKS, PROMPT_TEXTS = "prompts.tasks", "prompts.texts"
"""Metadata of GGUF files under the architecture's name: lists of equal length."""
FILES = (
    MODULES,
    PROMPTS,
    "1_Pooling/config.json",
    *(f"{folder}/{name}" for folder in ("2_Dense", "3_Dense") for name in ("config.json", "model.safetensors")),
)


def read_modules(path: Path, known: Sequence[str]) -> tuple[dict[str, Stored], int]:
    """(`2_Dense.linear.weight`, .. of the modules Dense; their files' bytes) of a folder. known: the family's modules.
    CheckpointError for others. A folder without modules.json has the family's, unless matrices would be missing."""
    file = path / MODULES
    dense = [f"{i}_{kind}" for i, kind in enumerate(known) if kind == "Dense"]
    if not exists(file):
        if not dense:
            return {}, 0
        raise CheckpointError(f"{file} is missing: fetch the folder with all of its parts")
    listed = parse_json(b'{"modules": %s}' % read_file(file, MAX_JSON), f"{file} is not JSON")["modules"]
    found = listed if isinstance(listed, list) else []
    kinds = [str(m.get("type")).rpartition(".")[2] if isinstance(m, Mapping) else "" for m in found]
    folders = [str(m.get("path")) if isinstance(m, Mapping) else "" for m in found]
    parts = ["1_Pooling", *dense]
    if kinds != list(known) or folders[1 : 1 + len(parts)] != parts:
        shown = ", ".join(f"{kind} in {folder!r}" for kind, folder in zip(kinds, folders, strict=True)) or "no list"
        raise CheckpointError(
            f"{file}: modules {shown} are not supported; known: {', '.join(known)}, in folders {', '.join(parts)}"
        )
    _check_pooling(_fields(path / "1_Pooling" / "config.json", required=True))
    stored, size = dict[str, Stored](), 0
    for folder in dense:
        config = _fields(path / folder / "config.json", required=True)
        if config.truth("bias", True):
            raise config.error("bias", "must be false: the matrices have none")
        activation = config.text("activation_function", "Tanh").rpartition(".")[2]
        if activation != "Identity":
            raise config.error("activation_function", f"{activation} is not supported; known: Identity")
        tensors, nbytes = read_safetensors(path / folder / "model.safetensors")
        stored |= {f"{folder}.{name}": tensor for name, tensor in tensors.items()}
        size += nbytes
    return stored, size


def read_prompts(path: Path) -> dict[str, str]:
    """Task -> text before an input; empty where the folder has none."""
    prompts = _fields(path / PROMPTS).sub("prompts")
    return {task: prompts.text(task) for task in prompts.values}


def prompts_of(m: Fields) -> dict[str, str]:
    """`read_prompts` of a GGUF file. m: the metadata under the architecture's name."""
    tasks, texts = m.get(PROMPT_TASKS, []), m.get(PROMPT_TEXTS, [])
    lists = isinstance(tasks, list) and isinstance(texts, list) and len(tasks) == len(texts)
    if not lists or not all(isinstance(text, str) for text in (*tasks, *texts)):
        raise m.error(PROMPT_TASKS, f"and {PROMPT_TEXTS} must be lists of as many texts")
    return dict(zip(tasks, texts, strict=True))


def _check_pooling(config: Fields) -> None:
    """CheckpointError unless the mean of all rows is taken."""
    modes = [key for key in config.values if key.startswith("pooling_mode_") and config.get(key)]
    if (config.get("pooling_mode") or modes) not in ("mean", ["pooling_mode_mean_tokens"]):
        raise config.error("pooling_mode", f"{config.get('pooling_mode') or modes!r} is not supported; known: mean")
    if not config.truth("include_prompt", True):
        raise config.error("include_prompt", "must be true: the mean is of all rows")


def _fields(path: Path, required: bool = False) -> Fields:
    if required and not exists(path):
        raise CheckpointError(f"{path} is missing: fetch the folder with all of its parts")
    return Fields(read_json(path), path)
