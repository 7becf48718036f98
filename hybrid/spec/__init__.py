"""Declarations as data: operation specs, tensors, plans and the device protocol.

The spec models need pydantic; they are imported when first used, so that a backend that only wants `dtypes` or `plan`
starts without it.
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
