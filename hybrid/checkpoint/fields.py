"""Typed look-ups in a config or metadata; errors name the file, the field and the expected value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.checkpoint.base import CheckpointError

_MISSING = object()
_LARGEST, _LARGEST_FLOAT = 2**63, 3.4e38


def _shown(value: object) -> str:
    """A shortened value for an error message."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (list, Mapping)):
        return f"a {'list' if isinstance(value, list) else 'table'} of {len(value)}"
    return repr(value[:60] + "..." if isinstance(value, str) and len(value) > 60 else value)


class Fields:
    """Key -> value of one file (JSON object or GGUF metadata). null counts as absent.

    `notes` collects assumptions about the file, shared with derived Fields."""

    def __init__(
        self, values: Mapping[str, Any], path: Path, prefix: str = "", where: str = "", notes: list[str] | None = None
    ) -> None:
        self.values, self.path, self.prefix, self.where = values, path, prefix, where
        self.notes = [] if notes is None else notes

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """Whether a key is present with value null, for fields where this differs from absence."""
        return self.prefix + key in self.values and self.get(key) is None

    def sub(self, key: str) -> Fields:
        """The object under `key`; empty if absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {_shown(value)}")
        return Fields(value, self.path, where=f"{self.where}{self.prefix}{key}.", notes=self.notes)

    def under(self, prefix: str) -> Fields:
        """The same fields with `prefix` added to looked-up keys."""
        return Fields(self.values, self.path, prefix, notes=self.notes)

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self._get(key, default)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or abs(value) >= _LARGEST:
            raise self.error(key, f"must be a whole number below 2**63, not {_shown(value)}")
        return int(value)

    def below(self, key: str, limit: int) -> int:
        """A token id below `limit`."""
        value = self.integer(key)
        if not 0 <= value < limit:
            raise self.error(key, f"{value} is outside the {limit} rows of the embedding")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"must be a number, not {_shown(value)}")
        if not abs(value) < _LARGEST_FLOAT:
            raise self.error(key, f"must be a finite number that float32 can hold, not {_shown(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be text, not {_shown(value)}")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.get(key) is None else self.text(key)

    def truth(self, key: str, default: Any = _MISSING) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_shown(value)}")
        return value

    def error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.where}{self.prefix}{key} {what}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is _MISSING:
            raise self.error(key, "is missing")
        return default if value is None else value
