"""Find and remove temporary files of killed runs."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_NAME = re.compile(r"\.(?P<target>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)(?P<old>\.old)?\.part", re.DOTALL)
_FOREIGN_AGE = 24 * 3600.0  # seconds without a write before another machine's file is stale


def part_name(target: Path, old: bool = False) -> Path:
    """The temporary name of a target: hidden, in the same folder, with an unknown suffix and the process id. old: the
    name of a replaced file until the end."""
    return target.with_name(f".{target.name}.{_host()}-{os.getpid()}{'.old' if old else ''}.part")


def remove_stale(folder: Path, replaced: bool = False) -> list[Path]:
    """Remove temporary files of dead processes from a folder. replaced: also replaced files, if the new file exists.
    Files of other machines are kept for a day. Returns the removed paths."""
    removed = []
    for path, found in _unfinished(folder):
        if found["old"] and not (replaced and (folder / found["target"]).exists()):
            continue
        try:
            if not _over(path, found["host"], int(found["pid"])):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except (FileNotFoundError, PermissionError):  # removed by another run, or owned by another user
            continue
        removed.append(path)
    return removed


def _unfinished(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    for path in sorted(folder.iterdir()):
        if found := _NAME.fullmatch(path.name):
            yield path, found.groupdict()


def _over(path: Path, host: str, pid: int) -> bool:
    """Whether the process that wrote a file is dead: no process has its id, or one that is younger than the file."""
    age = time.time() - max(p.stat().st_mtime for p in (path, *(path.iterdir() if path.is_dir() else ())))
    if host != _host():
        return age > _FOREIGN_AGE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # alive, owned by another user
        return False
    running = _seconds_since_start(pid)
    return running is not None and running < age


def _seconds_since_start(pid: int) -> float | None:
    """Age of a process in seconds; None if unknown."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


@cache
def _host() -> str:
    """Identifier of the process id namespace: the machine and, on Linux, the container."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]
