"""Typed look-ups in a config or in metadata: every error names the file, the field and what was wanted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.checkpoint.base import CheckpointError

_MISSING = object()


class Fields:
    """Key -> value of one file (JSON object or GGUF metadata). Absent and null are the same."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "", where: str = "") -> None:
        self.values, self.path, self.prefix, self.where = values, path, prefix, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def sub(self, key: str) -> Fields:
        """The object under `key`; an empty one where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {value!r}")
        return Fields(value, self.path, where=f"{self.where}{self.prefix}{key}.")

    def under(self, prefix: str) -> Fields:
        """The same fields, of which only those that begin with `prefix` are looked up."""
        return Fields(self.values, self.path, prefix)

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise self.error(key, f"must be a whole number, not {value!r}")
        return int(value)

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"must be a number, not {value!r}")
        return float(value)

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be text, not {value!r}")
        return value

    def error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.where}{self.prefix}{key} {what}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is _MISSING:
            raise self.error(key, "is missing")
        return default if value is None else value
