"""Stop strings in a stream: text is passed on as soon as it cannot be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Cuts a stream before the first stop string. `stopped` is the one that was found."""

    def __init__(self, stops: Sequence[str]) -> None:
        stops = tuple(stops)
        wrong = [s for s in stops if not isinstance(s, str)]
        if wrong:
            raise ValueError(f"a stop string must be text, not {wrong[0]!r}")
        if any(not s for s in stops):
            raise ValueError("a stop string is empty: it would stop before the first character")
        self.stops = stops
        self.stopped: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """The part of everything so far that can be passed on now. All pieces together are the text before the stop
        string that begins first (of those that begin together the shortest), however the text is cut into pieces."""
        if not self.stops:
            return text
        if self.stopped is not None:
            return ""
        self._held += text
        begun = self._begun()
        found = self._first()
        if found is None or begun < found[0]:  # one that began earlier may still end
            out, self._held = self._held[:begun], self._held[begun:]
            return out
        at, self.stopped = found
        out, self._held = self._held[:at], ""
        return out

    def flush(self) -> str:
        """What was held back, at the end of the stream: a stop string inside of one that did not end stops it now."""
        at, self.stopped = self._first() or (len(self._held), self.stopped)
        out, self._held = self._held[:at], ""
        return out

    def _first(self) -> tuple[int, str] | None:
        """Where the first stop string of what is held begins, and the shortest that begins there."""
        found = [(self._held.find(s), s) for s in self.stops if s in self._held]
        return min(found, key=lambda f: (f[0], len(f[1])), default=None)

    def _begun(self) -> int:
        """Where the earliest stop string begins that what is held may still become."""
        ends = (n for s in self.stops for n in range(1, len(s)) if self._held.endswith(s[:n]))
        return len(self._held) - max(ends, default=0)
