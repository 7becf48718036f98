"""The types that a device holds matrices in, by those of a file: what DTYPES says. Needs no NumPy."""

from __future__ import annotations

from hybrid.core.dtypes import DTYPES
from hybrid.core.dtypes import held_as as native
from hybrid.core.dtypes import native_types as computed

__all__ = ["MOST", "NATIVE", "computed", "native"]

MOST = 1.35  # bytes of the held type for each byte of the file's
NATIVE = {source: target for source, kind in DTYPES.items() for _, target in kind.elsewhere}
"""Type of a file -> type that it is re-encoded to where a device does not compute with it."""
for _source, _target in NATIVE.items():
    assert DTYPES[_target].bits <= MOST * DTYPES[_source].bits
