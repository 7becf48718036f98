"""The definition of every operation, in NumPy: float64 for proofs, float32 as the fallback device.

Functions take named arrays (quantised and bf16 tensors as `Tensor`) and return the un-rounded outputs in the
spec's order; state arrays are changed in place.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hybrid.core.places import SPECS
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import Real, Value, argument, encode

__all__ = ["ORACLE", "argument", "call", "encoded", "step"]

Definition = Callable[..., tuple[np.ndarray, ...]]


def _functions() -> Iterator[tuple[str, Definition]]:
    """Functions of this package's modules."""
    for found in pkgutil.iter_modules(__path__):
        if found.name != "device":  # it imports them from here
            module = importlib.import_module(f"{__name__}.{found.name}")
            functions = inspect.getmembers(module, inspect.isfunction)
            yield from ((n, f) for n, f in functions if f.__module__.startswith(__name__))


_OPERATIONS = [path.stem for path in sorted((SPECS / "ops").glob("*.toml"))]
_FUNCTIONS = dict(_functions())
ORACLE: dict[str, Definition] = {op: _FUNCTIONS[op] for op in _OPERATIONS if op in _FUNCTIONS}
"""Functions by operation name."""


def step(op: str, result: str) -> Definition:
    """Functions OPERATION_RESULT, which compute one result of an operation from inputs and earlier results."""
    return _FUNCTIONS[f"{op}_{result}"]


def call(
    op: str,
    tensors: Mapping[str, Value],
    attrs: Mapping[str, Any],
    out_dtypes: Mapping[str, str],
    real: Real = np.float64,
) -> dict[str, Tensor]:
    """Run one operation and round its results as declared.

    `tensors`: inputs and state by spec name (state is changed in place). `out_dtypes`: the storage type of each
    output, in the spec's order; a scratch's type may stand among them (fused_ffn rounds its `h`).
    Returns the outputs by name. Raises KeyError for an unknown op, TypeError for missing arguments."""
    if op not in ORACLE:
        raise KeyError(f"no oracle for operation {op!r}; known: {', '.join(sorted(ORACLE))}")
    accepted = inspect.signature(ORACLE[op]).parameters
    kept = {f"{name}_dtype": dtype for name, dtype in out_dtypes.items() if f"{name}_dtype" in accepted}
    outputs = {name: dtype for name, dtype in out_dtypes.items() if f"{name}_dtype" not in kept}
    results = ORACLE[op](**{name: argument(t) for name, t in tensors.items()}, **attrs, **kept, real=real)
    return encoded(op, results, outputs)


def encoded(what: str, results: tuple[np.ndarray, ...], outputs: Mapping[str, str]) -> dict[str, Tensor]:
    """A function's results rounded to the storage types of `outputs`, by name. TypeError for a wrong count."""
    if len(results) != len(outputs):
        raise TypeError(f"{what} returned {len(results)} arrays for the outputs {list(outputs)}")
    return {name: encode(r, dtype) for r, (name, dtype) in zip(results, outputs.items(), strict=True)}
