"""What every command shares: one-line errors, exit codes, no traceback unless HYBRID_DEBUG=1.

Exit codes: 0 done, 1 something given is wrong or failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse with the project's error form."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def run(command: Callable[[], int]) -> int:
    """The command's exit code; errors become `error: ...` on stderr."""
    try:
        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        if os.environ.get("HYBRID_DEBUG") == "1":
            raise
        print(f"error: {describe(e)}", file=sys.stderr)
        return 1


def describe(error: Exception) -> str:
    """One line; kinds that no user causes say how to see more."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"not enough memory{': ' + text if text else ''}; use a smaller ctx or a smaller weight type"
    if isinstance(error, (ValueError, OSError, RuntimeError)) and text:
        return text
    return f"internal: {type(error).__name__}: {text} (set HYBRID_DEBUG=1 for the traceback)"
