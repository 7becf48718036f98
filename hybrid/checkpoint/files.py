"""Safe file access for checkpoints: regular files of bounded size, read within their size and unchanged since opening.

Files are read with pread and never mapped: access to a map of a truncated file kills the process with SIGBUS. Size and
mtime are compared before every tensor. Replacing or deleting the file is harmless at any time.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint.base import CheckpointError

MAX_JSON = 1 << 24
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_REASONS = {
    errno.ENOENT: "no such file or directory",
    errno.ELOOP: "symbolic links that lead to each other",
    errno.EACCES: "permission denied: make it readable (chmod +r)",
    errno.EPERM: "permission denied: make it readable (chmod +r)",
}


def why(error: OSError | ValueError) -> str:
    """The text of an operating system error."""
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno) or (error.strerror or str(error)).lower()
    return str(error)


def exists(path: Path) -> bool:
    """Whether a path exists. CheckpointError if that cannot be determined (loops, permissions)."""
    try:
        os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link to {os.readlink(path)}, which does not exist") from None
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {why(error)}") from None
    return True


class OpenFile:
    """A regular file, open for reading. CheckpointError for other files and after a modification."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            kind = stat.S_IFMT(os.stat(path).st_mode)  # before opening, which may have side effects on a device
            if kind == stat.S_IFREG:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
                weakref.finalize(self, os.close, self._fd)
                kind = stat.S_IFMT(os.fstat(self._fd).st_mode)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {why(error)}") from None
        if kind != stat.S_IFREG:
            raise CheckpointError(f"{path} cannot be read: it is {_KINDS.get(kind, 'something')}, not a file")
        self._state = self._now()
        self.size = self._state[0]

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """CheckpointError if the file's size or mtime has changed since opening."""
        now = self._now()
        if now != self._state:
            size = f": it had {self.size} bytes and has {now[0]}" if now[0] != self.size else ""
            raise CheckpointError(f"{self.path} changed while it was open{size}; load it again")

    def read(self, at: int, count: int) -> bytes:
        """Read exactly `count` bytes from `at`."""
        parts = []
        while count:
            try:
                part = os.pread(self._fd, min(count, 1 << 24), at)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {at}: {why(error)}") from None
            if not part:
                raise CheckpointError(f"{self.path} ends at byte {at}, {count} bytes too early; fetch it again")
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return b"".join(parts)

    def read_into(self, at: int, out: np.ndarray) -> None:
        """Fill a contiguous uint8 array from byte `at`, and check that the file is unmodified."""
        self.check()
        done = 0
        while done < out.size:
            try:
                got = os.preadv(self._fd, [out[done:].data], at + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {at + done}: {why(error)}") from None
            if not got:
                raise CheckpointError(
                    f"{self.path} changed while it was open: it ends at byte {at + done}; load it again"
                )
            done += got


def read_file(path: Path, limit: int) -> bytes:
    """A whole small file. CheckpointError above `limit` bytes."""
    file = OpenFile(path)
    if file.size > limit:
        raise CheckpointError(f"{path} has {file.size} bytes: more than {limit} is not believable for such a file")
    return file.read(0, file.size)


def read_json(path: Path, required: bool = False, limit: int = MAX_JSON) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is absent and not required."""
    if not exists(path):
        if required:
            raise CheckpointError(f"{path} is missing: a model directory needs config.json, or name a .gguf file")
        return {}
    return parse_json(read_file(path, limit), f"{path} is not JSON")


def parse_json(data: bytes, problem: str) -> dict[str, Any]:
    """Parse one JSON object. CheckpointError beginning with `problem`, also for duplicate names and for values beyond
    the depth and length limits."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except RecursionError:
        raise CheckpointError(f"{problem}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{problem}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{problem}: it must hold an object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is duplicated")
    return out
