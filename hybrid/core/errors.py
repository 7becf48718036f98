"""Errors that every layer shares. Of declarations: one line that names the file, the key and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecError(ValueError):
    """A declaration, or a use of one, is wrong. The message is one line: `file: key: what is wrong, and the fix`."""


class DeviceLost(RuntimeError):
    """A device does not answer any more, or was taken away, and what was on it is gone. Close the model and load it
    again."""


class FieldError(ValueError):
    """Raised by validators that know which key is at fault; the loader puts file and key in front of the message."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
        self.message = message


def nearest(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, else `; known: a, b, c`."""
    names = [str(n) for n in known]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else "; none is declared"


class ContextExceeded(ValueError):
    """A sequence does not fit in the context."""


class NoFreeSlot(ValueError):
    """The cache has no room for another sequence until one of those that it holds ends."""


class QueueFull(RuntimeError):
    """As many requests wait as may. retry_after: seconds after which there may be room again."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests wait already, as many as may: try again in {retry_after:.0f} s")
        self.retry_after = retry_after
