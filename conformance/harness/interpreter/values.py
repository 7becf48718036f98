"""Values of lanes: NumPy scalars where uniform, else arrays [lanes]; vectors, arrays and structures are lists of them,
matrices arrays [lanes, elements]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Fault(RuntimeError):
    """An illegal action of a kernel, with its name and the lane."""


class NotInterpreted(RuntimeError):
    """The interpreter does not support an instruction: the kernel is untested."""


def each(call: Callable[..., Any], *values: Any) -> Any:
    """Apply a scalar function to vectors element by element."""
    if isinstance(values[0], list):
        return [each(call, *parts) for parts in zip(*values, strict=True)]
    return call(*values)


def merged(mask: Any, new: Any, old: Any) -> Any:
    """`new` where the mask is set."""
    if isinstance(new, list):
        return [merged(mask, n, o) for n, o in zip(new, old, strict=True)]
    if new is old:
        return new
    return np.where(mask[:, None] if np.ndim(new) == 2 or np.ndim(old) == 2 else mask, new, old)


def signed(x: Any) -> Any:
    return x.view(f"i{x.itemsize}")


def unsigned(x: Any) -> Any:
    return x.view(f"u{x.itemsize}")


def spread(value: Any, lanes: int) -> np.ndarray:
    """Broadcast to an array of all lanes."""
    found: np.ndarray = np.broadcast_to(value, (lanes,)) if np.ndim(value) == 0 else value
    return found


def uniform(value: Any, mask: Any) -> int | None:
    """The value shared by all active lanes; None where they differ."""
    if np.ndim(value) == 0:
        return int(value)
    held = value if mask is None else value[mask]
    first = held[0]
    return int(first) if (held == first).all() else None
