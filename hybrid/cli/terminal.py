"""Turns from a terminal: with editing where readline is there; a paste of many lines is one turn."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import select
import sys
from collections.abc import Callable

PROMPT, MORE = "> ", "... "
PASTE_SECONDS = 0.05  # lines that follow each other faster were not typed


def reader() -> Callable[[], str]:
    """Reads a turn at the prompt; EOFError at the end. Standard output gets no prompt when it is no terminal.

    Terminals mark a paste where GNU readline asks them to: it is then one line with line ends in it. Elsewhere lines
    that come together are one turn, unless they were there before the prompt: those were typed ahead. A line that ends
    in a backslash goes on in the next."""
    _mark_pastes()

    def line(prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def read() -> str:
        ahead = _waiting(0.0)
        lines = [line(PROMPT)]
        with contextlib.suppress(EOFError):  # the end of this turn
            while (goes_on := lines[-1].endswith("\\")) or (not ahead and _waiting(PASTE_SECONDS)):
                if goes_on:
                    lines[-1] = lines[-1][:-1]
                lines.append(line(MORE if goes_on else ""))
        return "\n".join(lines)

    return read


def _mark_pastes() -> None:
    """Editing, and marks around pastes (bracketed paste), which Python switches off in GNU readline and libedit
    lacks."""
    if importlib.util.find_spec("readline"):
        readline = importlib.import_module("readline")  # input() uses it once it is loaded
        if "libedit" not in (readline.__doc__ or "") and os.environ.get("TERM", "dumb") != "dumb":
            readline.parse_and_bind("set enable-bracketed-paste on")


def _waiting(seconds: float) -> bool:
    """Is there something to read, or within so many seconds?"""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # a stream that cannot be waited for
        return False
