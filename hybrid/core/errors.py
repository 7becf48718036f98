"""Errors that all layers share. An error in a declaration is one line that names the file, the key and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecError(ValueError):
    """A declaration, or a use of one, is wrong. The message is one line: `file: key: what is wrong, and the fix`.
    more: lines for the other problems of the same file."""

    def __init__(self, message: str, more: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.more = tuple(more)


class DeviceLost(RuntimeError):
    """The device hangs or was removed, and its memory is lost. Close the model and load it again."""


class FieldError(ValueError):
    """Raised by validators for a key; the loader prefixes the message with file and key."""

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
    """The cache has no free slot until a running sequence ends."""


class QueueFull(RuntimeError):
    """The queue of waiting requests is full. retry_after: seconds after which to try again."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting and the queue is full: try again in {retry_after:.0f} s")
        self.retry_after = retry_after
