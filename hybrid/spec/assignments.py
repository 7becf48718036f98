"""Which dtypes the tensors of an operation may have together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.spec.op import OpSpec


def assignments(spec: OpSpec, backend: str | None) -> tuple[Mapping[str, str], ...]:
    """Every assignment of dtypes to all tensors that the rules allow, in the declaration's order; of a backend, those
    that it supports."""
    return tuple(possible(spec, backend))


def possible(spec: OpSpec, backend: str | None) -> Iterator[Mapping[str, str]]:
    """`assignments`, one after another."""
    free = [n for n, t in spec.tensors.items() if t.same is None]
    narrow = spec.taken(backend) if backend is not None else {}
    lists = [[d for d in spec.tensors[n].dtype if d in narrow.get(n, (d,))] for n in free]
    sources = {n: t.same or n for n, t in spec.tensors.items()}
    for values in itertools.product(*lists):
        chosen = dict(zip(free, values, strict=True))
        full = {n: chosen[source] for n, source in sources.items()}
        # Every type is one of its tensor's; where one follows another, the backend may still leave it out.
        if all(d in narrow.get(n, (d,)) for n, d in full.items()) and all(
            rule.allows(full) for rule in spec.dtype_rules
        ):
            yield MappingProxyType(full)
