"""Split GGUF models: NAME-00001-of-0000N.gguf; the first part has the metadata, all have tensors.

Every part has its index and the number of parts (split.no from 0, split.count), the first also the total of tensors.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import exists

if TYPE_CHECKING:
    from hybrid.checkpoint.gguf_file import Part

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 4096


def part_paths(path: Path, values: dict[str, Any]) -> list[Path]:
    """All parts of the model that `path`, with metadata `values`, belongs to; [path] if it is not split.
    CheckpointError for a name that contradicts the metadata, and for a missing part."""
    fields = Fields(values, path)
    count, number = fields.integer("split.count", 1), fields.integer("split.no", 0)
    if not 1 <= count <= _MAX_PARTS:
        raise fields.error("split.count", f"{count} is not between 1 and {_MAX_PARTS}")
    if not 0 <= number < count:
        raise fields.error("split.no", f"{number} is not below split.count {count}")
    if count == 1:
        return [path]
    found = _NAME.fullmatch(path.name)
    if found is None or (int(found[2]), int(found[3])) != (number + 1, count):
        raise CheckpointError(
            f"{path} is part {number + 1} of {count}, but its name does not end in -{number + 1:05}-of-{count:05}.gguf: "
            "give every part its own name again"
        )
    paths = [path.with_name(f"{found[1]}-{k + 1:05}-of-{count:05}.gguf") for k in range(count)]
    missing = next((p for p in paths if not exists(p)), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing: it is one of the {count} parts of this model; fetch it as well")
    return paths


def beside(path: Path) -> list[Path]:
    """The files there are of the split model that `path` belongs to by its name; [path] if by that it is not split."""
    found = _NAME.fullmatch(path.name)
    return sorted(path.parent.glob(f"{glob.escape(found[1])}-*-of-{found[3]}.gguf")) if found else [path]


def check_parts(parts: list[Part]) -> None:
    """CheckpointError unless these are all parts of one model, in order, without duplicate tensors."""
    first = Fields(parts[0].values, parts[0].path)
    for number, part in enumerate(parts):
        fields = Fields(part.values, part.path)
        for key, want in (("split.no", number), ("split.count", len(parts))):
            if fields.integer(key) != want:
                raise fields.error(key, f"{fields.integer(key)} should be {want}: this part belongs to another model")
        for key in ("general.architecture", "general.name", "split.tensors.count"):
            own = fields.get(key)
            if own is not None and own != first.get(key):
                raise fields.error(
                    key, f"{own!r} differs from {first.get(key)!r} of {parts[0].path.name}: parts are mixed"
                )
    owner: dict[str, Path] = {}
    for part in parts:
        for name in part.stored:
            if name in owner:
                raise CheckpointError(f"{part.path}: tensor {name} is duplicated (also in {owner[name].name})")
            owner[name] = part.path
    total = first.integer("split.tensors.count", len(owner))
    if total != len(owner):
        raise first.error("split.tensors.count", f"says {total}, but the {len(parts)} parts hold {len(owner)} tensors")
