"""Valid dtype combinations of an operation's tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.spec.op import OpSpec


def assignments(spec: OpSpec, backend: str | None) -> tuple[Mapping[str, str], ...]:
    """Every assignment of dtypes to all tensors that the rules allow, in declaration order; with a backend, those that
    it supports."""
    return tuple(possible(spec, backend))


def possible(spec: OpSpec, backend: str | None) -> Iterator[Mapping[str, str]]:
    """`assignments` as an iterator."""
    free = [n for n, t in spec.tensors.items() if t.same is None]
    narrow = spec.taken(backend) if backend is not None else {}
    lists = [[d for d in spec.tensors[n].dtype if d in narrow.get(n, (d,))] for n in free]
    sources = {n: t.same or n for n, t in spec.tensors.items()}
    for values in itertools.product(*lists):
        chosen = dict(zip(free, values, strict=True))
        full = {n: chosen[source] for n, source in sources.items()}
        # Each dtype is valid for its tensor; a `same:` dtype may still be unsupported by the backend.
        if all(d in narrow.get(n, (d,)) for n, d in full.items()) and all(
            rule.allows(full) for rule in spec.dtype_rules
        ):
            yield MappingProxyType(full)
