"""The folders that sentence-transformers puts around a model: its modules, and prompts by task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import MAX_JSON, exists, parse_json, read_file, read_json
from hybrid.checkpoint.safetensors_file import read_safetensors
from hybrid.checkpoint.stored import Stored

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
_KINDS = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
_DENSE = ("2_Dense", "3_Dense")
FILES = (
    MODULES,
    PROMPTS,
    "1_Pooling/config.json",
    *(f"{folder}/{name}" for folder in _DENSE for name in ("config.json", "model.safetensors")),
)


def read_modules(path: Path) -> tuple[dict[str, Stored], int]:
    """(`2_Dense.linear.weight` and `3_Dense.linear.weight`, their files' bytes) of a folder. CheckpointError for other
    modules than mean pooling, two matrices and normalisation."""
    file = path / MODULES
    if not exists(file):
        raise CheckpointError(f"{file} is missing: fetch the folder with all of its parts")
    listed = parse_json(b'{"modules": %s}' % read_file(file, MAX_JSON), f"{file} is not JSON")["modules"]
    found = listed if isinstance(listed, list) else []
    kinds = [str(m.get("type")).rpartition(".")[2] if isinstance(m, Mapping) else "" for m in found]
    folders = [str(m.get("path")) if isinstance(m, Mapping) else "" for m in found]
    if tuple(kinds) != _KINDS or folders[1:4] != ["1_Pooling", *_DENSE]:
        shown = ", ".join(kinds) or "no list"
        raise CheckpointError(
            f"{file}: modules {shown} are not supported; known: {', '.join(_KINDS)}, in folders 1_Pooling to 3_Dense"
        )
    _check_pooling(_fields(path / "1_Pooling" / "config.json"))
    stored, size = dict[str, Stored](), 0
    for folder in _DENSE:
        config = _fields(path / folder / "config.json")
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


def _check_pooling(config: Fields) -> None:
    """CheckpointError unless the mean of all rows is taken."""
    modes = [key for key in config.values if key.startswith("pooling_mode_") and config.get(key)]
    if (config.get("pooling_mode") or modes) not in ("mean", ["pooling_mode_mean_tokens"]):
        raise config.error("pooling_mode", f"{config.get('pooling_mode') or modes!r} is not supported; known: mean")
    if not config.truth("include_prompt", True):
        raise config.error("include_prompt", "must be true: the mean is of all rows")


def _fields(path: Path) -> Fields:
    return Fields(read_json(path), path)
