"""The suite's process without the collections of a program that serves or measures."""

from __future__ import annotations

from types import SimpleNamespace

UNTOUCHED = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
"""In place of the module gc: a collection of all objects takes half a second in the suite's process."""
