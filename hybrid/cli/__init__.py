"""Common code of commands: one-line errors, exit codes, no traceback unless HYBRID_DEBUG=1.

Exit codes: 0 success, 1 invalid input or failure, 2 wrong usage, 3 device lost or timed out (a retry may succeed), 129
hung up, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import atexit
import io
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from hybrid import __version__
from hybrid.core import interrupts
from hybrid.core.dtypes import CACHE_CHOICES
from hybrid.core.errors import DeviceLost
from hybrid.core.units import parse_bytes

PRECISIONS, CACHES = ("auto", "exact", "fast"), CACHE_CHOICES
"""Values of --precision and --kv."""
LOST = 3
"""Exit code after a device loss or timeout."""


class UsageError(ValueError):
    """Invalid or conflicting arguments: exit code 2, like argparse's errors."""


@contextmanager
def usage() -> Iterator[None]:
    """Convert ValueError of the block to UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_writable(option: str, path: Path) -> None:
    """UsageError if a file cannot be written. Does not leave a new file behind."""
    there = path.exists()
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}: name a file in a folder that can be written") from None
    if not there:
        path.unlink()


class Parser(argparse.ArgumentParser):
    """argparse with the project's error format, and --version. prog: the command as a module, unless a script such as
    hybrid-generate was called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        called = Path(sys.argv[0]).stem if sys.argv else ""
        if called.startswith("hybrid-"):
            self.prog = called
        self.add_argument(
            "--version", action="version", version=f"hybrid-kernels {__version__}", help="print the version and stop"
        )

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def run(command: Callable[[], int]) -> int:
    """Run a command; returns its exit code. Prints errors as `error: ...` on stderr."""
    alone = False
    try:
        alone = interrupts.begin()
        _standard_streams()
        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        if alone:  # CPython may end by the signal instead, if it came within exec or eval of a text
            atexit._run_exitfuncs()
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(130)
        return 130
    except BrokenPipeError:  # the reader (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except Exception as e:
        if os.environ.get("HYBRID_DEBUG") == "1":
            raise
        print(f"error: {describe(e)}", file=sys.stderr)
        return LOST if isinstance(e, DeviceLost) else 1


def _standard_streams() -> None:
    """Redirect closed standard streams to /dev/null: otherwise a file opened later gets their descriptor, and drivers'
    output. Replace characters that a stream cannot encode or decode, instead of failing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the process's life)
        elif isinstance(stream, io.TextIOWrapper) and name != "stderr":
            stream.reconfigure(errors="replace")


def input_waits() -> bool:
    """Whether standard input is no terminal and has something to read now."""
    try:
        descriptor = sys.stdin.fileno()
        if os.isatty(descriptor) or not select.select([descriptor], [], [], 0)[0]:
            return False
        return bool(sys.stdin.buffer.peek(1))  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):  # no file, or none that can be asked (Windows: only sockets)
        return False


@contextmanager
def terminable() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP in the block, so that temporary files are removed; exit code 143 or 129.
    An ignored SIGHUP (nohup) stays ignored."""
    wanted = {signal.SIGTERM: "terminated"}
    if (hangup := getattr(signal, "SIGHUP", None)) is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        wanted[hangup] = "hung up"

    def stop(signum: int, frame: object) -> NoReturn:
        for other in wanted:  # a second signal must not interrupt the cleanup
            signal.signal(other, signal.SIG_IGN)
        with suppress(OSError):  # after a hangup the terminal may be gone
            print(wanted[signal.Signals(signum)], file=sys.stderr)
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def amount(text: str) -> float:
    """Parse a finite number above 0, such as seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def size(text: str) -> int:
    """Parse bytes: 16GiB, 500MB, 4096."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def describe(error: Exception) -> str:
    """An error as one line; internal errors mention HYBRID_DEBUG."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"not enough memory{': ' + text if text else ''}; use a smaller ctx or a smaller weight type"
    if isinstance(error, (ValueError, OSError, RuntimeError)) and text:
        return text
    return f"internal: {type(error).__name__}: {text} (set HYBRID_DEBUG=1 for the traceback)"
