"""Compressed SPIR-V modules in a folder: `<name>.spv.gz` and manifest.json. `zcat` decompresses a module."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from hybrid.kernels.vulkan.spirv import SpirvError

SUFFIX = ".spv.gz"


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}{SUFFIX}"


def read(folder: Path, name: str) -> bytes:
    """The module's SPIR-V. FileNotFoundError where there is none, SpirvError where the file is damaged."""
    path = path_of(folder, name)
    try:
        code = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise SpirvError(f"{path} is damaged: {e}") from e
    if not code:  # an empty file decompresses to nothing
        raise SpirvError(f"{path} is damaged: it is empty")
    return code


def write(folder: Path, name: str, code: bytes) -> None:
    """Replace the module atomically; the same code gives the same file."""
    path = path_of(folder, name)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(gzip.compress(code, 9, mtime=0))
    temporary.replace(path)


def names(folder: Path) -> list[str]:
    """Names of the modules in the folder."""
    return sorted(p.name.removesuffix(SUFFIX) for p in folder.glob(f"*{SUFFIX}"))
