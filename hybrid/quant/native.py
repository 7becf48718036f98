"""The types that a device holds matrices in, by those of a file. Needs no NumPy: plans are made with it."""

from __future__ import annotations

from functools import cache

from hybrid.core.dtypes import DTYPES
from hybrid.spec.op import load_op

NATIVE = {"q4_k": "q4_1", "q5_0": "q5_1", "q5_k": "q5_1"}
MOST = 1.35  # bytes of the native type for each byte of the file's
for _source, _target in NATIVE.items():
    assert DTYPES[_target].bits <= MOST * DTYPES[_source].bits


@cache
def computed(backend: str) -> frozenset[str]:
    """Types of matrices that a backend computes with, by the declaration of `linear`: whatever else models are made of
    takes these too, or float32 alone, which it gets whatever a file has (conformance/ops/test_spec_details.py)."""
    return frozenset(choice["w"] for choice in load_op("linear").dtype_choices(backend))


@cache
def native(dtype: str, backend: str) -> str:
    """The type in which a backend holds matrices that a file has as `dtype`. ValueError where it has none."""
    if dtype in computed(backend):
        return dtype
    target = NATIVE.get(dtype)
    if target not in computed(backend):
        raise ValueError(f"{backend} does not compute with {dtype} and has nothing near it: convert to another type")
    return target
