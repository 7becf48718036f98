"""Tile kernels of the catalogue, by their names in designs, and compiled for the host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from hybrid.kernels.npu import compile as host
from hybrid.kernels.npu.catalogue import Number, find
from hybrid.kernels.npu.design import Array, Design, Kernel

_DTYPES = {"i4x2": "u8"}  # bytes of two codes
STACK = 1024
"""Bytes of stack given to every worker: twice what any kernel here is allowed (Kernel.stack_bytes)."""


def tile_kernel(name: str, static_bytes: int = 0, stack_bytes: int = 512, **macros: Number) -> Kernel:
    """An entry point of aie/*.toml compiled with `macros`. SpecError for unknown names."""
    entry = find(name)
    values = entry.values(macros)
    sizes = entry.sizes(macros)
    args = tuple(
        "i32" if a.scalar else Array(_DTYPES.get(a.dtype, a.dtype), (sizes[n],)) for n, a in entry.args.items()
    )
    tag = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]
    return Kernel(
        name, f"{entry.source.stem}_{tag}.o", _typed(args), tuple(sorted(values.items())), static_bytes, stack_bytes
    )


def _typed(args: tuple[Any, ...]) -> tuple[Array | Literal["i32"], ...]:
    return args


def digests(design: Design) -> dict[str, str]:
    """Content hash of every kernel that a design calls: source, headers, declaration, macros."""
    return {k.name: host.digest(k.name, **dict(k.macros)) for k in design.kernels}


def on_this_computer(design: Design, sources: Mapping[str, Any] | None = None) -> dict[str, Callable[..., None]]:
    """The compiled kernels by name. `sources`: other texts of them, for mutations. CompileError without a compiler."""
    given = sources or {}
    return {k.name: host.compiled(find(k.name), dict(k.macros), source=given.get(k.name)) for k in design.kernels}
