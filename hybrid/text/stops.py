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
        """The part of everything so far that can be passed on now."""
        if self.stopped is not None:
            return ""
        self._held += text
        found = [(self._held.find(s), s) for s in self.stops if s in self._held]
        if found:
            at, self.stopped = min(found, key=lambda f: (f[0], -len(f[1])))
            out, self._held = self._held[:at], ""
            return out
        keep = max((n for s in self.stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        out, self._held = self._held, ""
        return out
