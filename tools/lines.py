"""Prints the project's size by folder."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

SUFFIXES = {".py", ".slang", ".cc", ".hpp", ".sh"}
APART = {"kernels"}  # its folders are backends: each is a line of its own


def folder(name: str) -> str:
    """The top folder of a file, or the backend's."""
    parts = PurePosixPath(name).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] and parts[0] in APART else 1]) or "."


def main() -> int:
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    counts = {
        n: len(Path(n).read_text().splitlines()) for n in names if Path(n).suffix in SUFFIXES and Path(n).exists()
    }
    folders: Counter[str] = Counter()
    for name, lines in counts.items():
        folders[folder(name)] += lines
    shown = ", ".join(f"{f} {n}" for f, n in sorted(folders.items()) if n)
    print(f"lines: {shown}, total {sum(counts.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
