"""Storage types on a device by a file's types, from DTYPES. Needs no NumPy."""

from __future__ import annotations

from hybrid.core.dtypes import DTYPES
from hybrid.core.dtypes import held_as as native
from hybrid.core.dtypes import native_types as computed

__all__ = ["MOST", "NATIVE", "computed", "native"]

MOST = 1.35  # largest growth in bytes by re-encoding
NATIVE = {source: target for source, kind in DTYPES.items() for _, target in kind.elsewhere}
"""File type -> type that it is re-encoded to on devices without kernels for it."""
for _source, _target in NATIVE.items():
    assert DTYPES[_target].bits <= MOST * DTYPES[_source].bits
