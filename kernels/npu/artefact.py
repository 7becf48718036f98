"""Built files of a design, and the digest that ties them to kernels and design.

NAME-DIGEST.xclbin      the fabric: configuration of the tiles (a real xclbin; for sim-npu1 the IRON source)
NAME-DIGEST-STREAM.bin  an instruction stream: one runtime sequence; a fabric has one for each size
NAME-DIGEST.json        the digest, the SHA-256 of each file, the builder
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid.kernels.npu.design import Array, Design, Finish, Move, Tile
from hybrid.kernels.npu.iron import manifest
from hybrid.kernels.npu.objects import digests

KERNEL = "MLIR_AIE"  # the name that aiecc gives to the one kernel of an xclbin


class ArtefactError(ValueError):
    """A built file is missing, or was built from something else."""


def fabric_digest(design: Design) -> str:
    """Digest part of a fabric: kernels, fifos, links, cores, workers, without the sizes of the runtime sequence."""
    return hashlib.sha256(json.dumps([_form(design), digests(design), manifest()["release"]]).encode()).hexdigest()


@lru_cache(maxsize=256)
def _form(design: Design) -> str:
    """Digest without the kernels' sources, cached: every run asks for it."""
    parts = (
        design.columns,
        len(design.arguments),
        design.kernels,
        sorted(design.fifos, key=lambda f: f.name),
        design.links,
        design.cores,
        design.workers,
        design.buffers,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def stream_digest(design: Design) -> str:
    return hashlib.sha256(repr((design.arguments, design.sequence)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Artefact:
    digest: str
    builder: str
    """The builder: sim-npu1, or the toolchain."""
    xclbin: Path
    stream: Path


def stem(design: Design) -> str:
    return f"{design.name}-{fabric_digest(design)[:12]}"


def find(folder: Path, design: Design) -> Artefact:
    """The built files of a design. ArtefactError where they are missing, damaged, or built from other kernels or
    data."""
    name, digest = stem(design), fabric_digest(design)
    listing = folder / f"{name}.json"
    if not listing.exists():
        others = sorted(p.name for p in folder.glob(f"{design.name}-*.json")) if folder.is_dir() else []
        why = f"{others[0]} was built from other kernels or another design" if others else "nothing was built"
        raise ArtefactError(
            f"{folder}: no artefact of {design.name} with digest {digest[:12]}: {why}; "
            f"run python -m kernels.npu.build --out {folder}"
        )
    table = json.loads(listing.read_text())
    if table["digest"] != digest:
        raise ArtefactError(f"{listing}: digest {table['digest'][:12]}, the sources give {digest[:12]}: build it again")
    found = {}
    for role, file in (("xclbin", f"{name}.xclbin"), ("stream", f"{name}-{stream_digest(design)[:12]}.bin")):
        path = folder / file
        if file not in table["files"] or not path.exists():
            raise ArtefactError(
                f"{folder}: {file} is missing: this {role} was not built; python -m kernels.npu.build --out {folder}"
            )
        if hashlib.sha256(path.read_bytes()).hexdigest() != table["files"][file]:
            raise ArtefactError(f"{path}: its bytes are not those that were built (SHA-256 differs): build it again")
        found[role] = path
    return Artefact(digest, table["builder"], found["xclbin"], found["stream"])


def write(folder: Path, design: Design, builder: str, xclbin: bytes, stream: bytes) -> Artefact:
    """Move built files into place and list them; streams of the same fabric are added to its list."""
    folder.mkdir(parents=True, exist_ok=True)
    name, digest = stem(design), fabric_digest(design)
    listing = folder / f"{name}.json"
    table: dict[str, Any] = json.loads(listing.read_text()) if listing.exists() else {"files": {}}
    table |= {"digest": digest, "builder": builder, "release": manifest()["release"], "kernels": digests(design)}
    for file, data in ((f"{name}.xclbin", xclbin), (f"{name}-{stream_digest(design)[:12]}.bin", stream)):
        _replace(folder / file, data)
        table["files"][file] = hashlib.sha256(data).hexdigest()
    _replace(listing, json.dumps(table, indent=1).encode())
    return find(folder, design)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, path)


# --- instruction streams of the simulator: the sequence as JSON, for a fabric


def encode(design: Design) -> bytes:
    steps = [
        ["finish", s.group]
        if isinstance(s, Finish)
        else [s.kind, s.fifo, s.argument, s.tile.col, s.tile.row, s.offset, s.sizes, s.strides, s.group, s.wait]
        for s in design.sequence
    ]
    arguments = [[n, a.dtype, a.shape] for n, a in design.arguments]
    text = json.dumps({"fabric": fabric_digest(design), "arguments": arguments, "sequence": steps}).encode()
    return text + b" " * (-len(text) % 4)  # instruction streams are whole words


def decode(data: bytes) -> tuple[str, tuple[tuple[str, Array], ...], tuple[Move | Finish, ...]]:
    """(fabric, arguments, sequence). ValueError for anything that encode did not make."""
    table = json.loads(data)
    steps: list[Move | Finish] = []
    for s in table["sequence"]:
        if s[0] == "finish":
            steps.append(Finish(s[1]))
        else:
            kind, fifo, argument, col, row, offset, sizes, strides, group, wait = s
            steps.append(Move(kind, fifo, argument, Tile(col, row), offset, tuple(sizes), tuple(strides), group, wait))
    return table["fabric"], tuple((n, Array(d, tuple(shape))) for n, d, shape in table["arguments"]), tuple(steps)
