"""Declarations as data: operation specs, schedules, model and device sheets.

The models need pydantic. They are imported lazily, so that a backend can import other modules without pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.core.errors import SpecError
    from hybrid.spec.op import SPECS_DIR, OpSpec, load_op, load_ops

__all__ = ["SPECS_DIR", "OpSpec", "SpecError", "load_op", "load_ops"]


def __getattr__(name: str) -> Any:
    if name == "SpecError":
        from hybrid.core.errors import SpecError

        return SpecError
    if name in __all__:
        from hybrid.spec import op

        return getattr(op, name)
    raise AttributeError(f"module 'hybrid.spec' has no attribute {name!r}")
