"""Models by their name on the Hugging Face hub: OWNER/NAME[@REVISION] or OWNER/NAME[@REVISION]:FILE.gguf.

They are found in the hub's cache without the library; huggingface_hub (extra `hub`) fetches what is missing, and
honours HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. Of a repository only the files that are read are fetched.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.find import hubs, sharded
from hybrid.checkpoint.hf_files import TOKENIZER_FILES
from hybrid.checkpoint.sentence import FILES as MODULE_FILES

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>.+\.gguf))?", re.ASCII)
INDEX = "model.safetensors.index.json"
CONFIGS = ("config.json", "generation_config.json", *TOKENIZER_FILES, *MODULE_FILES)


@dataclass(frozen=True, slots=True)
class HubName:
    """file: a GGUF file; None: the repository's safetensors."""

    repo: str
    revision: str = "main"
    file: str | None = None

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """The name that a text can be; None for paths, among them those below a folder that exists."""
        found = _NAME.fullmatch(text)
        if found is None or (found["file"] is None and text.endswith((".gguf", ".safetensors"))):
            return None
        if ".." in (found["revision"] or "").split("/") + (found["file"] or "").split("/"):
            return None
        if Path(text.split("/")[0]).is_dir():
            return None
        return cls(found["repo"], found["revision"] or "main", found["file"])

    def __str__(self) -> str:
        return (
            self.repo
            + ("" if self.revision == "main" else f"@{self.revision}")
            + (f":{self.file}" if self.file else "")
        )

    def wanted(self, files: Collection[str], index: Mapping[str, Any] | None) -> list[str]:
        """The files of the repository to fetch. index: its INDEX, parsed. CheckpointError."""
        if self.file is not None:
            if self.file not in files:
                raise CheckpointError(f"{self}: the repository has no such file{_listing(self.repo, files)}")
            pattern = sharded(self.file)
            return [f for f in sorted(files) if f == self.file or (pattern is not None and pattern.fullmatch(f))]
        if "config.json" not in files:
            raise CheckpointError(f"{self}: the repository has no config.json{_listing(self.repo, files)}")
        weights = {"model.safetensors"} if index is None else {INDEX, *map(str, _shards(index))}
        if not weights <= set(files):
            lost = next(iter(sorted(weights - set(files))))
            raise CheckpointError(f"{self}: the repository has no {lost}{_listing(self.repo, files)}")
        return sorted(weights | {f for f in CONFIGS if f in files})


def find_or_fetch(name: HubName, env: Mapping[str, str] = os.environ) -> Path:
    """The model's file, or its folder. CheckpointError with one line."""
    return cached(name, env) or _fetch(name)


def cached(name: HubName, env: Mapping[str, str] = os.environ) -> Path | None:
    """Where the cache has all of a model; None if it does not."""
    for hub in hubs(env):
        folder = hub / f"models--{name.repo.replace('/', '--')}"
        try:
            commit = (folder / "refs" / name.revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            commit = name.revision
        snapshots = [folder / "snapshots" / commit]
        if commit == "main":  # nobody asked the hub what that is: the only one that is here
            snapshots = list((folder / "snapshots").glob("*"))
        if len(snapshots) != 1 or not (snapshot := snapshots[0]).is_dir():
            continue
        files = {p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.exists()}
        try:
            index = json.loads((snapshot / INDEX).read_bytes()) if INDEX in files else None
            wanted = name.wanted(files, index)
        except (CheckpointError, OSError, ValueError, AttributeError):
            continue  # a part is missing, or the index is damaged: fetched again
        if name.file is not None and (count := _parts(name.file)) and len(wanted) < count:
            continue
        return snapshot / name.file if name.file is not None else snapshot
    return None


def _fetch(name: HubName) -> Path:
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise CheckpointError(
            f"{name}: no such file or directory, nor in the Hugging Face cache; to fetch it: pip install "
            "'hybrid-kernels[hub]'"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{name}: not in the Hugging Face cache, and HF_HUB_OFFLINE forbids fetching it: unset it"
        )
    try:
        found = hub.HfApi().model_info(name.repo, revision=name.revision)
        files = [f.rfilename for f in found.siblings or ()]
        index = None
        if name.file is None and INDEX in files:
            index = json.loads(Path(hub.hf_hub_download(name.repo, INDEX, revision=name.revision)).read_bytes())
        wanted = name.wanted(files, index)
        folder = hub.snapshot_download(name.repo, revision=name.revision, allow_patterns=[escape(f) for f in wanted])
    except CheckpointError:
        raise
    except GatedRepoError:
        raise CheckpointError(
            f"{name}: its owner asks for consent: accept the terms at {constants.ENDPOINT}/{name.repo}, then "
            "`hf auth login`, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{name}: the repository has no revision {name.revision}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name}: no such file or directory, nor a repository of {constants.ENDPOINT} that is open to you"
        ) from None
    except Exception as error:  # of several HTTP libraries, by version
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{name}: cannot be fetched from {constants.ENDPOINT}: {first}") from None
    return Path(folder) / name.file if name.file is not None else Path(folder)


def _shards(index: Mapping[str, Any]) -> set[str]:
    shards = index["weight_map"].values()
    return {s for s in shards if isinstance(s, str) and s.endswith(".safetensors") and "/" not in s}


def _parts(file: str) -> int | None:
    found = re.search(r"-\d{5}-of-(\d{5})\.gguf$", file)
    return int(found[1]) if found else None


def _listing(repo: str, files: Collection[str]) -> str:
    """The GGUF files that could be named instead."""
    some = [f for f in sorted(files) if f.endswith(".gguf")]
    return f"; name a file of it: {', '.join(f'{repo}:{f}' for f in some[:8])}" if some else ""
