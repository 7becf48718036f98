"""Atomic writes: files are written under temporary names and renamed at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybrid.checkpoint import CheckpointError
from hybrid.checkpoint.hf_files import MORE_TEMPLATES, TOKENIZER_FILES
from hybrid.convert.unfinished import part_name


def check_free(targets: Sequence[Path], force: bool) -> None:
    """CheckpointError if a target cannot be written, or exists without `force`."""
    for target in targets:
        parent = target.absolute().parent
        if target.is_dir():
            raise CheckpointError(f"{target} is a folder: give the name of the .gguf file to write, or --format hf")
        if not parent.is_dir():
            raise CheckpointError(f"{parent} does not exist: create the folder first")
        if target.exists() and not force:
            raise CheckpointError(f"{target} exists: choose another name, or --force to replace it")


@contextmanager
def atomic_files(targets: Sequence[Path], force: bool) -> Iterator[list[Path]]:
    """Temporary paths that are renamed to `targets` if the block succeeds, and removed if it fails.

    The first target, which users name, is renamed last: once it exists, the set is complete.
    """
    check_free(targets, force)
    parts = [part_name(t) for t in targets]
    try:
        with _named(dict(zip(parts, targets, strict=True))):
            yield parts
        for part in parts:
            sync(part)
        check_free(targets, force)
        _replace(list(reversed(list(zip(parts, targets, strict=True)))))
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    sync(targets[0].absolute().parent)


def _replace(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Rename every (part, target). If a rename fails, restores all targets."""
    done: list[tuple[Path, Path | None]] = []
    try:
        for part, target in pairs:
            kept = None
            if len(pairs) > 1 and target.exists():  # a single rename is atomic by itself
                kept = part_name(target, old=True)
                os.replace(target, kept)
            done.append((target, kept))
            os.replace(part, target)
    except BaseException:
        for target, kept in done:
            if kept is not None:
                os.replace(kept, target)
            elif len(pairs) > 1:
                target.unlink(missing_ok=True)
        raise
    for _, kept in done:
        if kept is not None:
            kept.unlink()


@contextmanager
def atomic_folder(target: Path, force: bool) -> Iterator[Path]:
    """A temporary folder that becomes `target`. With `force` its files replace those of an existing model folder, whose
    other tensor and tokenizer files are removed."""
    check_folder(target, force)
    part = part_name(target)
    try:
        with _named({part: target}):
            part.mkdir()
            yield part
        for file in part.rglob("*"):
            sync(file)
        check_folder(target, force)
        if target.exists() and any(target.iterdir()):
            _take_over(part, target)
        else:
            os.replace(part, target)
    finally:
        if part.exists():
            shutil.rmtree(part)
    sync(target.absolute().parent)


@contextmanager
def _named(targets: Mapping[Path, Path]) -> Iterator[None]:
    """Name targets in errors of writing (a full disk, a folder without permission), never the temporary paths."""
    try:
        yield
    except OSError as error:
        said = "" if error.filename is None else os.fspath(error.filename)
        if isinstance(said, str) and error.strerror:
            part = next((part for part in targets if said in ("", str(part)) or Path(said).is_relative_to(part)), None)
            if part is not None:
                error.filename = str(targets[part])
        raise


def check_folder(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: give the name of a folder for a Hugging Face checkpoint")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target.absolute().parent} does not exist: create the folder first")
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise CheckpointError(
                f"{target} exists and is not empty: choose another name, or --force to replace its model"
            )
        if not (target / "config.json").is_file():
            raise CheckpointError(f"{target} holds other files and no model: choose another name")


def _take_over(part: Path, target: Path) -> None:
    new = {f.name for f in part.iterdir()}
    shutil.rmtree(target / MORE_TEMPLATES, ignore_errors=True)
    for file in sorted(part.iterdir(), key=lambda f: f.name == "config.json"):
        os.replace(file, target / file.name)
    tensors = (*target.glob("*.safetensors"), *target.glob("*.safetensors.index.json"))
    for old in (*tensors, *(target / name for name in TOKENIZER_FILES)):
        if old.name not in new:
            old.unlink(missing_ok=True)
    part.rmdir()


def sync(path: Path) -> None:
    """fsync a file or folder, so that a rename is never durable before its data. Some systems cannot open folders."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
