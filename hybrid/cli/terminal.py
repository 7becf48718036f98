"""Read messages from a terminal: line editing with readline if present; a multi-line paste is one message."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import select
import sys
from collections.abc import Callable

PROMPT, MORE = "> ", "... "
PASTE_SECONDS = 0.05  # lines at shorter intervals are a paste


def reader() -> Callable[[], str]:
    """A function that reads a message; it raises EOFError at the end. Prints no prompt if standard output is not a
    terminal.

    With GNU readline the terminal marks a paste, which is then one line with line breaks. Otherwise lines that arrive
    together are one message, except lines typed before the prompt. A line that ends in a backslash continues in the
    next."""
    _mark_pastes()

    def line(prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def read() -> str:
        ahead = _waiting(0.0)
        lines = [line(PROMPT)]
        with contextlib.suppress(EOFError):  # the end of this message
            while (goes_on := lines[-1].endswith("\\")) or (not ahead and _waiting(PASTE_SECONDS)):
                if goes_on:
                    lines[-1] = lines[-1][:-1]
                lines.append(line(MORE if goes_on else ""))
        return "\n".join(lines)

    return read


def _mark_pastes() -> None:
    """Enable line editing and bracketed paste, which Python disables in GNU readline and libedit lacks."""
    if importlib.util.find_spec("readline"):
        readline = importlib.import_module("readline")  # input() uses it after the import
        if "libedit" not in (readline.__doc__ or "") and os.environ.get("TERM", "dumb") != "dumb":
            readline.parse_and_bind("set enable-bracketed-paste on")


def _waiting(seconds: float) -> bool:
    """Whether standard input becomes readable within `seconds`."""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # a stream without select support
        return False
