"""Find local models: Hugging Face's cache, common folders of GGUF files, Ollama's blobs.

Scans folders and reads headers; downloads nothing. Searches only the user's home and that of Ollama's service.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

OLLAMA_MODEL = "application/vnd.ollama.image.model"
_LATER_PART = re.compile(r"-(?!0*1-of-)\d+-of-\d+\.gguf$")
_DEPTH = 4  # of a scan below a folder
ADVICE = (
    "a model is a .gguf file, a Hugging Face directory (config.json, *.safetensors and the tokenizer) or an Ollama blob; "
    "`python -m hybrid.inspect --find` lists those on this machine; a name such as google/gemma-3-1b-it or "
    "OWNER/NAME:FILE.gguf is fetched from Hugging Face"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A local model. path: for commands; name: in its cache or store; problem: why it cannot be loaded."""

    kind: str
    name: str
    path: Path
    bytes: int
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "path": str(self.path),
            "bytes": self.bytes,
            "problem": self.problem,
        }


def sharded(file: str) -> re.Pattern[str] | None:
    """The pattern of a split GGUF file's part names; None for an unsplit file."""
    found = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", file, re.DOTALL)
    return re.compile(re.escape(found[1]) + r"-\d{5}" + re.escape(found[2])) if found else None


def find_models(problem_of: Callable[[Path], str | None], env: Mapping[str, str] = os.environ) -> list[Found]:
    """All local models without duplicate paths, loadable ones first. Skips unreadable folders. problem_of: why a path
    cannot be loaded, or None (`problem` of checkpoint/open.py, which reads headers)."""
    seen: dict[Path, Found] = {}
    for found in _everywhere(env):
        seen.setdefault(found.path.resolve(), found)
    judged = [replace(found, problem=problem_of(found.path)) for found in seen.values()]
    return sorted(judged, key=lambda f: (f.problem is not None, f.kind, f.name))


def called(name: str, env: Mapping[str, str] = os.environ) -> list[Found]:
    """Local models with this name, exactly or ignoring case and owner, without opening them."""
    wanted, found = name.casefold(), []
    for one in _everywhere(env):
        full = one.name.casefold()
        if wanted in (full, full.replace(":", "/").rpartition("/")[2], full.rpartition("/")[2], full.partition(":")[0]):
            found.append(one)
    return found


def models_in(folder: Path) -> list[Path]:
    """GGUF files and Hugging Face directories directly in a folder, of split files the first part; unopened."""
    directories = [path.parent for path in _listed(folder, "*/config.json")]
    return sorted([*directories, *(f for f in _listed(folder, "*.gguf") if not _LATER_PART.search(f.name))])


def places(env: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders that are searched."""
    home = Path(env.get("HOME") or Path.home())
    return [*hubs(env), *_stores(env, home), *_folders(env, home)]


def _everywhere(env: Mapping[str, str]) -> Iterator[Found]:
    home = Path(env.get("HOME") or Path.home())
    yield from _hugging_face(hubs(env))
    yield from _ollama(_stores(env, home))
    yield from _gguf(_folders(env, home))


def hubs(env: Mapping[str, str]) -> list[Path]:
    """Folders of the Hugging Face hub's cache."""
    home = Path(env.get("HOME") or Path.home())
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    return [Path(p) for p in (env.get("HF_HUB_CACHE"), env.get("HUGGINGFACE_HUB_CACHE")) if p] or [
        Path(env.get("HF_HOME") or cache / "huggingface") / "hub"
    ]


def _stores(env: Mapping[str, str], home: Path) -> list[Path]:
    own = [Path(env["OLLAMA_MODELS"])] if env.get("OLLAMA_MODELS") else [home / ".ollama" / "models"]
    return [*own, Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama/.ollama/models")]


def _folders(env: Mapping[str, str], home: Path) -> list[Path]:
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    programs = (
        env.get("LLAMA_CACHE") or cache / "llama.cpp",
        home / ".lmstudio" / "models",
        cache / "lm-studio" / "models",
    )
    return [Path.cwd(), *map(Path, programs), home / "models", home / "Downloads"]


def _hugging_face(hubs: list[Path]) -> Iterator[Found]:
    """Snapshots of a hub's cache: directories of safetensors, and GGUF files in them."""
    for folder in (f for hub in hubs for f in _listed(hub, "models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        for snapshot in _listed(folder / "snapshots", "*"):
            weights = _listed(snapshot, "*.safetensors")
            if weights and (snapshot / "config.json").exists():
                yield Found("Hugging Face", name, snapshot, sum(map(_size, weights)))
            for file in (*_listed(snapshot, "*.gguf"), *_listed(snapshot, "*/*.gguf")):
                if not _LATER_PART.search(file.name):
                    yield Found("GGUF", f"{name}:{file.relative_to(snapshot).as_posix()}", file, _size(file))


def _ollama(stores: list[Path]) -> Iterator[Found]:
    """Models in Ollama's manifests, which name their blobs; the weights are a GGUF file without suffix."""
    for store in stores:
        for manifest in _listed(store / "manifests", "*/*/*/*"):
            try:
                layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
                digests = [str(one["digest"]) for one in layers if one["mediaType"] == OLLAMA_MODEL]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not a manifest
            owner, model, tag = manifest.parts[-3:]
            name = f"{model}:{tag}" if owner == "library" else f"{owner}/{model}:{tag}"
            for blob in (store / "blobs" / d.replace(":", "-") for d in digests):
                if blob.is_file():
                    yield Found("Ollama", name, blob, _size(blob))


def _gguf(folders: list[Path]) -> Iterator[Found]:
    for folder in folders:
        deep = 1 if folder == Path.cwd() else _DEPTH
        for pattern in ("/".join(["*"] * n + ["*.gguf"]) for n in range(deep + 1)):
            for file in _listed(folder, pattern):
                if not _LATER_PART.search(file.name):
                    yield Found("GGUF", file.name, file, _size(file))


def _listed(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # no permission
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a dangling link
        return 0
