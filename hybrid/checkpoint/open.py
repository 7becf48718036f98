"""Open a checkpoint of any format."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hybrid.checkpoint.base import Checkpoint, CheckpointError
from hybrid.checkpoint.files import exists
from hybrid.checkpoint.find import ADVICE, called
from hybrid.checkpoint.gguf_file import open_gguf
from hybrid.checkpoint.hf import open_hf
from hybrid.checkpoint.hub import HubName, find_or_fetch


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a .gguf file, a Hugging Face directory, or a model by its name on the hub (hybrid/checkpoint/hub.py), which is
    fetched where the cache lacks it. A path that exists wins. Reads headers and checks every tensor's presence and shape; data
    is read lazily. Raises CheckpointError (a ValueError) with one line."""
    try:
        path = Path(path).expanduser()
    except RuntimeError as error:  # "~nobody/model.gguf"
        raise CheckpointError(f"{path}: {error}") from None
    if not exists(path) and (name := HubName.of(path.as_posix())) is not None:
        found = open_checkpoint(find_or_fetch(name))
        return found if name.file is not None else replace(found, name=name.repo.partition("/")[2])
    if not exists(path):
        raise CheckpointError(_no_such(str(path)))
    if path.is_dir():
        inside = sorted(path.glob("*.gguf"))
        if inside and not exists(path / "config.json"):
            raise CheckpointError(f"{path} is a folder of GGUF files: name one, for example {inside[0]}")
        return open_hf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the directory that holds it, {path.parent}, with its config.json")
    return open_gguf(path)


def _no_such(name: str) -> str:
    """The error for a missing path: a local model of that name, else how to get a model."""
    here = called(name)
    if here:
        return f"{name}: no such file or directory; a model of that name on this machine is {here[0].path}"
    return f"{name}: no such file or directory; {ADVICE}"


def problem(path: Path) -> str | None:
    """Why a checkpoint cannot be opened, without its path, or None. Reads headers."""
    try:
        with open_checkpoint(path):
            return None
    except CheckpointError as error:
        return str(error).removeprefix(f"{path}: ")
