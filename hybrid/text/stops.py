"""Stop strings in a stream: text is released as soon as it cannot be a prefix of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Cuts a stream before the first stop string. `stopped`: the stop string that was found."""

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
        """Add text and return the part that can be released. All parts joined are the text before the earliest stop
        string (the shortest at a tie), independent of the pieces."""
        if not self.stops:
            return text
        if self.stopped is not None:
            return ""
        self._held += text
        begun = self._begun()
        found = self._first()
        if found is None or begun < found[0]:  # an earlier one may still be completed
            out, self._held = self._held[:begun], self._held[begun:]
            return out
        at, self.stopped = found
        out, self._held = self._held[:at], ""
        return out

    def flush(self) -> str:
        """The buffered rest at the end of the stream, cut at a stop string inside an incomplete one."""
        at, self.stopped = self._first() or (len(self._held), self.stopped)
        out, self._held = self._held[:at], ""
        return out

    def _first(self) -> tuple[int, str] | None:
        """(position, string) of the first stop string in the buffer, the shortest at a tie."""
        found = [(self._held.find(s), s) for s in self.stops if s in self._held]
        return min(found, key=lambda f: (f[0], len(f[1])), default=None)

    def _begun(self) -> int:
        """Position of the first incomplete stop string in the buffer."""
        ends = (n for s in self.stops for n in range(1, len(s)) if self._held.endswith(s[:n]))
        return len(self._held) - max(ends, default=0)
